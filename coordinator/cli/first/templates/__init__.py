"""Job files that `atoll new` writes: each runs as it is, on a CPU, and downloads nothing."""
