"""Transport: bytes between workers."""
