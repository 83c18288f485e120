"""Costs: seconds, bytes and memory of ops, stages, links and whole plans. Pure."""
