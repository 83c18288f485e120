"""The two commands' common parts: groups of options, output, and errors without a traceback."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from atoll.errors import AtollError, UsageError
from hostos import leaving
from hostos.installation import check_installation

INTERRUPTED = 130
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value for scripts.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        allow_dash=True,
        help="File that holds the token, - for standard input: what stands on a command line, others see.",
    ),
]
MAX_TOKEN_FILE_BYTES = 64 << 10
BytesDone = Callable[[int, int], None]  # bytes done, bytes in all
Result = TypeVar("Result")

# Much of what is shown was written elsewhere: no text is markup.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def given_token(token: str | None, file: Path | None) -> str | None:
    """Return the token in ``file``, or on standard input where that is ``-``; without a file, ``token``.

    UsageError for a file that cannot be read or is too large to hold one.
    """
    if file is None:
        return token
    try:
        if str(file) == "-":
            text = sys.stdin.read(MAX_TOKEN_FILE_BYTES + 1)
        else:
            with file.expanduser().open() as opened:
                text = opened.read(MAX_TOKEN_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {file}: {error}") from None
    if not text.strip() or len(text) > MAX_TOKEN_FILE_BYTES:
        raise UsageError(f"{file} holds {len(text)} characters; give a file with one token")
    return text.strip()


def with_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command an option for each field of every dataclass among its parameters' types.

    A field is declared as any parameter of a command: ``name: Annotated[type, typer.Option(...)] = default``.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: kind for name, kind in hints.items() if is_dataclass(kind) and name != "return"
    }
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            annotation = hints[parameter.name]
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=annotation))
            continue
        kinds = get_type_hints(group, include_extras=True)
        parameters += [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name])
            for f in fields(group)
        ]

    @functools.wraps(command)
    def expanded(**given: Any) -> Result:
        made = {
            name: group(**{f.name: given.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def shown_time(at_s: float, unknown: str = "-") -> str:
    """A Unix time as the commands show it, in this machine's time zone; 0 is ``unknown``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else unknown


def print_json(value: Any) -> None:
    """Print one JSON value on one line of standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=True) + "\n")
    sys.stdout.flush()


@contextmanager
def byte_progress(what: str, quiet: bool) -> Iterator[BytesDone]:
    """Show a progress bar on the terminal's error stream; nothing when ``quiet`` or not a terminal."""
    if quiet or not err.is_terminal:
        yield lambda done, total: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Run a command line; returns its exit code and never shows a traceback for a user's error."""
    try:
        check_installation()
        result = app(args=arguments, prog_name=app.info.name, standalone_mode=False)
    except AtollError as error:
        err.print(Text("error:", style="red"), str(error), soft_wrap=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort, EOFError):
        err.print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left; nothing is wrong, and nothing more can be said.
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def enter(app: typer.Typer) -> NoReturn:
    """Run the process's command line and exit."""
    # gRPC's own lines about refused handshakes would stand before our errors, which say what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    leaving.leave(run(app))
