"""Blobs whose presence was confirmed to an uploader: it will name them without having sent them.

The same job twice stores the same bytes, and so does a step that is done anew. Such a blob may belong to a
checkpoint that another job has replaced meanwhile, and is not to go between the answer and the report that
names it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class Promises:
    """Safe for several threads. What was reported stands until ``lapse`` all the same: who deletes looks at
    the reports first, and at the promises while it deletes."""

    _told: dict[str, dict[str, float]] = field(default_factory=dict)  # blob -> to whom -> when
    _settled: set[tuple[str, str]] = field(default_factory=set)  # whom, blob
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def told(self, whom: str, blob: str, now_s: float) -> None:
        """Note that somebody counts on a blob."""
        with self._lock:
            self._told.setdefault(blob, {})[whom] = now_s
            self._settled.discard((whom, blob))

    def reported(self, whom: str, blobs: Collection[str]) -> None:
        """Note that somebody has named these: whether they are needed shows without a promise."""
        with self._lock:
            self._settled.update((whom, blob) for blob in blobs if whom in self._told.get(blob, ()))

    def stands(self, blob: str) -> bool:
        """Return whether somebody counts on a blob."""
        return blob in self._told

    def lapse(self, before_s: float) -> None:
        """Forget what was reported, and what was confirmed ``before_s`` and never reported."""
        with self._lock:
            for blob, those in list(self._told.items()):
                for whom, told_s in list(those.items()):
                    if told_s < before_s or (whom, blob) in self._settled:
                        del those[whom]
                if not those:
                    del self._told[blob]
            self._settled.clear()
