"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 5  # frames between workers: several in a message, acknowledgements without marks
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
