"""Files form no circle by what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx

from tests.house.test_arrows import LEVELS, ROOT, _sources

BY_TYPES = (
    {"worker.transport.peers.connection", "worker.transport.peers.peer"},
    {"worker.transport.ways.dialling", "worker.transport.ways.meeting", "worker.transport.network"},
)
"""Circles that type checkers alone see; none comes in."""


def _named(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    names = {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def _imports(path: Path, known: Iterable[str]) -> Iterator[str]:
    """Modules that a file names anywhere: at its head, in functions, for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def circles(root: Path, files: Iterable[Path]) -> list[set[str]]:
    modules, graph = _named(root, files), nx.DiGraph()
    for name, path in modules.items():
        graph.add_edges_from((name, other) for other in _imports(path, modules) if other in modules)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return [set(found) for found in nx.strongly_connected_components(graph) if len(found) > 1]


def test_no_files_form_a_circle() -> None:
    found = circles(ROOT, [path for package in LEVELS for path in _sources(package)])
    assert [sorted(circle) for circle in found if circle not in BY_TYPES] == []


def test_a_circle_through_a_function_is_seen(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def late():\n    import two\n")
    (tmp_path / "two.py").write_text("from three import x\n")
    (tmp_path / "three.py").write_text("if TYPE_CHECKING:\n    from one import late\n")
    (tmp_path / "four.py").write_text("import one\n")
    assert circles(tmp_path, tmp_path.glob("*.py")) == [{"one", "two", "three"}]
