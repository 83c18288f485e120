"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 5  # frames between workers; a welcome's term; what workers say they hold
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
