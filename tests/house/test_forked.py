"""Tests in forked processes end as they do in one, whatever becomes of a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "test_a.py": """
import os, pytest
@pytest.fixture(scope="module")
def made(tmp_path_factory):
    yield tmp_path_factory.mktemp("made")
    print("taken down")
@pytest.mark.parametrize("n", range(30))
def test_fine(n, made): print("fine", n)
def test_wrong(made):
    print("printed by the wrong one")
    assert {"a": 1} == {"a": 2}
""",
    "test_b.py": """
import os, pytest
@pytest.mark.parametrize("n", range(30))
def test_more(n): print("more", n)
def test_left_out(): pytest.skip("no such machine")
@pytest.mark.xfail
def test_known(): assert False
@pytest.fixture
def broken(): raise OSError("it is broken")
def test_of_a_fixture(broken): pass
""",
    "test_c.py": "def test_last(): pass\n",
}
KILLED = "import os, signal\ndef test_kills(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_after(): pass\n"


def outcome(folder: Path, *options: str, processes: int = 2) -> tuple[int, str]:
    """Exit code and output of pytest over a folder's tests."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.forked", f"--processes={processes}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-q", "-rfEsx", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    return done.returncode, done.stdout + done.stderr


def filled(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def summary(text: str) -> list[str]:
    """The summary's lines in order, without times."""
    lines = text.partition("short test summary info")[2].splitlines()
    return sorted(re.sub(r" in [\d.]+s.*", "", line) for line in lines if line and "===" not in line)


def test_outcomes_and_words_are_those_of_one_process(tmp_path: Path) -> None:
    filled(tmp_path, FILES)
    (code, forked), (same, plain) = (outcome(tmp_path, processes=n) for n in (2, 0))
    assert code == same == 1
    assert summary(forked) == summary(plain)
    assert "1 failed, 61 passed, 1 skipped, 1 xfailed, 1 error" in forked
    assert "printed by the wrong one" in forked
    assert "taken down" in forked
    assert not re.search(r"^(fine|more) \d", forked, re.MULTILINE)  # of tests that passed
    assert set(json.loads(next(tmp_path.rglob("atoll/seconds")).read_text())) == set(FILES)


def test_a_process_that_a_test_ends_is_a_failure_that_names_what_was_not_run(tmp_path: Path) -> None:
    code, text = outcome(filled(tmp_path, FILES | {"test_d.py": KILLED}))
    assert code == 1
    assert "FAILED test_d.py::test_kills" in text
    assert re.search(r"not run for that:\ntest_d.py::test_after", text)
    assert "2 failed, 61 passed" in text


def test_the_longest_file_is_begun_first_and_a_failure_ends_the_run_where_that_is_asked(
    tmp_path: Path,
) -> None:
    names = [f"test_{n}.py" for n in range(9)]
    text = "def test_it():\n    with open('begun', 'a') as file: file.write('{n}')\n    assert {n} != 7\n"
    filled(tmp_path, {name: text.replace("{n}", name[5]) for name in names})
    seconds = tmp_path / ".pytest_cache" / "v" / "atoll" / "seconds"
    seconds.parent.mkdir(parents=True)
    seconds.write_text(json.dumps({name: 9.0 if name == "test_7.py" else 0.1 for name in names}))
    code, said = outcome(tmp_path, "-x")
    assert code == 1
    assert "FAILED test_7.py::test_it" in said
    assert "stopping after 1 failures" in said
    assert "7" in (tmp_path / "begun").read_text()[:2]
