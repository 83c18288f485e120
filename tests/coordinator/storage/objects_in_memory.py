"""An object store in memory, by the port that S3 has; it fails when told to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import StorageError
from coordinator.storage.object_store import Listed

WRITTEN_S = 1000.0


@dataclass
class MemoryObjects:
    """``away``: it answers nothing; ``reads``: ranges asked for, ``lists``: times that it was listed."""

    held: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    lists: int = 0

    def listed(self) -> dict[str, Listed]:
        self._answer()
        self.lists += 1
        return {name: Listed(len(data), WRITTEN_S) for name, data in self.held.items()}

    def put(self, name: str, file: Path, size: int) -> None:
        self._answer()
        data = file.read_bytes()
        assert len(data) == size
        self.held.setdefault(name, data)

    def size(self, name: str) -> int | None:
        self._answer()
        return len(self.held[name]) if name in self.held else None

    def read(self, name: str, offset: int, length: int) -> bytes | None:
        self._answer()
        self.reads.append((name, offset, length))
        assert offset + length <= len(self.held.get(name, b"")) or name not in self.held
        return self.held[name][offset : offset + length] if name in self.held else None

    def delete(self, names: Collection[str]) -> None:
        self._answer()
        for name in names:
            self.held.pop(name, None)

    def _answer(self) -> None:
        if self.away:
            raise StorageError("s3://bucket does not answer; jobs go on by themselves once it does")
