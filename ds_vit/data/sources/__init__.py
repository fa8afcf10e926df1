"""Where images come from: folders, tar files, torchvision's data sets and the embedded digits."""
