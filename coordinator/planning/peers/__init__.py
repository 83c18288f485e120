"""Plans of several replicas, and of peers with steps of their own: who is one, what they exchange. Pure."""
