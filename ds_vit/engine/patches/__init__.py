"""Patches of DeepSpeed: every private or replaced attribute of it is in this package."""
