"""`atoll flower` without a terminal: runs that were detached, and all that are open on the coordinator."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from time import localtime, strftime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.errors import AtollError, UsageError
from coordinator.cli.options import Common, StateDir
from coordinator.cli.views.facts import FactTable
from coordinator.cli.views.format import add_row
from coordinator.client.endpoint import default_state_dir
from coordinator.flower import detached
from coordinator.flower.detached import OVER, Detached, Stage
from coordinator.flower.launcher import new_run
from hostos.command_line import INTERRUPTED, err, out, print_json, show, with_groups
from protos.text_limits import clean

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.client.endpoint import Endpoint
    from coordinator.flower.detached import RunFolder
    from coordinator.flower.launcher import Wish
    from protos import atoll_apps_pb2 as pb

PROCESS = "coordinator.cli.flower.process"
HERE = "this machine"
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Detach from this terminal: `atoll flower list`, `logs`, `stop`."),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Id, as `atoll flower list` shows it, or its first digits.")
]


def register(flower: typer.Typer) -> None:
    """Add `list`, `logs` and `stop` to `atoll flower`."""
    flower.command("list", epilog="Example: atoll flower list")(show_runs)
    flower.command(epilog="Example: atoll flower logs 1f3a --follow")(logs)
    flower.command(epilog="Example: atoll flower stop 1f3a")(stop)


def detach(
    wish: Wish, endpoint: Endpoint | None, state_dir: Path | None, *, workers: int = 0, json: bool
) -> int:
    """Start a run that goes on without this command, and see it begin; returns the exit code.

    ``endpoint`` None: on ``workers`` workers of its own.
    """
    spec, run = wish.bundle.spec, f"{new_run():x}"
    record = Detached(
        run=run,
        app=spec.name,
        version=spec.version,
        hash=wish.bundle.hash,
        folder=str(wish.folder.resolve()),
        where=endpoint.address if endpoint is not None else "",
        started_s=time.time(),
        nodes=wish.nodes,
    )
    folder, process = detached.begin(state_dir or default_state_dir(), record, PROCESS, {
        "workers": workers,
        "config": dict(wish.config),
        "nodes": wish.nodes,
        "wait_s": wish.wait_s,
        "show_log": wish.show_log,
        "packages": wish.packages,
        "signed": [part.hex() for part in wish.signed],
        "endpoint": None if endpoint is None else {
            "host": endpoint.host,
            "port": endpoint.port,
            "token": endpoint.token.encode() if endpoint.token is not None else "",
            "use_proxy": endpoint.use_proxy,
        },
    })  # fmt: skip
    try:
        found = folder.read()
        while not _begun(found, wish.wait_s) and process.poll() is None:
            time.sleep(detached.LOOK_EVERY_S)
            found = folder.read()
    except KeyboardInterrupt:
        folder.stop()
        raise
    found = folder.read()
    if found.stage is Stage.STARTING or (found.stage in OVER and found.stage is not Stage.DONE):
        sys.stderr.write(b"".join(folder.output()).decode(errors="replace"))
        return found.code or 1
    if json:
        print_json({**asdict(found), "output": str(folder.path / detached.OUTPUT)})
        return 0
    out.print(run)
    if found.stage is Stage.WAITING:
        err.print(found.reason)
    err.print(f"{found.app} is {found.stage}; `atoll flower logs {run[:6]} --follow`, `... stop {run[:6]}`")
    return 0


def _begun(found: Detached, wait_s: float) -> bool:
    return (
        found.stage in OVER or found.stage is Stage.RUNNING or (found.stage is Stage.WAITING and wait_s > 0)
    )


@with_groups
def show_runs(*, common: Common) -> int:
    """List the runs that were detached on this machine, and those that are open on the coordinator.

    If no coordinator answers, only the former are listed.
    """
    found = detached.runs(common.state_dir or default_state_dir())
    known, others = {record.run for record in found}, []
    try:
        with common.client() as client:
            others = [facts for facts in client.app_runs() if f"{facts.run:x}" not in known]
    except AtollError as error:
        if common.coordinator is not None:
            raise
        missing = str(error)
    else:
        missing = ""
    rows = [_elsewhere(facts) for facts in others] + [asdict(r) | {"owner": "", "here": True} for r in found]
    if common.json:
        print_json(rows)
        return 0
    table = FactTable("run", "app", "state", "round", "nodes", "started", "where")
    for row in rows:
        of = f"{row['round']}/{row['rounds']}" if row["rounds"] else str(row["round"] or "")
        where = f"{row['where']}, of {row['owner']}" if row["owner"] else row["where"] or HERE
        started = strftime("%Y-%m-%d %H:%M", localtime(row["started_s"]))
        name = f"{row['app']} {row['version']}"
        add_row(table, row["run"], name, row["stage"], of, str(row["nodes"] or ""), started, where)
    show(table)
    if missing:
        err.print(f"only runs of this machine: {missing}", style="dim")
    return 0


def _elsewhere(facts: pb.AppRunFacts) -> dict[str, Any]:
    record = Detached(
        run=f"{facts.run:x}",
        app=clean(facts.app.name, 100),
        version=clean(facts.app.version, 40),
        hash=facts.app.hash,
        folder="",
        where="coordinator",
        started_s=facts.opened_s,
        nodes=facts.nodes,
        stage=Stage.RUNNING if facts.partitions else Stage.WAITING,
    )
    return asdict(record) | {"owner": clean(facts.owner, 60), "here": False}


def logs(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id, as `atoll flower list` shows it; default: the newest.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait until the run has ended.")] = False,
    state_dir: StateDir = None,
) -> int:
    """Show what a detached run printed: rounds, metrics, and the ServerApp's own output."""
    folder = detached.find(state_dir or default_state_dir(), run.lower())
    if folder is None:
        raise UsageError(
            f"no detached run {run!r} on this machine; a run's output is where `--detach` was given"
            if run
            else "no run was detached on this machine; `atoll flower run APP_DIR --detach` starts one"
        )
    for piece in folder.output(follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    return 0


@with_groups
def stop(run: RunName, *, common: Common) -> int:
    """End a run: one detached on this machine shuts down cleanly, any other is ended at the coordinator."""
    folder = detached.find(common.state_dir or default_state_dir(), run.lower())
    if folder is not None:
        ended = _stopped_here(folder)
    else:
        with common.client() as client:
            found = [facts.run for facts in client.app_runs() if f"{facts.run:x}".startswith(run.lower())]
            if len(found) != 1:
                raise UsageError(f"{len(found)} open runs begin with {run!r}; `atoll flower list` shows them")
            client.end_app_run(found[0], "stopped by its owner from elsewhere")
            ended = f"{found[0]:x}"
    if common.json:
        print_json({"run": ended})
    else:
        err.print(f"run {ended} is stopped")
    return 0


def _stopped_here(folder: RunFolder) -> str:
    before = folder.read()
    if before.stage in OVER:
        raise UsageError(f"run {before.run} has ended already: {before.stage}")
    folder.stop()
    after = folder.read()
    if after.stage not in (Stage.STOPPED, Stage.LOST):
        raise UsageError(f"run {before.run} ended meanwhile: {after.stage}")
    return before.run


def outcome(error: BaseException | None) -> tuple[Stage, int, str]:
    """How a run ended that raised this, with the command's exit code and the reason."""
    match error:
        case None:
            return Stage.DONE, 0, ""
        case AtollError():
            return Stage.FAILED, error.exit_code, str(error)
        case KeyboardInterrupt() | SystemExit():
            return Stage.STOPPED, INTERRUPTED, "stopped on this machine"
        case _:
            return Stage.FAILED, 1, f"{type(error).__name__}: {error}"
