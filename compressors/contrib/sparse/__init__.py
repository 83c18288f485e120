"""Codecs that send few values with their positions."""
