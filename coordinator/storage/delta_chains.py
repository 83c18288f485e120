"""Deltas that workers have sent, kept for those who have an older blob than the newest.

They lead from one blob to the next. Each blob lies in the store whole, so a delta is worth keeping only while
it saves a receiver bytes: at most 8 in a row, together shorter than the blob. They are forgotten with the
process: who fetches then gets all bytes. Source: BitSnap (arXiv 2511.12376) bounds its chains so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from protos.blob_transfer import Change

LONGEST = 8
MOST_SHARE = 0.9  # of a blob that the deltas to it may take: what is longer goes as the blob itself


@dataclass(slots=True)
class DeltaChains:
    """The last delta to each blob; belongs to the event loop's thread."""

    _to: dict[str, tuple[Change, int]] = field(default_factory=dict)  # by blob, with the blob's size

    def add(self, change: Change, size: int) -> list[str]:
        """Take in a delta to a blob of ``size`` bytes; returns the deltas that may go, perhaps this one."""
        known = self._to.get(change.hash)
        if known is not None:
            return [] if known[0].delta == change.delta else [change.delta]
        if change.size > MOST_SHARE * size:
            return [change.delta]
        self._to[change.hash] = change, size
        last = self.to(change.hash)[-1]
        gone = []
        while (stale := self._to.pop(last.base, None)) is not None:
            last = stale[0]
            gone.append(last.delta)
        return gone

    def to(self, name: str) -> list[Change]:
        """Return the deltas that lead to a blob, the newest first."""
        found, n_bytes = list[Change](), 0
        while (known := self._to.get(name)) is not None and len(found) < LONGEST:
            change, size = known
            n_bytes += change.size
            if n_bytes > MOST_SHARE * size:
                break
            found.append(change)
            name = change.base
        return found

    def deltas(self, names: Collection[str]) -> frozenset[str]:
        """Return the deltas that lead to any of these blobs."""
        return frozenset(change.delta for name in names for change in self.to(name))

    def prune(self, names: Collection[str]) -> list[str]:
        """Keep what leads to these blobs alone; returns the deltas that may go."""
        kept = self.deltas(names)
        gone = {name: known[0].delta for name, known in self._to.items() if known[0].delta not in kept}
        for name in gone:
            del self._to[name]
        return list(gone.values())
