"""Files, functions and words follow the house: see the sizes and names that a reader relies on."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.patience import HUNG_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "atoll",
    "coordinator",
    "worker",
    "hostos",
    "protos",
    "strategies",
    "compressors",
    "lab",
    "experiments",
    "benchmarks",
    "examples",
    "docs",
)
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError|HACK)\b")
UNSAFE = re.compile(r"\b(pickle\.|marshal\.|shelve\.|eval\(|exec\(|weights_only=False)")
# Paths of somebody's machine, hosts of registries, and words for how a text came to be.
FOREIGN = re.compile(
    r"(/(?:root|home/\w+|work)/|/venv|pypi\.org|files\.pythonhosted|registry\.npmjs|deb\.debian\.org"
    r"|\bas an AI\b|\blanguage model assistant\b|\bsub-?agents?\b|\bchatbot\b)",
    re.IGNORECASE,
)


def _tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def _sources() -> list[Path]:
    return [
        path
        for path in _tracked()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES and "_pb2" not in path.name
    ]


def _shown(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_no_test_has_a_limit_in_seconds_of_its_own() -> None:
    """One limit ends what hangs: the suite's, which no timeout of a call in a test comes before."""
    suite = re.search(r"^timeout = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert suite is not None
    assert float(suite[1]) < HUNG_S
    own = re.compile(r"mark\.timeout|\b(?:timeout=|(?:wait|join|result|communicate)\()\d\d")
    found = [
        _shown(path, number)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if own.search(line) and not re.search(r"\b(world|made)\.wait\(", line)  # of simulated time
    ]
    assert found == []


def test_files_hold_one_concept() -> None:
    long = [
        f"{p.relative_to(ROOT)}: {n}" for p in _sources() if (n := p.read_text().count("\n")) > MAX_FILE_LINES
    ]
    assert long == []


def test_functions_fit_on_a_screen() -> None:
    long = []
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{_shown(path, node.lineno)} {node.name}: {lines}")
    assert long == []


@pytest.mark.parametrize("pattern", [UNFINISHED, UNSAFE], ids=["unfinished", "unsafe"])
def test_nothing_unfinished_or_unsafe_is_in_the_source(pattern: re.Pattern[str]) -> None:
    found = []
    for path in _sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line.partition("#")[0] if pattern is UNSAFE else line):
                found.append(_shown(path, number))
    assert found == []


def test_texts_speak_of_the_project_alone() -> None:
    kinds = {".py", ".md", ".toml", ".txt", ".proto", ".yml", ".yaml", ""}
    found = []
    for path in _tracked():
        if path.suffix not in kinds or path == Path(__file__) or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if FOREIGN.search(line):
                found.append(_shown(path, number))
    assert found == []


def test_every_package_and_module_says_what_it_is() -> None:
    assert [
        str(p.relative_to(ROOT)) for p in _sources() if ast.get_docstring(ast.parse(p.read_text())) is None
    ] == []


def test_the_scheduler_names_no_kind_of_job() -> None:
    text = (ROOT / "coordinator" / "scheduler.py").read_text().lower()
    kinds = ("pipeline", "federat", "stage", "round", "client", "aggregat")
    allowed = {"releasestage"}  # the message by which a worker lets go of whatever it holds
    words = set(re.findall(r"[a-z_]+", text)) - allowed
    assert {word for word in words if any(kind in word for kind in kinds)} - {"round"} == set()


def test_no_handler_of_an_event_asserts_what_its_table_says() -> None:
    for package in ("coordinator", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            assert "the table says so" not in path.read_text(), path
