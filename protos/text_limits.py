"""Limits of texts from an app, a worker or any other peer: length, characters, rate."""

from __future__ import annotations

import re

# Control characters, line separators, marks and changes of the reading direction, what is not seen at all
# (but the joiners that emoji and several scripts are written with), halves of pairs: all that may move a
# terminal's cursor, forge a line of a log or show a text as another one.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_CONTROL_BUT_LINES = re.compile(_CONTROL.pattern.replace(r"\x00-\x1f", r"\x00-\x09\x0b-\x1f"))


def plain(text: str) -> bool:
    """True when a name may be shown as it is."""
    return _CONTROL.search(text) is None


def clean(text: str, most: int, *, lines: bool = False) -> str:
    """Cut a text at ``most`` characters, each control character a space; ``lines``: but newlines stay."""
    return (_CONTROL_BUT_LINES if lines else _CONTROL).sub(" ", text[:most])


class Budget:
    """Token bucket: ``burst`` at once, ``per_s`` each second after that; refusals are counted."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at_s = burst, 0.0
        self._refused = 0

    def take(self, now_s: float, cost: float = 1.0) -> bool:
        """Spend ``cost`` at ``now_s``, on a clock that never goes back; False when it is refused."""
        self._left = min(self._burst, self._left + self._per_s * max(0.0, now_s - self._at_s))
        self._at_s = max(self._at_s, now_s)
        if cost > self._left:
            self._refused += 1
            return False
        self._left -= cost
        return True

    def refused(self) -> int:
        """Refusals since the last call."""
        found, self._refused = self._refused, 0
        return found
