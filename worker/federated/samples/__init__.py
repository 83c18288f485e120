"""Privacy of single samples: noised gradients, and what a data set's samples have spent. Imports strategies
alone."""
