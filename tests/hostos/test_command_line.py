"""Groups of options: each field is an option of the command, which gets them as one value."""

from __future__ import annotations

import errno
import io
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from atoll.errors import StorageError
from coordinator.cli.main import app as atoll
from hostos.command_line import AsJson, Lines, quoted, run, with_groups
from worker.cli.main import app as atoll_worker

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    """Where something is."""

    host: Annotated[str | None, typer.Argument(metavar="HOST")] = None
    port: Annotated[int, typer.Option("--port", "-p", min=1)] = 7700
    tags: Annotated[list[str] | None, typer.Option("--tag")] = None


def app_with(seen: list[object]) -> typer.Typer:
    app = typer.Typer(name="look")

    @app.command(epilog="Example: look at lab")
    @with_groups
    def at(place: Place, name: Annotated[str, typer.Option()] = "n", *, json: AsJson = False) -> int:
        """Look at a place."""
        seen.extend((place, name, json))
        return 3

    @app.command()
    def fail() -> None:
        raise StorageError("the disk is full")

    return app


def test_a_group_is_given_as_one_value_made_from_its_options():
    seen: list[object] = []
    assert run(app_with(seen), ["at", "lab", "--json", "-p", "9", "--tag", "a", "--tag", "b"]) == 3
    assert seen == [Place("lab", 9, ["a", "b"]), "n", True]


def test_options_of_a_group_have_their_defaults_and_bounds(capsys: pytest.CaptureFixture[str]):
    seen: list[object] = []
    app = app_with(seen)
    assert run(app, ["at"]) == 3
    assert seen == [Place(), "n", False]
    assert run(app, ["at", "--port", "0"]) == 2
    assert "--port" in capsys.readouterr().err


def test_help_names_the_options_of_a_group_in_the_order_of_declaration(capsys: pytest.CaptureFixture[str]):
    assert run(app_with([]), ["at", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("--port") < shown.index("--tag") < shown.index("--name") < shown.index("--json")


def test_an_error_of_ours_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]):
    assert run(app_with([]), ["fail"]) == StorageError.exit_code
    assert capsys.readouterr().err == "error: the disk is full\n"


PROGRAM = """
import os, sys, typer
from hostos.command_line import enter, out, print_json

app = typer.Typer(name="look", pretty_exceptions_enable=False)

@app.command()
def text():
    for number in range(20_000):
        out.print("a/long/path " * 20)

@app.command()
def json():
    for number in range(20_000):
        print_json(["value"] * 20)

@app.command()
def stop():
    raise KeyboardInterrupt

@app.command()
def blocks():
    out.print("\u2588 90 %")
    print(len(sys.stdin.read()))

@app.command()
def numbers():
    print("lost")
    print("also lost", file=sys.stderr)
    made = os.open(os.environ["MADE"], os.O_CREAT | os.O_RDWR)
    os.write(made, str(made).encode())

@app.command()
def refused(why: int):
    raise OSError(why, os.strerror(why), "a/file")

@app.command()
def forks():
    raise BlockingIOError(11, "Resource temporarily unavailable")

@app.command()
def threads():
    raise RuntimeError("can't start new thread")

@app.command()
def memory():
    raise MemoryError

enter(app)
"""


