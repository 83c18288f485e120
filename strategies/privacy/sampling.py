"""Who is drawn under privacy: by coins of a secret, one a name.

Amplification by sampling holds against whoever does not know who was drawn. The job's seed is every
client's, so nothing is drawn by it. Nobody's coin depends on who else is here: a client that drops out
changes no other's draw, and in a fixed cohort makes room for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256

from atoll.errors import UsageError

COIN_BITS = 64


def poisson(names: Iterable[str], chance: float, secret: str) -> tuple[str, ...]:
    """Return the names drawn, ascending, each by itself with ``chance`` in (0, 1]; perhaps none."""
    below = int(chance * 2.0**COIN_BITS)  # exact, or rounded down
    return tuple(sorted(name for name in names if _coin(name, secret) < below))


def cohort(names: Iterable[str], count: int, secret: str) -> tuple[str, ...]:
    """Return ``count`` names, or all where there are no more, ascending."""
    return tuple(sorted(sorted(names, key=lambda name: (_coin(name, secret), name))[:count]))


def in_slot(names: Mapping[str, str], at_round: int, tree: int, job: str) -> tuple[str, ...]:
    """Return the clients whose round of its tree this is, ascending. ``names``: by client, what its slot is
    drawn by. No secret is in it, as nothing is amplified; who else is here changes nobody's slot."""
    number, slot = divmod(at_round, tree)
    return tuple(
        sorted(client for client, name in names.items() if _coin(name, f"{job}/{number}") % tree == slot)
    )


def drawn(names: Iterable[str], sampling: float, count: int, secret: str) -> tuple[str, ...]:
    """Return a round's clients; ``sampling`` 0: a cohort of ``count``."""
    if len(secret) < 32:
        raise UsageError("a secret of fewer than 128 bits")
    return poisson(names, sampling, secret) if sampling else cohort(names, count, secret)


def _coin(name: str, secret: str) -> int:
    return int.from_bytes(sha256(f"{secret}/{name}".encode()).digest()[: COIN_BITS // 8], "big")
