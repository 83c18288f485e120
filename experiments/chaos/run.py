"""A run of chaos: a job trains undisturbed, then again and again while its fleet is disturbed."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, ConnectionFailed, JobFailed, StorageError, UsageError
from coordinator.client.client import FINISHED
from coordinator.planning.baselines import GIVEN_CUT
from experiments.chaos.fleet import Facts, Fleet, filled
from experiments.chaos.kinds import BETWEEN_HOSTS, COORDINATOR, Deed, Draw, Kind, Wish
from experiments.chaos.members import Member, frozen, full_disk, kill, lives
from experiments.chaos.promises import Line, Seen, Trained
from protos.credentials import Identity

if TYPE_CHECKING:
    from coordinator.client.prepare import Prepared
    from protos import atoll_control_pb2 as pb

LOOK_EVERY_S = 0.05
WHOLE_WITHIN_S = 60.0  # a fleet that is not whole by then is disturbed all the same
STANDS_STILL_S = 300.0
ORPHANS_S = 6.0  # for what a killed daemon had started to be gone
AGAIN_S = 0.2  # before a log that broke off is read on
WELL = frozenset({"pool", "assigned"})
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Network:
    """Commands that disturb what lies between two hosts, with {one} and {other} for their names."""

    cut_by: str = ""
    slow_by: str = ""
    heal_by: str = ""


class Watching:
    """A job's newest state, kept by a thread."""

    def __init__(self, fleet: Fleet, job: str) -> None:
        self.job = job
        self.state, self.reason, self.step, self.step_s = "", "", 0, 0.0
        self.holders: tuple[str, ...] = ()
        self.ended = threading.Event()
        self._fleet, self._moved_s = fleet, time.monotonic()
        threading.Thread(target=self._watch, name="atoll-chaos-watch", daemon=True).start()

    @property
    def stands_still(self) -> bool:
        """Return whether no step came for so long that none will."""
        return time.monotonic() - self._moved_s > STANDS_STILL_S

    def _watch(self) -> None:
        try:
            for update in self._fleet.client.watch(self.job):
                self._take(update)
        except (AtollError, ValueError) as error:  # a ValueError: our channel is closed
            self.state, self.reason = "unknown", str(error)
        self.ended.set()

    def _take(self, update: pb.JobUpdate) -> None:
        # Where there is one replica, its stages stand in the plan itself.
        stages = [*update.plan.stages, *(stage for r in update.plan.replicas for stage in r.stages)]
        self.holders = tuple(stage.workers[0] for stage in stages) or self.holders
        if update.step != self.step:
            self._moved_s = time.monotonic()
        self.step, self.step_s = update.step, update.step_s or self.step_s
        self.state, self.reason = update.state, update.reason


class LogOf:
    """Lines of the coordinator's log, read by a thread as they come, of every process that serves."""

    def __init__(self, fleet: Fleet) -> None:
        self._client, self._found = fleet.client, dict[tuple[float, str, str], Line]()
        self._over = threading.Event()
        threading.Thread(target=self._read, name="atoll-chaos-log", daemon=True).start()

    @property
    def lines(self) -> list[Line]:
        """Lines in the order of their times."""
        return sorted(self._found.copy().values(), key=lambda line: line.at_s)

    def close(self) -> None:
        """Read no more."""
        self._over.set()

    def _read(self) -> None:
        while not self._over.wait(AGAIN_S):
            with suppress(AtollError, ValueError):  # it is away, or our own channel is closed
                for line in self._client.logs("", follow=True):
                    with suppress(ValueError):
                        fields: Mapping[str, Any] = json.loads(line.fields_json)
                        key = (line.time_s, line.event, line.fields_json)
                        self._found[key] = Line(line.time_s, line.event, fields)


