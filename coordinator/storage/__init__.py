"""Storage: what lies on the coordinator's disk."""
