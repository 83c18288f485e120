"""Relay: joins two workers' connections where neither can be dialled; imports nothing of its neighbours."""
