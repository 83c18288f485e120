"""Differential privacy on the sums of whole numbers: clip, discrete noise, accounting, and the words for
them.

Pure but for the operating system's randomness, which a test may replace. Imports strategies and atoll
alone."""
