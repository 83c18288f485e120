"""Pipe: what the daemon and its compute process share: an arena for tensors, a page of status, names."""
