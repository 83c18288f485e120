"""Ranks: the other hosts of a site as its first one sees them: a sealed connection each, joined to a pipe.

May import nothing of the worker; no torch.
"""
