"""What clients keep from round to round, and the folders that it lies in."""
