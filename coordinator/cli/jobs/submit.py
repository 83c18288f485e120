"""`atoll submit`: a job file's model captured, checked, uploaded and trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import UsageError
from atoll.job import Priority
from coordinator.cli.fleet.admin import parse_duration
from coordinator.cli.jobs.commands import JobFile, follow
from coordinator.cli.jobs.pool import ANSWER_S, note_empty
from coordinator.cli.options import Common, PlanOptions, telling
from coordinator.cli.views.format import in_bytes, in_seconds
from coordinator.cli.views.render import plan_view, worker_names
from coordinator.client.client import Client, LivePlan
from hostos.command_line import answer, byte_progress, err, out, show, with_groups

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.job import Job
    from coordinator.client.prepare import Prepared
    from protos import atoll_control_pb2 as pb

LOOK_EVERY_S = 0.5
IDLE = "pool"
FromWorkers = Annotated[
    bool | None,
    typer.Option(
        "--from-workers/--upload-all",
        help="--from-workers: copy the weights that workers already hold (`atoll-worker model add`) "
        "from those workers; --upload-all: send everything from this machine. Default: from workers, unless "
        "the coordinator is on this machine.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add `atoll submit`."""
    app.command(epilog="Example: atoll submit examples/gpt.py --steps 500 --set optimizer.lr=3e-4 --watch")(
        submit
    )


@with_groups
def submit(
    jobfile: JobFile,
    train_for: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="TIME",
            help="Train for the number of steps that the plan predicts for this time, such as 20m or 2h, "
            "but at least --steps.",
        ),
    ] = "",
    name: Annotated[
        str | None, typer.Option(help="Name of the job; default: the one in the job file.")
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="JOB", help="Continue from the last checkpoint of this job.")
    ] = "",
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Wait for this many idle workers; default: plan with those that are available.",
        ),
    ] = 0,
    from_workers: FromWorkers = None,
    priority: Annotated[
        Priority,
        typer.Option(
            help="Priority among jobs; a job of lower priority gives up its workers at its next commit."
        ),
    ] = Priority.NORMAL,
    deadline: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time until the result is needed, such as 12h; the job gets precedence over others when "
            "time is short.",
        ),
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch/--detach", help="Stay attached and show progress; default: detach.")
    ] = False,
    *,
    options: PlanOptions,
    common: Common,
) -> None:
    """Capture the job file's model, check the capture, upload it and train it on the fleet."""
    json = common.json
    seconds = _asked_s(train_for, resume)
    with common.client() as client:
        with _nothing_submitted(json):
            note_empty(client, json)
            job = options.load(jobfile, *([f"name={name}"] if name else []))
            prepared = _prepared(client, job, jobfile, options, seconds, resume, workers, json)
            within_s = parse_duration(deadline) if deadline else 0.0
            prepared = replace(
                prepared, spec=replace(prepared.spec, priority=_said(priority), within_s=within_s)
            )
            if not json:
                size = in_bytes(prepared.upload_bytes)
                err.print(f"submitting {job.name}: {size} of graphs, weights and data")
            _upload(client, prepared, from_workers, json)
        reply = client.queue(prepared)
        if not watch:
            _tell_submitted(reply, json)
            return
        if not json:
            out.print(f"{reply.job} {reply.update.state} {reply.update.reason}")
        follow(client, reply.job, json)


def _said(priority: Priority) -> Priority | None:
    return None if priority is Priority.NORMAL else priority


@contextmanager
def _nothing_submitted(json: bool) -> Iterator[None]:
    """Say to who interrupts it that no job was submitted."""
    try:
        yield
    except KeyboardInterrupt:
        if not json:
            err.print("nothing was submitted")
        raise


def _prepared(
    client: Client,
    job: Job,
    jobfile: Path,
    options: PlanOptions,
    seconds: float,
    resume: str,
    workers: int,
    json: bool,
) -> Prepared:
    """Capture the job and wait for workers; with ``seconds`` as many steps as are predicted to fit."""
    from coordinator.client.job_file import blaming
    from coordinator.client.prepare import prepare

    if seconds:
        _check_timed(job)
    with telling(json) as tell:
        with blaming(jobfile, options.trace):
            prepared = prepare(
                job,
                partitioner=options.partitioner,
                schedule=options.schedule,
                resume_of=resume,
                standbys=options.most_standbys,
                tell=tell,
            )
        wait_for_workers(client, workers, tell)
        if seconds:
            tell("timing ops and links on the fleet, then planning")
            prepared, live = fitted(client, prepared, seconds, options.steps or 1)
    if prepared.notice:
        err.print(prepared.notice, style="yellow")
    if seconds and not json:
        _show_fit(live, prepared.spec.training.steps)
    return prepared


def _upload(client: Client, prepared: Prepared, from_workers: bool | None, json: bool) -> None:
    with byte_progress("uploading", json) as progress:
        found = client.upload(prepared, progress, from_workers=from_workers)
    if found.from_workers and not json:
        shown = f"{in_bytes(found.from_workers)} came from workers, {in_bytes(found.sent)} from here"
        err.print(shown)


def _asked_s(train_for: str, resume: str) -> float:
    """Return the seconds of --for, 0 without. Raises UsageError."""
    seconds = parse_duration(train_for) if train_for else 0.0
    if seconds and resume:
        raise UsageError("--for counts from the first step, but --resume starts at a later one; give --steps")
    return seconds


def _check_timed(job: Job) -> None:
    if job.federated is not None:
        raise UsageError(f"{job.name} is federated, and no plan predicts a round's time; give --steps")


def wait_for_workers(
    client: Client,
    count: int,
    tell: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Return once ``count`` workers are idle, however long that takes."""
    shown = -1
    while count:
        idle = sum(worker.state == IDLE for worker in client.status(ANSWER_S).workers)
        if idle >= count:
            return
        if idle != shown:
            tell(f"waiting for workers: {idle} of {count} are idle")
            shown = idle
        pause(LOOK_EVERY_S)


def fitted(client: Client, prepared: Prepared, seconds: float, least: int) -> tuple[Prepared, LivePlan]:
    """``prepared`` with as many steps as fit into ``seconds`` by the prediction, at least ``least``.

    Also the plan that says so. UsageError where the coordinator predicts no step time.
    """
    spec = prepared.spec
    live = client.plan(
        prepared.graphs, spec.training, spec.partitioner, spec.schedule, pinned=spec.data.pinned
    )
    predicted = live.plan.prediction
    if predicted is None or not predicted.step_s > 0:
        raise UsageError("the coordinator predicts no step time for this plan; give --steps instead of --for")
    steps = max(least, int(seconds / predicted.step_s))
    return replace(prepared, spec=replace(spec, training=replace(spec.training, steps=steps))), live


def _show_fit(live: LivePlan, steps: int) -> None:
    show(plan_view(live.plan, worker_names(live.fleet)))
    predicted = live.plan.prediction
    if predicted is not None:
        out.print(f"{steps} steps, {in_seconds(steps * predicted.step_s)} as predicted")


def _tell_submitted(reply: pb.SubmitReply, json: bool) -> None:
    job, update = reply.job, reply.update
    reason = f": {update.reason}" if update.reason else ""
    further = f"watch it with `atoll watch {job}`, then `atoll export {job} -o model.safetensors`"
    values = {"job": job, "state": update.state, "reason": update.reason}
    answer(values, f"{job} {update.state}{reason}", further, json=json)
