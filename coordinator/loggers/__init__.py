"""Loggers: where a run's figures go besides its own files, one plug-in a file; imports no other wing."""
