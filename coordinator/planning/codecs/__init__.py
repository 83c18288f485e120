"""Codecs of a plan's links: which, at which ratio, and which others while the plan runs. Pure."""
