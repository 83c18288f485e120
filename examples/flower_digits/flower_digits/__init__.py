"""Handwritten digits with a small MLP, as a Flower app."""
