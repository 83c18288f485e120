"""Federated: jobs that train in rounds on data owners' machines. Pure."""
