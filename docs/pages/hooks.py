"""Hooks of mkdocs, called while it builds the site: they add pages made from code and draw the diagrams."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

from docs.pages.decisions import decisions, index
from docs.pages.diagrams import diagram, rows, table
from docs.pages.reference import PAGES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
INDEX = "decisions/index.md"
_LINK = re.compile(r"\]\(([^)#:\s]+)")
_STATES = re.compile(r"<!-- states: ([a-z-]+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages made from code, the decisions' index, and files beside docs/ that pages link to."""
    made = {path: make() for path, make in PAGES.items()} | {INDEX: index()}
    beside = _linked(files)
    for name in (*ROOT_PAGES, *beside):
        made[_page_of(name)] = _shown(name)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    config.nav = [
        *(config.nav or []),
        {"Decisions": [INDEX, *(f"decisions/{name}" for name in decisions())]},
        {"Examples": [_page_of(name) for name in beside]},
    ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the state diagrams that a page asks for; lead links to files of the repository to their pages."""
    text = _STATES.sub(lambda found: states(found[1]), markdown)
    here = page.file.src_uri
    return _LINK.sub(lambda found: f"]({_site_link(here, found[1])}", text)


def states(name: str) -> str:
    """Return a machine's diagram, and below it every event of every phase, folded."""
    inner = "\n".join(f"    {line}" for line in rows(table(name)).splitlines())
    return f'```mermaid\n{diagram(table(name))}\n```\n\n??? note "Every event of every phase"\n\n{inner}\n'


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


def _linked(files: Files) -> list[str]:
    """Return files of the repository, neither in docs/ nor at the top, that pages link to."""
    targets = {
        _target(file.src_uri, link)
        for file in files.documentation_pages()
        for link in _LINK.findall(file.content_string)
    }
    return sorted(t for t in targets if "/" in t and not t.startswith("docs/") and (ROOT / t).is_file())


def _page_of(name: str) -> str:
    return name if name.endswith(".md") else f"{name}.md"


def _shown(name: str) -> str:
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        return text
    return f"# {name}\n\n````{Path(name).suffix[1:]}\n{text}````\n"
