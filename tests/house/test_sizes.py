"""The house keeps its sizes: files, classes, functions and wings stay as large as a reader can hold."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("atoll", "hostos", "protos", "strategies", "compressors", "coordinator", "worker")
MAX_FILE, MAX_CLASS, MAX_FUNCTION, MAX_WING = 700, 400, 70, 12


def _sources() -> Iterator[Path]:
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def _sizes() -> Iterator[tuple[str, int, int]]:
    """Each file, class and function, its lines, and how many it may have."""
    for path in _sources():
        text, name = path.read_text(), str(path.relative_to(ROOT))
        yield name, text.count("\n"), MAX_FILE
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                most = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
                yield f"{name} {node.name}", (node.end_lineno or 0) - node.lineno + 1, most


def _over(sizes: dict[str, tuple[int, int]]) -> list[str]:
    return [
        f"{name}: {size} lines or files, {most} at most"
        for name, (size, most) in sizes.items()
        if size > most
    ]


def test_files_classes_and_functions_keep_to_their_limits() -> None:
    sizes: dict[str, tuple[int, int]] = {}
    for name, size, most in _sizes():
        if size >= sizes.get(name, (0, 0))[0]:
            sizes[name] = (size, most)
    assert _over(sizes) == []


def test_a_wing_has_at_most_twelve_files() -> None:
    files = Counter(path.parent.relative_to(ROOT) for path in _sources() if path.stem[0] != "_")
    wings = {
        str(wing): (count, MAX_WING)
        for wing, count in files.items()
        if len(wing.parts) > 1 or wing.name == "hostos"
    }
    assert _over(wings) == []


@pytest.mark.parametrize(("size", "found"), [(401, 1), (400, 0)])
def test_one_line_over_the_limit_is_seen(size: int, found: int) -> None:
    assert len(_over({"f": (size, MAX_CLASS)})) == found
