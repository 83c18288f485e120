"""Rules that exchange gradients as factors of low rank: which tensors, which phases."""
