"""Commands of `atoll` about planned and submitted jobs: plan, watch, logs, cancel, export, metrics, trace."""

from __future__ import annotations

import contextlib
import json as jsonlib
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from atoll.errors import NotEnoughMemory, StorageError, UsageError
from atoll.exchange import EXACT
from atoll.job import MAX_STEPS
from atoll.worker_names import with_names
from coordinator.cli.jobs.pool import need_workers
from coordinator.cli.options import Common, PlanOptions, Trace, now_and_then, telling
from coordinator.cli.views.brief import brief_view
from coordinator.cli.views.format import in_bytes
from coordinator.cli.views.render import memory_view, plan_view, watch_line, watch_view, worker_names
from coordinator.cli.views.render_readings import reading_words, readings_values, readings_view, remedy
from coordinator.cli.views.render_ways import ways_values, ways_view
from coordinator.client.client import BEST, Client, KeptStep, check_ended
from hostos.command_line import answer, byte_progress, err, out, print_json, show, with_groups, written
from protos.coding import plain
from protos.convert import to_proto

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

    from atoll.dataset_spec import PinnedData
    from atoll.job import Job
    from atoll.plan import Plan
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.planner import PlanRequest
    from coordinator.planning.readings import Reading
    from coordinator.planning.ways import Way
    from protos import atoll_control_pb2 as pb

