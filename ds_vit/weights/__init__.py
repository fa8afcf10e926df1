"""Files of weights: opened, checked and loaded into a model, exported for other tools and imported from them."""
