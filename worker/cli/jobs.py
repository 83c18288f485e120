"""`atoll-worker jobs`: federated jobs that named this machine's data, and its owner's word on them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from atoll.federated import ConsentWord as Word
from hostos.command_line import AsJson, out, print_json, shown_time
from worker.cli.options import StateDir
from worker.cli.running import running_process, signal_consent_changed
from worker.config import default_state_dir
from worker.data.consent import ConsentStore
from worker.data.departures import MESSAGE, UPDATE_BEGINS, read_departures
from worker.data.registry import list_datasets

if TYPE_CHECKING:
    from pathlib import Path

    from worker.data.consent import Request

STANDING = {Word.AWAITED: "waits for you", Word.GIVEN: "accepted", Word.REFUSED: "refused"}
MAX_SHOWN = 10_000
LOOK_S = 0.5  # between looks for a request that is waited for

jobs = typer.Typer(help="Jobs that ask for this machine's data.", invoke_without_command=True)

Job = Annotated[str, typer.Argument(metavar="JOB", help="Id, as `atoll-worker jobs` shows it.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll-worker` command."""
    app.add_typer(jobs, name="jobs")


@jobs.callback(epilog="Example: atoll-worker jobs")
def show(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Show ended jobs too.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until a job asks.")] = False,
    state_dir: StateDir = None,
    json: AsJson = False,
) -> None:
    """Show each job that asks for this machine's data: what would leave, and what became of it."""
    if context.invoked_subcommand is not None:
        return
    folder = state_dir or default_state_dir()
    store = ConsentStore(folder)
    found = [r for r in store.known() if every or not r.over]
    while wait and not found:
        time.sleep(LOOK_S)
        found = [r for r in store.known() if every or not r.over]
    store.mark_shown(found)
    if json:
        print_json([_as_json(request) for request in found])
        return
    if not found:
        for line in _none(folder, every):
            out.print(line, soft_wrap=True, markup=False)
    for at, request in enumerate(found):
        if at:
            out.print()
        _show(request)


@jobs.command(epilog="Example: atoll-worker jobs accept digits-7")
def accept(job: Job, state_dir: StateDir = None) -> int:
    """Let a job train on this machine's data under the terms shown; if the terms change, you are asked
    again."""
    return _decide(job, Word.GIVEN, "", state_dir)


@jobs.command(epilog="Example: atoll-worker jobs refuse digits-7 --reason 'no agreement with this group'")
def refuse(
    job: Job,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason, shown to the submitter of the job.")
    ] = "",
    state_dir: StateDir = None,
) -> int:
    """Refuse a job, even one that is running: nothing more leaves for it, whatever terms it states later.

    Other jobs with the same graph or submitter are not accepted automatically by the policy: each waits for
    you. `jobs accept JOB` revokes the refusal.
    """
    return _decide(job, Word.REFUSED, reason, state_dir)


@jobs.command(epilog="Example: atoll-worker jobs log digits-7")
def log(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Show only entries of this job.")] = "",
    state_dir: StateDir = None,
    json: AsJson = False,
) -> int:
    """Show what left this machine for federated jobs, newest last: updates, numbers, facts about data."""
    lines = [
        line for line in read_departures(state_dir or default_state_dir()) if not job or line["job"] == job
    ]
    lines = lines[-MAX_SHOWN:]
    if json:
        for line in lines:
            print_json(line)
        return 0
    table = Table("when", "job", "round", "what", "bytes", box=None, pad_edge=False)
    for line in lines:
        if line["kind"] == UPDATE_BEGINS:
            continue
        what = str(line.get("message", "") if line["kind"] == MESSAGE else line["kind"])
        at_round = "" if line.get("round") is None else str(line["round"])
        table.add_row(shown_time(line["at_s"]), str(line["job"]), at_round, what, f"{line['bytes']:,}")
    total = sum(line["bytes"] for line in lines)
    out.print(table if lines else "nothing has left this machine for a federated job")
    out.print(f"{total:,} bytes in all")
    return 0


def _none(folder: Path, every: bool) -> list[str]:
    """That no job asks, and what it takes until one can."""
    lines = ["no job asks for data of this machine" + ("" if every else "; --all shows those that are over")]
    if not list_datasets(folder):
        return [
            *lines,
            f"no data are registered in {folder}: `atoll-worker data add NAME PATH` registers some",
        ]
    if running_process(folder) is None:
        return [*lines, f"no worker runs from {folder}: `atoll-worker join` starts one"]
    waits = "a job asks once the coordinator has prepared it, often within a minute of its submission"
    return [*lines, f"{waits}; `atoll-worker jobs --wait` shows it then"]


def _decide(job: str, word: Word, reason: str, state_dir: Any) -> int:
    folder = state_dir or default_state_dir()
    request = ConsentStore(folder).decide(job, word, reason, time.time())
    notified = "; the running worker was notified" if signal_consent_changed(folder) else ""
    out.print(f"job {job}: {STANDING[request.word]} ({request.why}){notified}", soft_wrap=True, markup=False)
    if word is Word.REFUSED:
        out.print("jobs of its graph or its submitter wait for your word, whatever the policy accepts")
    return 0


def _show(request: Request) -> None:
    over = f", over: {request.over}" if request.over else ""
    head = f"job {request.job}: {STANDING[request.word]} ({request.why}){over}"
    out.print(head, style="bold", soft_wrap=True, markup=False)
    sent = f"{request.updates} updates, {request.sent_bytes:,} bytes" if request.updates else "no update"
    if request.evaluations:
        sent += f"; means of {request.evaluations} evaluations"
    for heading, text in (("asked", shown_time(request.asked_s)), *request.facts, ("sent so far", sent)):
        out.print(f"  {heading:13} {text}", soft_wrap=True, markup=False)


def _as_json(request: Request) -> dict[str, Any]:
    return {**asdict(request), "facts": dict(request.facts)}