LOSSES_SHOWN = 48
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name or id, as `atoll status` shows it.")]
JobFile = Annotated[Path, typer.Argument(metavar="JOBFILE", help="Python file with a function job().")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.command(
        epilog="Example: atoll plan examples/gpt.py --fleet examples/fleet.toml --compress auto "
        "--plot plan.png"
    )(plan)
    app.command(epilog="Example: atoll watch j-1")(watch)
    app.command(epilog="Example: atoll logs j-1 --follow")(logs)
    app.command(epilog="Example: atoll cancel j-1")(cancel)
    app.command(epilog="Example: atoll forget j-1 j-2")(forget)
    app.command(epilog="Example: atoll export j-1 -o adapter --format peft --job-file job.py")(export)
    app.command(epilog="Example: atoll trace j-1 -o trace.json   (open it in Perfetto)")(trace)
    app.command(epilog="Example: atoll metrics j-1 --out metrics.csv")(metrics)


@with_groups
def plan(
    jobfile: JobFile,
    fleet: Annotated[
        Path | None,
        typer.Option(
            metavar="FLEET.toml",
            help="Plan for the fleet in this file (docs/fleet-files.md), without a coordinator.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw the plan.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also show what takes up the memory of each device.")
    ] = False,
    *,
    options: PlanOptions,
    common: Common,
) -> None:
    """Show the plan of a job, without running it: stages, devices, step time, bottleneck, bytes, memory.

    With --fleet, also compare ways to train: one pipeline, replicas, data parallelism; with --exchange also
    local steps or gossip. Machines of several cards are also planned with other workers.
    """
    ways: Sequence[Way] = ()
    readings: Sequence[Reading] = ()
    request: PlanRequest | None = None
    if fleet is not None:
        job = _cut(options.read(jobfile, shapes_only=True))
        found, request, ways, readings = _local_plan(job, jobfile, fleet, options, common.json)
        names: Mapping[str, str] = {device.worker: device.label for device in request.fleet.devices}
    else:
        with common.client() as client:
            need_workers(client)
            job = _cut(options.load(jobfile, shapes_only=True))
            found, names = _live_plan(client, job, jobfile, options, common.json)
    if plot is not None:
        from coordinator.cli.plot.plan import plot_plan

        plot_plan(found, names, plot, request)
    if common.json:
        values = {"ways": ways_values(ways, batch_of(job))} if ways else {}
        others = {"readings": readings_values(readings)} if readings else {}
        print_json({**plain(to_proto(found)), "names": dict(names), **values, **others})
    else:
        show(plan_view(found, names))
        if memory:
            show(memory_view(found, names))
        if len(ways) > 1:
            show(ways_view(ways, names, batch_of(job)))
        if readings:
            show(readings_view(readings))
        if plot is not None:
            out.print(f"drawn in {plot}")


def _cut(job: Job) -> Job:
    if job.federated is not None:
        raise UsageError(
            f"{job.name} is federated: every client runs the whole model, so there is nothing to cut; "
            "`atoll submit` it, `atoll watch` shows its clients"
        )
    return job


def batch_of(job: Job) -> int:
    """Samples of a micro-batch."""
    return int(next(iter(job.example_inputs.values())).shape[0])


def _local_plan(
    job: Job, jobfile: Path, fleet: Path, options: PlanOptions, quiet: bool
) -> tuple[Plan, PlanRequest, Sequence[Way], Sequence[Reading]]:
    from coordinator.client.fleet_file import read_fleet
    from coordinator.client.job_file import blaming
    from coordinator.client.prepare import capture_graphs, pinned_data
    from coordinator.planning.baselines import GIVEN_CUT
    from coordinator.planning.chosen import chosen_plan
    from coordinator.planning.peers.replicas import with_blocks
    from coordinator.planning.planner import PlanRequest, remembering
    from coordinator.planning.readings import other_readings
    from coordinator.planning.ways import WayKind, compare_ways

    described = read_fleet(fleet)
    with telling(quiet) as tell:
        tell("capturing the model as an op-DAG")
        with blaming(jobfile, options.trace):
            graphs = capture_graphs(job)
        tell(f"planning {len(graphs.dag.ops)} ops on {len(described.devices)} devices")
        request = PlanRequest(
            "plan",
            1,
            graphs.dag,
            graphs.eval_dag if job.training.eval_batches else None,
            job.training,
            described,
            options.partitioner,
            options.schedule,
            dag_hash=graphs.blob.hash,
            eval_dag_hash=graphs.eval_blob.hash,
            standbys=options.most_standbys,
            pinned=_owner_in(described, pinned_data(job)),
        )
        # The ways and the plan that is chosen have most parts in common.
        request = remembering(request, now_and_then(tell))
        asked = replace(request, training=with_blocks(job.training))
        # Either is one way, whatever the options.
        if options.partitioner.startswith(GIVEN_CUT) or request.pinned:
            return chosen_plan(asked), asked, (), ()
        how = job.training.exchange
        try:
            ways = compare_ways(request, inexact="" if how == EXACT else how.partition(":")[0])
        except NotEnoughMemory as error:
            if not (others := [other for other in other_readings(request, ()) if other.better]):
                raise
            raise NotEnoughMemory(f"{error}; or {remedy(others[0])}: {reading_words(others[0])}") from error
        plain = how == EXACT and job.training.replicas == "1"
        one = next((way.plan for way in ways if plain and way.kind is WayKind.PIPELINE), None)
        made = one or chosen_plan(asked)
        return made, asked, ways, other_readings(request, ways)


def _owner_in(fleet: Fleet, pinned: PinnedData | None) -> str:
    """Return the device of a fleet file that has pinned data, "" where none are pinned."""
    if pinned is None:
        return ""
    found = [device.worker for device in fleet.devices if pinned.worker in (device.worker, device.label)]
    if not found:
        raise UsageError(
            f"which device of the fleet has data set {pinned.data!r}? name it in the job, "
            f"Registered(..., pin={fleet.devices[0].label!r})"
        )
    return found[0]


def _live_plan(
    client: Client, job: Job, jobfile: Path, options: PlanOptions, quiet: bool
) -> tuple[Plan, Mapping[str, str]]:
    from coordinator.client.job_file import blaming
    from coordinator.client.prepare import capture_graphs, pinned_data

    pinned = pinned_data(job)
    with telling(quiet) as tell:
        tell("capturing the model as an op-DAG")
        with blaming(jobfile, options.trace):
            graphs = capture_graphs(job)
        tell(f"timing {len(graphs.dag.ops)} ops and the links on the fleet, then planning")
        live = client.plan(
            graphs, job.training, options.partitioner, options.schedule, options.most_standbys, pinned
        )
    return live.plan, worker_names(live.fleet)


@with_groups
def watch(
    job: JobName,
    loggers: Annotated[
        list[str] | None,
        typer.Option(
            "--logger",
            metavar="NAME",
            help="Also pass the figures to wandb, mlflow, trackio, tensorboard, or another plug-in.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="On a terminal, show every stage, link and client instead of at most ten lines."
        ),
    ] = False,
    *,
    common: Common,
) -> None:
    """Show a job live until it ends: loss, speed, ETA, stages and links. Exit code 8 if it fails."""
    with common.client() as client:
        if not loggers:
            follow(client, job, common.json, everything=everything)
            return
        from coordinator.notebook.fleet import Fleet

        with Fleet(client).run(job).logging(loggers) as passed_on:
            follow(client, job, common.json, passed_on.take, everything=everything)


def keep_costs(last: pb.JobUpdate, update: pb.JobUpdate) -> None:
    """Take over what the loss of each stage costs, which is reported now and then, from an update before."""
    for before, stage in zip(last.stages, update.stages, strict=False):
        same = (before.stage, before.worker) == (stage.stage, stage.worker)
        if same and before.HasField("replace_s") and not stage.HasField("replace_s"):
            stage.replace_s, stage.replace_why = before.replace_s, before.replace_why
            stage.copy = before.copy


def follow(
    client: Client,
    job: str,
    json: bool,
    take: Callable[[pb.JobUpdate], object] = lambda update: None,
    *,
    goes_on: bool = True,
    everything: bool = False,
) -> None:
    """Show updates as they arrive: a live view, plain lines if not on a terminal, or JSON lines. ``take``
    gets each first. ``everything``: the live view has more than ten lines.

    Who interrupts it learns what goes on without it, unless the job does not (``goes_on`` False).
    """
    try:
        _follow(client, job, json, take, watch_view if everything else brief_view)
    except KeyboardInterrupt:
        if goes_on and not json:
            err.print(f"{job} goes on by itself: `atoll watch {job}` shows it, `atoll cancel {job}` stops it")
        raise


def _head(update: pb.JobUpdate) -> tuple[str, int, str]:
    """What a line is printed for, when it changes."""
    return update.state, update.step, update.reason


def _follow(
    client: Client,
    job: str,
    json: bool,
    take: Callable[[pb.JobUpdate], object],
    view: Callable[[pb.JobUpdate, Sequence[float], Mapping[str, str]], RenderableType],
) -> None:
    names = worker_names(client.status().workers)
    losses: deque[float] = deque(maxlen=LOSSES_SHOWN)
    last: pb.JobUpdate | None = None
    live = Live(console=out, refresh_per_second=4) if out.redraws and not json else None
    if live is not None:
        live.start()
    try:
        for update in client.watch(job):
            take(update)
            if any(stage.worker not in names for stage in update.stages):
                names = worker_names(client.status().workers)
            losses.extend(point.value for point in update.metrics if point.name == "loss")
            if last is not None and not json:
                keep_costs(last, update)
            if json:
                print_json(plain(update))
            elif live is not None:
                live.update(view(update, losses, names))
            elif last is None or _head(last) != _head(update):
                out.print(watch_line(update, last.reason if last else ""))
            last = update
    finally:
        if live is not None:
            live.stop()
    if last is None:
        raise UsageError(f"no job {job!r} is known; see `atoll status`")
    check_ended(last)


@with_groups
def logs(
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="Name or id, as `atoll status` shows it; default: all.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue as lines arrive.")] = False,
    *,
    common: Common,
) -> None:
    """Print the log of a job: lines of the coordinator and of its workers."""
    with common.client() as client:
        names = {} if common.json else {w.worker: w.name for w in client.status().workers}
        for line in client.logs(job, follow=follow):
            if common.json:
                print_json(plain(line))
            else:
                out.print(with_names(_log_line(line), names))


