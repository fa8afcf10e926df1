"""What a layout would cost before there is one: memory, time, the pipeline's course, goodput on many hosts."""
