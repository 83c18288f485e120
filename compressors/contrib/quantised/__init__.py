"""Codecs that send few bits a value."""
