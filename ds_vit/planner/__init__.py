"""The cost of a layout before it runs: memory, time and pipeline stages."""
