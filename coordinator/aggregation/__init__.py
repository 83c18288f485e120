"""Aggregation: the child process that sums a federated job's updates, and its supervisor."""
