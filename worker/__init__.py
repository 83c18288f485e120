"""Computes: runs stages, moves tensors, obeys its guest's limits."""
