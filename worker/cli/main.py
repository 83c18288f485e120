"""The `atoll-worker` command: lend this machine, check it first, take it back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import structlog
import typer

from atoll.errors import AtollError, UsageError
from atoll.version import __version__
from hostos.command_line import (
    HELP_NAMES,
    AsJson,
    enter,
    err,
    in_panels,
    out,
    print_json,
    version_option,
    with_groups,
)
from hostos.log_stream import LogBudget, log_stream
from hostos.units import shown_energy, shown_size, shown_work
from protos import PROTOCOL_VERSION
from worker.cli import apps as cli_apps
from worker.cli import data as cli_data
from worker.cli import forget as cli_forget
from worker.cli import install as cli_install
from worker.cli import jobs as cli_jobs
from worker.cli import manners as cli_manners
from worker.cli import model as cli_model
from worker.cli.options import AppOptions, Joining, Limits, Reach, StateDir
from worker.config import WorkerConfig, default_state_dir, make_config, was_insecure, with_insecure_check
from worker.manners.applied import read_applied

if TYPE_CHECKING:
    from worker.daemon import Daemon
    from worker.ranks.gathering import Gathering

EXIT_CODES = """Exit codes: 0 left as asked, 1 other error, 2 wrong usage, 5 coordinator unreachable,
6 access denied (token, certificate, or dismissed), 7 protocol mismatch, 9 storage, 130 interrupted."""
DOCTOR_CODES = EXIT_CODES.replace("0 left as asked", "0 fit to join").replace(
    "1 other error", "1 something to fix"
)

PANELS = {
    "Joining": ("doctor", "join", "leave", "status", "credit", "install"),
    "Limits": ("limits", "pause", "resume", "config"),
    "Data and consent": ("data", "jobs", "model", "apps"),
    "This program": ("version",),
}

app = typer.Typer(
    name="atoll-worker",
    help="Lend this machine to train a model that no one machine could train.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    context_settings=HELP_NAMES,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback()
def common(version: version_option(__version__) = False) -> None:  # type: ignore[valid-type]
    """Lend this machine to train a model that no one machine could train."""


cli_data.register(app)
cli_apps.register(app)
cli_jobs.register(app)
cli_model.register(app)
cli_manners.register(app)
cli_install.register(app)


@app.command(
    epilog="Examples: atoll-worker join 192.0.2.7:7700 --token atoll2_... --memory 4GiB; later just: "
    "atoll-worker join. Ctrl+C leaves at once."
)
@with_groups
def join(
    joining: Joining,
    reach: Reach,
    limits: Limits,
    apps: AppOptions,
    log: Annotated[
        bool,
        typer.Option("--log", help="Print the log even on a terminal, instead of the live view."),
    ] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object per line.")] = False,
) -> int:
    """Join a coordinator's fleet and compute for it, within the limits given here.

    It runs tensor operations from an allow-list and no foreign code, unless --allow-apps and
    `atoll-worker apps accept` permit an app. Settings are remembered; the token is exchanged once for a
    certificate and not stored.
    """
    config = configured(
        {
            **joining.given(),
            **reach.given(),
            **limits.given(),
            **apps.given(),
            "log_json": log_json,
        }
    )
    if err.redraws and not log and not log_json:
        return _run_shown(config)
    start_log(config.log_json)
    return run_daemon(config)


@app.command(epilog=f"Example: atoll-worker doctor 192.0.2.7:7700 --token atoll2_...\n\n{DOCTOR_CODES}")
@with_groups
def doctor(joining: Joining, json: AsJson = False) -> int:
    """Check this machine and its route to the coordinator before joining; changes nothing."""
    from worker.cli.doctor import examine, show

    config = configured(joining.given())
    report = examine(config, (lambda what: None) if json else (lambda what: err.print(f"... {what}")))
    if json:
        print_json(report.as_json())
    else:
        show(report, out)
    return report.exit_code


@app.command(epilog="Example: atoll-worker leave; for good: atoll-worker leave --forget")
def leave(
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Then remove everything about the fleet from this machine: identity, settings, data "
            "sets, blobs.",
        ),
    ] = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Ask the worker that runs on this machine to leave its fleet, like Ctrl+C in its terminal."""
    from worker.cli.running import ask_to_leave, running_process

    folder = state_dir or default_state_dir()
    process = running_process(folder) if forget else ask_to_leave(folder)
    if not forget:
        if json:
            print_json({"process": process})
        else:
            out.print(f"process {process} was asked to leave")
        return 0
    if process is not None:
        cli_forget.await_left(folder, ask_to_leave(folder))
    removed, rest = cli_forget.forget(folder)
    if json:
        print_json({"process": process, "removed": [asdict(gone) for gone in removed], "kept": rest})
        return 0
    for gone in removed:
        line = f"removed {folder / gone.name}: {gone.what} ({shown_size(gone.bytes)})"
        out.print(line, soft_wrap=True, markup=False)
    if not removed:
        out.print(f"nothing of a worker is in {folder}", markup=False)
    if rest:
        out.print(f"not a worker's, and kept: {', '.join(rest)}", soft_wrap=True, markup=False)
    return 0


