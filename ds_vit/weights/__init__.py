"""Files of weights: opened, checked and loaded into a model, exported for other tools and imported from them."""

from ds_vit.weights.commands import import_weights
from ds_vit.weights.export import export
from ds_vit.weights.initial_checkpoint import InitialCheckpoint, find_pretrained

__all__ = ["InitialCheckpoint", "export", "find_pretrained", "import_weights"]
