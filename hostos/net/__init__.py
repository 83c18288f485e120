"""Addresses, networks, proxies, and sockets that are joined."""
