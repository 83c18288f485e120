"""What mkdocs calls while it builds the site: adds the pages that are made from code, and draws the diagrams."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.pages.decisions import decisions, index
from docs.pages.diagrams import diagram, rows, table
from docs.pages.reference import PAGES

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
INDEX = "decisions/index.md"
_OUTSIDE = re.compile(r"\]\((?:\.\./)+([^)#]+)")
_LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")
_STATES = re.compile(r"<!-- states: ([a-z-]+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages made from code, the decisions' index, and files beside docs/ that pages link to."""
    made = {path: make() for path, make in PAGES.items()} | {INDEX: index()}
    for name in (*ROOT_PAGES, *_linked(files)):
        made[_page_of(name)] = _shown(ROOT / name)
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    config.nav = _with_decisions(config.nav)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw state diagrams where a page asks for them, and point links to files beside docs/ at their pages."""
    text = _STATES.sub(lambda found: states(found[1]), markdown)
    depth = page.file.src_uri.count("/")
    up, root_page = "../" * (depth + 1), page.file.src_uri in ROOT_PAGES
    return _LINK.sub(lambda found: f"]({_inside(found[1], up, depth, root_page)}{found[2] or ''})", text)


def states(name: str) -> str:
    """Return a machine's diagram, and below it every event of every phase, folded."""
    inner = "\n".join(f"    {line}".rstrip() for line in rows(table(name)).splitlines())
    return f"```mermaid\n{diagram(table(name))}\n```\n\n??? note \"Every event of every phase\"\n\n{inner}\n"


def _linked(files: Files) -> list[str]:
    """Return files of the repository, outside docs/, that pages link to."""
    names = {
        target
        for file in files.documentation_pages()
        for target in _OUTSIDE.findall(file.content_string)
        if (ROOT / target).is_file() and target not in ROOT_PAGES and not target.startswith("docs/")
    }
    return sorted(names)


def _page_of(name: str) -> str:
    return name if name.endswith(".md") else f"{name}.md"


def _shown(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"# {path.relative_to(ROOT)}\n\n````{path.suffix[1:]}\n{text}````\n"


def _inside(target: str, up: str, depth: int, root_page: bool) -> str:
    """Return a link's target below the site, where it named a file by its place in the repository."""
    if target.startswith(up):
        return "../" * depth + _page_of(target.removeprefix(up))
    return target.removeprefix("docs/") if root_page else target


def _with_decisions(nav: Any) -> Any:
    """Return the navigation with every decision below the one entry that stands for them."""
    pages = [INDEX, *(f"decisions/{name}" for name in decisions())]
    return [{"Decisions": pages} if entry == {"Decisions": INDEX} else entry for entry in nav]
