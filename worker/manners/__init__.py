"""Manners: what this machine's owner lets a guest use, in one settings file, and how that is enforced."""
