"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 8  # ranks in neighbours, two authorities while one takes the other's place
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
