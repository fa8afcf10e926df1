"""Train Vision Transformers of any size with DeepSpeed; the layout is not a hyper-parameter."""

__version__ = "0.1.0"
