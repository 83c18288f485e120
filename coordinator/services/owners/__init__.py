"""The Owner service, and what owners are shown of jobs, workers and links."""
