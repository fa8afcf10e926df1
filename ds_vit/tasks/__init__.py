"""The training tasks: one folder per task; `registry.py` has the table of `--task`."""

import ds_vit.config  # noqa: F401  (first: its schema takes in the flags of the tasks)
