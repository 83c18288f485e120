"""Code lines: what counts, and against a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.code_lines import code_lines, counted, in_commit, in_tree, totals

SOURCE = '''"""A docstring
over two lines."""

# a comment
x = """text
that is code"""


def f(
    a: int,  # why

) -> int:
    """Return a."""
    return a
'''


def test_comments_blanks_and_docstrings_are_no_code() -> None:
    assert code_lines(SOURCE) == 2 + 3 + 1


def test_generated_files_and_the_demo_are_left_out_and_wings_are_named() -> None:
    names = ("worker/daemon.py", "worker/stage/steps/run.py", "protos/a_pb2.py", "experiments/demo/run.py")
    lines = counted((name, "x = 1\n") for name in names)
    assert lines == {"worker/*": 1, "worker/stage": 1}
    assert totals(lines)["product"] == totals(lines)["worker"] == 2


def test_a_commit_is_counted_as_its_files_were(tmp_path: Path) -> None:
    (tmp_path / "atoll").mkdir()
    (tmp_path / "atoll" / "one.py").write_text("x = 1\n")
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "atoll" / "one.py").write_text("x = 1\ny = 2\n")
    assert counted(in_commit(tmp_path, "HEAD")) == {"atoll/*": 1}
    assert counted(in_tree(tmp_path)) == {"atoll/*": 2}
