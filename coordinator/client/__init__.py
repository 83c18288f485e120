"""Client: the coordinator as functions, for its owner's programs and the command line."""

from coordinator.client.client import Client, connect

__all__ = ["Client", "connect"]
