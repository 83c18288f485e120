"""Rules that exchange the elements or coefficients of gradients that are large, with their positions."""
