"""Every worker the coordinator knows since its start: membership, facts, figures; and the fleet
that a plan may use. Pure: time comes in as an argument."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from atoll.messages.from_worker import MAX_MEMORY_BYTES, MIN_MEMORY_BYTES
from atoll.plan import LinkPrediction
from atoll.stage_memory import BESIDE, HEAP_SHARE
from coordinator.config import Liveness, Probing, Relaying
from coordinator.membership import member as members
from coordinator.membership.deadlines import Deadlines
from coordinator.membership.guests import slower, within_limits
from coordinator.membership.known_weights import KnownWeights
from coordinator.membership.links.guesses import guesses
from coordinator.membership.links.probing import LinkProbing
from coordinator.membership.links.relayed import Joined
from coordinator.membership.links.table import MIN_GOODPUT_BYTES, judge_step, measured_fleet
from coordinator.membership.loss_rate import Losses
from coordinator.membership.member import Member, Phase
from coordinator.membership.memory_learnt import LearntMemory
from coordinator.membership.op_probing import OpProbing
from coordinator.messages.events import (
    UNLIMITED,
    CopyHeld,
    Goodput,
    Guest,
    Heartbeat,
    Introduction,
    StepReady,
)
from coordinator.messages.instructions import Addresses, ExpectPeer, RelayUse
from coordinator.planning.costs import message_costs
from coordinator.planning.costs.codec_costs import judge_speeds
from coordinator.planning.costs.fleet import HOPED, UNKNOWN, Device, Fleet, LinkEstimate, Mesh, Pair
from coordinator.planning.costs.op_seconds import SCALE_RANGE, refresh_scale
from coordinator.planning.search.preselect import candidates

MAX_QUOTA_PERIOD_S = 1.0  # the kernel has no longer one
MOST_CODECS = 200  # whose speeds one worker may state, in all its messages
ROUNDING_S = 1e-6  # a deadline and the member's own comparison are rounded differently


@dataclass(slots=True)
class Ratio:
    """Measured over predicted seconds, refined by committed steps."""

    value: float = 1.0
    samples: int = 0

    def refine(
        self,
        planned: float | None,
        predicted_s: float,
        measured_s: float,
        within: tuple[float, float] = SCALE_RANGE,
    ) -> None:
        """``predicted_s`` holds ``planned``, the ratio that the job's plan was made with: learning from
        it while the ratio moves would never settle. None: a plan of an earlier life."""
        if planned is None:
            return
        self.value = refresh_scale(self.value, predicted_s / planned, measured_s, self.samples, within)
        self.samples += 1


@dataclass(slots=True)
class Worker:
    """A worker; ``session`` None while it is not connected."""

    member: Member
    introduction: Introduction
    session: int | None
    number: int = 0  # in join order
    quarantined: str = ""  # why no plan uses it; a new process starts clean
    suspected: str = ""  # what is odd about it, though plans go on using it
    computing: Ratio = field(default_factory=Ratio)  # forwards, backwards, optimizer
    coding: Ratio = field(default_factory=Ratio)  # encoding and decoding
    handling: Ratio = field(default_factory=Ratio)  # what messages take around the actions
    clock_offset_s: float | None = None  # ours minus the worker's steady one
    clock_of: int | None = None  # the session in which that was heard
    memory_bytes: int = 0
    heard_job: tuple[str, int] = ("", 0)
    beat: Heartbeat | None = None  # the newest
    guest: Guest = UNLIMITED
    uploads: int = 0  # signs that bytes of its arrived
    copies: dict[str, CopyHeld] = field(default_factory=dict)  # of stages on its disk, by name
    store_bps: float = 0.0  # at which it fetched one from the store; 0: not known

    @property
    def free(self) -> bool:
        """Whether it has no work, and may be given some."""
        kept_out = self.quarantined or self.guest.paused
        return self.member.phase is Phase.POOL and not kept_out and self.session is not None

    @property
    def idle(self) -> bool:
        """Whether a new plan may use it."""
        return self.free and not self.guest.apps_only

    @property
    def reason(self) -> str:
        if self.quarantined:
            return f"quarantined: {self.quarantined}"
        reason = self.member.reason
        if self.guest.paused:
            reason = f"paused: {self.guest.paused}"
        elif self.guest.apps_only and self.free:
            reason = "takes Flower apps only"
        return f"{reason}; {self.suspected}" if self.suspected else reason

    @property
    def memory_limit_bytes(self) -> int:
        return self.guest.memory_limit_bytes or self.introduction.memory_limit_bytes


@dataclass(frozen=True, slots=True)
class Planned:
    """Figures that a job's newest plan was made with: later measurements are compared with them."""

    scales: Mapping[str, float]  # by worker
    codec_scales: Mapping[str, float]
    handling_scales: Mapping[str, float]
    drags: Mapping[Pair, float]
    usual_drag: float = 1.0  # of pairs without one of their own
    guests: Mapping[str, Guest] = field(default_factory=dict)  # limits, by worker

    def drag(self, pair: Pair) -> float | None:
        """Return what the plan counted on for a pair, None where it was not made for both ends."""
        if pair[0] == pair[1] or not all(worker in self.scales for worker in pair):
            return None
        return self.drags.get(pair, self.usual_drag)


