"""Schedule of link measurements: pure policy, answers with requests.

Links are measured only between workers without work and only while no job runs, each direction
on its own, so that probing disturbs neither training nor itself:

1. a look: the round trip of every pair, a few small echoes that disturb nobody;
2. the rate of every pair. Two rates are measured at once only when no link can be common to both:
   they share no worker, and no worker of one is *near* one of the other. Machines behind one
   uplink are near each other: the same declared site, an uplink that was found shared, or a round
   trip below ``NEAR_RTT_S``;
3. when the pairs are known, deliberately concurrent probes show what is shared: one between every
   two groups for the uplink that joins them, and two a worker, out of it and into it, for its own.

A pair that cannot be measured counts as 1 kbit/s: plans avoid it.

Of a fleet that is larger than ``all_pairs_up_to`` only the pairs that its ``Survey`` chooses are measured,
rates alone, and as above those between the workers that a plan names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

import numpy as np

from coordinator.config import Probing
from coordinator.membership.links.pairs import PairMap
from coordinator.membership.links.survey import Survey
from coordinator.membership.links.table import (
    MAX_RTT_S,
    MIN_BANDWIDTH_BPS,
    SHARED_BELOW,
    LinkTable,
    infer_shared,
    judge_link,
)
from coordinator.messages.events import LinkProbed
from coordinator.planning.costs.fleet import LinkEstimate, Pair, Uplink
from coordinator.planning.search.clusters import groups

MAX_TOGETHER = 12  # concurrent probes of one fleet
NEAR_RTT_S = 0.02  # a home's, a campus's or a cluster's own network is quicker
LOOKS_EACH = 3  # of one worker at once: the echoes are small, but the machine may be slow
ABOUT = 0.75  # of the fastest flow's rate: about as fast
WORTH_SHARING = 0.35  # of the best flow: a smaller one beside it shows no sharing (SHARED_BELOW)
NOMINAL_BPS = 20e6
HOPELESS = LinkEstimate(MIN_BANDWIDTH_BPS, MAX_RTT_S / 2)  # of a pair that cannot be measured


class Kind(Enum):
    """Purpose of a probe."""

    LOOK = "look"  # the round trip
    ALONE = "alone"  # the rate, on links that nobody else uses meanwhile
    TOGETHER = "together"  # several rates at once, to see what they share
    FEW = "few"  # the rate, of one of the few pairs by which a large fleet is known


@dataclass(frozen=True, slots=True)
class Measurement:
    """Pairs to be measured at once; more than one only where that is the purpose."""

    kind: Kind
    pairs: tuple[Pair, ...]


@dataclass(slots=True)
class _Flow:
    """A direction being measured."""

    pair: Pair
    deadline_s: float
    of: Measurement

    @property
    def kind(self) -> Kind:
        return self.of.kind


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """Ask ``source`` to measure its link to ``target``; ``rate`` False: only the round trip."""

    request: int
    source: str
    target: str
    rate: bool


@dataclass(slots=True)
class LinkProbing:
    """Times of past measurements, and the measurements in flight."""

    config: Probing
    table: LinkTable = field(default_factory=LinkTable)
    solo_bps: PairMap[float] = field(default_factory=PairMap)
    measured_s: PairMap[float] = field(default_factory=PairMap)
    attempts: PairMap[int] = field(default_factory=PairMap)  # failed ones
    failed_s: PairMap[float] = field(default_factory=PairMap)
    together: dict[frozenset[Pair], dict[Pair, float]] = field(default_factory=dict)
    looked_s: dict[frozenset[str], float] = field(default_factory=dict)  # round trips
    flows: dict[int, _Flow] = field(default_factory=dict)
    survey: Survey = field(init=False)
    _among: set[str] = field(default_factory=set)  # workers all of whose pairs were wanted
    _rates: dict[Measurement, dict[Pair, float]] = field(default_factory=dict)  # of concurrent ones

    def __post_init__(self) -> None:
        self.survey = Survey(self.config.few_peers)

    @property
    def busy(self) -> bool:
        return bool(self.flows)

    @property
    def surveying(self) -> bool:
        return any(flow.kind is Kind.FEW for flow in self.flows.values())

    def unsurveyed(self, workers: Iterable[str]) -> bool:
        """Return whether a pair by which one of these is to be known has not been measured yet."""
        workers = set(workers)
        measuring = (flow.pair for flow in self.flows.values() if flow.kind is Kind.FEW)
        return any(not workers.isdisjoint(pair) for pair in measuring) or self.survey.pending(workers)

    def few_due(
        self, ready: Callable[[str], bool], connectable: Callable[[str, str], bool], now_s: float
    ) -> list[Measurement]:
        """Measurements of a large fleet to begin now, between workers that are ``ready``."""
        room = self.config.probes_at_once - len(self.flows)
        if room <= 0:
            return []

        def needed(pair: Pair) -> bool:
            if not connectable(*pair):
                self.table.estimates.setdefault(pair, HOPELESS)
                return False
            return self._missing(pair, now_s, fresh=False)

        busy = (worker for flow in self.flows.values() for worker in flow.pair)
        return [Measurement(Kind.FEW, (pair,)) for pair in self.survey.take(room, ready, needed, busy)]

    def unmeasured(self, workers: Sequence[str]) -> bool:
        """Return whether a pair of these was neither measured nor given up."""
        pairs = ((a, b) for a in workers for b in workers if a != b)
        return any(pair not in self.table.estimates for pair in pairs)

    def due(
        self,
        workers: list[str],
        connectable: Callable[[str, str], bool],
        now_s: float,
        fresh: bool,
        sites: Mapping[str, str] | None = None,
    ) -> list[Measurement]:
        """Measurements to begin now, beside those under way; none while the next must wait for them.

        ``workers`` in join order; ``connectable``: one of a pair may dial the other; ``fresh``: figures older
        than ``stale_after_s`` count as missing; ``sites``: declared ones. Nothing under way and
        nothing due: all is known.
        """
        wanted = []
        self._among.update(workers)
        for pair in self._pairs(workers):
            if not connectable(*pair):
                self.table.estimates.setdefault(pair, HOPELESS)
            elif self._missing(pair, now_s, fresh):
                wanted.append(pair)
        under_way = {flow.kind for flow in self.flows.values()}
        looks = [pair for pair in wanted if self._unseen(pair)]
        if Kind.LOOK in under_way or looks:
            # Echoes beside a flood would make neighbours seem far apart.
            return list(self._looks(looks)) if under_way <= {Kind.LOOK} else []
        near = self._nearness(workers, sites or {})
        if wanted:
            # In the order of a tournament's rounds everybody has a partner nearly all the time.
            wanted.sort(key=_tournament(workers))
            return list(self._apart((Measurement(Kind.ALONE, (pair,)) for pair in wanted), near))
        if Kind.ALONE in under_way:
            return []
        probes = [*self._between_groups(workers), *self._own_lines(workers)]
        rest = [p for p in probes if frozenset(p.pairs) not in self.together and p not in self._rates]
        return list(self._apart(rest, near))

    def begin(self, measurement: Measurement, first_request: int, now_s: float) -> list[LinkRequest]:
        """Start a measurement; the answers come back under the request numbers."""
        if measurement.kind is Kind.TOGETHER:
            self._rates[measurement] = {}
        deadline_s = now_s + self.config.seconds + self.config.answer_within_s
        requests = []
        for at, pair in enumerate(measurement.pairs):
            self.flows[first_request + at] = _Flow(pair, deadline_s, measurement)
            requests.append(LinkRequest(first_request + at, *pair, rate=measurement.kind is not Kind.LOOK))
        return requests

    def answered(self, worker: str, message: LinkProbed, now_s: float) -> str | None:
        """Take in an answer; returns why its figures are impossible, None when they are fine."""
        flow = self.flows.get(message.request)
        if flow is None or flow.pair != (worker, message.peer):
            return None  # late: its deadline passed, or the peer is gone
        del self.flows[message.request]
        if message.error:
            self._failed(flow, now_s)
            self._close_round()
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
        self.survey.forget(worker)
        self._among.discard(worker)
        for known in (self.solo_bps, self.measured_s, self.attempts, self.failed_s):
            known.forget(worker)
        for probe in [p for p in self.together if any(worker in pair for pair in p)]:
            del self.together[probe]
        for ends in [ends for ends in self.looked_s if worker in ends]:
            del self.looked_s[ends]
        for measurement in [m for m in self._rates if any(worker in pair for pair in m.pairs)]:
            del self._rates[measurement]
        for request in [r for r, flow in self.flows.items() if worker in flow.pair]:
            del self.flows[request]

    def uplinks(self, sites: Mapping[str, str]) -> tuple[Uplink, ...]:
        """Shared uplinks from declared sites and from what concurrent probes showed."""
        workers = list(sites)
        if len(workers) > self.config.all_pairs_up_to:
            workers = [worker for worker in workers if worker in self._among]
        named, grouped = dict(sites), None
        for pairs, rates in self.together.items():
            if len({source for source, _ in pairs}) < 2 or len({target for _, target in pairs}) < 2:
                continue  # one worker's own uplink
            if not self._shared(rates):
                continue
            grouped = grouped or self._groups(workers)
            for at, group in enumerate(grouped):
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

    def _unseen(self, pair: Pair) -> bool:
        """Return whether the pair's round trip is still unknown; a pair that failed is not measured again."""
        return frozenset(pair) not in self.looked_s and not self.attempts.get(pair)

    def _looks(self, pairs: list[Pair]) -> Iterator[Measurement]:
        """Round trips, each pair one way, every worker in few at once."""
        held = [worker for flow in self.flows.values() for worker in flow.pair]
        asked = {frozenset(flow.pair) for flow in self.flows.values()}
        room = self.config.probes_at_once - len(self.flows)
        for pair in pairs:
            if room <= 0:
                return
            if frozenset(pair) not in asked and all(held.count(w) < LOOKS_EACH for w in pair):
                held += pair
                asked.add(frozenset(pair))
                room -= 1
                yield Measurement(Kind.LOOK, (pair,))

    def _apart(
        self, wanted: Iterable[Measurement], near: Callable[[str, str], bool]
    ) -> Iterator[Measurement]:
        """Those that can have no link in common with each other and with what is under way."""
        held = {worker for flow in self.flows.values() for worker in flow.pair}
        room = self.config.probes_at_once - len(self.flows)
        for measurement in wanted:
            if room < len(measurement.pairs):
                return
            ends = {worker for pair in measurement.pairs for worker in pair}
            if ends.isdisjoint(held) and not any(near(a, b) for a in ends for b in held):
                held |= ends
                room -= len(measurement.pairs)
                yield measurement

    def _nearness(self, workers: list[str], sites: Mapping[str, str]) -> Callable[[str, str], bool]:
        """Return a function: whether two workers may share an uplink. Unknown counts as near."""
        shared = [set(u.members) for u in self.uplinks({w: sites.get(w, "") for w in workers})]

        def near(a: str, b: str) -> bool:
            if sites.get(a) and sites.get(a) == sites.get(b):
                return True
            if any(a in members and b in members for members in shared):
                return True
            return self.looked_s.get(frozenset((a, b)), 0.0) < NEAR_RTT_S

        return near

    def _groups(self, workers: list[str]) -> list[list[str]]:
        n = len(workers)
        rate = np.full((n, n), NOMINAL_BPS)
        for i, a in enumerate(workers):
            for j, b in enumerate(workers):
                link = self.table.get(a, b)
                if link is not None:
                    rate[i, j] = link.bandwidth_bps
        np.fill_diagonal(rate, rate.max(initial=1.0))
        return [[workers[i] for i in group] for group in groups(rate)]

    def _between_groups(self, workers: list[str]) -> list[Measurement]:
        """Return two flows at once, between different pairs, for every two groups of at least two."""
        if len(workers) < 4:
            return []
        large = [group for group in self._groups(workers) if len(group) > 1]
        found = []
        for source in large:
            for target in large:
                if source is not target:
                    pairs = tuple(zip(source[:2], target[:2], strict=True))
                    if all(pair in self.solo_bps for pair in pairs):
                        found.append(Measurement(Kind.TOGETHER, pairs))
        return found[:MAX_TOGETHER]

    def _own_lines(self, workers: list[str]) -> Iterator[Measurement]:
        """Yield for every worker two of its fastest flows out at once, and two of its fastest flows in.

        Among flows about as fast, those of workers not yet used: then more fit side by side.
        """
        used: Counter[str] = Counter()
        for worker in workers:
            out = [(worker, w) for w in workers if (worker, w) in self.solo_bps]
            into = [(w, worker) for w in workers if (w, worker) in self.solo_bps]
            for flows in (out, into):
                fastest = max((self.solo_bps[pair] for pair in flows), default=0.0)
                best = [pair for pair in flows if self.solo_bps[pair] >= WORTH_SHARING * fastest]
                best.sort(
                    key=lambda pair: (
                        self.solo_bps[pair] < ABOUT * fastest,
                        sum(used[w] for w in pair if w != worker),
                    )
                )
                if len(best) > 1:
                    used.update(w for pair in best[:2] for w in pair if w != worker)
                    yield Measurement(Kind.TOGETHER, tuple(sorted(best[:2])))

    def _take(self, flow: _Flow, message: LinkProbed, now_s: float) -> str | None:
        a, b = flow.pair
        if flow.kind is Kind.LOOK:
            wrong = judge_link(a, b, NOMINAL_BPS, message.rtt_s)
            if wrong is None:
                self.looked_s[frozenset(flow.pair)] = message.rtt_s
            return wrong
        if flow.kind is Kind.TOGETHER:
            if not isfinite(message.bandwidth_bps) or message.bandwidth_bps <= 0:
                return f"{a} reports {message.bandwidth_bps:.3g} bit/s to {b}"
            self._rates.get(flow.of, {})[flow.pair] = message.bandwidth_bps
            return None
        wrong = self.table.probed(a, b, message.bandwidth_bps, message.rtt_s)
        if wrong is None:
            self.solo_bps[flow.pair] = message.bandwidth_bps
            self.measured_s[flow.pair] = now_s
        return wrong

    def _failed(self, flow: _Flow, now_s: float) -> None:
        if flow.kind is Kind.TOGETHER:
            return
        # Who does not answer echoes in one direction will not in the other.
        pairs = (flow.pair, flow.pair[::-1]) if flow.kind is Kind.LOOK else (flow.pair,)
        for pair in pairs:
            tries = self.attempts.get(pair, 0) + 1
            self.attempts[pair] = tries
            self.failed_s[pair] = now_s
            if tries >= self.config.attempts and pair not in self.table.estimates:
                self.table.estimates[pair] = HOPELESS
            elif flow.kind is Kind.FEW and tries < self.config.attempts:
                self.survey.again(pair)

    def _close_round(self) -> None:
        """Keep what concurrent probes found once the last of their flows is over."""
        running = {flow.of for flow in self.flows.values()}
        for measurement in [m for m in self._rates if m not in running]:
            self.together[frozenset(measurement.pairs)] = self._rates.pop(measurement)


def _tournament(workers: list[str]) -> Callable[[Pair], int]:
    """The circle method: a pair's round among rounds in which every worker has one partner."""
    place = {worker: at for at, worker in enumerate(workers)}
    last = len(workers) + len(workers) % 2 - 1

    def round_of(pair: Pair) -> int:
        i, j = sorted((place[pair[0]], place[pair[1]]))
        both_ways = 2 * ((2 * i if j == last else i + j) % last)
        return both_ways + (place[pair[0]] > place[pair[1]])

    return round_of
