"""Measuring the fleet: which ops and links are timed when, and what the answers are worth. Pure.

Workers time the ops that jobs showed, idle ones measure the links between them; requests go out
through ``Effects``, one worker never does both at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from coordinator.config import Probing
from coordinator.membership.effects import Effects
from coordinator.membership.links.probing import LinkRequest, Measurement
from coordinator.membership.links.table import judge_timing
from coordinator.membership.op_probing import RTT_SAMPLES, OpsRequest
from coordinator.messages import instructions as do
from coordinator.messages.events import LinkProbed, OpsProbed
from protos.telemetry import Event as Name


@dataclass(slots=True)
class Measuring:
    """Requests under way to workers, numbered."""

    config: Probing
    effects: Effects
    _requests: int = 0
    _renewed_s: float = -inf
    _timed: dict[str, set[str]] = field(default_factory=dict)  # job -> workers with nothing left to time
    _among: frozenset[str] = frozenset()  # of a large fleet: between these every pair is known

    def greet(self, worker: str) -> None:
        """Learn the round trip to a new worker from requests that it answers at once."""
        if len(self.effects.roster.ops.rtt_s.get(worker, ())) < RTT_SAMPLES:
            self._ask_ops(worker, "", "fp32", ())

    def expire(self) -> None:
        """Give up on late answers."""
        roster, now_s = self.effects.roster, self.effects.now_s
        late_links, late_ops = roster.links.expire(now_s), roster.ops.expire(now_s)
        if late_links or late_ops:
            self.effects.advance = True

    def renew_tickets(self, every_s: float) -> None:
        """Give relayed pairs that work for one job new tickets, so that a broken stream can be replaced."""
        effects, roster = self.effects, self.effects.roster
        if effects.now_s - self._renewed_s < every_s:
            return
        self._renewed_s = effects.now_s
        for one, other in roster.joined.relayed():
            jobs = {roster.workers[w].member.job for w in (one, other) if w in roster.workers}
            if len(jobs) == 1 and "" not in jobs:
                for worker, peer in ((one, other), (other, one)):
                    effects.send(worker, replace(roster.way(worker, peer), dial=False))

    def moved(self, worker: str) -> None:
        """Have a worker with other addresses and its peers find each other again."""
        roster = self.effects.roster
        ends = (end for pair in roster.joined.ways.of(worker) for end in pair)
        for peer in dict.fromkeys(end for end in ends if end != worker):
            for one, other in ((peer, worker), (worker, peer)):
                self.effects.send(one, roster.way(one, other))

    # ------------------------------------------------------------ ops

    def measure_ops(
        self, job: str, precision: str, signatures: Iterable[str], workers: Iterable[str]
    ) -> bool:
        """Have idle workers time the ops that they have not timed yet; True when none is awaited."""
        ops, signatures, done = self.effects.roster.ops, tuple(signatures), True
        timed = self._timed.setdefault(job, set())
        for worker in workers:
            if ops.asked(worker):
                done = False
                continue
            if worker in timed:
                continue
            missing = ops.missing(worker, precision, signatures)
            if missing:
                done = False
                self._ask_ops(worker, job, precision, missing[: self.config.ops_per_request])
            else:
                timed.add(worker)
        return done

    def stop(self, job: str) -> None:
        """Forget how far measuring for a job is: its plan is made, or is not wanted any more."""
        self._timed.pop(job, None)
        self._among = frozenset()

    def _ask_ops(self, worker: str, job: str, precision: str, signatures: tuple[str, ...]) -> None:
        self._requests += 1
        now_s = self.effects.now_s
        within_s = self.config.ops_answer_within_s if signatures else self.config.answer_within_s
        request = OpsRequest(worker, job, precision, signatures, now_s, now_s + within_s)
        self.effects.roster.ops.begin(self._requests, request)
        self.effects.emit(do.SendTo(worker, do.ProbeOps(self._requests, job, signatures, precision)))

    def ops_probed(self, worker: str, message: OpsProbed) -> None:
        """Take in a worker's timings; impossible ones quarantine it."""
        self.effects.advance = True
        request = self._answered(worker, message)
        if request is None:
            return
        ops = self.effects.roster.ops
        for signature, (forward_s, backward_s) in message.timings.items():
            for seconds in (forward_s, backward_s):
                wrong = judge_timing(worker, f"op {signature}", seconds, ops.flops.get(signature, 0))
                if wrong is not None:
                    ops.timings.pop((worker, request.precision), None)
                    for timed in self._timed.values():
                        timed.discard(worker)
                    self.effects.quarantine(worker, wrong)
                    return
        self.effects.log(
            Name.OPS_PROBED, worker=worker, ops=len(message.timings), error=message.error, job=request.job
        )

    def _answered(self, worker: str, message: OpsProbed) -> OpsRequest | None:
        """Return the request for ops that this answers, None when there is none any more."""
        ops = self.effects.roster.ops
        request = ops.requests.get(message.request)
        if request is None or request.worker != worker:
            return None
        ops.end(message.request)
        if not request.signatures:
            if not message.error:
                ops.rtt_s.setdefault(worker, []).append(max(0.0, self.effects.now_s - request.sent_s))
                self.greet(worker)
            return None
        asked = set(request.signatures)
        known = ops.timings.setdefault((worker, request.precision), {})
        for signature, (forward_s, backward_s) in message.timings.items():
            if signature in asked and isfinite(forward_s) and isfinite(backward_s):
                known[signature] = (forward_s, backward_s)
        # What it could not time is estimated from FLOPs and bytes.
        ops.give_up(request)
        return request

    # ------------------------------------------------------------ links

    def measure_links(self, *, fresh: bool, wanted: Collection[str] = ()) -> bool:
        """Start the measurements that the idle fleet needs next; True when none is needed.

        In a large fleet those are all pairs between the idle ones of ``wanted``, then, whose end nobody
        waits for, its survey.
        """
        roster = self.effects.roster
        if not self.large:
            return self._measure_among(roster.idle(), fresh)
        among = roster.in_order(filter(roster.is_idle, wanted))
        if not self._among.issuperset(among):
            if roster.links.surveying or not self._measure_among(among, fresh):
                return False
            self._among = frozenset(among)

        def ready(worker: str) -> bool:
            return roster.is_idle(worker) and not roster.ops.asked(worker)

        self._begin(roster.links.few_due(ready, roster.connectable, self.effects.now_s))
        return True

    @property
    def large(self) -> bool:
        """Whether only some pairs of the idle fleet are measured."""
        return self.effects.roster.idle_count > self.config.all_pairs_up_to

    def _measure_among(self, workers: list[str], fresh: bool) -> bool:
        roster, now_s = self.effects.roster, self.effects.now_s
        if any(roster.ops.asked(worker) for worker in workers):
            return False  # timing and sending would slow each other
        sites = {worker: roster.workers[worker].introduction.site for worker in workers}
        self._begin(roster.links.due(workers, roster.connectable, now_s, fresh, sites))
        return not roster.links.busy

    def _begin(self, measurements: Iterable[Measurement]) -> None:
        for measurement in measurements:
            first = self._requests + 1
            self._requests += len(measurement.pairs)
            for request in self.effects.roster.links.begin(measurement, first, self.effects.now_s):
                self._ask_link(request)

    def _ask_link(self, request: LinkRequest) -> None:
        """Have one end expect the other, as workers refuse strangers, then measure."""
        link, expect = self.effects.roster.ways(request.source, request.target)
        most = self.config.max_bytes if request.rate else 0
        probe = do.ProbeLink(request.request, link, self.config.seconds, most)
        self.effects.emit(do.SendTo(request.target, expect))
        self.effects.emit(do.SendTo(request.source, probe))

    def link_probed(self, worker: str, message: LinkProbed) -> None:
        """Take in a link's measurement; an impossible one quarantines who reports it."""
        wrong = self.effects.roster.links.answered(worker, message, self.effects.now_s)
        if wrong is not None:
            self.effects.quarantine(worker, wrong)
        self.effects.log(
            Name.LINK_PROBED,
            source=worker,
            target=message.peer,
            bandwidth_bps=round(message.bandwidth_bps) if isfinite(message.bandwidth_bps) else 0,
            rtt_s=message.rtt_s,
            error=message.error,
        )
        self.effects.advance = True
