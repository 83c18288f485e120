"""Session: the worker's side of a session as a pure machine, and its messages."""
