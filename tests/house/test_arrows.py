"""Imports point down, the pure cores stay pure, and the daemon starts without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"atoll": 0, "protos": 1, "strategies": 2, "compressors": 2, "coordinator": 3, "worker": 3}
BESIDE = ("lab", "benchmarks", "examples", "tests")
PURE = [
    "atoll/job.py",
    "atoll/opdag.py",
    "atoll/ops.py",
    "atoll/plan.py",
    "atoll/program.py",
    "atoll/microbatch.py",
    "coordinator/planning/costs/op_seconds.py",
    "coordinator/membership/link_table.py",
    "coordinator/planning/clusters.py",
    "coordinator/planning/planner.py",
    "coordinator/planning/costs/timeline.py",
    "coordinator/membership/member.py",
    "coordinator/pipeline/machine.py",
    "coordinator/scheduler.py",
    "coordinator/client/chrome_trace.py",
    "coordinator/planning/op_fence.py",
    "coordinator/planning/chain.py",
    "coordinator/planning/costs/lower_bound.py",
    "worker/session/machine.py",
    "worker/session/events.py",
    "worker/session/instructions.py",
    "protos/convert.py",
    "protos/convert_graph.py",
    "protos/convert_job.py",
    "protos/convert_plan.py",
    "protos/telemetry.py",
    "protos/bounds.py",
]
IMPURE = {
    "socket", "threading", "asyncio", "time", "random", "os", "subprocess", "grpc", "torch",
    "multiprocessing", "tempfile", "shutil", "sqlite3", "sqlalchemy",
}  # fmt: skip


def _sources(package: str) -> list[Path]:
    return [
        p for p in sorted((ROOT / package).rglob("*.py")) if not p.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]


def _loaded(path: Path) -> Iterator[str]:
    """Modules that importing the file imports: not those inside functions or under TYPE_CHECKING."""
    pending: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.If):
            checking = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            pending += node.orelse if checking else [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            pending += [*node.body, *node.orelse, *node.finalbody]


def _all_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", LEVELS)
def test_imports_point_down(package: str) -> None:
    wrong = []
    for path in _sources(package):
        for name in _all_imports(path):
            other = name.partition(".")[0]
            up = other in LEVELS and other != package and LEVELS[other] >= LEVELS[package]
            if up or other in BESIDE:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("name", PURE)
def test_pure_cores_touch_no_clock_thread_file_or_socket(name: str) -> None:
    found = {module.partition(".")[0] for module in _loaded(ROOT / name)} & IMPURE
    assert found == set()


def test_the_daemon_and_the_command_start_without_torch() -> None:
    code = (
        "import sys, coordinator.server, coordinator.cli.main, coordinator.client.client;"
        "sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_convert_is_the_only_module_that_knows_both_schema_and_types_of_jobs() -> None:
    allowed = {"convert.py", "convert_graph.py", "convert_job.py", "convert_plan.py"}
    both = [
        path.name
        for path in _sources("protos")
        if any("atoll_job_pb2" in name for name in _all_imports(path)) and path.name not in allowed
    ]
    assert both == []
