"""From a picked job to a planning request: which figures are missing, asking for them, and when
they are all there. Pure; its requests go out through ``emit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from atoll.job import JobSpec
from coordinator.config import Probing
from coordinator.membership.link_probing import LinkRequest
from coordinator.membership.op_probing import RTT_SAMPLES, OpsRequest
from coordinator.membership.roster import Roster
from coordinator.messages import instructions as do
from coordinator.messages.events import OpsProbed


@dataclass(slots=True)
class _Inquiry:
    spec: JobSpec
    ops: Mapping[str, int]


@dataclass(slots=True)
class Preparer:
    """Figures and plans in the making. ``flops`` knows every op that any job showed."""

    roster: Roster
    config: Probing
    emit: Callable[[do.Instruction], None]
    flops: dict[str, int] = field(default_factory=dict)
    ops_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _reading: set[str] = field(default_factory=set)
    _attempts: dict[str, int] = field(default_factory=dict)  # job -> the one being planned
    _planned_on: dict[str, frozenset[tuple[str, int, bool]]] = field(default_factory=dict)
    _inquiries: dict[str, _Inquiry] = field(default_factory=dict)
    _requests: int = 0

    # ------------------------------------------------------------ jobs' ops

    def know(self, job: str, ops: Mapping[str, int]) -> None:
        """The distinct ops of a job: signature -> forward FLOPs."""
        self.ops_of[job] = tuple(ops)
        self.flops.update(ops)
        self._reading.discard(job)

    def forget(self, worker: str) -> None:
        """A worker is gone: nothing more will come from it."""
        self.roster.links.forget(worker)
        self.roster.ops.forget(worker)

    # ------------------------------------------------------------ when to plan again

    def changed(self, job: str) -> bool:
        """Whether the fleet is another one than the one that did not suffice."""
        return self._planned_on.get(job) != self.roster.fingerprint()

    def wait_for_change(self, job: str) -> None:
        """This fleet does not suffice; plan again when it has changed."""
        self._planned_on[job] = self.roster.fingerprint()

    def anything_changed(self) -> None:
        """Whatever kept jobs waiting may be over."""
        self._planned_on.clear()

    # ------------------------------------------------------------ measuring

    def greet(self, worker: str, now_s: float) -> None:
        """Learn the round trip to a new worker from requests that it answers at once."""
        if len(self.roster.ops.rtt_s.get(worker, ())) < RTT_SAMPLES:
            self._ask_ops(worker, "", "fp32", (), now_s)

    def ops_answered(self, worker: str, message: OpsProbed, now_s: float) -> OpsRequest | None:
        """Take in timings; returns the request, None when it is no longer awaited."""
        ops = self.roster.ops
        request = ops.requests.get(message.request)
        if request is None or request.worker != worker:
            return None
        del ops.requests[message.request]
        if not request.signatures:
            if not message.error:
                ops.rtt_s.setdefault(worker, []).append(max(0.0, now_s - request.sent_s))
                self.greet(worker, now_s)
            return None
        asked = set(request.signatures)
        known = ops.timings.setdefault((worker, request.precision), {})
        for signature, (forward_s, backward_s) in message.timings.items():
            if signature in asked and isfinite(forward_s) and isfinite(backward_s):
                known[signature] = (forward_s, backward_s)
        # What it could not time is estimated from FLOPs and bytes.
        ops.give_up(request)
        return request

    def expire(self, now_s: float) -> bool:
        """Give up on late answers; whether there were any."""
        late_links = self.roster.links.expire(now_s)
        late_ops = self.roster.ops.expire(now_s)
        return bool(late_links or late_ops)

    def measure_links(self, *, fresh: bool, now_s: float) -> bool:
        """Start the measurements that the idle fleet needs next; True when none is needed."""
        links = self.roster.links
        idle = self.roster.idle()
        if any(self.roster.ops.asked(worker) for worker in idle):
            return False  # timing and sending would slow each other
        sites = {worker: self.roster.workers[worker].introduction.site for worker in idle}
        for measurement in links.due(idle, self.roster.connectable, now_s, fresh, sites):
            first = self._requests + 1
            self._requests += len(measurement.pairs)
            for request in links.begin(measurement, first, now_s):
                self._ask_link(request)
        return not links.busy

    def _ask_link(self, request: LinkRequest) -> None:
        """Workers refuse strangers, so the other end is told first; who can be reached is dialled."""
        source, target = request.source, request.target
        theirs = self.roster.addresses(target, source)
        ours = self.roster.addresses(source, target)
        expect = do.ExpectPeer(source, ours, dial=not theirs)
        most = self.config.max_bytes if request.rate else 0
        probe = do.ProbeLinkTo(request.request, target, theirs, bool(theirs), self.config.seconds, most)
        self.emit(do.SendTo(target, expect))
        self.emit(do.SendTo(source, probe))

    def measure_ops(self, job: str, precision: str, now_s: float) -> bool:
        """Have every idle worker time the ops it has not timed yet; True when none is awaited."""
        done = True
        for worker in self.roster.idle():
            if self.roster.ops.asked(worker):
                done = False
                continue
            missing = self.roster.ops.missing(worker, precision, self.ops_of[job])
            if missing:
                done = False
                self._ask_ops(worker, job, precision, missing[: self.config.ops_per_request], now_s)
        return done

    def _ask_ops(
        self, worker: str, job: str, precision: str, signatures: tuple[str, ...], now_s: float
    ) -> None:
        self._requests += 1
        within_s = self.config.ops_answer_within_s if signatures else self.config.answer_within_s
        self.roster.ops.requests[self._requests] = OpsRequest(
            worker, job, precision, signatures, now_s, now_s + within_s
        )
        self.emit(do.SendTo(worker, do.ProbeOpsOf(self._requests, job, signatures, precision)))

    # ------------------------------------------------------------ planning

    def profile(self, job: str, spec: JobSpec, training: bool, now_s: float) -> bool:
        """Ask for whatever is missing; True when a plan can be made.

        ``training``: another job runs and must not be disturbed, so links are taken as known.
        """
        if job not in self.ops_of:
            if job not in self._reading:
                self._reading.add(job)
                self.emit(do.ReadJob(job, spec))
            return False
        links_known = training or self.measure_links(fresh=True, now_s=now_s)
        return links_known and self.measure_ops(job, spec.training.precision.value, now_s)

    def plan(self, job: str, version: int, spec: JobSpec) -> None:
        """Ask the shell for a plan on the idle fleet."""
        attempt = self._attempts.get(job, 0) + 1
        self._attempts[job] = attempt
        precision = spec.training.precision.value
        fleet = self.roster.fleet_for(job, self.roster.idle(), precision, self.flops)
        self.emit(do.MakePlan(job, attempt, version, spec, fleet))

    def awaited(self, job: str, attempt: int) -> bool:
        """Whether this is the planning attempt that counts."""
        return self._attempts.get(job) == attempt

    def inquire(self, inquiry: str, spec: JobSpec, ops: Mapping[str, int]) -> None:
        """Somebody asks for a plan without wanting it run."""
        self.know(inquiry, ops)
        self._inquiries[inquiry] = _Inquiry(spec, ops)

    def answer_inquiries(self, training: bool, now_s: float) -> None:
        """Plan for those whose figures are there; while a job runs, with the figures at hand."""
        for name, inquiry in list(self._inquiries.items()):
            if not training and not self.profile(name, inquiry.spec, training, now_s):
                continue
            del self._inquiries[name]
            self.ops_of.pop(name, None)
            workers = [w for w, x in self.roster.workers.items() if not x.member.gone and not x.aside]
            fleet = self.roster.fleet(workers, inquiry.spec.training.precision.value, self.flops)
            self.emit(do.MakePlan(name, 0, 0, inquiry.spec, fleet))