def _log_line(line: pb.LogLine) -> str:
    try:
        fields = jsonlib.loads(line.fields_json or "{}")
    except ValueError:
        fields = {"fields": line.fields_json}
    words = " ".join(f"{key}={value}" for key, value in fields.items()) if isinstance(fields, dict) else ""
    at = strftime("%H:%M:%S", localtime(line.time_s))
    return f"{at} {line.level:7} {line.source:12} {line.event} {words}".rstrip()


@with_groups
def cancel(
    job: JobName,
    common: Common,
) -> None:
    """Stop a job; its last checkpoint stays and can be exported or resumed."""
    with common.client() as client:
        update = client.cancel(job)
    words = f"{update.job} {update.state} at step {update.step}, checkpoint of step {update.checkpoint_step}"
    answer(plain(update), words, json=common.json)


@with_groups
def forget(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...", help="Names or ids of ended jobs, as `atoll status` shows them."),
    ],
    common: Common,
) -> None:
    """Delete jobs that have ended: their checkpoints, figures and logs, and those models and data that no
    other job needs. They can no longer be exported or resumed."""
    with common.client() as client:
        client.forget_jobs(jobs)
    answer({"forgotten": jobs}, f"{', '.join(jobs)} forgotten", json=common.json)


@with_groups
def export(
    job: JobName,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH",
            help="Output file; default: model.safetensors; for other formats a folder named after the job.",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="HOW",
            help="safetensors: one file; hf: a folder for from_pretrained; peft: only the adapter.",
        ),
    ] = "safetensors",
    jobfile: Annotated[
        Path | None,
        typer.Option(
            "--job-file", metavar="JOBFILE",
            help="The submitted job file, whose module writes the folder; needed for hf and peft.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job.")
    ] = None,
    step: Annotated[
        str,
        typer.Option(
            metavar="N|best",
            help="Checkpoint to export: a step that `atoll checkpoints JOB` lists, or best, the one "
            "nearest to the best held-out loss. Default: the newest.",
        ),
    ] = "",
    *,
    trace: Trace = False,
    common: Common,
) -> None:  # fmt: skip
    """Write the newest weights under the module's own names, or in a form that transformers or peft can
    read."""
    from coordinator.client.export import Format, check_target

    if form not in {known.value for known in Format}:
        raise UsageError(f"--format {form}: give {', '.join(Format)}")
    wanted = Format(form)
    at = _kept_step(step)
    path = output or Path("model.safetensors" if wanted is Format.SAFETENSORS else job)
    if wanted is Format.SAFETENSORS:
        check_target(path)
    module = None if wanted is Format.SAFETENSORS else _module(form, jobfile, sets or [], trace)
    with (
        common.client() as client,
        byte_progress("downloading", common.json) as progress,
    ):
        if module is None:
            found = client.export(job, path, progress, at)
        else:
            found = client.export_folder(job, path, module, wanted, progress, at)
    words = f"{found.path}: {found.tensors} tensors, {in_bytes(found.bytes)}, after step {found.step}"
    answer({**asdict(found), "path": str(found.path)}, words, json=common.json)


