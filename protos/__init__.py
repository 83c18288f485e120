"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 8  # idle workers keep copies of stages, and send them to who takes one over
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
