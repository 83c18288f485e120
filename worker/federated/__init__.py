"""Federated: trains a round on this machine's own data."""