@app.command(epilog="Example: atoll-worker status --json")
def status(
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Show which coordinator this machine joined, under which name, and whether a worker runs now."""
    from protos.credentials import Identity
    from worker.cli.running import running_process

    folder = state_dir or default_state_dir()
    identity = Identity.load(folder / "identity")
    process = running_process(folder)
    applied = read_applied(folder)
    try:
        config: WorkerConfig | None = make_config({"state_dir": folder}, {})
    except AtollError:
        config = None
    facts = {
        "state_dir": str(folder),
        "coordinator": config.entry_address if config else None,
        "worker": identity.name if identity else None,
        "devices": (config.devices or config.device) if config else None,
        "certificate_expires": identity.expires().isoformat() if identity else None,
        "process": process,
        "paused": (applied.paused or None) if applied is not None and process is not None else None,
        "given": _given(config) if config is not None and identity is not None else None,
    }
    if json:
        print_json(facts)
    else:
        for key, value in facts.items():
            out.print(f"{key.replace('_', ' '):20} {value if value is not None else '-'}")
    return 0


def _given(config: WorkerConfig) -> str | None:
    """What the coordinator says that this machine has given, in words; None where it does not answer."""
    from worker.control.given import ask_given

    try:
        found = ask_given(config)
    except AtollError:
        return None
    if not found.days:
        return "nothing yet"
    mib = 1 << 20
    energy = f"{shown_energy(found.energy_j)} measured, " if found.energy_j else ""
    return (
        f"{shown_work(found.compute_s)} of computing since {found.since}: {found.steps} steps, "
        f"{found.samples} samples, {energy}{found.bytes_in / mib:.1f} MiB received, "
        f"{found.bytes_out / mib:.1f} MiB sent; "
        f"{found.pending_steps} steps are not stored yet, {found.discarded_steps} were discarded"
    )


@app.command(epilog="Example: atoll-worker credit --out receipt.json")
def credit(
    to: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the signed receipt to this file."),
    ] = None,
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="Verify such a file offline.")] = None,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Show what this machine has contributed to which owners, in a receipt signed by its coordinator."""
    from protos.credentials import Identity, authorities_in
    from protos.receipts import checked, read_receipt
    from worker.control.given import ask_receipt

    folder = state_dir or default_state_dir()
    identity = Identity.load(folder / "identity")
    if identity is None:
        raise UsageError(f"{folder} holds no identity; join a coordinator first: `atoll-worker join`")
    if check is not None:
        receipt = read_receipt(check.read_text())
    else:
        receipt = ask_receipt(make_config({"state_dir": folder}, {}))
    held = checked(receipt, authorities_in(identity.ca_pem))
    if to is not None:
        to.write_text(receipt.file())
    if json:
        print_json(held)
        return 0
    for row in held["credits"]:
        useful, took = row["useful"], shown_work(row["useful"]["computed_ms"] / 1e3)
        words = f"{useful['steps']} steps, {useful['samples']} samples, {took} of computing"
        if useful.get("energy_mj"):
            words += f", {shown_energy(useful['energy_mj'] / 1e3)}"
        words += f"; {row['discarded']['steps']} discarded, {row['pending']['steps']} not stored yet"
        out.print(f"{row['day']} for {row['owner'] or '-'}: {words}", markup=False, soft_wrap=True)
    if not held["credits"]:
        out.print("nothing yet")
    if to is not None:
        out.print(f"{to}: signed by the coordinator; check it with `atoll-worker credit --check {to}`")
    return 0


@app.command(epilog="Example: atoll-worker version")
def version(json: AsJson = False) -> int:
    """Print the version; with --json also that of the protocol."""
    if json:
        print_json({"atoll": __version__, "protocol": str(PROTOCOL_VERSION)})
    else:
        out.print(__version__)
    return 0


in_panels(app, PANELS)


def configured(given: dict[str, Any]) -> WorkerConfig:
    """Return the configuration from options, None where one was not given. Raises as ``make_config``."""
    config = with_insecure_check(make_config(given))
    if not config.insecure and was_insecure(config.state_dir):
        err.print(
            f"the last join from {config.state_dir} was --insecure, which is no longer remembered: this one "
            "uses TLS; give --insecure again if that is meant",
            soft_wrap=True,
        )
    return config


def _run_shown(config: WorkerConfig) -> int:
    """Run the daemon behind a view of what it does; its log goes into the state folder."""
    from worker.manners.screen import LOG_FOLDER, Notes, shown_live

    notes = Notes(config.state_dir / LOG_FOLDER)
    _configure_log(notes, None)
    return run_daemon(config, lambda daemon: shown_live(daemon.activity, notes))


def run_daemon(
    config: WorkerConfig,
    beside: Callable[[Daemon], AbstractContextManager[None]] = lambda daemon: nullcontext(),
    ranks: Gathering | None = None,
) -> int:
    """Run a worker until it leaves; ``beside`` shows it meanwhile. ``ranks``: the other hosts of a site."""
    from worker.cli.running import only_one
    from worker.daemon import Daemon

    if config.insecure:
        err.print("--insecure: no TLS, anyone on this network can read and change what is sent")
    with only_one(config.state_dir):
        daemon = Daemon(config, ranks=ranks)
        with beside(daemon):
            daemon.run()
    if err.is_terminal:
        err.print("left; `atoll-worker join` comes back, without a token")
    return 0


def start_log(as_json: bool) -> None:
    """Structured events on the error stream."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    _configure_log(renderer, log_stream(sys.stderr))


def _configure_log(last: Any, stream: TextIO | None) -> None:
    """``last``: of the processors, which renders an event for ``stream`` or drops it."""
    structlog.configure(
        processors=[
            LogBudget(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,  # the renderer's own shows the values of local variables
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )


def main() -> NoReturn:
    """Entry of the command."""
    enter(app)
