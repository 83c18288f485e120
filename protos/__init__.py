"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 6  # a welcome carries its coordinator's term; workers refuse a smaller one than they saw
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
