"""Processes, folders, locks, proxies and units: what every process needs of the machine under it."""