def of_program(command: str, shell: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of a command of ``PROGRAM``, whose output goes where ``shell`` says."""
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} {command} {shell}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", program], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_a_user_without_a_home_is_told_to_set_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def nobody(key: object) -> None:
        raise KeyError(key)

    assert run(atoll_worker, ["status", "--state-dir", "~no.such.user/state"]) == 2
    assert "there is no such user; set HOME, or give paths in full" in capsys.readouterr().err
    monkeypatch.delenv("HOME")  # as in a container that runs as a number
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert run(atoll_worker, ["status"]) == 2
    assert run(atoll, ["status"]) == 2
    assert "Traceback" not in (said := capsys.readouterr().err)
    assert said.count("this user has no home folder") == 2
    assert run(atoll_worker, ["status", "--state-dir", str(tmp_path)]) == 0


def test_another_error_of_a_runtime_keeps_its_traceback() -> None:
    broken = typer.Typer()

    @broken.command()
    def breaks() -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        run(broken, [])


@pytest.mark.parametrize("command", ["text", "json", "--help"])
def test_a_reader_that_leaves_early_is_no_error(command: str) -> None:
    # Help is shorter than what a pipe holds: its reader has left before it is written.
    reader = "| head -n 1" if command != "--help" else "> >(exec true)"
    code, shown, errors = of_program(command, reader)
    assert (code, shown.count("\n"), errors) == (0, int(command != "--help"), "")


@pytest.mark.parametrize("command", ["text", "json"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_is_said_in_one_line(command: str) -> None:
    code, _, errors = of_program(command, "> /dev/full")
    assert (code, errors) == (9, "error: cannot write the output: No space left on device\n")


def test_an_interrupted_command_says_so() -> None:
    """Of newer versions of typer it is an exit code."""
    assert of_program("stop") == (130, "", "interrupted\n")


def test_texts_keep_their_lines_at_any_width() -> None:
    written = io.StringIO()
    lines = Lines(file=written, width=40)
    lines.print("state in", "/a/path of/many words " * 5)
    assert written.getvalue().count("\n") == 1
    lines.print("state in /a/path of/many words " * 5, soft_wrap=False)
    assert written.getvalue().count("\n") > 2


def test_paths_are_printed_as_a_shell_takes_them() -> None:
    assert [quoted(path) for path in ("a/job.py", Path("my dir/job.py"))] == ["a/job.py", "'my dir/job.py'"]


@pytest.mark.parametrize(
    ("terminal", "term", "redraws"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)]
)
def test_lines_are_drawn_anew_where_a_terminal_can(
    terminal: bool, term: str, redraws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that only prints, as in an editor, shows what is new on a line of its own."""
    monkeypatch.setenv("TERM", term)
    assert Lines(file=io.StringIO(), force_terminal=terminal).redraws is redraws


def test_what_an_output_cannot_encode_is_no_error() -> None:
    assert of_program("blocks", "< /dev/null")[:2] == (0, "\u2588 90 %\n0\n")
    program = (
        f"export PYTHONIOENCODING=ascii; {shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} blocks <&-"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "? 90 %\n0\n", "")


def test_where_outputs_are_closed_no_file_takes_their_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    assert of_program("numbers", "<&- >&- 2>&-") == (0, "", "")
    assert int((tmp_path / "made").read_text()) > 2


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (
            f"refused {errno.EMFILE}",
            9,
            "cannot use a/file: Too many open files; raise the limit of open files",
        ),
        (f"refused {errno.EFBIG}", 9, "cannot use a/file: File too large; raise the limit of a file's size"),
        (f"refused {errno.ENOENT}", 9, "cannot use a/file: No such file or directory"),
        (
            "forks",
            9,
            "cannot go on: Resource temporarily unavailable; raise the limit of processes",
        ),
        ("threads", 1, "cannot start another thread; raise the limit of processes: `ulimit -u`"),
        ("memory", 1, "this process got no more memory; free some"),
    ],
)
def test_what_a_machine_refuses_is_a_sentence(command: str, code: int, words: str) -> None:
    found, shown, errors = of_program(command)
    assert (found, shown) == (code, "")
    assert errors.startswith(f"error: {words}")
    assert "Traceback" not in errors


def test_help_on_a_full_disk_is_a_sentence() -> None:
    code, _, errors = of_program("--help", "> /dev/full")
    assert code == 9
    assert errors.startswith("error: cannot go on: No space left on device")
    assert errors.count("\n") == 1


def test_no_output_is_lost_in_a_pipe_that_was_set_not_to_wait_for_its_reader() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(reading, "rb") as reader:
        with open(writing, "wb") as output:
            started = subprocess.Popen([sys.executable, "-c", PROGRAM, "json"], stdout=output, cwd=ROOT)
        time.sleep(0.1)  # more than fits is there before it is read
        assert reader.read().count(b"\n") == 20_000
    assert started.wait() == 0


def test_an_error_stream_that_cannot_be_written_changes_no_exit_code() -> None:
    assert of_program(f"refused {errno.EIO}", "2> /dev/full") == (9, "", "")
