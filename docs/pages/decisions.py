"""The index of docs/decisions, whose titles say what was decided."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "decisions"


def decisions() -> dict[str, str]:
    """Return file name -> title ("001: ..."). ValueError for a file without its number and title."""
    return {path.name: _title(path) for path in sorted(FOLDER.glob("[0-9]*.md"))}


def _title(path: Path) -> str:
    found = re.match(r"# (\d{3}: .+)", path.read_text())
    if found is None or not path.name.startswith(found[1][:3]):
        raise ValueError(f"{path.name}: begin with '# {path.name[:3]}: what was decided'")
    return found[1]


def index() -> str:
    """Return the page that lists them."""
    lines = [f"- [{title}]({name})" for name, title in decisions().items()]
    return "\n".join(("# Decisions", "", *lines, ""))
