"""Compression of links as an owner requests it: the values of ``--compress``.

    off | lossless | auto[:RATIO] | adatopk[:RATIO] | CODEC[:RATIO]

RATIO is how many times fewer bytes than dense the slowest link shall carry (``auto``, ``adatopk``)
or every link (a codec by name). ``:independent`` after any lossy form lets a sparse codec choose a
gradient's own elements instead of its value's. Which codecs there are, this package does not know.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from atoll.errors import UsageError

OFF, LOSSLESS, AUTO, ADATOPK = "off", "lossless", "auto", "adatopk"
EXACT = frozenset({OFF, LOSSLESS})
"""Modes that change no bit of what is trained."""
MAX_RATIO = 10_000.0
INDEPENDENT = "independent"
_FORM = re.compile(rf"([a-z][a-z0-9_]{{0,31}})(?::([0-9]{{1,6}}(?:\.[0-9]{{1,6}})?))?(?::({INDEPENDENT}))?")


@dataclass(frozen=True, slots=True)
class Compression:
    """A parsed ``--compress``; ``ratio`` None means the mode's own default."""

    mode: str  # one of the four words, or a codec's name
    ratio: float | None = None
    independent: bool = False  # gradients choose their own elements

    @property
    def exact(self) -> bool:
        return self.mode in EXACT

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f":{self.ratio:g}"
        return f"{self.mode}{ratio}{':' + INDEPENDENT if self.independent else ''}"

    @classmethod
    def parse(cls, text: str) -> Compression:
        """UsageError unless ``text`` has the form above with 1 <= RATIO <= 10,000."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageError(
                f"--compress {text[:64]!r} is not understood; give off, lossless, auto, "
                "or CODEC:RATIO as in topk:32"
            )
        mode, ratio = found.group(1), None if found.group(2) is None else float(found.group(2))
        if ratio is not None and (not math.isfinite(ratio) or not 1.0 <= ratio <= MAX_RATIO):
            raise UsageError(f"compression ratio {ratio:g}; give a number from 1 to {MAX_RATIO:g}")
        if ratio is not None and mode in EXACT:
            raise UsageError(f"{mode} takes no ratio; write --compress {mode}")
        if found.group(3) and mode in EXACT:
            raise UsageError(f"{mode} is exact and has no setting; write --compress {mode}")
        return cls(mode, ratio, found.group(3) is not None)
