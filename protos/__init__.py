"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 8  # workers beside the plan stand by for its stages
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
