"""timm's ViTs as layers that DeepSpeed can train: names, layers, initial values, parameter groups."""
