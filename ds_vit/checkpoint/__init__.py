"""Checkpoints without a layout: safetensors with timm's names, whole shapes, fp32; written and read by all ranks."""
