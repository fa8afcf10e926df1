"""A run: planned, built, fed, stepped, saved, evaluated and summed up."""