def _kept_step(given: str) -> KeptStep:
    """Return what --step asks for, None without; UsageError for what is no step."""
    if given in ("", BEST):
        return BEST if given else None
    if not (given.isascii() and given.isdecimal() and len(given) < len(str(MAX_STEPS)) + 1):
        raise UsageError(f"--step {given[:40]}: give the step of a kept checkpoint, or {BEST}")
    return int(given)


def _module(form: str, jobfile: Path | None, sets: Sequence[str], trace: bool) -> nn.Module:
    """Return the module of a job file with the weights that it begins with."""
    from coordinator.client.job_file import load_job
    from coordinator.client.weights import with_weights

    if jobfile is None:
        raise UsageError(
            f"--format {form} needs the module, which is on this machine alone: give --job-file JOBFILE, the "
            "file that was submitted"
        )
    found = load_job(jobfile, sets, full_trace=trace)
    with_weights(found)
    return found.module


@with_groups
def metrics(
    job: JobName,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Output file; default: standard output."),
    ] = None,
    *,
    common: Common,
) -> None:
    """Print a job's metrics as CSV: every loss, step time and evaluation, and whether it was rolled back."""
    from coordinator.client.metrics_csv import marked

    with common.client() as client:
        lines = marked(client.metrics(job))
        try:
            with contextlib.ExitStack() as stack:
                if output is None:
                    stack.enter_context(written())
                target = stack.enter_context(output.expanduser().open("w")) if output else sys.stdout
                rows = sum(target.write(f"{line}\n") > 0 for line in lines)
        except OSError as error:
            raise StorageError(f"cannot write {output or 'the metrics'}: {error.strerror}") from None
    if not rows:
        raise UsageError(f"{job} has no metrics yet; try again once it trains")
    if output is not None:
        answer({"path": str(output), "rows": rows - 1}, f"{output}: {rows - 1} rows", json=common.json)


@with_groups
def trace(
    job: JobName,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = Path(
        "trace.json"
    ),
    otlp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send it to an OpenTelemetry collector instead, such as http://localhost:4318/v1/traces.",
        ),
    ] = "",
    *,
    common: Common,
) -> None:
    """Write a job's timeline for Perfetto: every computation, send and receive, by worker."""
    from coordinator.client.chrome_trace import chrome_trace

    with common.client() as client:
        names = worker_names(client.status().workers)
        spans = client.trace(job)
    if not spans:
        raise UsageError(f"{job} has no recorded spans yet; try again once it trains")
    if otlp:
        from coordinator.notebook.otlp import sent

        count = sent(job, spans, otlp, names)
        answer({"url": otlp, "spans": count}, f"{otlp}: {count} spans", json=common.json)
        return
    try:
        output.expanduser().write_text(jsonlib.dumps(chrome_trace(job, spans, names)))
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror}; give another -o") from None
    workers = len({span.worker for span in spans})
    words = f"{output}: {len(spans)} spans of {workers} workers; open it in Perfetto"
    answer({"path": str(output), "spans": len(spans)}, words, json=common.json)
