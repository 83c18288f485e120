"""Apps: Flower apps on the coordinator, the hub between an owner's run and the workers."""
