"""Sentences that users read, and a random draw of them for a reader:
`python -m docs.pages.sentences --seed 2026`.

A reader who does not know the project marks each sentence that needs a second reading. Of 200 at most 5 may
be.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from docs.pages import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
DRAWN = 200
MIN_CELL_WORDS = 4
"""Cells of tables with fewer words are names and figures."""


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a text, without code, tables and headings."""
    block: list[str] = []
    for line in [*_without_code(text).splitlines(), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.)\s", line)
        if block and (item or not line.strip() or line.lstrip().startswith(("|", "#"))):
            yield " ".join(block)
            block = []
        if line.strip() and not line.lstrip().startswith(("|", "#")) and (item or line[:4] != "    "):
            block.append(line.strip())


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; one ends where a capital, a quotation or code follows the stop."""
    return [s for p in paragraphs(text) for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"(\[])", p)]


def words(sentence: str) -> int:
    """Return the number of words of a sentence; code between backticks is one."""
    return sum(bool(re.search(r"\w", word)) for word in re.sub(r"`[^`]*`", "CODE", sentence).split())


def cells(text: str) -> list[str]:
    """Return the cells of a text's tables that hold prose."""
    rows = [line.strip() for line in _without_code(text).splitlines() if line.lstrip().startswith("|")]
    found = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
    return [cell for cell in found if words(cell) >= MIN_CELL_WORDS]


def pages(*, decisions: bool = False) -> list[Path]:
    """Return the files of the documentation; decisions are written for developers."""
    found = [
        inner
        for page in (ROOT / name for name in PAGES)
        for inner in (sorted(page.rglob("*.md")) if page.is_dir() else [page])
    ]
    return [path for path in found if decisions or path.parent.name != "decisions"]


def helps() -> list[tuple[str, str]]:
    """Return the help texts of commands and of their options, each with where it stands."""
    found = []
    for path, command in reference.commands():
        found.append((path, getattr(command, "help", "") or ""))
        found += [(f"{path} {p.name}", getattr(p, "help", "") or "") for p in getattr(command, "params", ())]
    return found


def read() -> list[tuple[str, str]]:
    """Return every sentence and cell that users read in docs and help texts once, with where it first
    stands."""
    texts = [(str(path.relative_to(ROOT)), path.read_text()) for path in pages()]
    found: dict[str, str] = {}
    for where, text in [*texts, *helps()]:
        for sentence in [*sentences(text), *cells(text)]:
            found.setdefault(sentence, where)
    return [(where, sentence) for sentence, where in found.items()]


def drawn(seed: int, count: int = DRAWN) -> list[tuple[str, str]]:
    """Draw sentences without repetition; the same seed draws the same from the same texts."""
    return random.Random(seed).sample(read(), count)


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def main() -> None:
    """Print the sentences of a draw, numbered."""
    parser = argparse.ArgumentParser(description="Draw sentences of docs and help texts for a fresh reader.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=DRAWN)
    given = parser.parse_args()
    for number, (where, sentence) in enumerate(drawn(given.seed, given.count), 1):
        print(f"{number:3} {where}: {sentence}")


if __name__ == "__main__":
    main()
