"""Codecs that send a matrix as factors of low rank."""
