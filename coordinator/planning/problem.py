"""A planning problem: a DAG, how it is trained, a fleet; and what any candidate would cost.

A Candidate is an order of devices with the position where each begins; a device that stands in it more than
once has several pieces of the pipeline. ``Problem`` turns one into a Workload, compressed as the training
asks, chooses how many micro-batches each piece may have in flight, and asks the timeline. Results are kept,
since searches come back to the same candidate.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from atoll.compression import AUTO, OFF, Compression
from atoll.job import EXACTLY, Keeping, Precision
from atoll.microbatch import Depth, ScheduleName, delay_aware_warmup, one_f_one_b
from atoll.ops import is_layer
from coordinator.planning import TUNED
from coordinator.planning.codecs.ratios import (
    Link,
    asked_ratio,
    assumed_ratio,
    choose,
    links_of,
    mask_of,
    within,
)
from coordinator.planning.costs.codec_costs import coded
from coordinator.planning.costs.lower_bound import lower_bound
from coordinator.planning.costs.memory import MemoryModel, Together, prefix
from coordinator.planning.costs.message_costs import handled
from coordinator.planning.costs.op_seconds import OpTable, apply_seconds, away_rates
from coordinator.planning.costs.quota import core_share, quota_of
from coordinator.planning.costs.timeline import Timeline, simulate, step_seconds
from coordinator.planning.costs.traffic import Traffic
from coordinator.planning.costs.workload import StageLoad, Wire, Workload, route, routes_of
from coordinator.planning.inside.choice import Insides
from coordinator.planning.inside.costs import undivided
from coordinator.planning.search.chain import Chain
from coordinator.planning.search.pins import pinned_ops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from atoll.job import TrainingSpec
    from atoll.mesh.layout import Inside
    from atoll.microbatch import Action
    from atoll.opdag import OpDag, OpNode
    from atoll.plan import LinkSpec, Replica
    from coordinator.planning.costs.fleet import Device, Fleet
    from coordinator.planning.inside.costs import Divisions
    from coordinator.planning.search.chain import Bools

    Floats = NDArray[np.float64]
    Positions = NDArray[np.intp]
    Held = tuple[int, tuple[tuple[int, int], ...]]  # a device, and the intervals of ops that it has


APART = 0.03
"""Overhead of a split backward, as a share of the weights' seconds, as it reads activations and gradients
twice; measured on one core with stages of 9 to 25 ms. And CPU seconds of each op with weights ..."""
LAYER_CPU_S = 1.5e-4  # ... whose products are known by hand ...
OWN_GRAPH_CPU_S = 4e-4  # ... or that has a graph of its own; all of it out of the caches after each wait


@dataclass(frozen=True, slots=True)
class Candidate:
    """The device (index in the fleet) of each piece in pipeline order, and the op where the piece begins."""

    devices: tuple[int, ...]
    starts: tuple[int, ...]

    def bounds(self, n_ops: int) -> list[tuple[int, int]]:
        return list(zip(self.starts, (*self.starts[1:], n_ops), strict=True))

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The pieces of each device, ascending; devices in the order of their first pieces."""
        found: dict[int, list[int]] = {}
        for at, device in enumerate(self.devices):
            found.setdefault(device, []).append(at)
        return tuple(map(tuple, found.values()))

    @property
    def several(self) -> bool:
        """Whether a device has several pieces."""
        return len(set(self.devices)) < len(self.devices)


def joined(devices: Sequence[int], starts: Sequence[int]) -> Candidate:
    """Return the candidate of these pieces; of those in a row that one device has it makes one."""
    kept = [at for at in range(len(devices)) if not at or devices[at] != devices[at - 1]]
    return Candidate(tuple(devices[at] for at in kept), tuple(starts[at] for at in kept))


def candidate_of(replica: Replica, fleet: Fleet) -> tuple[Candidate, list[Depth]]:
    """Return a replica as a candidate on ``fleet``, which has its workers, and the depths of its pieces."""
    pieces = replica.pieces
    devices = tuple(fleet.index[worker] for worker in replica.workers)
    return Candidate(devices, replica.starts), [Depth(one.piece.warmup, one.piece.held) for one in pieces]


