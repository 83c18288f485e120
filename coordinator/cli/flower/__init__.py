"""`atoll flower`: Flower apps run from a terminal, or without one."""
