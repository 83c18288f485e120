"""The search of ``op_fence``: orders of devices, cuts of an order, rings, local improvement."""
