"""Which samples a client trains and evaluates on: pure functions of seed, client, round and epoch.

    own order     = permutation of 0..n-1 drawn by (seed, client)
    held out      = its last round(share * n), but never all but one; the rest is trained on
    epoch e of r  = permutation of the trained samples drawn by (seed, client, r, e),
                    cut into floor(n / batch) full micro-batches; what is left over waits for another epoch
    n < batch     = one micro-batch that repeats the permutation until it is full

Shapes are static, so training has full micro-batches only. Whoever trains a client by these rules, here
or under another framework, sees the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

_SPLIT, _EPOCH, _OPS = 0, 1, 2  # what a draw is for


def client_key(client: str) -> int:
    """64 bits that stand for a client's name."""
    return int.from_bytes(blake2b(client.encode(), digest_size=8).digest(), "little")


def op_seed_of(seed: int, client: str) -> int:
    """Seed of a client's random ops (dropout), in [0, 2^63)."""
    draw = np.random.default_rng([seed, client_key(client), _OPS])
    return int(draw.integers(2**63))


@dataclass(frozen=True)
class Split:
    """Sample numbers of one client's data, ascending."""

    train: Indices
    held_out: Indices


def split(n: int, share: float, seed: int, client: str) -> Split:
    """Part ``n`` samples; ``share`` in [0, 1) of them is held out, at least one where it is above 0.

    UsageError when nothing is left to train on.
    """
    held = held_out_of(n, share)
    if n - held < 1:
        raise UsageError(f"{n} samples with {share:g} held out leave none to train on; register more data")
    order = np.random.default_rng([seed, client_key(client), _SPLIT]).permutation(n).astype(np.int64)
    return Split(np.sort(order[: n - held]), np.sort(order[n - held :]))


def held_out_of(n: int, share: float) -> int:
    """Return how many of ``n`` samples ``split`` holds out."""
    return max(1, min(n - 1, round(share * n))) if share > 0.0 else 0


def steps_an_epoch(n: int, batch: int) -> int:
    """Micro-batches of one epoch over ``n`` samples; at least one."""
    return max(1, n // batch)


def local_steps(n: int, batch: int, epochs: int, cap: int = 0) -> int:
    """Micro-batches of a round; ``cap`` 0 is none."""
    steps = epochs * steps_an_epoch(n, batch)
    return min(steps, cap) if cap else steps


def epoch_batches(
    samples: Indices, batch: int, seed: int, client: str, at_round: int, epoch: int
) -> Iterator[Indices]:
    """The sample numbers [batch] of each micro-batch of one epoch."""
    draw = np.random.default_rng([seed, client_key(client), _EPOCH, at_round, epoch])
    yield from _cut(draw.permutation(samples), batch)


def held_out_batches(samples: Indices, batch: int, least: int = 1) -> list[Indices]:
    """The same micro-batches at every evaluation, each sample once: full ones in stored order, and one of the
    rest. A rest of fewer than ``least`` samples shares with the full one before it, or is left out where
    halves would have fewer as well."""
    full, rest = divmod(len(samples), batch)
    whole, end = full * batch, len(samples)
    cuts = [*range(0, whole, batch), whole]
    if rest >= least:
        cuts.append(end)
    elif rest and full and (batch + rest) // 2 >= least:
        cuts[-1:] = [(whole - batch + end + 1) // 2, end]
    return [samples[a:b] for a, b in pairwise(cuts)]


def _cut(order: Indices, batch: int) -> Iterator[Indices]:
    if len(order) < batch:
        yield np.resize(order, batch)
        return
    for at in range(0, len(order) - batch + 1, batch):
        yield order[at : at + batch]
