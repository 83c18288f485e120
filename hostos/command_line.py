"""The two commands' common parts: groups of options, output, and errors without a traceback."""

from __future__ import annotations

import codecs
import copy
import functools
import inspect
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_type_hints

import click
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from typer.models import OptionInfo, TyperInfo

from atoll.errors import AtollError, UsageError
from hostos import leaving
from hostos.descriptors import hold_standard
from hostos.files.refusals import NO_THREAD, disk, refusal
from hostos.installation import check_installation

INTERRUPTED = 130
_HOMELESS = "Could not determine home directory"  # of pathlib, for Path.home() and expanduser()
_THREADLESS = "can't start new thread"  # of threading
HELP_ALL = "help_all"
HELP_NAMES = {"help_option_names": ["-h", "--help"]}  # context settings of both commands
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value for scripts.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        allow_dash=True,
        help="File with the token, - for standard input: other users of this machine can see command lines.",
    ),
]
MAX_TOKEN_FILE_BYTES = 64 << 10
BytesDone = Callable[[int, int], None]  # bytes done, bytes in all
Result = TypeVar("Result")


class Lines(Console):
    """A console whose texts keep their lines at any width, so that paths and commands can be copied and found
    by programs; a reader that leaves early (head, less) ends the command without an error."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print as any console does; texts are not wrapped unless ``soft_wrap`` is False."""
        if soft_wrap is None:
            soft_wrap = all(isinstance(one, str | Text) for one in objects)
        with written():
            super().print(*objects, soft_wrap=soft_wrap, **options)

    @property
    def redraws(self) -> bool:
        """Whether lines can be drawn anew: not in a file, nor on a terminal that only prints (TERM=dumb)."""
        return self.is_terminal and not self.is_dumb_terminal

    def on_broken_pipe(self) -> None:
        """Leave it to ``written``."""
        raise BrokenPipeError


@contextmanager
def written() -> Iterator[None]:
    """Around writing to standard output: exit without an error where its reader has left. StorageError where
    it cannot be written, as on a full disk."""
    try:
        yield
    except BrokenPipeError:
        raise SystemExit(0) from None
    except OSError as error:
        raise refusal(error, "write the output") from None


# Much of what is shown was written elsewhere: no text is markup.
out = Lines(highlight=False, markup=False, emoji=False)
err = Lines(stderr=True, highlight=False, markup=False, emoji=False)


def kept_folder(keep: Path) -> Path:
    """Make the folder of ``--keep``, and return its whole path. StorageError when it cannot be."""
    with disk(f"write {keep}", "give another --keep"):
        keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()


