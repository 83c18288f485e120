"""Apps: runs the ClientApps that this machine's owner accepted."""
