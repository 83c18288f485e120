"""Messages: what the machines hear, want and remember; data only."""
