"""Transport on one asyncio loop and gRPC's public asyncio API; replaces the one of threads beside it."""
