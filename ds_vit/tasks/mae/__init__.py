"""`--task mae`: masked autoencoding."""
