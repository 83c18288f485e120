"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 9  # losses of micro-batches one by one with their weights
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
