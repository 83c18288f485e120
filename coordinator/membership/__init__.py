"""Membership: which workers are here, and what was measured of them and their links. Pure."""
