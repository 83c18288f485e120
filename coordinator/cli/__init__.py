"""The `atoll` command, one group of commands a file."""
