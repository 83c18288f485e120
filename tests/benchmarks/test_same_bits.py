"""What `benchmarks.same_bits` compares, and that it says where bits differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from atoll.errors import UsageError
from benchmarks import same_bits
from benchmarks.same_bits import FIRST, Compared, table, tensor_hashes
from benchmarks.trees import ROOT, THIS, Tree, checkout, python_of

WEIGHT = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def hashes(**tensors: torch.Tensor) -> dict[str, str]:
    return tensor_hashes(save(tensors, {"atoll": "facts of the run"}))


def test_equal_tensors_have_equal_hashes_whatever_else_the_file_says() -> None:
    bias = torch.zeros(3)
    assert hashes(a=WEIGHT, b=bias) == tensor_hashes(save({"b": bias, "a": WEIGHT}))


@pytest.mark.parametrize(
    "other",
    [
        {"w": WEIGHT.reshape(3, 2)},
        {"w": WEIGHT.view(torch.int32)},
        {"v": WEIGHT},
        {"w": torch.nextafter(WEIGHT, WEIGHT + 1)},
        {"w": WEIGHT, "v": WEIGHT.clone()},
        {},
    ],
    ids=["shape", "dtype", "name", "last bits", "one more", "none"],
)
def test_any_difference_is_found(other: dict[str, torch.Tensor]) -> None:
    found = Compared("case", hashes(w=WEIGHT), hashes(**other))
    assert found.different
    assert "no: " in table([found], "HEAD")


def test_a_difference_ends_the_benchmark_with_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Compared("equal", hashes(w=WEIGHT), hashes(w=WEIGHT)), Compared("other", hashes(w=WEIGHT), {})]
    monkeypatch.setattr(same_bits, "checkout", lambda commit, folder: folder)
    monkeypatch.setattr(same_bits, "same_versions", lambda other: {"torch": "2"})
    monkeypatch.setattr(same_bits, "compared", lambda *_: found)
    monkeypatch.setattr(sys, "argv", ["same_bits", "--environment", sys.prefix, "--json"])
    assert same_bits.main() == 1
    *_, wrong, last = capsys.readouterr().out.splitlines()
    assert wrong == "WRONG VALUES: other bits in other"
    assert {name: case["different"] for name, case in json.loads(last)["cases"].items()} == {
        "equal": [],
        "other": ["w"],
    }


def test_an_unknown_commit_and_a_folder_without_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no commit 0000000 here"):
        checkout("0000000", tmp_path)
    with pytest.raises(UsageError, match="no virtual environment"):
        python_of(tmp_path)


def test_environments_with_other_versions_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "versions", lambda tree: {"torch": "2.13.0" if tree is THIS else "2.12.0"})
    with pytest.raises(UsageError, match="within one"):
        same_bits.same_versions(Tree(Path("other"), THIS.python))


@pytest.mark.slow
def test_the_bits_are_those_of_9125213() -> None:
    known = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{FIRST}^{{commit}}"], check=False)
    if known.returncode:
        pytest.skip(f"this clone has no commit {FIRST}")
    command = [sys.executable, "-m", "benchmarks.same_bits", "--environment", sys.prefix]
    done = subprocess.run(
        command, cwd=ROOT, env=THIS.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
