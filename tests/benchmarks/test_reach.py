"""What a change touches: an example of each kind applies to the tree, works, and keeps to its aim."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import AtollError
from benchmarks import reach
from benchmarks.code_lines import PRODUCT, ROOT
from tests.parameters import sampled


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree: what an example may change, and links to what its test reads."""
    for name in (*PRODUCT, "docs", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "figures"))
    for name in ("pyproject.toml", "benchmarks", "examples", "experiments", "lab"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("kind", reach.AIMS)
def test_an_example_of_each_kind_of_change_fits_and_touches_few_files(kind: str, tree: Path) -> None:
    reach.apply(kind, tree)
    files = reach.touched(reach.example(kind))
    assert reach.reach(files)["product"] <= reach.AIMS[kind], files


@pytest.mark.parametrize("kind", sampled(1, ["message", *(kind for kind in reach.AIMS if kind != "message")]))
def test_an_example_of_each_kind_of_change_works(kind: str, tree: Path) -> None:
    files = reach.touched(reach.example(kind))
    reach.apply(kind, tree)
    tests = [path for path in files if reach.part_of(path) == "tests"]
    if any(reach.part_of(path) == "docs" for path in files):
        tests.append("tests/house/test_docs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    ran = subprocess.run(
        [*command, *tests, "-k", "example or command_and_option or job_file_may_set"],
        cwd=tree, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_an_example_that_does_not_fit_any_more_is_named_with_the_place(tree: Path) -> None:
    (tree / "atoll" / "job.py").write_text("")
    with pytest.raises(AtollError, match=r"job_option\.patch does not fit .*mend it(.|\n)*atoll/job\.py"):
        reach.apply("job_option", tree)


def test_files_count_as_what_they_are() -> None:
    files = [
        "worker/daemon.py",
        "protos/a.proto",
        "protos/a_pb2.py",
        "protos/a_pb2.pyi",
        "docs/cli.md",
        "Makefile",
    ]
    assert reach.reach(files) == {"product": 2, "generated": 2, "docs": 1, "beside": 1}
