"""Imports point down, the pure cores stay pure, and the daemon starts without torch."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {
    "atoll": 0, "hostos": 1, "protos": 2, "strategies": 3, "compressors": 3, "coordinator": 4, "worker": 4,
}  # fmt: skip
BESIDE = ("lab", "experiments", "benchmarks", "examples", "docs", "tests")
PURE = [
    "atoll/job.py",
    "atoll/dataset_spec.py",
    "atoll/opdag.py",
    "atoll/ops.py",
    "atoll/plan.py",
    "atoll/program.py",
    "atoll/microbatch.py",
    "atoll/transitions.py",
    "atoll/collective.py",
    "atoll/exchange.py",
    "coordinator/config.py",
    "coordinator/scheduler.py",
    "coordinator/planning",
    "coordinator/messages",
    "coordinator/membership",
    "coordinator/pipeline",
    "coordinator/sharing",
    "coordinator/federated",
    "coordinator/client/chrome_trace.py",
    "coordinator/dashboard/curves.py",
    "coordinator/dashboard/model.py",
    "coordinator/dashboard/rows.py",
    "coordinator/dashboard/spans.py",
    "worker/session",
    "protos/convert.py",
    "protos/coding.py",
    "protos/checks.py",
    "protos/telemetry.py",
    "protos/bounds.py",
]
"""Files, and wings with every file in them, that touch no clock, thread, file or socket."""
HALLS = {
    "coordinator": {"__init__", "server", "shell", "planner_pool", "scheduler", "config"},
    "worker": {
        "__init__",
        "daemon",
        "member",
        "connections",
        "shared",
        "context",
        "config",
        "cancel",
        "spans",
        "blobs",
    },
}
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
            if package == "strategies" and other == "compressors":  # decision 025
                up = "exchanges" not in path.relative_to(ROOT).parts
            if path.parent == ROOT / "atoll" and path.stem in ("hf", "fleet"):  # doors: decisions 073 and 084
                up = up and other != "coordinator"
            if up or other in BESIDE:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_codec_that_a_policy_chooses_needs_one_of_contrib() -> None:
    wrong = [
        f"{path.name} imports {name}"
        for path in sorted((ROOT / "compressors").glob("*.py"))
        for name in _all_imports(path)
        if name.startswith("compressors.contrib") and path.name != "catalogue.py"
    ]
    assert wrong == []


def _pure_files(root: Path, name: str) -> list[Path]:
    return sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name]


def _impurities(root: Path, name: str) -> list[str]:
    return [
        f"{path.relative_to(root)} imports {module}"
        for path in _pure_files(root, name)
        for module in _loaded(path)
        if module.partition(".")[0] in IMPURE
    ]


@pytest.mark.parametrize("name", PURE)
def test_pure_cores_touch_no_clock_thread_file_or_socket(name: str) -> None:
    assert _pure_files(ROOT, name)
    assert _impurities(ROOT, name) == []


def test_a_clock_in_a_pure_wing_is_caught(tmp_path: Path) -> None:
    wing = tmp_path / "coordinator" / "planning" / "costs"
    wing.mkdir(parents=True)
    (wing / "honest.py").write_text("import math\n")
    (wing / "clocked.py").write_text("try:\n    from time import monotonic\nfinally:\n    pass\n")
    assert _impurities(tmp_path, "coordinator/planning") == [
        "coordinator/planning/costs/clocked.py imports time"
    ]


@pytest.mark.parametrize("package", HALLS)
def test_only_the_hall_stands_directly_in_a_package(package: str) -> None:
    assert {path.stem for path in (ROOT / package).glob("*.py")} == HALLS[package]


@pytest.mark.parametrize("package", HALLS)
def test_every_wing_says_in_a_sentence_what_it_is(package: str) -> None:
    for init in (ROOT / package).rglob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), init


def _contracts() -> list[dict[str, object]]:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return [contract for contract in linter["contracts"] if contract["type"] == "layers"]


@pytest.mark.parametrize("package", HALLS)
def test_every_wing_stands_in_a_contract(package: str) -> None:
    [layers] = [c["layers"] for c in _contracts() if str(c["name"]).endswith(f"wings of the {package}")]
    assert isinstance(layers, list)
    named = {name.strip() for layer in layers for name in str(layer).split("|")}
    parts = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} | HALLS[package]
    assert named == {f"{package}.{part}" for part in parts - {"__init__"}}


def test_a_wing_that_imports_upward_is_caught(tmp_path: Path) -> None:
    for package in LEVELS:
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    with (tmp_path / "coordinator" / "messages" / "jobs.py").open("a") as planted:
        planted.write("\n\ndef upward() -> None:\n    from coordinator.pipeline import machine  # noqa\n")
    with (tmp_path / "worker" / "links" / "codecs.py").open("a") as planted:
        planted.write("\nfrom worker.session import events  # noqa\n")
    with (tmp_path / "worker" / "control" / "calls.py").open("a") as planted:
        planted.write("\n\ndef heavy() -> None:\n    from worker.stage import tensor_blobs  # noqa\n")
    with (tmp_path / "worker" / "compute" / "logs.py").open("a") as planted:
        planted.write("\n\ndef aloud() -> None:\n    import grpc  # noqa\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "coordinator.messages is not allowed to import coordinator.pipeline" in done.stdout
    assert "worker.links is not allowed to import worker.session" in done.stdout
    assert "worker.control is not allowed to import torch" in done.stdout
    assert "worker.compute is not allowed to import grpc" in done.stdout
    assert ", 5 broken." in done.stdout


def test_the_daemon_and_the_command_start_without_torch() -> None:
    code = (
        "import sys, coordinator.server, coordinator.cli.main, coordinator.client.client;"
        "sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_workers_daemon_and_its_command_start_without_torch() -> None:
    code = (
        "import sys, worker.daemon, worker.cli.main;"
        "sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_what_computes_starts_without_grpc() -> None:
    code = "import sys, worker.compute.process;sys.exit('grpc is imported' if 'grpc' in sys.modules else 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def _modules_without_torch() -> list[str]:
    """Every module of the contract on the worker's daemon."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [c for c in linter["contracts"] if c.get("forbidden_modules") == ["torch"]]
    found: list[str] = []
    for source in contract["source_modules"]:
        place = ROOT / source.replace(".", "/")
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        assert files, source
        found += [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in found if not name.endswith("__main__")]


def test_the_wings_of_the_workers_daemon_load_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')"
    )
    subprocess.run([sys.executable, "-c", code, *_modules_without_torch()], cwd=ROOT, check=True)


def test_no_function_of_the_workers_daemon_imports_torch() -> None:
    """Import-linter does not look into other packages: ``safetensors.torch`` loads torch as well."""
    for name in _modules_without_torch():
        place = ROOT / name.replace(".", "/")
        path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert not [imported for imported in _all_imports(path) if "torch" in imported.split(".")], name


def test_convert_is_the_only_module_that_knows_both_schema_and_types_of_jobs() -> None:
    allowed = {"convert.py"}
    both = [
        path.name
        for path in _sources("protos")
        if any("atoll_job_pb2" in name for name in _all_imports(path)) and path.name not in allowed
    ]
    assert both == []
