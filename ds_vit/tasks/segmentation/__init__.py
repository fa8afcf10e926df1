"""`--task segmentation`: a class for each pixel."""
