"""Hosting: starts the process that computes, contained, bounds its memory and says how it ended."""
