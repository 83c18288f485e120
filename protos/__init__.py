"""What both ends of a wire agree on: schema, conversions, identities, names."""
