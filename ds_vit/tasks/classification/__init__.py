"""`--task classification`, the default."""
