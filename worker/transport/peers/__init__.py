"""One peer: the connections to it, and what is under way to it and from it."""
