"""Secure aggregation of whole-number sums: keys, shares, masks, and who may open which sum.

Pure but for the operating system's randomness, which a test may replace. Imports strategies and atoll
alone."""
