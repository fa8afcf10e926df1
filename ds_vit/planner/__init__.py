"""The cost of a layout before it runs: memory, time, pipeline stages, goodput on many hosts."""
