"""The real scheduler, ledger, federation and sessions on one seeded clock and network, tried to death."""
