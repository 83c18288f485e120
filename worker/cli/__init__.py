"""The `atoll-worker` command, one group of commands a file."""
