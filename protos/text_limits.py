"""Limits of texts from an app, a worker or any other peer: length and characters."""

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


REASON_CHARS = 4000
"""Of an app's error, of why it does not run, or of how a run ended; whoever sends it cuts it, too."""
LINES_CHARS, LINES_CHARS_PER_S = 256_000, 1000.0
"""Budget of the lines of one worker, or of all its apps, in a log: at most 86 MB a day."""
LINE_CHARS = 120  # what the log adds to a line


def plain(text: str) -> bool:
    """True when a name may be shown as it is."""
    return _CONTROL.search(text) is None


def clean(text: str, most: int, *, lines: bool = False) -> str:
    """Cut a text at ``most`` characters, each control character a space; ``lines``: but newlines stay."""
    return (_CONTROL_BUT_LINES if lines else _CONTROL).sub(" ", text[:most])
