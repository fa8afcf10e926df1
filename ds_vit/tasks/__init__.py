"""The training tasks: one folder per task; `registry.py` has the table of `--task`."""
