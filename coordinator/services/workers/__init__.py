"""Entry and Work: how a worker comes in, and its stream of messages."""
