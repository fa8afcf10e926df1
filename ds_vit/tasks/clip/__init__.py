"""`--task clip` and `--task siglip`: contrastive training of an image tower and a text tower."""
