"""Control: calls to the coordinator."""
