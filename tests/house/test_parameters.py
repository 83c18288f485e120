"""No function outside the command lines takes more than 8 parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("atoll", "hostos", "protos", "strategies", "compressors", "coordinator", "worker")
MAX_PARAMETERS = 8
ALLOWED: set[str] = set()  # "path:function", for as long as one is being mended


def _functions(root: Path, package: str) -> Iterator[tuple[str, int]]:
    """(path:function, parameters but self or cls) of every function outside ``cli/``."""
    for path in sorted((root / package).rglob("*.py")):
        relative = path.relative_to(root)
        if "cli" in relative.parts or "_pb2" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                yield f"{relative}:{node.name}", len(names) - (names[:1] in (["self"], ["cls"]))


def _too_many(root: Path) -> list[str]:
    return [
        f"{name} takes {count}"
        for package in PACKAGES
        for name, count in _functions(root, package)
        if count > MAX_PARAMETERS and name not in ALLOWED
    ]


def test_no_function_takes_more_parameters_than_a_reader_can_hold() -> None:
    assert _too_many(ROOT) == []


def test_a_function_with_a_parameter_too_many_is_caught(tmp_path: Path) -> None:
    (tmp_path / "worker" / "cli").mkdir(parents=True)
    names = "abcdefghi"
    (tmp_path / "worker" / "a.py").write_text(
        f"def f({', '.join(names)}): ...\ndef g({', '.join(names[1:])}): ...\n"
        f"class C:\n    def h(self, {', '.join(names[1:])}): ...\n"
    )
    (tmp_path / "worker" / "cli" / "b.py").write_text(f"def f({', '.join(names)}): ...\n")
    assert _too_many(tmp_path) == ["worker/a.py:f takes 9"]
