"""Federated rules: a client half and a server half each (the federated issue fills it)."""
