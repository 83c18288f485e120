"""The site as a browser gets it: lists, tables, links and code are what they were written as."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.pages import build

ROOT = Path(__file__).resolve().parents[2]
RUN_ON = re.compile(r"(?:^|\n)\s*(?:[-*]|\d+\.) |\|\s*-{3}|^ {4}|\n {4}\S")
"""A list, a table or a block of code that became text of a paragraph."""
NOT_FOUND = "404.html"  # its links begin at the root of wherever the site stands


@dataclass
class Page(HTMLParser):
    """What a page of the site holds."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)  # cells of each row
    run_on: list[str] = field(default_factory=list)
    items: int = 0
    _code: int = 0
    _article: bool = False
    _link: bool = False
    _text: str | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        self.links += [
            value for name in ("href", "src") if (value := given.get(name)) and tag in ("a", "img")
        ]
        self._code += tag in ("pre", "code", "script")
        self._article |= tag == "article"
        self._link |= tag == "a"
        self.items += tag == "li" and self._article
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append(0)
        elif tag in ("td", "th") and self.tables:
            self.tables[-1][-1] += 1
        elif tag == "p":
            self._text = ""

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("pre", "code", "script")
        self._article &= tag != "article"
        self._link &= tag != "a"
        if tag == "p" and self._text is not None:
            self.run_on += [self._text] if RUN_ON.search(self._text) else []
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._article and not self._code and "```" in data:
            self.run_on.append(data)
        if self._text is not None:
            self._text += "x" if self._code or self._link else data


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


def broken(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Links to files of the site that are not there, or to places that a page has not."""
    found = []
    for path, page in pages.items():
        for link in page.links if path.name != NOT_FOUND else []:
            if re.match(r"[a-z]+:|//", link):
                continue
            file, _, place = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (place and target in pages and place not in pages[target].ids):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = shutil.which("zensical", path=f"{Path(sys.executable).parent}:{sys.prefix}/bin")
    if command is None:
        pytest.skip("zensical is not installed here; `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    build.write(folder / "build" / "docs")
    (folder / "zensical.toml").write_text(
        (ROOT / "zensical.toml").read_text().replace('paths = ["."]', f'paths = ["{ROOT}"]')
    )
    made = subprocess.run(
        [command, "build", "--strict", "-f", "zensical.toml"], cwd=folder, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return (folder / "build" / "site").resolve()


@pytest.mark.slow
def test_the_built_site_reads_as_it_was_written(site: Path) -> None:
    pages = {path: read(path.read_text()) for path in sorted(site.rglob("*.html"))}
    assert len(pages) > 100
    uneven = [f"{path.name}: {rows}" for path, p in pages.items() for rows in p.tables if len(set(rows)) > 1]
    assert uneven == []
    assert [f"{path.name}: {text[:90]!r}" for path, page in pages.items() for text in page.run_on] == []
    assert broken(site, pages) == []
    first = pages[site / "index.html"]
    assert any(link.endswith("dashboard-job.png") for link in first.links)
    assert sum(page.items for page in pages.values()) > 500
    assert sum(len(page.tables) for page in pages.values()) > 200
    assert 'class="mermaid"' in (site / "ARCHITECTURE.html").read_text()


def test_what_is_broken_in_a_page_is_seen(tmp_path: Path) -> None:
    text = "<article><p>Three:\n- one\n- two</p><p>```sh</p><p>run\n    atoll serve</p>"
    text += "<table><tr><th>a</th></tr><tr><td>1</td><td>2</td></tr></table>"
    text += (
        '<a id="here" href="#here">x</a><a href="#gone">x</a><a href="none.html">x</a><p>see <a>32</a>. x</p>'
    )
    (tmp_path / "page.html").write_text(text)
    page = read(text)
    assert len(page.run_on) == 3
    assert page.tables == [[1, 2]]
    assert broken(tmp_path, {tmp_path / "page.html": page}) == ["page.html: #gone", "page.html: none.html"]
