"""Commands about jobs: planned, submitted, watched, gone back to, exported."""
