"""DeepSpeed's engines behind one face, and the guard of a step."""
