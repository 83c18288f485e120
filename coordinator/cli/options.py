"""What every `atoll` command shares: options, output, exit codes, and how errors are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from atoll.errors import AtollError
from coordinator.client.client import Client, connect
from coordinator.client.transfer import Progress as ByteProgress

INTERRUPTED = 130
EXIT_CODES = """Exit codes: 0 done, 1 other error, 2 wrong usage or job file, 3 model cannot be captured,
4 no plan for this fleet, 5 coordinator unreachable, 6 access denied, 7 protocol mismatch,
8 job failed, 9 storage, 10 damaged message, 130 interrupted."""

Coordinator = Annotated[
    str | None,
    typer.Option("--coordinator", envvar="ATOLL_COORDINATOR", metavar="HOST:PORT",
                 help="Which coordinator; default: the one remembered in the state folder."),
]  # fmt: skip
Token = Annotated[
    str | None,
    typer.Option(envvar="ATOLL_TOKEN", help="The owner's token, when the state folder does not hold it."),
]
StateDir = Annotated[
    Path | None,
    typer.Option(envvar="ATOLL_STATE", help="State folder; default ~/.local/state/atoll."),
]
UseProxy = Annotated[
    bool,
    typer.Option(
        "--use-proxy",
        envvar="ATOLL_USE_PROXY",
        help="Reach the coordinator by way of the environment's proxy (https_proxy); else directly.",
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: loopback experiments only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value for scripts.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a job field, e.g. optimizer.lr=3e-4; may repeat."
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Train so many steps; same as --set steps=N.")]
Compress = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="What links do to their tensors: off, lossless, auto[:RATIO], adatopk[:RATIO] or "
        "CODEC[:RATIO]; same as --set compress=HOW.",
    ),
]
Trace = Annotated[bool, typer.Option("--trace", help="Show the whole traceback when the job file raises.")]

# Much of what is shown was written elsewhere: no text is markup.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """One JSON value on one line of standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=True) + "\n")
    sys.stdout.flush()


@contextmanager
def client_of(
    coordinator: str | None, token: str | None, state_dir: Path | None, insecure: bool
) -> Iterator[Client]:
    """The client that the common options name, closed afterwards."""
    root = click.get_current_context().find_root()
    use_proxy = bool(root.params.get("use_proxy"))
    with connect(coordinator, token, state_dir, insecure=insecure, use_proxy=use_proxy) as client:
        yield client


@contextmanager
def byte_progress(what: str, quiet: bool) -> Iterator[ByteProgress]:
    """A progress bar on the terminal's error stream; nothing when ``quiet`` or not a terminal."""
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


@contextmanager
def telling(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Say on the error stream what is being done; nothing when ``quiet``."""
    if quiet:
        yield lambda what: None
    elif err.is_terminal:
        with err.status("") as status:
            yield lambda what: status.update(Text(what))
    else:
        yield lambda what: err.print(what, soft_wrap=True)


def overrides(sets: list[str] | None, steps: int | None, compress: str | None = None) -> list[str]:
    """The ``--set`` items with ``--steps`` and ``--compress`` last."""
    found = list(sets or [])
    found += [f"steps={steps}"] if steps is not None else []
    return found + ([f"compress={compress}"] if compress is not None else [])


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Run a command line; returns its exit code and never shows a traceback for a user's error."""
    try:
        result = app(args=arguments, prog_name="atoll", standalone_mode=False)
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
