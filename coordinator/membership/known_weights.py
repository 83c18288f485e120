"""Who says that it holds which blobs of weights on its disk: claims, of which nothing follows but a question.

Machines that hold the same checkpoints say the same bytes, which are kept once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.messages.from_worker import HASH_BYTES

MAX_CLAIMED_BYTES = 64 << 20  # of all claims that differ: 2 million blobs


@dataclass(slots=True)
class KnownWeights:
    """Claims of the workers that are connected; who was found to claim wrongly is heard no more."""

    _claims: dict[str, bytes] = field(default_factory=dict)  # by worker
    _same: dict[bytes, bytes] = field(default_factory=dict)  # equal claims are one object
    _held: Counter[bytes] = field(default_factory=Counter)  # workers with these claims
    _barred: set[str] = field(default_factory=set)
    _bytes: int = 0

    def said(self, worker: str, hashes: bytes) -> str:
        """Take in all that a worker claims, in place of what it did before; returns why it does not count,
        "" where it does."""
        self.gone(worker)
        if not hashes:
            return ""
        if worker in self._barred:
            return "it has sent other bytes than it claimed to hold"
        if hashes not in self._held:
            if self._bytes + len(hashes) > MAX_CLAIMED_BYTES:
                return f"workers claim {self._bytes // HASH_BYTES} different blobs already"
            self._bytes += len(hashes)
        same = self._same.setdefault(hashes, hashes)
        self._held[same] += 1
        self._claims[worker] = same
        return ""

    def gone(self, worker: str) -> None:
        """Forget what a worker claims: its session has ended."""
        hashes = self._claims.pop(worker, None)
        if hashes is None:
            return
        self._held[hashes] -= 1
        if not self._held[hashes]:
            del self._held[hashes], self._same[hashes]
            self._bytes -= len(hashes)

    def bar(self, worker: str) -> None:
        """Believe a worker no more, until this process ends."""
        self.gone(worker)
        self._barred.add(worker)

    def claims(self) -> dict[str, bytes]:
        """Return what each worker claims: hashes of ``HASH_BYTES`` each, ascending."""
        return dict(self._claims)


def names_of(hashes: bytes) -> Iterator[str]:
    """Yield the blobs of a claim."""
    text = hashes.hex()
    for at in range(0, len(text), 2 * HASH_BYTES):
        yield text[at : at + 2 * HASH_BYTES]
