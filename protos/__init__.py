"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 8  # peers of an assignment are named by their ranks, steps have digests
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
