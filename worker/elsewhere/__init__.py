"""Elsewhere: what a stage keeps outside its device's memory, in files or in pinned memory."""
