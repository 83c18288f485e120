"""Capture: a torch module becomes an op-DAG that is proven to compute the same."""
