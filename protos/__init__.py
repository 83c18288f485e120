"""What both ends of a wire agree on: schema, conversions, identities, names."""

PROTOCOL_VERSION = 1
