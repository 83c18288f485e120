"""Job files, and the demo that `make demo` runs."""
