"""Files form no circle by what they import, and a wing has few enough files to be known."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx

from tests.house.test_arrows import HALLS, LEVELS, ROOT, _sources

MOST_FILES = 12
OVERFULL = {
    "coordinator/membership",
    "worker/federated", "worker/hosting", "worker/stage",
    "worker/transport",
}  # fmt: skip
"""Wings that are still to be parted; a name leaves this list with its wing and none comes in."""
BY_TYPES = (
    {"worker.transport.connection", "worker.transport.peer"},
    {"worker.transport.dialling", "worker.transport.meeting", "worker.transport.network"},
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


def test_a_wing_has_at_most_twelve_files() -> None:
    sizes = {
        init.parent.relative_to(ROOT).as_posix(): len(list(init.parent.glob("*.py"))) - 1
        for package in HALLS
        for init in (ROOT / package).rglob("*/__init__.py")
    }
    assert {wing for wing, files in sizes.items() if files > MOST_FILES} <= OVERFULL
