"""Manners: what this machine's owner lets a guest take, in one settings file, and how that is held."""
