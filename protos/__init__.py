"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 8  # steps have digests; idle workers keep copies of stages, repeat steps beside the plan
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