Fingerprint = frozenset[tuple[str, int, Guest]]
NOT_PLANNED = Planned({}, {}, {}, {})


@dataclass(slots=True)
class Roster:
    """Workers in join order with what is known of their links and ops."""

    liveness: Liveness
    probing: Probing
    relaying: Relaying = field(default_factory=Relaying)
    workers: dict[str, Worker] = field(default_factory=dict)
    planned: dict[str, Planned] = field(default_factory=dict)  # by job
    links: LinkProbing = field(init=False)
    joined: Joined = field(init=False)
    ops: OpProbing = field(init=False)
    memory: LearntMemory = field(default_factory=LearntMemory)
    losses: Losses = field(default_factory=Losses)
    weights: KnownWeights = field(default_factory=KnownWeights)
    _idle: list[tuple[int, str]] = field(default_factory=list)  # with their numbers, in join order
    _idle_holders: dict[str, set[str]] = field(default_factory=dict)  # by data set
    _apps_only: set[str] = field(default_factory=set)  # free, and for Flower apps only
    _fingerprint: Fingerprint | None = None  # None: computed anew when asked for
    _watched: Deadlines = field(default_factory=Deadlines)
    _readmissions: Deadlines = field(default_factory=Deadlines)  # when quarantines end

    def label(self, worker: str) -> str:
        """Return a worker's name and id for people."""
        known = self.workers.get(worker)
        name = known.introduction.name if known is not None else ""
        return f"{name} ({worker})" if name and name != worker else worker

    def __post_init__(self) -> None:
        self.links = LinkProbing(self.probing)
        self.joined = Joined(self.relaying)
        self.ops = OpProbing(self.probing)

    def open(self, worker: str, session: int, introduction: Introduction, now_s: float) -> Member | None:
        """A session begins; returns the member as it was, None of a newcomer."""
        self.weights.gone(worker)  # it says anew what it holds
        known = self.workers.get(worker)
        if known is None or known.member.gone or introduction.incarnation != known.member.incarnation:
            self.losses.came(worker, now_s)
        if known is None:
            member = members.joined(worker, introduction.incarnation, now_s)
            number, guest = len(self.workers), introduction.guest
            self.workers[worker] = Worker(member, introduction, session, number, guest=guest)
            self.workers[worker].copies = {copy.name: copy for copy in introduction.copies}
            self._changed(worker)
            return None
        before = known.member
        if introduction.incarnation != before.incarnation:
            known.quarantined = ""
            self._readmissions.drop(worker)
        known.member, _ = members.step(before, members.Joined(introduction.incarnation), now_s, self.liveness)
        self._list_data(worker, listed=False)
        known.introduction, known.session, known.guest = introduction, session, introduction.guest
        known.copies = {copy.name: copy for copy in introduction.copies}
        self._list_data(worker, listed=known.idle)
        self._changed(worker)
        return before

    def move(self, worker: str, event: members.Event, now_s: float) -> tuple[Member, Member, str | None]:
        """Apply a membership event; returns the member before and after, and why it was refused."""
        known = self.workers[worker]
        before = known.member
        after, refused = members.step(before, event, now_s, self.liveness)
        known.member = after
        if after.gone and not before.gone:
            self.losses.went(worker, now_s)
        still = (before.phase, before.job, before.lost_s) == (after.phase, after.job, after.lost_s)
        if not still or worker not in self._watched:
            self._changed(worker)
        return before, after, refused

    def disconnected(self, worker: str) -> None:
        """The worker's session has ended."""
        self.workers[worker].session = None
        self.weights.gone(worker)
        self._changed(worker)

    def limit(self, worker: str, guest: Guest) -> float:
        """Take in the limits of a worker's owner; returns how much slower than before it is at most."""
        known = self.workers[worker]
        before, known.guest = known.guest, guest
        self._changed(worker)
        return slower(before, guest, self.links.table.best_bps(worker))

    def slowdown(self, job: str, workers: Iterable[str]) -> float:
        """Return how much slower at most one of a job's workers is than its plan counted on, by limits that
        its owner has set since; at least 1."""
        guests, best_bps = self._planned(job).guests, self.links.table.best_bps
        found = (slower(guests[w], self.workers[w].guest, best_bps(w)) for w in workers if w in guests)
        return max(found, default=1.0)

    def quarantine(self, worker: str, reason: str, until_s: float = inf) -> None:
        """Let no plan use a worker until then, or until its process starts anew."""
        self.workers[worker].quarantined = reason
        self._readmissions.drop(worker)
        if until_s < inf:
            self._readmissions.at(worker, until_s)
        self._changed(worker)

    def readmit(self, now_s: float) -> list[str]:
        """End the quarantines whose time is over; returns whose, in join order."""
        over = self.in_order(self._readmissions.take(now_s))
        for name in over:
            self.quarantine(name, "")
        return over

    def _changed(self, worker: str) -> None:
        """Keep what is derived from a worker's state."""
        known = self.workers[worker]
        if known.member.gone:
            self._watched.drop(worker)
        else:
            self._watched.at(worker, members.watched_at_s(known.member, self.liveness))
        self._fingerprint = None
        if known.free and not known.idle:
            self._apps_only.add(worker)
        else:
            self._apps_only.discard(worker)
        entry = (known.number, worker)
        at = bisect_left(self._idle, entry)
        if (at < len(self._idle) and self._idle[at] == entry) is known.idle:
            return
        self._list_data(worker, listed=known.idle)
        if known.idle:
            insort(self._idle, entry)
            self.links.survey.meet(worker, known.introduction.site or known.introduction.seen or worker)
        else:
            del self._idle[at]

    def _list_data(self, worker: str, *, listed: bool) -> None:
        for data in self.workers[worker].introduction.datasets:
            holders = self._idle_holders.setdefault(data.name, set())
            if listed:
                holders.add(worker)
            else:
                holders.discard(worker)
            if not holders:  # names are the workers' to choose
                del self._idle_holders[data.name]

    def silent(self, now_s: float) -> list[str]:
        """Return the workers, in join order, that a Tick may change: all others are as they were."""
        found = []
        for worker in self._watched.take(now_s + ROUNDING_S):
            due_s = members.watched_at_s(self.workers[worker].member, self.liveness)
            if due_s > now_s + ROUNDING_S:  # it was heard meanwhile
                self._watched.at(worker, due_s)
            else:
                found.append(worker)
        return self.in_order(found)

    def forgive(self, gap_s: float) -> None:
        """We stalled for ``gap_s``: nobody was silent in that time."""
        for worker in self.workers.values():
            if not worker.member.gone:
                worker.member = members.silence_forgiven(worker.member, gap_s)

    def idle(self) -> list[str]:
        """Workers a new plan may use, in join order."""
        return [name for _, name in self._idle]

    def free(self) -> list[str]:
        """Return the workers that a run of an app may use, in join order."""
        return self.in_order([*self.idle(), *self._apps_only]) if self._apps_only else self.idle()

    def idle_holders(self, data: str) -> list[str]:
        """Return the idle workers that hold a data set, in join order."""
        return self.in_order(self._idle_holders.get(data, ()))

    def is_idle(self, worker: str) -> bool:
        """Return whether a new plan may use this worker."""
        known = self.workers.get(worker)
        return known is not None and known.idle

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    def beat_of(self, worker: str, job: str) -> Heartbeat | None:
        """Return a worker's newest heartbeat, None where it is about another job, or none."""
        beat = self.workers[worker].beat if worker in self.workers else None
        return beat if beat is not None and beat.job == job else None

    def addresses(self, worker: str, caller: str) -> Addresses:
        """Return the addresses of ``worker`` that ``caller`` may be asked to dial; none: nowhere."""
        them, us = self.workers[worker].introduction, self.workers[caller].introduction
        return them.addresses + (them.nearby if them.seen == us.seen else ())

    def connectable(self, one: str, other: str) -> bool:
        """Return whether two workers can be joined: one may dial the other, or there is a relay."""
        return self.relaying.used or self._dialable(one, other)

    def _dialable(self, one: str, other: str) -> bool:
        return bool(self.addresses(one, other) or self.addresses(other, one))

    def relay_use(self, worker: str, peer: str) -> RelayUse | None:
        """Return what ``worker`` may do at the relays to meet ``peer``, None without relays."""
        return self.joined.use(worker, peer, dialable=self._dialable(worker, peer))

    def way(self, worker: str, peer: str) -> ExpectPeer:
        """Return ``worker``'s way to ``peer``: it dials where it can."""
        addresses = self.addresses(peer, worker)
        return ExpectPeer(peer, addresses, bool(addresses), self.relay_use(worker, peer))

    def ways(self, caller: str, other: str) -> tuple[ExpectPeer, ExpectPeer]:
        """Return the ways of two to each other, of which ``caller`` dials where it can, else the other."""
        mine = self.way(caller, other)
        return mine, replace(self.way(other, caller), dial=not mine.dial)

    def fingerprint(self) -> Fingerprint:
        """Changes whenever the set of usable workers, or a limit of theirs, does."""
        if self._fingerprint is None:
            known = ((name, self.workers[name]) for name in self.idle())
            self._fingerprint = frozenset((name, w.member.incarnation, w.guest) for name, w in known)
        return self._fingerprint

    def fleet(
        self, workers: list[str], precision: str, unknown: LinkEstimate = UNKNOWN, *, job: str = ""
    ) -> Fleet:
        """The planner's view of ``workers`` with the newest figures; ``unknown``: of pairs not measured yet;
        ``job``: whose stages' memory was learnt.

        FLOPs of known ops turn what was timed into a rate for those that could not be.
        """
        devices = [self._device(worker, precision, job) for worker in workers]
        sites = {worker: self.workers[worker].introduction.site for worker in workers}
        guessed = None
        if len(workers) > self.probing.all_pairs_up_to:
            guessed = guesses(workers, self.links.survey.place_of, self.links.table, unknown)
        relays = self.joined.lines(workers, self.links.solo_bps)
        uplinks = self.links.uplinks(sites)
        fleet = measured_fleet(devices, self.links.table, uplinks, unknown, guessed, relays)
        return within_limits(fleet, {worker: self.workers[worker].guest for worker in workers})

    def hoped(self, workers: Iterable[str]) -> LinkEstimate:
        """Return what links of newcomers to these are taken for while they train, and no link is probed: the
        best link between them. The default would never let the machines of a local network in."""
        own, table = list(workers), self.links.table
        found = [link for a in own for b in own if a != b and (link := table.get(a, b)) is not None]
        return max(found, key=lambda link: link.bandwidth_bps, default=HOPED)

    def in_order(self, workers: Iterable[str]) -> list[str]:
        """Return these workers in join order."""
        return sorted(workers, key=lambda worker: self.workers[worker].number)

    def plannable(self, workers: list[str], precision: str) -> list[str]:
        """Return at most ``planned_workers`` of these: the best of those whose links are known go first."""
        known, most = self.links.survey, self.probing.planned_workers
        if len(workers) <= most:
            return workers
        pending = {worker for worker in workers if known.pending((worker,))}
        chosen = self._best([worker for worker in workers if worker not in pending], most, precision)
        rest = [worker for worker in workers if worker in pending]
        return self.in_order([*chosen, *self._best(rest, most - len(chosen), precision)])

    def _best(self, workers: list[str], most: int, precision: str) -> list[str]:
        devices = [self._device(worker, precision) for worker in workers]
        shown = {worker: self.links.table.best_bps(worker) for worker in workers}
        return candidates(devices, most, shown, self.links.survey.place_of)

    def fleet_for(self, job: str, workers: list[str], precision: str) -> Fleet:
        """The same for a plan that will run; what it takes is compared with these figures."""
        self.planned[job] = Planned(
            {worker: self.workers[worker].computing.value for worker in workers},
            {worker: self.workers[worker].coding.value for worker in workers},
            {worker: self.workers[worker].handling.value for worker in workers},
            self.links.table.drags(),
            self.links.table.usual_drag(),
            {worker: self.workers[worker].guest for worker in workers},
        )
        return self.fleet(workers, precision, job=job)

    def _device(self, worker: str, precision: str, job: str = "") -> Device:
        known = self.workers[worker]
        timings = self.ops.timings.get((worker, precision), {})
        rate = flops_of(timings, self.ops.flops)
        return Device(
            worker=worker,
            memory_limit_bytes=known.memory_limit_bytes,
            name=known.introduction.name,
            site=known.introduction.site,
            gflops={"": rate} if rate > 0 else {},
            timings=dict(timings),
            scale=known.computing.value / known.guest.compute_share,
            codec_scale=known.coding.value,
            cores=known.introduction.cores,
            quota_period_s=known.introduction.quota_period_s,
            handling_scale=known.handling.value,
            coordinator=self.ops.round_trip(worker),
            codec_speeds=dict(known.introduction.codec_speeds),
            device_class=known.introduction.device_class,
            memory_scale=self.memory_factor(job, worker),
            heap_share=0.0 if known.introduction.memory_in_figures else HEAP_SHARE,
            beside=() if known.introduction.memory_in_figures else BESIDE,
            mesh=_mesh_of(known.introduction),
        )

    def gflops(self, worker: str, precision: str) -> float:
        """Return what a worker computes in a second, by what it has timed; 0 where it has not."""
        return flops_of(self.ops.timings.get((worker, precision), {}), self.ops.flops)

    def memory_factor(self, job: str, worker: str) -> float:
        """Return by how much more than the model says a job's stages are to count on a worker."""
        known = self.workers[worker].introduction
        return 1.0 if known.memory_in_figures else self.memory.factor(job, known.device_class)

    def codecs_timed(self, worker: str, speeds: Mapping[str, tuple[float, float]]) -> str | None:
        """Newer codec speeds of a worker, for plans to come; returns why they cannot be true."""
        if (wrong := judge_speeds(speeds)) is not None:
            return wrong
        known = self.workers[worker]
        merged = {**known.introduction.codec_speeds, **speeds}
        if len(merged) > MOST_CODECS:
            return f"speeds of {len(merged)} codecs; at most {MOST_CODECS} are possible"
        known.introduction = replace(known.introduction, codec_speeds=merged)
        return None

    def computed(self, job: str, worker: str, predicted_s: float, measured_s: float) -> None:
        """A committed step's compute time refines the worker's scale."""
        known, plan = self.workers[worker], self._planned(job)
        # What was predicted for another share takes as much longer as the share is smaller now.
        share = plan.guests.get(worker, known.guest).compute_share / known.guest.compute_share
        known.computing.refine(plan.scales.get(worker), predicted_s * share, measured_s)

    def coded(self, job: str, worker: str, predicted_s: float, measured_s: float) -> None:
        """The same of a step's encoding and decoding."""
        planned = self._planned(job).codec_scales.get(worker)
        self.workers[worker].coding.refine(planned, predicted_s, measured_s)

    def handled(self, job: str, worker: str, predicted_s: float, measured_s: float) -> None:
        """The same of what a step took besides computing, waiting and codecs."""
        planned = self._planned(job).handling_scales.get(worker)
        self.workers[worker].handling.refine(planned, predicted_s, measured_s, message_costs.SCALE_RANGE)

    def _planned(self, job: str) -> Planned:
        return self.planned.get(job, NOT_PLANNED)

    def transferred(self, job: str, link: LinkPrediction, carried: Goodput) -> None:
        """A committed step's transfers refine a link's drag; ``link`` is what was predicted."""
        pair = (link.source, link.target)
        planned = self._planned(job).drag(pair)
        if planned is None or carried.n_bytes < MIN_GOODPUT_BYTES:
            return
        # Reports are cut by the clock, steps by their commit: not always the same messages.
        predicted_s = link.under_way_s * carried.n_bytes / max(link.bytes_per_step, 1)
        self.links.table.dragged(pair, planned, predicted_s, carried.busy_s)

    def judge(self, worker: str, report: StepReady, elapsed_s: float | None) -> str | None:
        """Take in what a stage says of its step; returns why its figures cannot be true."""
        seconds = {
            "forward": report.forward_s,
            "backward": report.backward_s,
            "handling": report.handling_s,
        }
        for what, value in seconds.items():
            if not isfinite(value) or value < 0:
                return f"{worker} reports {value:.3g} s of {what} work"
        if elapsed_s is not None:
            # What a quota lends for short work counts as what that would take by the quota.
            elapsed_s += self.workers[worker].introduction.quota_period_s
            wrong = judge_step(worker, report.forward_s + report.backward_s, elapsed_s)
            if wrong is not None:
                return wrong
        if report.finite and not all(isfinite(n) and n >= 0 for n in report.square_norms):
            return f"{worker} calls its gradients finite, but reports a squared norm that cannot be"
        if report.weights and len(report.weights) != len(report.losses):
            return f"{worker} reports {len(report.losses)} losses with {len(report.weights)} weights"
        if not all(isfinite(weight) and weight >= 0 for weight in report.weights):
            return f"{worker} reports a weight of a loss that is not a count"
        table = self.links.table
        for link in report.links:
            if link.peer in self.workers:
                # Shrunk messages are over before a fast link shows its rate: they tell latency only.
                telling = link.n_bytes if 2 * link.n_bytes > link.dense_bytes else 0
                wrong = table.carried(worker, link.peer, telling, link.busy_s, link.rtt_s, link.quickest_bps)
                if wrong is not None:
                    return wrong
        return None

    def heard(self, worker: str, worker_time_s: float, now_s: float) -> None:
        """A heartbeat's clock: the least delayed one is nearest to the true offset."""
        if not isfinite(worker_time_s):
            return
        known = self.workers[worker]
        offset_s = now_s - worker_time_s - self.ops.round_trip(worker).latency_s
        # Since an earlier session it may have slept or been started anew.
        before_s = known.clock_offset_s if known.clock_of == known.session else None
        if before_s is None or offset_s < before_s:
            known.clock_offset_s, known.clock_of = offset_s, known.session


