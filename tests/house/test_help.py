"""Every command's help has an example that the command takes, and every command stands under a heading."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
import typer

from coordinator.cli import main as cli
from hostos.command_line import run
from tests.house.test_docs import COMMANDS
from worker.cli import main as worker_cli

PROGRAMS = {
    "atoll": typer.main.get_command(cli.app),
    "atoll-worker": typer.main.get_command(worker_cli.app),
}
ENDS = re.compile(r"\s+\(|\s+\||\s+>|\.\s+[A-Z]|$")  # of a command line: a comment, a pipe, a sentence
BEGINS = re.compile(r"(?:^|\s)(atoll(?:-worker)? .*)", re.DOTALL)


def examples(epilog: str) -> Iterator[list[str]]:
    """The command lines in an epilog, as words."""
    text = epilog.partition("\n\n")[0].partition(":")[2].replace("\n", " ")
    for part in re.split(r";", text):
        if found := BEGINS.search(part):
            line = found[1]
            line = re.sub(r"\$\(.*?\)", "today", line)  # what a shell puts in
            end = ENDS.search(line)
            assert end is not None
            yield shlex.split(line[: end.start()].rstrip(" "))


def parsed(words: list[str]) -> str:
    """The path of the command that takes ``words``. Raises click.UsageError."""
    command: click.Command = PROGRAMS[words[0]]
    path, rest, parent = words[0], words[1:], None
    while True:
        context = command.make_context(path.split()[-1], list(rest), parent=parent)
        if not isinstance(command, click.Group) or not (left := [*context._protected_args, *context.args]):
            return path
        name, inner, rest = command.resolve_command(context, left)
        assert inner is not None
        path, command, parent = f"{path} {name}", inner, context


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_a_command_takes_the_examples_of_its_help(path: str, command: click.Command) -> None:
    found = [parsed(words) for words in examples(command.epilog or "")]
    assert path in found


def test_an_example_with_an_unknown_option_is_caught() -> None:
    [words] = examples("Example: atoll status --jsn")
    with pytest.raises(click.UsageError):
        parsed(words)


@pytest.mark.parametrize(("program", "panels"), [("atoll", cli.PANELS), ("atoll-worker", worker_cli.PANELS)])
def test_every_command_stands_under_one_heading(program: str, panels: dict[str, tuple[str, ...]]) -> None:
    group = PROGRAMS[program]
    assert isinstance(group, click.Group)
    listed = [name for names in panels.values() for name in names]
    assert sorted(listed) == sorted(group.commands)


def test_rare_options_are_shown_when_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(worker_cli.app, ["join", "-h"]) == 0
    usual = capsys.readouterr().out
    assert run(worker_cli.app, ["join", "--help-all"]) == 0
    everything = capsys.readouterr().out
    for option in ("--min-batch", "--send-log-bytes", "--insecure", "--stage-memory"):
        assert option not in usual
        assert option in everything
    assert len(usual.splitlines()) < 70
    for panel in ("Joining", "Limits", "Flower apps"):
        assert panel in usual


@pytest.mark.parametrize("app", [cli.app, worker_cli.app])
def test_a_version_is_printed_and_completion_can_be_installed(
    app: typer.Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert run(app, ["-h"]) == 0
    assert "--install-completion" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["submt"], "submit"), (["status", "--jsn"], "--json"), (["token", "creat"], "create")],
)
def test_a_slip_is_answered_with_one_hint(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli.app, words) == 2
    text = capsys.readouterr().err
    assert text.count("Did you mean") == 1
    assert f"Did you mean '{hint}'?" in text


def test_a_shell_completes_commands_and_options() -> None:
    for words, found in (("atoll sub", "submit"), ("atoll submit --wat", "--watch")):
        environment = {
            **os.environ,
            "_ATOLL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-m", "coordinator.cli"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found in done.stdout.split(), done.stderr
