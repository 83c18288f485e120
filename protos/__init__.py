"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 10  # stages of several pieces
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
