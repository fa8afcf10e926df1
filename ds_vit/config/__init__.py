"""Settings: the schema of flags, its parser, the rules between them, and DeepSpeed's JSON."""