@dataclass(slots=True)
class Chaos:
    """Trains one job on one fleet, and disturbs it."""

    fleet: Fleet
    prepared: Prepared
    network: Network = field(default_factory=Network)
    tell: Tell = lambda words: None
    deeds: list[Deed] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    _ids: dict[str, str] = field(default_factory=dict)

    def run(self, draw: Draw, seconds: float) -> Seen:
        """Train undisturbed, then disturbed for so long; the last job is trained to its end."""
        log, facts = LogOf(self.fleet), Facts(self.fleet.journal)
        try:
            self.tell("training undisturbed")
            watching = self.submitted()
            watching.ended.wait()
            if watching.state != FINISHED:
                raise JobFailed(f"undisturbed, {watching.job} ended {watching.state}: {watching.reason}")
            undisturbed, step_s = self._tensors(watching.job), watching.step_s
            trained: list[Trained] = []
            until_s, wish = time.monotonic() + seconds, draw.next()
            due_s = time.monotonic() + wish.after_s
            while time.monotonic() < until_s or not trained:
                watching = self.submitted()
                self.tell(f"{watching.job} trains, disturbed")
                while not watching.ended.wait(LOOK_EVERY_S) and not watching.stands_still:
                    if due_s <= time.monotonic() < until_s:
                        self.disturb(wish, watching)
                        wish = draw.next()
                        due_s = max(due_s + wish.after_s, time.monotonic())
                        with suppress(StorageError):  # a coordinator that starts holds it; later, then
                            facts.look()
                facts.look()
                trained.append(self._ended(watching, facts))
        finally:
            log.close()
        journal = self.fleet.journal is not None
        return Seen(undisturbed, step_s, trained, self.deeds, log.lines, self.left, self.died, journal)

    # ------------------------------------------------------------ jobs

    def submitted(self) -> Watching:
        """Submit the job once more."""
        return Watching(self.fleet, self.fleet.client.submit(self.prepared).job)

    def _ended(self, watching: Watching, facts: Facts) -> Trained:
        if not watching.ended.is_set():
            watching.reason = f"no step for {STANDS_STILL_S:.0f} s: {watching.reason}"
            with suppress(AtollError):
                self.fleet.client.cancel(watching.job)
        tensors = self._tensors(watching.job) if watching.state == FINISHED else {}
        steps = self.prepared.spec.training.steps
        found = facts.of(watching.job)
        return Trained(watching.job, watching.state, watching.reason, steps, found, tensors)

    def _tensors(self, job: str) -> dict[str, str]:
        """Return the hashes of a job's result; the coordinator may just have been disturbed."""
        until_s = time.monotonic() + WHOLE_WITHIN_S
        while True:
            try:
                return {t.name: t.blob for t in self.fleet.client.result(job).tensors}
            except ConnectionFailed:
                if time.monotonic() > until_s:
                    raise
                time.sleep(AGAIN_S)

    # ------------------------------------------------------------ disturbances

    def disturb(self, wish: Wish, watching: Watching) -> Deed:
        """Wait until the fleet is whole again, then do as is wished and wait until that is over."""
        self.await_whole(watching)
        member = self.fleet.members[wish.target]
        worker = self._id_of(member)
        held = worker in watching.holders and watching.state == "training"
        at_s = time.time()
        deed = Deed(wish.kind, wish.target, at_s, at_s, wish.other, worker, held)
        idle = " (a backup)" if worker and worker not in watching.holders else ""
        self.tell(f"step {watching.step}: {deed}, {wish.lasts_s:.1f} s{idle}")
        with self._doing(wish, member):
            time.sleep(wish.lasts_s)
        deed = replace(deed, over_s=time.time())
        self.deeds.append(deed)
        return deed

    @contextmanager
    def _doing(self, wish: Wish, member: Member) -> Iterator[None]:
        match wish.kind:
            case Kind.KILL | Kind.RESTART:
                self._kill(member)
                yield
                self._start_again(member.name)
            case Kind.CRASH:
                kill(member.computing())
                yield
            case Kind.FREEZE:
                with frozen(member.family()):
                    yield
            case Kind.HANG:
                with frozen(member.computing()):
                    yield
                if self.fleet.start_again is not None:
                    self._kill(member)  # it is quarantined until its process starts anew
                    self._start_again(member.name)
            case Kind.DISK:
                with full_disk(member.family()):
                    yield
            case Kind.CUT | Kind.SLOW:
                made_by = self.network.cut_by if wish.kind is Kind.CUT else self.network.slow_by
                self._between(made_by, wish)
                try:
                    yield
                finally:
                    self._between(self.network.heal_by, wish)

    def _kill(self, member: Member) -> None:
        """Kill a daemon; what it had started is to be gone soon after it."""
        process = member.process()
        if process is None:
            return
        below = [p for p in member.family() if p != process]
        kill([process])
        until_s = time.monotonic() + ORPHANS_S
        while any(map(lives, below)) and time.monotonic() < until_s:
            time.sleep(LOOK_EVERY_S)
        for orphan in filter(lives, below):
            with suppress(Exception):  # it may end at any moment
                self.left.append(f"{' '.join(orphan.cmdline())[:100]} of {member.name}")

    def _start_again(self, name: str) -> None:
        if self.fleet.start_again is not None:
            self.fleet.start_again(name)

    def _between(self, command: str, wish: Wish) -> None:
        words = filled(command, one=wish.target, other=wish.other)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(
                f"{' '.join(words)} ended with exit code {done.returncode}: {done.stderr.strip()}"
            )

    # ------------------------------------------------------------ the fleet

    def await_whole(self, watching: Watching | None = None) -> None:
        """Wait until every worker runs and may be planned with; a minute at most, or until a job ends."""
        until_s = time.monotonic() + WHOLE_WITHIN_S
        while (away := self._away()) and not (watching and watching.ended.is_set()):
            if time.monotonic() > until_s:
                self.tell(f"going on without {', '.join(away)}")
                return
            time.sleep(LOOK_EVERY_S)

    def _away(self) -> list[str]:
        """Return who does not run, or cannot be planned with; the coordinator where it does not answer.
        Who has ended by itself is started again."""
        for name in self.fleet.ended():
            self.died.append(name)
            self._start_again(name)
        try:
            workers = self.fleet.client.status().workers
        except AtollError:
            return [COORDINATOR]
        well = {w.worker for w in workers if w.state in WELL and not w.reason.startswith("quarantined")}
        members = ((name, self.fleet.members[name]) for name in self.fleet.workers)
        # In this order: to look for a lock's holder, it is tried, and whoever starts just then would fail.
        return [n for n, member in members if self._id_of(member) not in well or member.process() is None]

    def _id_of(self, member: Member) -> str:
        if member.name == COORDINATOR:
            return ""
        if member.name not in self._ids:
            identity = Identity.load(member.folder / "identity")
            self._ids[member.name] = identity.name if identity is not None else ""
        return self._ids[member.name]


def cut_in(prepared: Prepared, stages: int) -> Prepared:
    """Return the same job cut in so many stages of as many ops, on the first workers in join order."""
    positions = prepared.graphs.dag.cuttable()
    if stages > len(positions) + 1:
        raise UsageError(f"the model can be cut in {len(positions) + 1} stages at most; lower --stages")
    starts = [positions[len(positions) * at // stages] for at in range(1, stages)]
    partitioner = GIVEN_CUT + ",".join(map(str, starts))
    return replace(prepared, spec=replace(prepared.spec, partitioner=partitioner))


def possible(network: Network, kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Return ``kinds``. UsageError where one of them lacks its commands."""
    needed = {Kind.CUT: network.cut_by, Kind.SLOW: network.slow_by}
    for kind in BETWEEN_HOSTS & set(kinds):
        if not needed[kind] or not network.heal_by:
            raise UsageError(
                f"{kind} needs --{kind}-by and --heal-by: processes alone cannot disturb a network"
            )
    return kinds
