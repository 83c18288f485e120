"""Datasets: public data for experiments, fetched once and dealt out to clients."""
