"""What is kept of others is what it was, with its license, and everything that a page asks for is there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from coordinator.dashboard import app

STATIC = app.FOLDER / "static"
UPLOT_1_6_32 = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_uplot_is_the_file_of_its_release_with_its_license() -> None:
    for name, digest in UPLOT_1_6_32.items():
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (STATIC / "uPlot.LICENSE").read_text()


def test_every_file_that_a_page_or_a_script_names_exists() -> None:
    for page in app.PAGES:
        assert (STATIC / "pages" / f"{page.script}.js").is_file()
    ours = [path for path in STATIC.rglob("*.js") if not path.name.startswith("uPlot")]
    assert len(ours) > 6
    for path in ours:
        for name in re.findall(r'from "(\.[^"]+)"', path.read_text()):
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"
    for template in (app.FOLDER / "templates").iterdir():
        for name in re.findall(r'"/(static/[^"{}]+)"', template.read_text()):
            assert (app.FOLDER / name).is_file(), f"{template.name} names {name}"


def test_no_script_makes_markup_of_text() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    )
    for path in Path(STATIC).rglob("*.js"):
        if not path.name.startswith("uPlot"):
            assert not forbidden.search(path.read_text()), path.name
