"""What is installed has its bytes named: locks with hashes, versions as tested, no index by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {path.stem: path for path in sorted((ROOT / "locks").glob("*.txt"))}
PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)", re.MULTILINE)
NOT_TESTED_BY_US = {"supply"}  # tools of an environment of their own


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    return {normal(name): version for name, version in PINNED.findall(text)}


CONSTRAINTS = pinned((ROOT / "constraints.txt").read_text())


def test_there_is_a_lock_of_what_the_image_builds_and_runs_with_and_of_what_tests_need() -> None:
    assert set(LOCKS) == {"build", "development", "docs", "runtime", "supply"}
    runtime, development = (pinned(LOCKS[name].read_text()) for name in ("runtime", "development"))
    assert runtime.items() <= development.items()


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_has_a_version_and_hashes(name: str) -> None:
    text = LOCKS[name].read_text().replace("\\\n", " ")
    requirements = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert requirements
    for line in requirements:
        assert PINNED.match(line), line[:100]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", line), line[:100]
        assert "://" not in line, "no place, whatever it holds, stands for bytes"


@pytest.mark.parametrize("name", sorted(set(LOCKS) - NOT_TESTED_BY_US))
def test_what_is_locked_is_what_was_tested(name: str) -> None:
    found = pinned(LOCKS[name].read_text())
    strange = {package: version for package, version in found.items() if CONSTRAINTS.get(package) != version}
    assert strange == {}, "constraints.txt has another version or none: `make lock` after changing it"


def test_torch_alone_comes_without_a_hash() -> None:
    assert [name for name, path in LOCKS.items() if "torch" in pinned(path.read_text())] == []
    project = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    needed = {normal(name) for name in re.findall(r'"([A-Za-z0-9_-]+)', project)}
    assert needed - pinned(LOCKS["runtime"].read_text()).keys() == {"torch"}


def test_the_image_is_built_from_locks_and_from_a_base_that_can_be_given_by_digest() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    assert re.search(r"^ARG BASE=\S+\nFROM \$\{BASE\}$", text, re.MULTILINE)
    installs = [line for line in re.split(r"&&|\n", text) if "pip install" in line]
    assert [line for line in installs if not re.search(r"--require-hashes|--no-index|torch==", line)] == []
