"""Hostile ops through a worker's own path, in processes that may die of it."""
