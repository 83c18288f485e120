"""Neighbours of a plan: connected, their messages let in and kept for replays, blobs that are lent."""
