"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 9  # losses of micro-batches with their weights, snapshots that ranks keep for each other
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
