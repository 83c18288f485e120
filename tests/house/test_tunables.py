"""Numbers that tune behaviour: a wing with many has them in one dataclass, and no wing has one of them twice.

The rule and its reasons: docs/decisions/062-where-tuned-numbers-stand.md.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("atoll", "hostos", "protos", "strategies", "compressors", "coordinator", "worker")
MANY = 16
TUNED = ("coordinator.planning", "worker.hosting", "worker.transport")
"""Wings whose rooms read one dataclass. Costs were measured, and stand beside their formulas."""
TWICE = {
    ("compressors", "ALIGNMENT"): "of a file's content, and of torch's memory",
    ("compressors", "_BLOCK"): "two loops, each as long as fits the cache",
    ("compressors/contrib/quantised", "_MIDDLE"): "two formats",
    ("protos", "KEY_BYTES"): "two formats",
    ("worker/machine", "MAX_BYTES"): "of a process's output, and of a file",
}
"""Numbers of the same name in two files of a wing that are not one."""


def _number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _number(node.left) and _number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _constants(path: Path) -> Iterator[tuple[str, str]]:
    """Each numeric constant of a module, and its value as it is written."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign):
            continue
        (target,) = node.targets
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        for name, value in pairs:
            if isinstance(name, ast.Name) and _number(value):
                yield name.id, ast.unparse(value)


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield str(path.parent.relative_to(ROOT)), path


def _tunes(name: str) -> bool:
    """Seconds and shares; what was measured of a machine's work (``_CPU_S``) is of a formula."""
    return name.endswith(("_S", "_SHARE")) and not name.endswith(("_CPU_S", "PER_S"))


def test_a_wing_with_many_tuned_numbers_has_them_in_one_dataclass() -> None:
    found = Counter(wing for wing, path in _modules() for name, _ in _constants(path) if _tunes(name))
    tuned = tuple(f"{wing.replace('.', '/')}/" for wing in TUNED)
    costs = "coordinator/planning/costs"
    assert {w: n for w, n in found.items() if f"{w}/".startswith(tuned) and w != costs} == {}
    assert {w: n for w, n in found.items() if n > MANY} == {}


def test_no_wing_has_the_same_number_under_the_same_name_twice() -> None:
    places: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for wing, path in _modules():
        for name, value in _constants(path):
            places[wing, name, value].append(path.name)
    twice = {(wing, name): files for (wing, name, _), files in places.items() if len(files) > 1}
    assert {key: files for key, files in twice.items() if key not in TWICE and key[1] != "VERSION"} == {}


@pytest.mark.parametrize("wing", TUNED)
def test_every_field_of_a_wings_numbers_is_used(wing: str) -> None:
    text = "".join(path.read_text() for path in (ROOT / wing.replace(".", "/")).rglob("*.py"))
    kind = import_module(wing).Tunables
    assert [field.name for field in fields(kind) if f"TUNED.{field.name}" not in text] == []
