"""Client: the coordinator as functions, for its owner's programs and the command line."""
