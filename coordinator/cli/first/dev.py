"""`atoll dev`: coordinator, workers and a job on this machine, for the length of one command."""

from __future__ import annotations

import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import JobFailed, UsageError
from atoll.federated import Registered
from coordinator.cli.jobs.commands import JobFile, follow
from coordinator.cli.local_fleet import COORDINATOR
from coordinator.cli.options import PlanOptions, telling
from hostos.allotted import threads_each
from hostos.command_line import AsJson, err, kept_folder, out, quoted, with_groups
from hostos.units import counted, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from atoll.job import Job
    from coordinator.cli.first.ending import EndedTogether
    from coordinator.cli.local_fleet import LocalFleet
    from coordinator.cli.processes import Processes

# Nothing leaves the machine that is not its user's: no floor need hold.
FLOORS = ("--min-batch", "1", "--min-samples", "1", "--min-steps", "1", "--min-clients", "1")
EVERYTHING = ("--accept", "any", "--allow-statistics", "1000000000")


def register(app: typer.Typer) -> None:
    """Add `atoll dev`."""
    app.command(epilog="Example: atoll dev my-job/job.py --workers 2 --output model.safetensors")(dev)


@with_groups
def dev(
    jobfile: JobFile,
    workers: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Worker processes.")] = 2,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory that plans assume for a worker's stage, such as 10MiB, to try a model that fits "
            "on no single worker; default: the free memory.",
        ),
    ] = "",
    device: Annotated[
        str, typer.Option(metavar="D", help="Device of each worker: cpu, auto or cuda.")
    ] = "cpu",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Export the weights to this file at the end."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep logs and state in this folder; default: they are deleted."),
    ] = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page/--no-page", help="Also serve the web page, if the extra `dashboard` is installed."
        ),
    ] = True,
    stay: Annotated[
        bool | None,
        typer.Option(
            "--stay/--end",
            help="Keep running after the job's end until Ctrl+C; default: if there is a terminal and a page.",
        ),
    ] = None,
    *,
    options: PlanOptions,
    json: AsJson = False,
) -> None:
    """Train a job with its own coordinator and workers on this machine; all of them end with this command.

    The same job file trains on a fleet with `atoll submit`. A federated job needs data for its workers: give
    `Registered(stand_in=...)` in the job file.
    """
    from coordinator.cli.first.ending import EndedTogether
    from coordinator.cli.first.page import has_page, shown_page
    from coordinator.cli.processes import ended_by_signals
    from coordinator.client.export import check_target

    if output is not None:
        check_target(output)
    job = options.load(jobfile)
    _check(job, workers)
    join = _join_options(job, workers, device, memory)
    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        folder = _folder(keep, stack)
        together = stack.enter_context(EndedTogether())
        fleet = stack.enter_context(_fleet(together, job, workers, join, folder))
        stack.enter_context(_last_words(keep))
        _tell_where(fleet, json)
        shown = page and has_page() and stack.enter_context(shown_page(together, fleet.folder, json))
        _train(fleet, job, jobfile, options, json)
        if output is not None:
            found = fleet.client.export(fleet.client.status().jobs[-1].job, output)
            err.print(f"{found.path}: {found.tensors} tensors, after step {found.step}")
        if stay if stay is not None else shown and out.is_terminal:
            err.print("the job has ended; Ctrl+C ends coordinator and workers")
            threading.Event().wait()


@contextmanager
def _last_words(keep: Path | None) -> Iterator[None]:
    """Print what becomes of logs and processes before they end with the command."""
    try:
        yield
    except JobFailed:
        if keep is None:
            err.print("logs and state end with this command; `--keep DIR` keeps them")
        raise
    except KeyboardInterrupt:
        err.print("ending coordinator and workers; nothing is left running")
        raise


def _check(job: Job, workers: int) -> None:
    """UsageError for a federated job that cannot be tried here."""
    if job.federated is None:
        return
    if not isinstance(job.data, Registered) or job.data.stand_in is None:
        raise UsageError(
            f"{job.name} is federated, its data are elsewhere; give Registered(..., stand_in=...) data for "
            "each worker here, or `atoll simulate` it with data of this machine"
        )
    if workers < (least := max(job.federated.min_clients, job.federated.clients)):
        raise UsageError(f"{job.name} needs {least} clients a round; give --workers {least}")


def _join_options(job: Job, workers: int, device: str, memory: str) -> list[str]:
    threads = threads_each(workers)
    found = ["--threads", str(threads), "--device", device]
    found += ["--stage-memory", str(parse_size(memory))] if memory else []
    return found + list(FLOORS if job.federated is not None else ())


def _folder(keep: Path | None, stack: ExitStack) -> Path:
    if keep is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-dev-")))
    return kept_folder(keep)


def _fleet(together: EndedTogether, job: Job, workers: int, join: Sequence[str], folder: Path) -> LocalFleet:
    from coordinator.cli.local_fleet import LocalFleet

    def before(processes: Processes, states: Sequence[Path]) -> None:
        if isinstance(job.data, Registered) and job.data.stand_in is not None:
            _register(job.data, processes, states)

    return LocalFleet(
        workers, join, keep=folder, before=before, start=together.start, in_order=False, awaited=False
    )


def _register(data: Registered, processes: Processes, states: Sequence[Path]) -> None:
    """Have each worker hold what stands in for an owner's data."""
    import torch
    from safetensors.torch import save_file

    assert data.stand_in is not None  # noqa: S101 - the caller looked
    for owner, state in enumerate(states):
        arrays = data.stand_in(owner, len(states))
        path = processes.folder / f"{data.name}-{owner}.safetensors"
        save_file({name: torch.as_tensor(value).contiguous() for name, value in arrays.items()}, path)
        add = ["-m", "worker.cli", "data", "add", data.name, str(path), *EVERYTHING]
        processes.run("data-add", "", [*add, "--replace", "--state-dir", str(state)])


def _tell_where(fleet: LocalFleet, json: bool) -> None:
    if json:
        return
    workers = counted(len(fleet.names), "worker")
    out.print(f"coordinator {fleet.client.endpoint.address}, {workers} on this machine")
    out.print(f"logs and state: {fleet.folder}; in another terminal:")
    out.print(f"  atoll status --state-dir {quoted(fleet.folder / COORDINATOR)}")


def _train(fleet: LocalFleet, job: Job, jobfile: Path, options: PlanOptions, json: bool) -> None:
    """Capture the job while the workers join, submit it, and show it until it ends."""
    from coordinator.client.job_file import blaming
    from coordinator.client.prepare import prepare

    with telling(json) as tell:
        with blaming(jobfile, options.trace):
            prepared = prepare(
                job,
                partitioner=options.partitioner,
                schedule=options.schedule,
                standbys=options.most_standbys,
                tell=tell,
            )
        tell("waiting for the workers")
        fleet.joined()
        reply = fleet.client.submit(prepared)
    if not json:
        out.print(f"{reply.job} submitted")
    follow(fleet.client, reply.job, json, goes_on=False)