def refusal(introduction: Introduction) -> str | None:
    """Return why these facts cannot be true or usable, None when they can."""
    limit, there = introduction.memory_limit_bytes, introduction.memory_bytes
    if not MIN_MEMORY_BYTES <= limit <= MAX_MEMORY_BYTES or not MIN_MEMORY_BYTES <= there <= MAX_MEMORY_BYTES:
        return (
            f"memory of {there} bytes with a limit of {limit}; possible are {MIN_MEMORY_BYTES} to "
            f"{MAX_MEMORY_BYTES}"
        )
    if not 1 <= introduction.threads <= 65536:
        return f"{introduction.threads} threads; possible are 1 to 65536"
    if not 0.0 <= introduction.cores <= 65536:
        return f"{introduction.cores} CPU cores; possible are 0 to 65536"
    if not 0.0 <= introduction.quota_period_s <= MAX_QUOTA_PERIOD_S:
        return f"a CPU quota of {introduction.quota_period_s} s; possible are 0 to {MAX_QUOTA_PERIOD_S:g} s"
    return judge_speeds(introduction.codec_speeds)


def _mesh_of(introduction: Introduction) -> Mesh | None:
    """The processes of a worker, where there are several and their collectives were probed."""
    latency_s, bytes_per_s = introduction.joint_latency_s, introduction.joint_bytes_per_s
    if introduction.processes < 2 or not (isfinite(bytes_per_s) and bytes_per_s > 0.0):
        return None
    return Mesh(introduction.processes, latency_s, bytes_per_s)


def flops_of(timings: Mapping[str, tuple[float, float]], ops: Mapping[str, int]) -> float:
    """GFLOP/s of the timed ops together; 0 when nothing was timed."""
    known = [s for s in timings if s in ops]
    seconds, flops = sum(timings[s][0] for s in known), sum(ops[s] for s in known)
    return flops / seconds / 1e9 if seconds > 0 else 0.0
