"""The process that computes: started in a sandbox, bounded in memory, and how it ended."""
