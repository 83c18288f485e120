"""The `atoll-worker` command: lend this machine, look before lending it, take it back."""

from __future__ import annotations

import json as json_module
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import structlog
import typer
from rich.console import Console
from rich.text import Text

import atoll
from atoll.errors import AtollError
from protos import PROTOCOL_VERSION, leaving
from protos.app_bundle import parse_pairs
from protos.installation import check_installation
from worker.cli import apps as cli_apps
from worker.cli import data as cli_data
from worker.config import (
    WorkerConfig,
    default_state_dir,
    make_config,
    parse_address,
    parse_size,
    was_insecure,
    with_insecure_check,
)

INTERRUPTED = 130
EXIT_CODES = """Exit codes: 0 left as asked, 1 other error, 2 wrong usage, 5 coordinator unreachable,
6 access denied (token, certificate, or dismissed), 7 protocol mismatch, 9 storage, 130 interrupted."""
DOCTOR_CODES = EXIT_CODES.replace("0 left as asked", "0 fit to join").replace(
    "1 other error", "1 something to fix"
)

app = typer.Typer(
    name="atoll-worker",
    help="Lend this machine to train a model that no one machine could train.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
# Much of what is shown was written elsewhere: no text is markup.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)
cli_data.register(app)
cli_apps.register(app)

Coordinator = Annotated[
    str | None,
    typer.Argument(metavar="HOST:PORT", help="The coordinator; default: the one joined last."),
]
Token = Annotated[
    str | None,
    typer.Option(metavar="T", help="Join token as `atoll serve` prints it; or ATOLL_TOKEN. First join only."),
]
StateDir = Annotated[
    Path | None,
    typer.Option(help="Identity, settings, cached blobs; default ~/.local/state/atoll-worker."),
]
DeviceOption = Annotated[str | None, typer.Option(metavar="D", help="auto, cpu, cuda or cuda:N.")]
Kept = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Most that federated rules may keep here between rounds; default 20GiB."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most that plans may use here, e.g. 4GiB; default: what is free."),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Of computation; default: one per physical core it may use."),
]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="No TLS and no token: loopback experiments only.")
]
UseProxy = Annotated[
    bool | None,
    typer.Option(
        "--use-proxy/--no-use-proxy",
        envvar="ATOLL_USE_PROXY",
        help="Reach coordinator and peers by way of the environment's proxy (https_proxy); else directly.",
    ),
]
Listen = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where peers connect; default 0.0.0.0, any free port.")
]
Advertise = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST[:PORT]", help="Where peers reach this machine, behind a forwarded port; may repeat."
    ),
]
NoInbound = Annotated[
    bool | None, typer.Option("--no-inbound", help="Accept no connection; open every one ourselves.")
]
MinBatch = Annotated[
    int | None, typer.Option(metavar="N", help="Own samples in each mean that leaves; default 3.")
]
MinSamples = Annotated[
    int | None, typer.Option(metavar="N", help="Own samples behind a federated update; default 10.")
]
MinSteps = Annotated[
    int | None, typer.Option(metavar="N", help="Local steps behind a federated update; default 2.")
]
MinClients = Annotated[int | None, typer.Option(metavar="N", help="Updates in a federated round; default 2.")]
AllowApps = Annotated[
    bool,
    typer.Option(
        "--allow-apps", help="This time, run those Flower apps that `atoll-worker apps accept` was told of."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value for scripts.")]


@app.command(
    epilog="Examples: atoll-worker join 192.0.2.7:7700 --token atoll1_... --memory 4GiB; later just: "
    "atoll-worker join. Ctrl+C leaves at once."
)
def join(
    coordinator: Coordinator = None,
    token: Token = None,
    name: Annotated[
        str | None, typer.Option(metavar="N", help="Shown to the owner; default: this host's.")
    ] = None,
    device: DeviceOption = None,
    threads: Threads = None,
    memory: Memory = None,
    listen: Listen = None,
    advertise: Advertise = None,
    no_inbound: NoInbound = None,
    site: Annotated[
        str | None, typer.Option(metavar="S", help="Machines behind one router or uplink give the same word.")
    ] = None,
    max_upload_mbit: Annotated[
        float | None, typer.Option(metavar="M", help="Rate of checkpoint uploads; 0 = unlimited.")
    ] = None,
    kept: Kept = None,
    min_batch: MinBatch = None,
    min_samples: MinSamples = None,
    min_steps: MinSteps = None,
    min_clients: MinClients = None,
    state_dir: StateDir = None,
    insecure: Insecure = None,
    use_proxy: UseProxy = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a log line.")] = False,
    allow_apps: AllowApps = False,
    accept_app: Annotated[
        list[str] | None,
        typer.Option(metavar="HASH", help="Accept this app for this time; for scripts; may repeat."),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Told to apps as Context.node_config, as in 'data=\"/data\"'."),
    ] = None,
) -> int:
    """Join a coordinator's fleet and compute what it plans, within the limits given here.

    What runs are tensor operations from a fixed list: no code of anybody else's, unless --allow-apps
    and `atoll-worker apps accept` say otherwise. Settings are remembered; the token is exchanged for a
    certificate once and not kept.
    """
    given: dict[str, Any] = {
        "token": token,
        "name": name,
        "device": device,
        "threads": threads,
        "memory_bytes": parse_size(memory) if memory else None,
        "inbound": False if no_inbound else None,
        "site": site,
        "max_upload_mbit": max_upload_mbit,
        "kept_bytes": parse_size(kept) if kept else None,
        "min_batch": min_batch,
        "min_samples": min_samples,
        "min_steps": min_steps,
        "min_clients": min_clients,
        "state_dir": state_dir,
        "insecure": insecure,
        "use_proxy": use_proxy,
        "log_json": log_json,
        "allow_apps": allow_apps,
        "accept_apps": tuple(accept_app or ()),
        "node_config": tuple(parse_pairs(node_config, "--node-config").items()) if node_config else None,
        **_address("host", "port", coordinator),
        **_address("listen_host", "listen_port", listen, default_port=0),
    }
    if advertise:
        # Port 0: the one we listen on.
        given["advertise"] = tuple(parse_address(a, default_port=0, lowest_port=0) for a in advertise)
    config = _config(given)
    _start_log(config.log_json)
    return _run_daemon(config)


@app.command(epilog=f"Example: atoll-worker doctor 192.0.2.7:7700 --token atoll1_...\n\n{DOCTOR_CODES}")
def doctor(
    coordinator: Coordinator = None,
    token: Token = None,
    device: DeviceOption = None,
    threads: Threads = None,
    memory: Memory = None,
    listen: Listen = None,
    state_dir: StateDir = None,
    insecure: Insecure = None,
    use_proxy: UseProxy = None,
    json: AsJson = False,
) -> int:
    """Check this machine and its way to the coordinator before joining; changes nothing."""
    from worker.cli.doctor import examine, show

    config = _config(
        {
            "token": token,
            "device": device,
            "threads": threads,
            "memory_bytes": parse_size(memory) if memory else None,
            "state_dir": state_dir,
            "insecure": insecure,
            "use_proxy": use_proxy,
            **_address("host", "port", coordinator),
            **_address("listen_host", "listen_port", listen, default_port=0),
        }
    )
    report = examine(config, (lambda what: None) if json else (lambda what: err.print(f"... {what}")))
    if json:
        _print_json(report.as_json())
    else:
        show(report, out)
    return report.exit_code


@app.command(epilog="Example: atoll-worker leave")
def leave(state_dir: StateDir = None, json: AsJson = False) -> int:
    """Ask the worker that runs on this machine to leave its fleet, like Ctrl+C in its terminal."""
    from worker.cli.running import ask_to_leave

    process = ask_to_leave(state_dir or default_state_dir())
    if json:
        _print_json({"process": process})
    else:
        out.print(f"process {process} was asked to leave")
    return 0


@app.command(epilog="Example: atoll-worker status --json")
def status(
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Say which coordinator this machine joined, as whom, and whether a worker runs now."""
    from protos.credentials import Identity
    from worker.cli.running import running_process

    folder = state_dir or default_state_dir()
    identity = Identity.load(folder / "identity")
    process = running_process(folder)
    try:
        config: WorkerConfig | None = make_config({"state_dir": folder}, {})
    except AtollError:
        config = None
    facts = {
        "state_dir": str(folder),
        "coordinator": config.entry_address if config else None,
        "worker": identity.name if identity else None,
        "certificate_expires": identity.expires().isoformat() if identity else None,
        "process": process,
    }
    if json:
        _print_json(facts)
    else:
        for key, value in facts.items():
            out.print(f"{key.replace('_', ' '):20} {value if value is not None else '-'}")
    return 0


@app.command(epilog="Example: atoll-worker version")
def version(json: AsJson = False) -> int:
    """Print the version; with --json also that of the protocol."""
    if json:
        _print_json({"atoll": atoll.__version__, "protocol": str(PROTOCOL_VERSION)})
    else:
        out.print(atoll.__version__)
    return 0


def _print_json(value: Any) -> None:
    sys.stdout.write(json_module.dumps(value) + "\n")


def _address(
    host_name: str, port_name: str, text: str | None, default_port: int | None = None
) -> dict[str, Any]:
    """Two options from one HOST:PORT; nothing when it was not given."""
    if text is None:
        return {}
    if default_port is None:
        host, port = parse_address(text)
    else:
        host, port = parse_address(text, default_port, lowest_port=0)
    return {host_name: host, port_name: port}


def _config(given: dict[str, Any]) -> WorkerConfig:
    config = with_insecure_check(make_config(given))
    if not config.insecure and was_insecure(config.state_dir):
        err.print(
            f"the last join from {config.state_dir} was --insecure, which is no longer remembered: this one "
            "uses TLS; give --insecure again if that is meant",
            soft_wrap=True,
        )
    return config


def _run_daemon(config: WorkerConfig) -> int:
    from worker.cli.running import only_one
    from worker.daemon import Daemon

    if config.insecure:
        err.print("--insecure: no TLS, anybody on this network may read and change what is sent")
    with only_one(config.state_dir):
        Daemon(config).run()
    return 0


def _start_log(as_json: bool) -> None:
    """Structured events on the error stream."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def run(arguments: list[str] | None = None) -> int:
    """Run a command line; returns its exit code and never shows a traceback for a user's error."""
    try:
        check_installation()
        result = app(args=arguments, prog_name="atoll-worker", standalone_mode=False)
    except AtollError as error:
        err.print(Text("error:", style="red"), str(error), soft_wrap=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort, EOFError):
        err.print("interrupted")
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def main() -> NoReturn:
    """Entry of the command."""
    # Its own lines about refused handshakes would stand before our errors, which say what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    leaving.leave(run())
