"""The `atoll` command: the coordinator, and the model owner's commands.

Commands that need torch import it themselves, so that `atoll status` starts at once.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from atoll.errors import UsageError
from atoll.version import __version__
from coordinator.cli import codecs
from coordinator.cli.first import dev, new
from coordinator.cli.fleet import admin, authority, backup, journals, owners, relay
from coordinator.cli.flower import command as flower
from coordinator.cli.jobs import checkpoints, submit
from coordinator.cli.jobs import commands as cli_jobs
from coordinator.cli.on_ray import commands as on_ray
from coordinator.cli.options import EXIT_CODES, Trace, UseProxy
from hostos.command_line import (
    HELP_NAMES,
    AsJson,
    enter,
    err,
    in_panels,
    out,
    print_json,
    show,
    version_option,
)
from protos import PROTOCOL_VERSION

if TYPE_CHECKING:
    import click

EXPERIMENTS = "atoll-experiments"
OF_COORDINATORS = ("matplotlib", "networkx", "prometheus_client", "sqlalchemy")  # no worker imports them
OF_DASHBOARDS = ("starlette", "uvicorn", "jinja2")
ITS_COMMANDS = ("chaos", "data", "demo", "simulate")
PANELS = {
    "First steps": ("new", "dev", "demo"),
    "Jobs": ("plan", "submit", "watch", "status", "dashboard", "logs", "cancel", "credit", "ops", "codecs"),
    "What a job leaves": ("export", "checkpoints", "metrics", "trace", "forget"),
    "The fleet": ("serve", "token", "worker", "kick", "owner", "relay", "ray"),
    "The coordinator's state": ("backup", "journal", "ca"),
    "Flower apps": ("flower",),
    "Experiments": ("simulate", "chaos", "data"),
    "This program": ("version",),
}


class Commands(TyperGroup):
    """The commands; where a package that some of them need is not installed, its installation is named."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in ITS_COMMANDS and args[0] not in self.commands:
            raise UsageError(f"`atoll {args[0]}` is for experiments: `pip install ./experiments` in a clone")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name in OF_DASHBOARDS:
                move = "the page needs `pip install '.[dashboard]'` in a clone"
            elif error.name in OF_COORDINATORS:
                move = "coordinators and owners need `pip install '.[coordinator]'` in a clone"
            else:
                raise
            raise UsageError(f"{error.name} is not installed here; {move}") from None


app = typer.Typer(
    name="atoll",
    cls=Commands,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    context_settings=HELP_NAMES,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def common(use_proxy: UseProxy = False, version: version_option(__version__) = False) -> None:  # type: ignore[valid-type]
    """Train one PyTorch model across islands of machines."""


new.register(app)
dev.register(app)
admin.register(app)
owners.register(app)
authority.register(app)
submit.register(app)
cli_jobs.register(app)
checkpoints.register(app)
codecs.register(app)
flower.register(app)
journals.register(app)
backup.register(app)
relay.register(app)
on_ray.register(app)
with suppress(metadata.PackageNotFoundError):
    for _commands in metadata.distribution(EXPERIMENTS).entry_points:
        _commands.load()(app)


@app.command(epilog="Example: atoll ops examples/gpt.py")
def ops(
    model: Annotated[Path, typer.Argument(metavar="MODEL.py", help="A job file.")],
    json: AsJson = False,
    trace: Trace = False,
) -> int:
    """List a model's ops, and those that are not supported. Exit code 3 if there are any."""
    from rich.text import Text

    from coordinator.capture.capture import op_uses
    from coordinator.capture.export_errors import remedies
    from coordinator.cli.views.facts import FactTable
    from coordinator.client.job_file import blaming, load_job

    job = load_job(model, full_trace=trace)
    with blaming(model, trace):
        uses = op_uses(job.module, job.example_inputs)
    unsupported = [use for use in uses if not use.supported]
    if json:
        print_json(
            [
                {"op": u.target, "count": u.count, "supported": u.supported}
                | {"module": u.module_path, "line": u.source_line}
                for u in uses
            ]
        )
        return 3 if unsupported else 0
    table = FactTable("op", "uses", "supported", "first in", "at")
    for use in uses:
        word = "yes" if use.supported else Text("no", style="red")
        table.add_row(use.target, str(use.count), word, use.module_path, use.source_line)
    show(table)
    if unsupported:
        known = remedies(" ".join(use.target for use in unsupported))
        moves = known or ("write them with plain tensor ops",)
        err.print(f"{len(unsupported)} of {len(uses)} ops are not supported; {'; '.join(moves)}")
        return 3
    out.print(f"all {len(uses)} ops are supported")
    return 0


@app.command(epilog="Example: atoll version --json")
def version(json: AsJson = False) -> None:
    """Show the versions of Atoll, its protocol, Python and the main libraries."""
    facts = {
        "atoll": __version__,
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
        **{name: _installed(name) for name in ("torch", "grpcio", "protobuf")},
    }
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        out.print(f"{name:9} {value}")


in_panels(app, PANELS)


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> NoReturn:
    """Entry point of the `atoll` script."""
    enter(app)
