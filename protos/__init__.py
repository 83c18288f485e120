"""Agreements of both ends of a wire: schema, conversions, identities, names."""

PROTOCOL_VERSION = 7  # survivors of a loss keep their stage, and who takes over replays what they sent
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""
