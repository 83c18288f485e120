"""When to measure which link and which ops: pure policy, answers with requests.

Links are measured only between workers without work and only while no job runs, one pair at a
time and each direction on its own, so that probing disturbs neither training nor itself. When
the pairs are known, one concurrent probe between every two groups shows whether their flows
share an uplink. A pair that cannot be measured counts as 1 kbit/s: plans avoid it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from coordinator.cluster import groups
from coordinator.config import Probing
from coordinator.events import LinkProbed
from coordinator.links import (
    MAX_RTT_S,
    MIN_BANDWIDTH_BPS,
    SHARED_BELOW,
    LinkEstimate,
    LinkTable,
    Pair,
    Uplink,
    infer_shared,
)

MAX_TOGETHER = 12  # concurrent probes of one fleet
RTT_SAMPLES = 3
NOMINAL = LinkEstimate(20e6, 0.03)


@dataclass(slots=True)
class _Flow:
    """One direction being measured."""

    pair: Pair
    deadline_s: float
    together: int | None  # which concurrent probe it belongs to


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """Ask ``source`` to measure its link to ``target``."""

    request: int
    source: str
    target: str


@dataclass(slots=True)
class LinkProbing:
    """What was measured when, and what is being measured now."""

    config: Probing
    table: LinkTable = field(default_factory=LinkTable)
    solo_bps: dict[Pair, float] = field(default_factory=dict)
    measured_s: dict[Pair, float] = field(default_factory=dict)
    attempts: dict[Pair, int] = field(default_factory=dict)  # failed ones
    failed_s: dict[Pair, float] = field(default_factory=dict)
    together: dict[frozenset[Pair], dict[Pair, float]] = field(default_factory=dict)
    flows: dict[int, _Flow] = field(default_factory=dict)
    _round: int = 0
    _round_rates: dict[Pair, float] = field(default_factory=dict)
    _round_pairs: frozenset[Pair] = frozenset()

    @property
    def busy(self) -> bool:
        return bool(self.flows)

    def due(
        self, workers: list[str], reachable: Mapping[str, bool], now_s: float, fresh: bool
    ) -> list[list[Pair]]:
        """Measurements that this fleet still needs, each a list of pairs to be run at once.

        ``workers`` in join order; ``reachable``: accepts connections; ``fresh``: figures older
        than ``stale_after_s`` count as missing.
        """
        solo = [
            [pair]
            for pair in self._pairs(workers)
            if (reachable.get(pair[0]) or reachable.get(pair[1])) and self._missing(pair, now_s, fresh)
        ]
        return solo or [list(probe) for probe in self._concurrent(workers) if probe not in self.together]

    def begin(self, pairs: list[Pair], first_request: int, now_s: float) -> list[LinkRequest]:
        """Start measuring ``pairs`` at once; the answers come back under the request numbers."""
        self._round += 1
        self._round_rates = {}
        self._round_pairs = frozenset(pairs)
        deadline_s = now_s + self.config.seconds + self.config.answer_within_s
        together = self._round if len(pairs) > 1 else None
        requests = []
        for at, pair in enumerate(pairs):
            self.flows[first_request + at] = _Flow(pair, deadline_s, together)
            requests.append(LinkRequest(first_request + at, *pair))
        return requests

    def answered(self, worker: str, message: LinkProbed, now_s: float) -> str | None:
        """Take in an answer; returns why its figures are impossible, None when they are fine."""
        flow = self.flows.get(message.request)
        if flow is None or flow.pair != (worker, message.peer):
            return None  # late: its deadline passed, or the peer is gone
        del self.flows[message.request]
        if message.error:
            self._failed(flow, now_s)
            return None
        wrong = self._take(flow, message, now_s)
        if wrong is not None:
            self._failed(flow, now_s)
        self._close_round()
        return wrong

    def expire(self, now_s: float) -> list[Pair]:
        """Give up on flows whose deadline passed; returns their pairs."""
        late = [request for request, flow in self.flows.items() if now_s > flow.deadline_s]
        pairs = [self.flows[request].pair for request in late]
        for request in late:
            self._failed(self.flows.pop(request), now_s)
        if late:
            self._close_round()
        return pairs

    def forget(self, worker: str) -> None:
        """Drop what concerns a worker that left."""
        self.table.forget(worker)
        for known in (self.solo_bps, self.measured_s, self.attempts, self.failed_s):
            for pair in [pair for pair in known if worker in pair]:
                del known[pair]
        for probe in [p for p in self.together if any(worker in pair for pair in p)]:
            del self.together[probe]
        for request in [r for r, flow in self.flows.items() if worker in flow.pair]:
            del self.flows[request]
        self._close_round()

    def uplinks(self, sites: Mapping[str, str]) -> tuple[Uplink, ...]:
        """Shared uplinks from declared sites and from what concurrent probes showed."""
        workers = list(sites)
        named = dict(sites)
        for pairs, rates in self.together.items():
            if not self._shared(rates):
                continue
            for at, group in enumerate(self._groups(workers)):
                if any(source in group for source, _ in pairs):
                    for worker in group:
                        named[worker] = named[worker] or f"group {at + 1}"
        return infer_shared(self.solo_bps, self.together.values(), named)

    def _shared(self, rates: Mapping[Pair, float]) -> bool:
        alone = sum(self.solo_bps.get(pair, 0.0) for pair in rates)
        return sum(rates.values()) < SHARED_BELOW * alone

    def _pairs(self, workers: list[str]) -> Iterable[Pair]:
        most = self.config.max_peers
        for at, b in enumerate(workers):
            # Against those who joined first: with many workers each is still measured a bounded
            # number of times.
            for a in workers[max(0, at - most) : at]:
                yield (a, b)
                yield (b, a)

    def _missing(self, pair: Pair, now_s: float, fresh: bool) -> bool:
        at_s = self.measured_s.get(pair)
        if at_s is None and self.attempts.get(pair, 0) < self.config.attempts:
            return True
        at_s = self.failed_s.get(pair, now_s) if at_s is None else at_s
        return fresh and now_s - at_s > self.config.stale_after_s

    def _groups(self, workers: list[str]) -> list[list[str]]:
        n = len(workers)
        rate = np.full((n, n), NOMINAL.bandwidth_bps)
        for i, a in enumerate(workers):
            for j, b in enumerate(workers):
                link = self.table.get(a, b)
                if link is not None:
                    rate[i, j] = link.bandwidth_bps
        np.fill_diagonal(rate, rate.max(initial=1.0))
        return [[workers[i] for i in group] for group in groups(rate)]

    def _concurrent(self, workers: list[str]) -> list[frozenset[Pair]]:
        """For every two groups of at least two: two flows at once, between different pairs."""
        if len(workers) < 4:
            return []
        large = [group for group in self._groups(workers) if len(group) > 1]
        found = []
        for source in large:
            for target in large:
                if source is not target:
                    pairs = list(zip(source[:2], target[:2], strict=True))
                    if all(pair in self.solo_bps for pair in pairs):
                        found.append(frozenset(pairs))
        return found[:MAX_TOGETHER]

    def _take(self, flow: _Flow, message: LinkProbed, now_s: float) -> str | None:
        a, b = flow.pair
        if flow.together is not None:
            if not isfinite(message.bandwidth_bps) or message.bandwidth_bps <= 0:
                return f"{a} reports {message.bandwidth_bps:.3g} bit/s to {b}"
            self._round_rates[flow.pair] = message.bandwidth_bps
            return None
        wrong = self.table.probed(a, b, message.bandwidth_bps, message.rtt_s)
        if wrong is None:
            self.solo_bps[flow.pair] = message.bandwidth_bps
            self.measured_s[flow.pair] = now_s
        return wrong

    def _failed(self, flow: _Flow, now_s: float) -> None:
        if flow.together is not None:
            return
        tries = self.attempts.get(flow.pair, 0) + 1
        self.attempts[flow.pair] = tries
        self.failed_s[flow.pair] = now_s
        if tries >= self.config.attempts and flow.pair not in self.table.estimates:
            self.table.estimates[flow.pair] = LinkEstimate(MIN_BANDWIDTH_BPS, MAX_RTT_S / 2)

    def _close_round(self) -> None:
        if not self.flows and len(self._round_pairs) > 1:
            self.together[self._round_pairs] = dict(self._round_rates)
            self._round_pairs = frozenset()


@dataclass(slots=True)
class OpsRequest:
    """Ops that a worker is timing now."""

    worker: str
    job: str
    precision: str
    signatures: tuple[str, ...]
    sent_s: float
    deadline_s: float


@dataclass(slots=True)
class OpProbing:
    """Op timings by worker and precision, and the round trip to the coordinator."""

    config: Probing
    timings: dict[tuple[str, str], dict[str, tuple[float, float]]] = field(default_factory=dict)
    failed: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    requests: dict[int, OpsRequest] = field(default_factory=dict)
    rtt_s: dict[str, list[float]] = field(default_factory=dict)

    def missing(self, worker: str, precision: str, signatures: Iterable[str]) -> tuple[str, ...]:
        """Signatures that this worker has neither timed nor failed to time."""
        known = self.timings.get((worker, precision), {})
        failed = self.failed.get((worker, precision), set())
        return tuple(s for s in signatures if s not in known and s not in failed)

    def asked(self, worker: str) -> bool:
        """Whether an answer of this worker is awaited."""
        return any(request.worker == worker for request in self.requests.values())

    def give_up(self, request: OpsRequest) -> None:
        """Those ops are estimated from FLOPs and bytes instead."""
        self.failed.setdefault((request.worker, request.precision), set()).update(request.signatures)

    def expire(self, now_s: float) -> list[OpsRequest]:
        """Requests whose deadline passed."""
        late = [number for number, request in self.requests.items() if now_s > request.deadline_s]
        found = [self.requests.pop(number) for number in late]
        for request in found:
            self.give_up(request)
        return found

    def round_trip(self, worker: str) -> LinkEstimate:
        """The coordinator as a link: the shortest round trip measured."""
        samples = self.rtt_s.get(worker)
        return LinkEstimate(NOMINAL.bandwidth_bps, min(samples) / 2 if samples else NOMINAL.latency_s)

    def forget(self, worker: str) -> None:
        """Drop requests of a worker that left; its timings stay, the device is the same."""
        for number in [n for n, request in self.requests.items() if request.worker == worker]:
            del self.requests[number]