def given_token(token: str | None, file: Path | None) -> str | None:
    """Return the token in ``file``, or on standard input where that is ``-``; without a file, ``token``.

    UsageError for a file that cannot be read or is too large to hold one.
    """
    if file is None:
        return None if token is None else _as_issued(token)
    try:
        if str(file) == "-":
            data = sys.stdin.buffer.read(MAX_TOKEN_FILE_BYTES + 1)
        else:
            with file.expanduser().open("rb") as opened:
                data = opened.read(MAX_TOKEN_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the token in {file}: {error}") from None
    # Windows' shells write UTF-16, its editors a mark before UTF-8. What is no text is refused as no token.
    code = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    text = data.decode(code, "replace")
    if not text.strip() or len(data) > MAX_TOKEN_FILE_BYTES:
        raise UsageError(f"{file} holds {len(text)} characters; give a file with one token")
    return _as_issued(text)


def _as_issued(text: str) -> str:
    """Return a token that was copied in quotes or with the command that `atoll serve` prints."""
    command = re.search(r"--token[=\s]+(\S+)", text)
    return (command[1] if command is not None else text).strip().strip("\"'`")


def with_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command an option for each field of every dataclass among its parameters' types.

    A field is declared as any parameter of a command: ``name: Annotated[type, typer.Option(...)] = default``.
    The help shows a dataclass's options together, under its ``PANEL`` where it has one. Options declared
    ``hidden`` are rarely needed: a command that has some gets ``--help-all``, which shows them too.
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
        panel = getattr(group, "PANEL", None)
        parameters += [
            Parameter(
                f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=_under(panel, kinds[f.name])
            )
            for f in fields(group)
        ]
    rare = sum(_hidden(parameter.annotation) for parameter in parameters)
    if rare:
        parameters.append(
            Parameter(HELP_ALL, Parameter.KEYWORD_ONLY, default=False, annotation=_help_all(rare))
        )

    @functools.wraps(command)
    def expanded(**given: Any) -> Result:
        given.pop(HELP_ALL, None)
        made = {
            name: group(**{f.name: given.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    expanded.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _under(panel: str | None, annotation: Any) -> Any:
    """The annotation of an option that the help shows under ``panel``, unless it names another."""
    kind, *more = get_args(annotation)
    made = [copy.copy(one) for one in more]
    for one in made:
        if isinstance(one, OptionInfo):
            one.rich_help_panel = one.rich_help_panel or panel
    return Annotated[(kind, *made)]


def _hidden(annotation: Any) -> bool:
    return any(isinstance(one, OptionInfo) and one.hidden for one in get_args(annotation))


def _help_all(rare: int) -> Any:
    which = f"the {rare} options that are" if rare > 1 else "the option that is"
    words = f"Show this help with {which} rarely needed."
    return Annotated[bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help=words)]


def _show_all(context: typer.Context, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    for parameter in context.command.params:
        if isinstance(parameter, click.Option):
            parameter.hidden = False
    click.echo(context.get_help())
    context.exit()


def shown_time(at_s: float, unknown: str = "-") -> str:
    """A Unix time as the commands show it, in this machine's time zone; 0 is ``unknown``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else unknown


def quoted(path: Path | str) -> str:
    """A path as a shell takes it: between quotes where it has spaces."""
    return shlex.quote(str(path))


def show(view: RenderableType) -> None:
    """Print a view: fitted to a terminal's width, else a line a fact, however long."""
    out.print(view, soft_wrap=not out.is_terminal)


def print_json(value: Any) -> None:
    """Print one JSON value on one line of standard output."""
    with written():
        sys.stdout.write(json.dumps(value, allow_nan=True) + "\n")
        sys.stdout.flush()


def answer(value: Any, *lines: str, json: bool) -> None:
    """Print what a command has done: as one JSON value for scripts, or in these lines for people."""
    if json:
        print_json(value)
        return
    for line in lines:
        out.print(line)


@contextmanager
def byte_progress(what: str, quiet: bool) -> Iterator[BytesDone]:
    """Show a progress bar on the terminal's error stream; nothing when ``quiet`` or not a terminal."""
    if quiet or not err.redraws:
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
        return _failed(error)
    except (RuntimeError, OSError, MemoryError) as error:
        if (words := _of_machine(error)) is None:
            raise
        return _failed(words)
    except click.ClickException as error:
        message = _hinted_once(error.format_message())
        shown = (
            error
            if message == error.format_message()
            else click.UsageError(message, getattr(error, "ctx", None))
        )
        shown.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort, EOFError):
        result = INTERRUPTED  # newer versions of typer return it themselves
    except SystemExit as left:
        # Where the help's reader leaves early, the libraries that print it exit with 1.
        result = 0 if isinstance(left.__context__, BrokenPipeError) else left.code
    if result == INTERRUPTED:
        err.print("interrupted")
    return result if isinstance(result, int) else 0


def _of_machine(error: RuntimeError | OSError | MemoryError) -> AtollError | None:
    """Words for what the machine refused and nobody closer to it put into words; None for another error."""
    if isinstance(error, MemoryError):
        return AtollError("this process got no more memory; free some, or raise its limit (`ulimit -v`)")
    if isinstance(error, OSError):
        what = f"use {error.filename}" if error.filename is not None else "go on"
        return None if error.errno is None else refusal(error, what)
    if str(error).startswith(_HOMELESS):
        return UsageError(
            "this user has no home folder, or a path begins with ~NAME and there is no such user; set "
            "HOME, or give paths in full (--state-dir /PATH)"
        )
    return AtollError(NO_THREAD) if str(error).startswith(_THREADLESS) else None


def _failed(error: AtollError) -> int:
    err.print(Text("error:", style="red"), str(error), soft_wrap=True)
    return error.exit_code


def _hinted_once(message: str) -> str:
    """An error's message whose hint, which two libraries may add, stands there once."""
    words, hint, more = message.partition("Did you mean")
    return f"{words}{hint}{more.partition('Did you mean')[0].rstrip()}" if hint else message


def version_option(version: str) -> Any:
    """The annotation of ``--version``, which prints ``version`` and exits."""

    def shown(asked: bool) -> None:
        if asked:
            out.print(version)
            raise typer.Exit

    words = "Show the version and exit."
    return Annotated[bool, typer.Option("--version", is_eager=True, callback=shown, help=words)]


def in_panels(app: typer.Typer, panels: Mapping[str, Sequence[str]]) -> None:
    """Have the help show the commands of ``app`` under these headings, in this order. What stands under none
    comes first."""
    panel = {name: heading for heading, names in panels.items() for name in names}
    order = {name: at for at, name in enumerate(name for names in panels.values() for name in names)}
    kinds: tuple[list[Any], list[Any]] = (app.registered_commands, app.registered_groups)
    for infos in kinds:
        infos.sort(key=lambda info: order.get(_name_of(info), -1))
        for info in infos:
            info.rich_help_panel = panel.get(_name_of(info))
    _flow(app)


def _name_of(info: Any) -> str:
    if isinstance(info, TyperInfo):
        return str(info.typer_instance.info.name if info.typer_instance else info.name)
    return str(info.name or info.callback.__name__)


def _flow(app: typer.Typer) -> None:
    """Have the lines of a docstring's paragraph flow together, as wide as the terminal is."""
    for command in app.registered_commands:
        if command.callback is not None and command.help is None:
            text = inspect.getdoc(command.callback) or ""
            command.help = "\n\n".join(" ".join(part.split("\n")) for part in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _flow(group.typer_instance)


def enter(app: typer.Typer) -> NoReturn:
    """Run the process's command line and exit."""
    hold_standard()
    leaving.leave(run(app))
