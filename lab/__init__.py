"""A WAN on one machine, for tests and benchmarks; the product never imports it."""
