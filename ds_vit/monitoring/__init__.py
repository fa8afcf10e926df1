"""What a run writes down for people: metrics, progress, gradient statistics and their pictures."""
