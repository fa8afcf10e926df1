"""Augmentation: each random step is a draw from the sample's key and its application."""
