"""Compute: the process that holds torch and runs strangers' graphs; no key, no socket but its pipe."""
