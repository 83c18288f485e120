"""HTML that Jupyter shows: every word is escaped, as workers and job files wrote some of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 360, 64  # of a curve, in pixels
MAX_POINTS = 360  # of a curve


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    cells = "".join(f"<th>{escape(word)}</th>" for word in head)
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def facts(title: str, pairs: Iterable[tuple[str, object]]) -> str:
    """Return a title with what is known, one fact a row; facts that are None or "" are left out."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in pairs
        if value not in (None, "")
    )
    return f"<div><strong>{escape(title)}</strong><table><tbody>{rows}</tbody></table></div>"


def bar(share: float) -> str:
    """Return a bar that is filled to ``share``, clipped to 0 and 1."""
    percent = round(100 * min(1.0, max(0.0, share)))
    return f"<progress max='100' value='{percent}' style='width:{WIDTH}px'>{percent} %</progress>"


def curve(values: Sequence[float]) -> str:
    """Return a line through finite ``values`` as SVG, "" for fewer than two."""
    shown = [value for value in values if abs(value) < float("inf")]  # neither infinite nor NaN
    shown = shown[:: -(-len(shown) // MAX_POINTS) or 1]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    scale = (HEIGHT - 4) / (high - low) if high > low else 0.0
    points = " ".join(
        f"{at * WIDTH / (len(shown) - 1):.1f},{HEIGHT - 2 - (value - low) * scale:.1f}"
        for at, value in enumerate(shown)
    )
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='from {shown[0]:.4g} to "
        f"{shown[-1]:.4g}'><polyline fill='none' stroke='currentColor' stroke-width='1.5' "
        f"points='{points}'/></svg>"
    )
