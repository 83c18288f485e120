"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 8  # ranks, and replicas that exchange gradients
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
