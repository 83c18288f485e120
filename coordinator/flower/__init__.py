"""Flower: an owner's side of a Flower app's run."""
