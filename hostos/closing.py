"""What is closed at the end of a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Base of what ``close`` undoes; it closes itself at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Undo it; may be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
