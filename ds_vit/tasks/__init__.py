"""What is trained for: the loss, and what goes into it."""
