"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 8  # ranks in neighbours, digests of steps, standbys, two authorities during an exchange
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
