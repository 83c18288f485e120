"""Colours and lettering of a plan's picture: safe for colour-blind readers, legible in grey print.

A replica has a hue and a kind of work a lightness, so that both can be read at once; vermilion marks what
bounds the step and nothing else. Hues: Okabe and Ito's palette.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.textpath import TextPath

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.plan import Plan, Prediction
    from coordinator.planning.costs.fleet import Fleet

INK, QUIET, FAINT, PAPER, ISLAND = "#1f2d3a", "#66737f", "#c9d1d8", "#ffffff", "#f3f5f7"
ACCENT = "#d55e00"
HUES = ("#0072b2", "#008a66", "#b05a8c", "#8a6d00", "#3b9bd0", "#5b5ea6")
RATES = ("#dde2e7", "#98a4af")  # of links: slow, fast


def lettering() -> AbstractContextManager[None]:
    """Return a context in which figures are drawn with this style, the same bytes each time."""
    return mpl.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 8,
            "svg.hashsalt": "atoll",  # the same ids each time
            "text.parse_math": False,  # names are what people chose
            "axes.linewidth": 0.6,
            "xtick.color": QUIET,
            "ytick.color": INK,
            "text.color": INK,
        }
    )


def hue(replica: int) -> str:
    """Return the colour of a replica."""
    return HUES[replica % len(HUES)]


def tint(colour: str, share: float) -> str:
    """Return ``colour`` mixed with white: 1.0 is the colour, 0.0 is white."""
    return mixed("#ffffff", colour, share)


def mixed(low: str, high: str, share: float) -> str:
    """Return a colour between two."""
    pairs = zip(to_rgb(low), to_rgb(high), strict=True)
    red, green, blue = (a + (b - a) * min(1.0, max(0.0, share)) for a, b in pairs)
    return to_hex((red, green, blue))


@lru_cache(maxsize=8192)
def text_width(text: str, size: float) -> float:
    """Inches that a line of text takes at a font size in points."""
    if not text.strip():
        return 0.0
    return float(np.ptp(np.asarray(TextPath((0, 0), text, size=size).vertices)[:, 0])) / 72


def fitted(text: str, inches: float, size: float) -> str:
    """Return ``text``, with its middle left out where it is wider than ``inches``."""
    if text_width(text, size) <= inches:
        return text
    for kept in range(len(text) - 1, 1, -1):
        head, tail = (kept + 1) // 2, kept // 2
        short = f"{text[:head]}…{text[-tail:]}"
        if text_width(short, size) <= inches:
            return short
    return f"{text[:1]}…"


def wrapped(text: str, inches: float, size: float) -> list[str]:
    """Return ``text`` in lines no wider than ``inches``, where its words allow."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and text_width(longer, size) > inches:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def rate_text(bps: float) -> str:
    """2.5e7 -> "25 Mbit/s"."""
    return f"{_short(bps / 1e9)} Gbit/s" if bps >= 0.9995e9 else f"{_short(bps / 1e6)} Mbit/s"


def size_text(n_bytes: float) -> str:
    """2_500_000 -> "2.5 MB", as links are sold."""
    return f"{_short(n_bytes / 1e9)} GB" if n_bytes >= 0.9995e9 else f"{_short(n_bytes / 1e6)} MB"


def memory_text(used: float, limit: float) -> str:
    """Return "1.2 of 8 GiB", in MiB where less than a GiB is used."""
    if used >= 2**30:
        return f"{_short(used / 2**30)} of {_short(limit / 2**30)} GiB"
    whole = f"{_short(limit / 2**30)} GiB" if limit >= 2**30 else f"{_short(limit / 2**20)} MiB"
    return f"{_short(used / 2**20)}{' MiB' if limit >= 2**30 else ''} of {whole}"


def _short(value: float) -> str:
    """Two digits, or all before the point."""
    return (
        f"{value:.0f}"
        if value >= 9.95
        else f"{value:.1f}".removesuffix(".0")
        if value >= 0.995
        else f"{value:.2g}"
    )


class Bound:
    """Places and links that the bottleneck of a prediction names; ``names``: of workers."""

    def __init__(
        self, plan: Plan, prediction: Prediction, names: Mapping[str, str], fleet: Fleet | None = None
    ) -> None:
        said, why = prediction.bottleneck, prediction.reason
        self.ranks: set[int] = set()
        self.pairs: set[tuple[str, str]] = (
            set()
        )  # workers; both directions of a link, those that share an uplink
        self.ways = said == "latency"  # every link's delay
        for rank, place in enumerate(plan.places):
            for name in (names.get(place.worker, place.worker), place.worker):
                stage = f"stage {place.stage} on {name}"
                if said == stage or (said == "memory" and why.startswith(f"{stage} ")):
                    self.ranks.add(rank)
        for link in prediction.links:
            ends = (link.source, link.target)
            if said in (
                f"link {names.get(ends[0], ends[0])}>{names.get(ends[1], ends[1])}",
                "link {}>{}".format(*ends),
            ):
                self.pairs |= {ends, (ends[1], ends[0])}
            elif fleet is not None and said in _uplinks(fleet, *ends):
                self.pairs.add(ends)


def _uplinks(fleet: Fleet, source: str, target: str) -> list[str]:
    """Shared uplinks on a way, as a bottleneck names them."""
    return [f"uplink {name}" for name, _ in fleet.path(fleet.index[source], fleet.index[target])[:-1]]
