"""A Flower app that only moves arrays."""
