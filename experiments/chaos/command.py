"""`atoll chaos`: disturb a fleet that trains, and judge promise by promise what held."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import UsageError
from coordinator.cli.options import Common, JobOptions, telling
from experiments.chaos.kinds import COORDINATOR, OF_PROCESSES, STARTED_BY_NOBODY, Draw, Kind
from hostos.command_line import kept_folder, out, print_json, with_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from experiments.chaos.fleet import Fleet
    from experiments.chaos.run import Network

DEMO_JOB = Path(__file__).parents[1] / "demo" / "job.py"
DEMO_SETTINGS = ("steps=1500", "eval_batches=0", "checkpoint_every=100")
EXAMPLES = (
    "Examples: atoll chaos --minutes 2; atoll chaos JOB.py --seed 7 --every 10 --kinds kill,freeze --json; "
    "a fleet of yours on this machine: atoll chaos JOB.py --attach /srv/atoll --attach /srv/w1 --not-mine"
)
JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="[JOBFILE]", help="Job file, as for `atoll submit`; default: the demo's model."),
]


@dataclass(frozen=True)
class When:
    """Options of what is done, and when."""

    seed: Annotated[int, typer.Option(min=0, help="Seed of the disturbances.")] = 0
    minutes: Annotated[
        float,
        typer.Option(min=0.05, help="Minutes of disturbances; after that the current job trains to its end."),
    ] = 5.0
    every: Annotated[
        float, typer.Option(min=0.5, metavar="SECONDS", help="Mean time between two disturbances.")
    ] = 20.0
    rate: Annotated[
        float, typer.Option(min=0.0, metavar="N", help="Disturbances per minute, instead of --every.")
    ] = 0.0
    kinds: Annotated[
        str,
        typer.Option(
            metavar="KIND,...",
            help="Some of: "
            + ", ".join(Kind)
            + ". Default: those of processes (with --attach: those after which no process must be "
            "restarted); cut and slow need commands that you give.",
        ),
    ] = ""

    @property
    def every_s(self) -> float:
        """Mean time between two disturbances."""
        return 60.0 / self.rate if self.rate else self.every

    def kinds_of(self, *, attached: bool) -> tuple[Kind, ...]:
        """The kinds that were named, else those that fit. UsageError for one that is unknown."""
        if not self.kinds:
            return STARTED_BY_NOBODY if attached else OF_PROCESSES
        try:
            return tuple(Kind(name.strip()) for name in self.kinds.split(","))
        except ValueError as error:
            raise UsageError(f"--kinds {self.kinds}: {error}; give some of {', '.join(Kind)}") from None


@dataclass(frozen=True)
class Where:
    """Options of the fleet that this command starts, or is attached to."""

    stages: Annotated[int, typer.Option(min=1, max=64, help="Number of stages of the job.")] = 3
    backups: Annotated[int, typer.Option(min=0, max=64, help="Number of additional workers.")] = 3
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep logs and state in this folder; default: they are deleted."),
    ] = None
    hosts: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Hosts, on each of which --start-by starts a worker."),
    ] = ""
    start_by: Annotated[
        str,
        typer.Option(
            metavar="CMD",
            help="Command prefix to start a worker, with {host} for its host, such as 'python -m lab exec "
            "{host} --'. The processes must run on this machine.",
        ),
    ] = ""
    address: Annotated[str, typer.Option(metavar="HOST", help="Address of this machine for the hosts.")] = (
        "127.0.0.1"
    )
    attach: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="State folder of a coordinator or worker that runs on this machine: disturb these "
            "instead of starting a fleet; may be repeated.",
        ),
    ] = None
    not_mine: Annotated[
        bool,
        typer.Option(
            "--not-mine", help="Disturb the processes of --attach even though other people may rely on them."
        ),
    ] = False

    def folder(self) -> Path | None:
        """The folder of --keep, made. StorageError when it cannot be."""
        return None if self.keep is None else kept_folder(self.keep)


@dataclass(frozen=True)
class Ways:
    """Options that disturb what lies between two hosts."""

    cut_by: Annotated[
        str, typer.Option(metavar="CMD", help="Command that cuts the hosts {one} and {other} off.")
    ] = ""
    slow_by: Annotated[
        str, typer.Option(metavar="CMD", help="Command that slows the link between {one} and {other}.")
    ] = ""
    heal_by: Annotated[str, typer.Option(metavar="CMD", help="Command that undoes both.")] = ""

    def network(self) -> Network:
        """The same for a run."""
        from experiments.chaos.run import Network

        return Network(self.cut_by, self.slow_by, self.heal_by)


def register(app: typer.Typer) -> None:
    """Add `atoll chaos`."""
    app.command(epilog=EXAMPLES)(chaos)


@with_groups
def chaos(
    jobfile: JobFile = None,
    *,
    when: When,
    where: Where,
    ways: Ways,
    options: JobOptions,
    common: Common,
) -> int:
    """Disturb a fleet while it trains (kill, freeze, hang, restart, fill disks), then report which promises
    held.

    It starts its own fleet on this machine, trains the job once undisturbed and then repeatedly while
    processes are disturbed, and compares the results. Exit code 1 if a promise is broken. Links between two
    hosts are disturbed only by commands that you give: see --cut-by and --slow-by.
    """
    from coordinator.cli.processes import ended_by_signals
    from coordinator.client.prepare import prepare
    from experiments.chaos import report
    from experiments.chaos.promises import judged
    from experiments.chaos.run import Chaos, cut_in, possible

    network = ways.network()
    kinds = possible(network, when.kinds_of(attached=bool(where.attach)))
    given = options if jobfile else replace(options, sets=[*DEMO_SETTINGS, *(options.sets or [])])
    job = given.load(jobfile or DEMO_JOB)
    with ended_by_signals(), ExitStack() as stack:
        tell = stack.enter_context(telling(common.json))
        fleet = stack.enter_context(_fleet(where, common, tell))
        prepared = prepare(job, tell=tell)
        if options.partitioner == "op_fence":
            prepared = cut_in(prepared, where.stages)
        run = Chaos(fleet, prepared, network, timed(tell))
        seen = run.run(Draw(when.seed, when.every_s, kinds, tuple(fleet.members)), 60.0 * when.minutes)
    promises = judged(seen)
    if common.json:
        print_json(report.values(when.seed, seen, promises))
    else:
        out.print(report.view(promises))
        out.print(report.deeds_line(seen), soft_wrap=True)
    return 0 if report.held(promises) else 1


@contextmanager
def _fleet(where: Where, common: Common, tell: Callable[[str], None]) -> Iterator[Fleet]:
    """The fleet that is given, or one of our own for as long."""
    from coordinator.cli.local_fleet import LocalFleet
    from coordinator.cli.processes import start_here
    from coordinator.client.client import connect
    from experiments.chaos.fleet import attached, given, own, started_by

    if where.attach:
        members = given(where.attach, not_mine=where.not_mine)
        serving = members.get(COORDINATOR)
        named = common.coordinator or common.state_dir
        with common.client() if serving is None or named else connect(state_dir=serving.folder) as client:
            yield attached(client, members)
        return
    hosts = tuple(filter(None, where.hosts.split(",")))
    if bool(hosts) != bool(where.start_by):
        raise UsageError("--hosts and --start-by go together: where each worker runs, and how one is started")
    count = len(hosts) or where.stages + where.backups
    tell(f"starting a coordinator and {count} workers")
    start = started_by(where.start_by) if hosts else start_here
    options = ["--threads", "1", "--log-json"]
    with LocalFleet(
        count,
        options,
        keep=where.folder(),
        hosts=hosts,
        start=start,
        address=where.address,
        in_order=False,
    ) as local:
        fleet = own(local)
        try:
            yield fleet
        finally:
            fleet.end()


def timed(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Show with each line how many seconds have passed."""
    begun_s = time.monotonic()
    return lambda words: tell(f"{time.monotonic() - begun_s:6.1f} s  {words}")
