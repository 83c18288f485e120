"""Machine: what this machine is, and how fast."""
