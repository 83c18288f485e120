"""Replicas and peers: runs a collective's action list over links. Imports ``worker.transport`` at most."""
