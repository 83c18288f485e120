"""Flower is an extra, and its insides are known to one file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "atoll", "coordinator", "worker", "hostos", "protos", "strategies", "compressors",
    "lab", "benchmarks", "examples", "tests",
)  # fmt: skip
INSIDER = "protos/flower_internals.py"
RIVAL = "benchmarks/rivals/flower_secagg.py"
"""It times a part of Flower that has no public name."""
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.serverapp", "flwr.serverapp.strategy")
LEGACY = ("flwr.client", "flwr.server", "flwr.simulation", "flwr.common")
"""Public too, and deprecated: only to test that apps which use it still run."""


def _imported(path: Path) -> Iterator[str]:
    """What a file that names Flower imports."""
    text = path.read_text()
    if "flwr" not in text:  # nor does it import it
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_one_file_alone_imports_flowers_insides() -> None:
    assert (ROOT / INSIDER).exists()
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in _imported(path)
        if name.split(".")[0] == "flwr"
        and name not in PUBLIC
        and str(path.relative_to(ROOT)) not in (INSIDER, RIVAL)
        and not (folder == "tests" and name in LEGACY)
    ]
    assert wrong == []


def test_everything_but_the_flower_adapters_starts_without_flower_and_ray() -> None:
    code = (
        "import sys; sys.modules['flwr'] = sys.modules['ray'] = None;"
        "import coordinator.cli.main, coordinator.client.client, coordinator.server;"
        "import worker.cli.main, worker.daemon;"
        "import strategies, compressors.catalogue, protos.convert, atoll"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
