"""Notebook: a fleet and its runs as objects, for scripts and Jupyter, behind the door `atoll.connect`."""
