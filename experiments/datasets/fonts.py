"""Letters and digits as FIGlet fonts draw them: a font is a writer with a hand of its own.

A FIGlet font file has a head, comments, and for each character from the blank on as many lines of text as
the font is high. A character's ink is scaled into the middle of 28 x 28 pixels, as MNIST's digits are, and
shifted by a few pixels that a seed draws, so that a writer has several images of each. Pure.
Source: the FIGfont specification, version 2 (Chappell and Cowan 1998).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from atoll.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase  # label 0 to 61
EACH = 4  # images of a character by one writer
SIDE, INK_SIDE, SHIFT = 28, 20, 3
MAX_HEIGHT = 16
DISTINCT = 56  # of a font's 62 characters: those without case would have fewer
FULL, FAINT = 255, 150
_FAINT = frozenset(".,'`-_:;~\"^")
_FIRST = 32  # the blank
_ODD = re.compile(r"[^A-Za-z0-9_-]")  # what names of files and clients do not have


@dataclass(frozen=True)
class Writers:
    """Images uint8 [n, 28, 28], their characters uint8 [n], and whose they are, int64 [n], of ``names``."""

    images: Bytes
    labels: Bytes
    writers: NDArray[np.int64]
    names: tuple[str, ...]


def writers(files: Mapping[str, bytes], seed: int = 0, each: int = EACH) -> Writers:
    """Images by every font that has all characters, in the order of the fonts' names.

    UsageError when no font has.
    """
    images, names = [], []
    for name in sorted(files):
        glyphs = _glyphs(files[name])
        if glyphs is None:
            continue
        rng = np.random.default_rng([seed, int.from_bytes(sha256(name.encode()).digest()[:8], "big")])
        shifts = rng.integers(-SHIFT, SHIFT + 1, (each, len(CHARACTERS), 2))
        images.append([_placed(g, *shift) for turn in shifts for g, shift in zip(glyphs, turn, strict=True)])
        names.append(_ODD.sub("", name.rpartition("/")[2].rpartition(".")[0]))
    if not names:
        raise UsageError(
            "no font has all letters and digits; fetch them again: atoll data fetch fonts --again"
        )
    labels = np.tile(np.arange(len(CHARACTERS), dtype=np.uint8), each * len(names))
    owners = np.repeat(np.arange(len(names)), each * len(CHARACTERS))
    return Writers(np.array(images, np.uint8).reshape(-1, SIDE, SIDE), labels, owners, tuple(names))


def characters(data: bytes) -> dict[str, list[str]]:
    """Lines of every character from the blank to the tilde. UsageError for what is no such font."""
    lines = data.decode("latin-1").splitlines()
    head = lines[0].split() if lines else []
    if not (head and head[0].startswith("flf2a") and len(head[0]) == 6 and len(head) >= 6):
        raise UsageError("a file that is no FIGlet font")
    try:
        height, comments = int(head[1]), int(head[5])
    except ValueError:
        raise UsageError("a FIGlet font without its height") from None
    found, at = {}, 1 + comments
    if not 1 <= height <= 1000 or comments < 0:
        raise UsageError(f"a FIGlet font {height} lines high")
    for code in range(_FIRST, 127):
        rows = [line.rstrip() for line in lines[at : at + height]]
        if len(rows) < height:
            raise UsageError(f"a FIGlet font that ends before {chr(code)!r}")
        found[chr(code)] = [row.rstrip(row[-1:]).replace(head[0][5], " ") for row in rows]
        at += height
    return found


def _glyphs(data: bytes) -> list[Bytes] | None:
    """Ink of every character, None for a font that does not draw them all differently."""
    try:
        drawn = characters(data)
    except UsageError:
        return None  # some files of the collection are no text fonts
    glyphs = []
    for character in CHARACTERS:
        rows = drawn[character]
        width = max(map(len, rows))
        cells = np.array([[_ink(cell) for cell in row.ljust(width)] for row in rows], np.uint8).reshape(
            len(rows), width
        )
        if len(rows) > MAX_HEIGHT or not cells.any():
            return None
        glyphs.append(_scaled(cells))
    return glyphs if len({glyph.tobytes() for glyph in glyphs}) >= DISTINCT else None


def _ink(cell: str) -> int:
    return 0 if cell.isspace() else FAINT if cell in _FAINT else FULL


def _scaled(cells: Bytes) -> Bytes:
    """The inked part, its longer side INK_SIDE pixels long; a cell of text is twice as high as wide."""
    rows, columns = np.flatnonzero(cells.any(1)), np.flatnonzero(cells.any(0))
    cells = cells[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = 2 * cells.shape[0], cells.shape[1]
    scale = INK_SIDE / max(height, width)
    size = [max(1, round(height * scale)), max(1, round(width * scale))]
    at = [np.arange(n) * have // n for n, have in zip(size, cells.shape, strict=True)]
    found: Bytes = cells[np.ix_(*at)]
    return found


def _placed(glyph: Bytes, down: int, right: int) -> Bytes:
    image = np.zeros((SIDE, SIDE), np.uint8)
    top, left = ((SIDE - n) // 2 for n in glyph.shape)
    top, left = top + int(down), left + int(right)
    image[top : top + glyph.shape[0], left : left + glyph.shape[1]] = glyph
    return image
