"""Megatron's tensor parallelism of timm's ViTs: layers sharded over a group of ranks; sequence parallelism."""