@dataclass(frozen=True)
class Scored:
    """A candidate with the schedule that suits it and its predicted step."""

    candidate: Candidate
    schedule: ScheduleName
    depths: tuple[Depth, ...]
    step_s: float
    specs: tuple[LinkSpec, ...] = ()  # of the pairs that send anything; empty: all dense


class Infeasible(Exception):
    """A stage of the candidate does not fit its device even with one micro-batch in flight."""


@dataclass
class Problem:
    """Costs of ``dag`` on every device of ``fleet``; ``schedule`` None lets the timeline choose.

    ``compression``: what links do to the bytes of every candidate judged here. ``keeping``: form in which
    stages keep what they need again, decided; ``keepings``: of workers that keep it otherwise; ``kinds``:
    inside plans of workers that divide their stages otherwise than an equal part of the model.
    """

    dag: OpDag
    training: TrainingSpec
    fleet: Fleet
    schedule: ScheduleName | None = None
    wire: Wire = field(default_factory=Wire)
    compression: Compression = field(default_factory=lambda: Compression(OFF))
    keeping: Keeping = EXACTLY
    keepings: Mapping[str, Keeping] = field(default_factory=dict)
    kinds: Mapping[str, Inside] = field(default_factory=dict)
    likely: tuple[tuple[int, ...], ...] = ()  # orders of devices that the search begins with, beside its own
    pinned: str = ""  # worker that computes all that reads inputs; "": any may
    divisions: Divisions = field(default_factory=dict)  # of the graph, which problems may share
    _scores: dict[Candidate, Scored | None] = field(default_factory=dict)
    _specs: dict[Candidate, tuple[LinkSpec, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n_ops = len(self.dag.ops)
        self.n_micro = self.training.n_micro
        self.traffic = Traffic(self.dag, self.training.optimizer, self.training.blocks)
        self.memories: dict[Keeping, MemoryModel] = {}
        self.memory = self.memory_in(self.keeping)
        self.insides = Insides(self.dag, self.training, self.keeping, self.memory, self.divisions)
        self.table = OpTable(self.dag, optimizer=self.training.optimizer)
        self._price()

    def _price(self) -> None:
        """Compute what depends on the fleet's devices."""
        # By device and what it has, as they are needed: candidates of a search differ in a piece or two.
        self.applies: dict[Held, float] = {}
        self.in_flight_caps: dict[tuple[Held, bool, float], list[int]] = {}
        alone = [self.table.costs(d, self.kept_by(d)) for d in self.fleet.devices]
        self.inside, costs = self.insides.priced(self.fleet.devices, alone, self.kinds)
        self.undivided = [undivided(each, a, c) for each, a, c in zip(self.inside, alone, costs, strict=True)]
        self.forward = np.stack([prefix(c.forward_s) for c in costs])  # [devices, ops + 1]
        self.backward = np.stack([prefix(c.backward_s) for c in costs])
        self.weights = np.stack([prefix(c.weights_s) for c in costs])
        waiting = (costs[0].weights_s > 0.0).astype(float)  # [ops]
        self.pieces = prefix(waiting)
        calls_s = waiting * np.array([self._apart_cpu_s(node) for node in self.dag.ops])  # of a whole core
        self.apart = np.stack(
            [
                prefix(APART * c.weights_s + calls_s / core_share(d) * d.scale)
                for c, d in zip(costs, self.fleet.devices, strict=True)
            ]
        )
        self.compute = self.forward + self.backward
        # In bytes of the whole model, for searches; ``caps`` looks at each process's own.
        self.times = np.array([self.insides.times(inside) for inside in self.inside])
        self.limits = self.times * [d.model_limit_bytes for d in self.fleet.devices]
        self.measured_share = float(np.mean([c.measured_share for c in costs]))

    def kept_by(self, device: Device) -> Keeping:
        """Return the form in which a device keeps what it needs again."""
        return self.keeping if device.mesh is not None else self.keepings.get(device.worker, self.keeping)

    def memory_in(self, keeping: Keeping) -> MemoryModel:
        found = self.memories.get(keeping) or MemoryModel(self.dag, self.training, self.traffic, keeping)
        return self.memories.setdefault(keeping, found)

    def _apart_cpu_s(self, node: OpNode) -> float:
        """CPU seconds that an op's weights take more when they come later."""
        cast = self.training.precision is not Precision.FP32 or node.autocast is not None
        own_graph = cast or self.keeping.selective or not is_layer(node)
        return OWN_GRAPH_CPU_S if own_graph else LAYER_CPU_S

    @cached_property
    def pins(self) -> NDArray[np.intp]:
        """Positions of the ops that the worker with the data computes."""
        return np.array(pinned_ops(self.dag) if self.pinned else (), dtype=np.intp)

    @property
    def owner(self) -> int:
        """The device of the worker with the data."""
        return self.fleet.index[self.pinned]

    def keeps_pins(self, candidate: Candidate) -> bool:
        """Whether the worker with the data has all ops that read them."""
        if not self.pinned:
            return True
        at = np.searchsorted(candidate.starts, self.pins, side="right") - 1
        return all(candidate.devices[piece] == self.owner for piece in np.unique(at))

    @cached_property
    def positions(self) -> Positions:
        """Positions where a stage may begin or end: 0, every cuttable position, the end."""
        return np.array([0, *self.dag.cuttable(), self.n_ops], dtype=np.intp)

    def coarse(self, most: int) -> Positions:
        """At most about ``most`` of ``positions``: the cheapest cut of each share of the work.

        The shares are of compute and of state bytes, so that a large embedding, which computes
        nothing, can still be cut off.
        """
        p = self.positions
        if len(p) <= most + 2:
            return p
        work = self.compute.sum(axis=0)[p] / max(float(self.compute.sum(axis=0)[-1]), 1e-12)
        held = np.array([self.memory.state_bytes(0, int(i)) for i in p])
        share = 0.5 * work + 0.5 * held / max(float(held[-1]), 1.0)
        bins = np.minimum((share * most).astype(np.int64), most - 1)
        live = self.traffic.live_bytes[p]
        inner = np.arange(1, len(p) - 1)
        order = inner[np.lexsort((inner, live[inner], bins[inner]))]
        _, first = np.unique(bins[order], return_index=True)
        return p[np.concatenate(([0], np.sort(order[first]), [len(p) - 1]))]

    def chain(
        self, devices: Sequence[int], positions: Positions, fits: Sequence[Bools | None] | None = None
    ) -> Chain:
        """The chain surrogate of an order of devices over some positions."""
        order = list(devices)
        link, toll = self.links(order, positions)
        return Chain(self.compute[order][:, positions], link, toll, fits or [None] * len(order))

    def links(self, order: Sequence[int], positions: Positions) -> tuple[Floats, Floats]:
        """(occupation, toll) [devices, positions] of the link into each device.

        Compressed links are taken as if all shrank as much as the slowest one will: only the
        slowest decides here, and the timeline judges what comes of it.
        """
        bits = 8.0 / assumed_ratio(self.compression)
        ahead = self.traffic.live_bytes[positions] * bits
        back = self.traffic.live_grad_bytes[positions] * bits
        link, toll = np.zeros((len(order), len(positions))), np.zeros((len(order), len(positions)))
        rate, latency = self.fleet.effective_bps, self.fleet.latency_s
        for j in range(1, len(order)):
            a, b = order[j - 1], order[j]
            there, again = ahead / rate[a, b], back / rate[b, a]
            link[j] = np.maximum(there, again) + self.wire.per_message_s
            toll[j] = there + again + latency[a, b] + latency[b, a] + 2 * self.wire.per_message_s
        return link, toll

    def fits(self, device: int, positions: Positions, in_flight: int) -> Bools | None:
        """[l, i] mask of the stages that ``device`` can hold; None when it can hold them all."""
        memory, limit = memory_on(self, device)
        mask: Bools = memory.matrix(positions, in_flight) <= limit
        return None if mask[np.triu_indices(len(positions), 1)].all() else mask

    def workload(
        self, candidate: Candidate, depths: Sequence[Depth], specs: Sequence[LinkSpec] = ()
    ) -> Workload:
        """The candidate's step for the timeline, its links as in ``specs``."""
        cut, applies = self.traffic.cut(candidate.starts), self._applies_s(candidate)
        stages = []
        bounds = candidate.bounds(self.n_ops)
        for (a, b), d, depth, apply_s in zip(bounds, candidate.devices, depths, applies, strict=True):
            device, more_s = self.fleet.devices[d], self.undivided[d](a, b)
            stages.append(
                StageLoad(
                    device=d,
                    forward_s=float(self.forward[d, b] - self.forward[d, a]) + more_s[0],
                    backward_s=float(self.backward[d, b] - self.backward[d, a]) + more_s[1],
                    apply_s=apply_s,
                    commit_latency_s=device.coordinator.latency_s,
                    actions=_actions(self.n_micro, depth),
                    weights_s=float(self.weights[d, b] - self.weights[d, a]) + more_s[2],
                    apart_s=float(self.apart[d, b] - self.apart[d, a]),
                    pieces=max(1, int(self.pieces[b] - self.pieces[a])),
                    quota=quota_of(device),
                )
            )
        routes = routes_of(self.fleet, candidate.devices, cut)
        work = Workload(tuple(stages), self.n_micro, cut.forward, cut.backward, cut.tied, routes, self.wire)
        devices = [self.fleet.devices[d] for d in candidate.devices]
        if specs:
            work = coded(work, self.traffic.loads(candidate.starts), specs, devices)
        return handled(work, devices)

    def _applies_s(self, candidate: Candidate) -> list[float]:
        """Return the seconds of the optimizer by piece: a device takes its step with its first one."""
        bounds, found = candidate.bounds(self.n_ops), [0.0] * len(candidate.devices)
        for those in candidate.together:
            found[those[0]] = apply_s_on(self, candidate.devices[those[0]], tuple(bounds[at] for at in those))
        return found

    def undisturbed(self, work: Workload) -> Workload:
        """``work`` on the rates that its links have shown, whatever training's messages got of them."""
        fleet = self.fleet.probed
        if fleet is None:
            return work
        devices = [stage.device for stage in work.stages]
        routes = {(s, t): route(fleet, devices[s], devices[t]) for s, t in work.routes}
        return replace(work, routes=routes)

    def links_between(self, candidate: Candidate) -> tuple[Link, ...]:
        """The candidate's links, dense, as ``coordinator.planning.codecs.ratios`` sees them."""
        work = self.workload(candidate, [Depth(1)] * len(candidate.devices))
        devices = [self.fleet.devices[d] for d in candidate.devices]
        return links_of(work, self.traffic.loads(candidate.starts), devices)

    def unnoticed_s(self, candidate: Candidate) -> float:
        """Seconds a micro-batch within which a link holds nothing up to speak of.

        No link slower than the slowest stage limits the rate of a full pipeline; filling and
        emptying it passes each of the S - 1 links once each way, which may add TUNED.fill_share of the
        M micro-batches' time.
        """
        bounds = candidate.bounds(self.n_ops)
        took = np.zeros(len(self.fleet.devices))
        for (a, b), d in zip(bounds, candidate.devices, strict=True):
            took[d] += self.compute[d, b] - self.compute[d, a]
        pace = float(took.max())
        hops = 2 * max(1, len(bounds) - 1)
        return pace * min(1.0, TUNED.fill_share * self.n_micro / hops)

    def specs(self, candidate: Candidate) -> tuple[LinkSpec, ...]:
        """Return the codecs that compression gives the candidate's links; empty when all stay dense.

        For ``auto`` a first guess without the timeline (``codecs.auto_codecs`` has the rest):
        every link fast enough to go unnoticed, or as fast as the limit allows.
        """
        if self.compression.mode == OFF:
            return ()
        if candidate not in self._specs:
            links = self.links_between(candidate)
            if self.compression.mode == AUTO:
                limit = asked_ratio(self.compression)
                slowest = max((link.dense_s for link in links), default=0.0)
                tau = max(slowest / limit, self.unnoticed_s(candidate))
                self._specs[candidate] = within(links, tau, limit, mask_of(self.compression))
            else:
                self._specs[candidate] = choose(links, self.compression, self.unnoticed_s(candidate))
        return self._specs[candidate]

    def caps(self, candidate: Candidate) -> list[int]:
        """Most micro-batches in flight by piece; raises Infeasible when a device cannot hold one of each, or
        has what is pinned to another."""
        if not self.keeps_pins(candidate):
            raise Infeasible(f"what reads the data is not all {self.pinned}'s")
        bounds, found = candidate.bounds(self.n_ops), [0] * len(candidate.devices)
        for those in candidate.together:
            device, pieces = candidate.devices[those[0]], tuple(bounds[at] for at in those)
            caps = caps_on(self, device, pieces, those[-1] == len(found) - 1)
            for at, cap in zip(those, caps, strict=True):
                found[at] = cap
            if min(caps) < 1:
                raise Infeasible(f"ops {list(pieces)} on {self.fleet.devices[device].label}")
        return found

    def in_flight(self, depth: Depth) -> tuple[int, int | None]:
        """Return how many micro-batches of a piece hold anything at most, and before their backward's end."""
        return min(depth.in_flight, self.n_micro), depth.whole

    def on(self, fleet: Fleet, likely: tuple[tuple[int, ...], ...] = ()) -> Problem:
        """The same job on another fleet."""
        found = copy(self)
        found.fleet, found.likely, found._scores, found._specs = fleet, likely, {}, {}
        found._price()
        return found

    def warmups(self, work: Workload, caps: Sequence[int]) -> list[tuple[int, ...]]:
        """Warm-up depths worth trying (microbatch.delay_aware_warmup), each within memory.

        Each boundary adds 1 + ceil(2c / (F + B)) with its own delay c and the slowest stage's
        F + B, which is the formula where all are alike. Where memory allows less, either every
        stage takes what it may, or all depths shrink alike (equal depths would make each stage
        wait for as many forwards as the first one), or plain 1F1B's are taken. A depth never
        rises from a stage to the next: that pipeline would wait for itself.
        """
        both = max((self._both_s(work, those) for those in work.together), key=sum)
        depths = [0]
        for s in range(len(caps) - 1, 0, -1):
            depths.append(
                depths[-1] + delay_aware_warmup(0, 2, self.n_micro + 1, self._hop_s(work, s), *both)
            )
        depths.reverse()
        wanted = [min(depth, self.n_micro - 1) for depth in depths]
        found = [_non_rising(wanted, caps)]
        if any(cap <= want for cap, want in zip(caps, wanted, strict=True)):
            ratio = min((cap - 1) / depth for cap, depth in zip(caps, depths, strict=True) if depth)
            shrunk = [round(depth * min(1.0, ratio)) for depth in depths]
            found.append(_non_rising(shrunk, caps))
            found.append(_non_rising([len(caps) - s - 1 for s in range(len(caps))], caps))
        return list(dict.fromkeys(found))

    @staticmethod
    def _both_s(work: Workload, those: Sequence[int]) -> tuple[float, float]:
        """Seconds of a micro-batch's forwards and backwards on one device."""
        stages = [work.stages[at] for at in those]
        return sum(stage.forward_s for stage in stages), sum(stage.backward_s for stage in stages)

    def _hop_s(self, work: Workload, s: int) -> float:
        """Delay plus transfer into stage s: half of there and back, from wherever it receives."""
        ways = [0.0]
        for hops in (work.forward, work.backward):
            for hop in hops:
                if s in (hop.source, hop.target) and s == max(hop.source, hop.target):
                    way = work.routes.get((hop.source, hop.target))
                    ways.append(way.latency_s + 8.0 * hop.n_bytes / way.rate_bps if way is not None else 0.0)
        return max(ways)

    def surrogate(self, candidate: Candidate) -> float:
        """Seconds, for ranking only: lower bound, optimizer and commit; inf when infeasible."""
        try:
            caps = self.caps(candidate)
        except Infeasible:
            return float("inf")
        depths = [Depth(self.n_micro)] * len(candidate.devices)
        work = self.workload(candidate, depths, self.specs(candidate))
        away = max(s.commit_latency_s for s in work.stages)
        in_flight = list(accumulate(caps, min))
        return lower_bound(work, in_flight=in_flight).step_s + 2 * away + max(s.apply_s for s in work.stages)

    def score(self, candidate: Candidate) -> Scored | None:
        """The candidate's step under its best allowed schedule; None when it does not fit."""
        if candidate not in self._scores:
            self._scores[candidate] = self.scheduled(candidate, self.specs(candidate))
        return self._scores[candidate]

    def scheduled(self, candidate: Candidate, specs: tuple[LinkSpec, ...]) -> Scored | None:
        """The candidate under these specs with the schedule that suits it; None if it does not fit."""
        try:
            caps = self.caps(candidate)
        except Infeasible:
            return None
        n = self.n_micro
        options: list[Scored] = []
        whole = (Depth(n),) * len(caps)
        work = self.workload(candidate, whole, specs)
        if self.schedule is not ScheduleName.GPIPE:
            depths = [tuple(map(Depth, warmups)) for warmups in self.warmups(work, caps)]
            options = [self._ordered(candidate, work, each, specs) for each in depths]
        if self.schedule in (None, ScheduleName.GPIPE) and min(caps) >= n:
            scored = self._ordered(candidate, work, whole, specs)
            options.append(replace(scored, schedule=ScheduleName.GPIPE))
        # 1F1B holds fewer micro-batches: GPipe must be clearly faster to be worth its memory.
        return min(
            options,
            key=lambda s: s.step_s * (1.01 if s.schedule is ScheduleName.GPIPE else 1.0),
            default=None,
        )

    def _ordered(
        self, candidate: Candidate, work: Workload, depths: tuple[Depth, ...], specs: tuple[LinkSpec, ...]
    ) -> Scored:
        """``work`` in the order of these depths."""
        step_s = step_seconds(work.with_actions([_actions(self.n_micro, depth) for depth in depths]))
        defers = any(depth.held for depth in depths)
        name = ScheduleName.ZERO_BUBBLE if defers else ScheduleName.ONE_F_ONE_B
        return Scored(candidate, name, depths, step_s, specs)

    def deferring(self, scored: Scored) -> Scored:
        """The same with weight gradients deferred, where that gains enough or was asked for; with as few
        micro-batches held as come within 1 % of the best.

        The search does without: it would take twice as long, and deferring shortens what fills and empties
        the pipeline, in which cuts that are about equally good differ little.
        """
        if self.schedule not in (None, ScheduleName.ZERO_BUBBLE) or scored.schedule is ScheduleName.GPIPE:
            return scored
        if scored.candidate.several:
            return scored  # what each piece may hold is a question of its own
        candidate, specs = scored.candidate, scored.specs
        work = self.workload(candidate, scored.depths, specs)
        least = scored.depths[0].warmup + 1
        options = []
        for most in dict.fromkeys((least, least + least // 2, self.n_micro)):
            depths = self._held(scored, work, most)
            if any(depth.held for depth in depths):
                options.append(self._ordered(candidate, work, depths, specs))
        if not options:
            return scored
        enough = 1.01 * min(option.step_s for option in options)
        found = next(option for option in options if option.step_s <= enough)
        asked = self.schedule is ScheduleName.ZERO_BUBBLE
        return found if asked or found.step_s <= TUNED.deferring_gains * scored.step_s else scored

    def _held(self, scored: Scored, work: Workload, most: int) -> tuple[Depth, ...]:
        """Return how many micro-batches each stage holds when it defers what no other stage waits for:
        ``most``, fewer where memory is short, 0 where that leaves no room, or where it costs more than it can
        gain: the other stages' backwards, of their (S - 1)(F + B + W) in which a stage waits."""
        awaited = {hop.source for hop in work.backward}
        gain_s = sum(load.backward_s for load in work.stages)
        if self.schedule is ScheduleName.ZERO_BUBBLE:
            gain_s = float("inf")
        found = []
        bounds = scored.candidate.bounds(self.n_ops)
        for s, (depth, load, (a, b)) in enumerate(zip(scored.depths, work.stages, bounds, strict=True)):
            memory, limit = memory_on(self, load.device)
            cap = memory.in_flight_cap(a, b, limit, defer=True) if self.inside[load.device] is None else 0
            held = min(cap, max(most, depth.warmup + 1))
            defers = s in awaited and held > depth.warmup
            worth = 0.0 < self.n_micro * load.apart_s < gain_s - load.backward_s
            found.append(Depth(depth.warmup, held if defers and worth else 0))
        return tuple(found)

    def timeline(self, scored: Scored, keep_spans: bool = True) -> tuple[Workload, Timeline]:
        """The full timeline of a scored candidate."""
        work = self.workload(scored.candidate, scored.depths, scored.specs)
        return work, simulate(work, keep_spans)


def memory_on(problem: Problem, device: int) -> tuple[MemoryModel, float]:
    """Return the memory model of each process of a device, and the most bytes that it may have."""
    inside, kept = problem.inside[device], problem.kept_by(problem.fleet.devices[device])
    limit = float(problem.limits[device] / problem.times[device])
    return (problem.memory_in(kept) if inside is None else inside.memory), limit


def apply_s_on(problem: Problem, device: int, pieces: tuple[tuple[int, int], ...]) -> float:
    """Return the seconds of the optimizer on a device that has these intervals of the ops."""
    if (device, pieces) not in problem.applies:
        held = Together(memory_on(problem, device)[0], pieces)
        away_s = state_away_s(problem, device, held)
        took_s = apply_seconds(*held.step_work(), problem.fleet.devices[device], away_s)
        problem.applies[device, pieces] = took_s
    return problem.applies[device, pieces]


def caps_on(problem: Problem, device: int, pieces: tuple[tuple[int, int], ...], ends: bool) -> list[int]:
    """Return the most micro-batches in flight by piece of one device; ``ends``: see ``Together.caps``."""
    memory, limit = memory_on(problem, device)
    key = (device, pieces), ends, limit
    if key not in problem.in_flight_caps:
        if len(pieces) == 1:
            problem.in_flight_caps[key] = [memory.in_flight_cap(*pieces[0], limit)]
        else:
            problem.in_flight_caps[key] = Together(memory, pieces).caps(limit, ends=ends)
    return problem.in_flight_caps[key]


def kept_as(problem: Problem, keeping: Keeping, keepings: Mapping[str, Keeping] | None = None) -> Problem:
    """Return the same with all that is needed again kept in this form, by some workers in another."""
    found = copy(problem)
    found.keeping, found.keepings, found._scores, found._specs = keeping, keepings or {}, {}, {}
    found.memory = problem.memory_in(keeping)
    if keeping != problem.keeping:
        found.insides = Insides(problem.dag, problem.training, keeping, found.memory, problem.divisions)
    found._price()
    return found


def divided_as(problem: Problem, kinds: Mapping[str, Inside]) -> Problem:
    """Return the same where these workers divide their stages by these kinds of inside plans."""
    found = copy(problem)
    found.kinds, found._scores, found._specs = kinds, {}, {}
    found._price()
    return found


def state_away_s(problem: Problem, device: int, held: Together) -> float:
    """Return the seconds in which optimizer state comes from elsewhere for a step, and goes back."""
    at = problem.fleet.devices[device]
    there, back = away_rates(at, problem.kept_by(at).state_on)
    away = float(held.stepped()[3])
    return away / there + away / back


def short_of_memory(problem: Problem, scored: Scored) -> bool:
    """Return whether a stage would have more micro-batches in flight if memory allowed."""
    caps = list(zip(problem.caps(scored.candidate), scored.depths, strict=True))
    if scored.candidate.several:
        caps.pop()  # the last piece of all never needs more than one, and has no more
    return any(cap < problem.n_micro and depth.in_flight >= cap for cap, depth in caps)


def _non_rising(wanted: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """The largest depths within ``wanted`` and caps - 1 that never rise."""
    return tuple(accumulate((min(want, cap - 1) for want, cap in zip(wanted, caps, strict=True)), min))


@lru_cache(maxsize=256)
def _actions(n_micro: int, depth: Depth) -> tuple[Action, ...]:
    """Searches ask for the same few lists thousands of times; GPipe is warm-up ``n_micro``."""
    return one_f_one_b(n_micro, *depth)
