"""Writes the site's pages into a folder before it is built: `python -m docs.pages.build build/docs`.

They are those of docs/, the ones made from code, the repository's own, and the files that pages link to.
State diagrams are drawn, and links to files of the repository lead to their pages.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from docs.pages.decisions import index
from docs.pages.diagrams import diagram, rows, table
from docs.pages.reference import PAGES

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
INDEX = "decisions/index.md"
NOT_PAGES = ("pages", "__pycache__")
_LINK = re.compile(r"\]\(([^)#:\s]+)")
_STATES = re.compile(r"<!-- states: ([a-z-]+) -->")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s")


def write(folder: Path) -> list[str]:
    """Write every page and picture below ``folder``, which is made anew; returns the pages' paths."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs", folder, ignore=shutil.ignore_patterns(*NOT_PAGES, "*.md", "*.toml", "*.json")
    )
    pages = {
        path.relative_to(ROOT / "docs").as_posix(): path.read_text()
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if not set(path.relative_to(ROOT / "docs").parts) & set(NOT_PAGES)
    }
    pages |= {path: make() for path, make in PAGES.items()} | {INDEX: index()}
    for name in (*ROOT_PAGES, *_linked(pages)):
        pages[_page_of(name)] = _shown(name)
    for name, text in pages.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_finished(name, text))
    return sorted(pages)


def states(name: str) -> str:
    """Return a machine's diagram, and below it every event of every phase, folded."""
    inner = "\n".join(f"    {line}" for line in rows(table(name)).splitlines())
    return f'```mermaid\n{diagram(table(name))}\n```\n\n??? note "Every event of every phase"\n\n{inner}\n'


def spaced(markdown: str) -> str:
    """Put an empty line before each list after a paragraph: Markdown runs it on as text without one."""
    lines: list[str] = []
    fenced, before = False, ""
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        begins = _ITEM.match(line) and before.strip() and not _ITEM.match(before) and before[0] not in " #|<"
        if begins and not fenced and line[0] != " " and not _in_item(lines):
            lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"


def _in_item(lines: list[str]) -> bool:
    """Whether the paragraph that ends here belongs to an item, whose lines need not be indented."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if _ITEM.match(line):
            return True
    return False


def _finished(name: str, text: str) -> str:
    text = _STATES.sub(lambda found: states(found[1]), text)
    return spaced(_LINK.sub(lambda found: f"]({_site_link(name, found[1])}", text))


def _target(here: str, link: str) -> str:
    """Return the repository's path of what a page of the site links to."""
    source = here if not (ROOT / "docs" / here).exists() and (ROOT / here).exists() else f"docs/{here}"
    return os.path.normpath(os.path.join(os.path.dirname(source), link))


def _site_link(here: str, link: str) -> str:
    target = _target(here, link)
    if not (ROOT / target).is_file():
        return link
    page = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
    return os.path.relpath(page, os.path.dirname(here))


def _linked(pages: dict[str, str]) -> list[str]:
    """Return files of the repository, neither in docs/ nor at the top, that pages link to."""
    targets = {_target(name, link) for name, text in pages.items() for link in _LINK.findall(text)}
    return sorted(t for t in targets if "/" in t and not t.startswith("docs/") and (ROOT / t).is_file())


def _page_of(name: str) -> str:
    return name if name.endswith(".md") else f"{name}.md"


def _shown(name: str) -> str:
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        return text
    return f"# {name}\n\n````{Path(name).suffix[1:]}\n{text}````\n"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
