"""Reasons that a plan gives: its bottleneck, who is left out and why, what memory it lacks. Pure."""
