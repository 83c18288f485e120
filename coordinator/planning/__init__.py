"""Planning: a graph and a fleet become a plan. Pure; imports nothing above it."""
