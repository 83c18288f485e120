"""Choose the few workers of a large fleet among which a plan is searched.

The full search looks at pairs of devices and at orders of them, so its time grows faster than the fleet.
Here pipelines are grown greedily from several seeds, each by the device that makes a rough guess of the step
the smallest, and the chosen are the members of the best of them, with some to spare. A guess needs one row of
the fleet's links for every device added: fast links keep a site's workers together without a search for
groups. ``candidates`` goes before that, where a fleet is so large that no table of its links can be built.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from coordinator.planning import TUNED
from coordinator.planning.codecs.ratios import assumed_ratio
from coordinator.planning.costs.op_seconds import DEFAULT_GFLOPS
from coordinator.planning.search.clusters import shortest_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from coordinator.planning.costs.fleet import Device, Fleet
    from coordinator.planning.problem import Problem

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Selection:
    """Chosen workers in join order, and pipelines of some of them from which the search may begin."""

    workers: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]  # places in ``workers``


@dataclass(frozen=True, slots=True)
class _Grown:
    """A pipeline as it was grown: ``members`` up to the most that were asked for, best with ``size``."""

    step_s: float
    size: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Preselection:
    """A fleet seen with one job: ``job`` has the job's costs, on any of the fleet's devices."""

    fleet: Fleet
    job: Problem

    @cached_property
    def seconds(self) -> Floats:
        """[devices] seconds of the whole model for one micro-batch on each device alone."""
        return np.maximum(self.job.table.totals(self.fleet.devices), 1e-12)

    @cached_property
    def limits(self) -> Floats:
        """[devices] bytes."""
        return np.array([device.model_limit_bytes for device in self.fleet.devices])

    @cached_property
    def _room(self) -> float:
        """Bytes of memory with which the model fits in all likelihood, one micro-batch in flight."""
        return TUNED.memory_room * self.job.memory.bytes(0, self.job.n_ops, 1)

    def choose(self, most: int) -> Selection:
        """Return at most ``most`` workers; more where more make a better pipeline: memory may be short."""
        most = max(most, TUNED.fastest + TUNED.largest)
        grown = sorted(
            (self._grown(seed, most) for seed in self._seeds()), key=lambda g: (g.step_s, g.members)
        )
        ranked = self._ranked(grown)
        most = max(most, int(TUNED.spare_devices * grown[0].size) + 1)
        chosen = sorted(ranked[:most])
        place = {device: at for at, device in enumerate(chosen)}
        orders = [self._order(g.members[: g.size]) for g in grown[: TUNED.orders]]
        return Selection(
            tuple(self.fleet.devices[at].worker for at in chosen),
            tuple(tuple(place[d] for d in order) for order in orders if place.keys() >= set(order)),
        )

    def _ranked(self, grown: Sequence[_Grown]) -> list[int]:
        """All devices, those first of which the best pipelines were grown."""
        by_speed = np.lexsort((np.arange(len(self.seconds)), self.seconds)).tolist()
        by_memory = np.lexsort((self.seconds, -self.limits)).tolist()
        owner = [self.fleet.index[self.job.pinned]] if self.job.pinned else []
        chosen = dict.fromkeys([*owner, *by_speed[: TUNED.fastest], *by_memory[: TUNED.largest]])
        for found in grown:
            chosen.update(dict.fromkeys(found.members[: int(TUNED.spare_devices * found.size) + 1]))
        for found in grown:
            chosen.update(dict.fromkeys(found.members))
        return list(chosen | dict.fromkeys(by_speed))

    def _order(self, members: Sequence[int]) -> tuple[int, ...]:
        """The members in the order in which the links between neighbours take the least."""
        cost = np.stack([self._links(a)[1][list(members)] for a in members])
        return tuple(members[at] for at in shortest_path(cost))

    def _seeds(self) -> list[int]:
        """The fastest device of each of the places whose fastest members compute most together."""
        members: dict[str, list[int]] = defaultdict(list)
        for at in np.lexsort((np.arange(len(self.seconds)), self.seconds)).tolist():
            members[self._places[at]].append(at)
        few = max(2, round(self._room / max(float(np.median(self.limits)), 1.0)))
        power = {place: float((1.0 / self.seconds[found[:few]]).sum()) for place, found in members.items()}
        fastest = [members[place][0] for place in sorted(power, key=lambda p: (-power[p], members[p][0]))]
        return fastest[: TUNED.seeds]

    @cached_property
    def _places(self) -> list[str]:
        """Each device's declared site, else the largest shared uplink that it is behind, else itself."""
        behind: dict[str, tuple[int, str]] = {}
        for uplink in self.fleet.uplinks:
            if len(uplink.members) > 1:
                for worker in uplink.members:
                    behind[worker] = max(behind.get(worker, (0, "")), (len(uplink.members), uplink.name))
        return [
            f"site {d.site}"
            if d.site
            else f"uplink {behind[d.worker][1]}"
            if d.worker in behind
            else d.worker
            for d in self.fleet.devices
        ]

    @cached_property
    def _cut_bits(self) -> tuple[float, float]:
        """Bits that a link carries a micro-batch, ahead and back."""
        inner = self.job.positions[1:-1]
        if not len(inner):
            return 0.0, 0.0
        bits = 8.0 / assumed_ratio(self.job.compression)
        traffic = self.job.traffic
        ahead, back = (
            float(np.quantile(live[inner], TUNED.typical_cut)) * bits
            for live in (traffic.live_bytes, traffic.live_grad_bytes)
        )
        return ahead, back

    def _links(self, device: int) -> tuple[Floats, Floats]:
        """[devices] seconds that a micro-batch occupies the link between ``device`` and each other one, and
        seconds there and back."""
        ahead, back = self._cut_bits
        rates, latency = self.fleet.effective_bps, self.fleet.latency_s
        rate = np.minimum(rates[device], rates[:, device])
        each_s = self.job.wire.per_message_s
        occupied = max(ahead, back) / rate + each_s
        there_and_back = (ahead + back) / rate + latency[device] + latency[:, device] + 2 * each_s
        return occupied, there_and_back

    def _grown(self, seed: int, most: int) -> _Grown:
        """Grow a pipeline from ``seed`` to ``most`` members, and on while more make it better."""
        members, left = [seed], np.ones(len(self.seconds), dtype=bool)
        left[seed] = False
        occupied, toll = self._links(seed)
        total, rate, tolls, slowest = self.seconds[seed], 1.0 / self.seconds[seed], 0.0, 0.0
        held = self.limits[seed]
        best, size = np.inf, len(self.seconds)
        if held >= self._room:
            best, size = float(self._guess(total, rate, tolls, slowest, held)), 1
        while len(members) < len(self.seconds) and (
            held < self._room or len(members) < max(most, min(2 * size, len(self.seconds)))
        ):
            k = len(members) + 1
            guess = self._guess(
                (total + self.seconds) / k,
                rate + 1.0 / self.seconds,
                tolls + toll,
                np.maximum(slowest, occupied),
                held + self.limits,
            )
            at = int(np.where(left, guess, np.inf).argmin())
            members.append(at)
            left[at] = False
            total, rate, tolls = total + self.seconds[at], rate + 1.0 / self.seconds[at], tolls + toll[at]
            slowest, held = max(slowest, float(occupied[at])), held + self.limits[at]
            if held >= self._room and guess[at] < best * (1 - 1e-9):
                best, size = float(guess[at]), k
            near, there = self._links(at)
            occupied, toll = np.minimum(occupied, near), np.minimum(toll, there)
        return _Grown(best, size, tuple(members))

    def _guess(
        self,
        alone_s: Floats,
        rate: Floats,
        tolls: Floats | float,
        slowest: Floats | float,
        held: Floats,
    ) -> Floats:
        """Seconds of a step if the work could be split at will: fill and M - 1 periods, or one fill for as
        many micro-batches as memory keeps in flight.

        ``alone_s``: mean seconds of the model on one member; ``rate``: micro-batches a second of all
        together; ``tolls``: seconds over all links and back; ``slowest``: of one link; ``held``: bytes.
        """
        n_micro = self.job.n_micro
        each = max(self.job.memory.per_micro_bytes(0, self.job.n_ops), 1.0)
        in_flight = np.clip((held - self.job.memory.state_bytes(0, self.job.n_ops)) / each, 1.0, n_micro)
        fill = alone_s + tolls
        step = fill + (n_micro - 1) * np.maximum(np.maximum(1.0 / rate, slowest), fill / in_flight)
        lacking = np.maximum(0.0, 1.0 - held / self._room)
        found: Floats = step * (1.0 + TUNED.short_cost_steps * lacking)
        return found


def candidates(
    devices: Sequence[Device],
    most: int,
    rates_bps: Mapping[str, float | None],
    place_of: Mapping[str, str],
) -> list[str]:
    """Return the workers, at most ``most``, in join order, that are worth timing, probing and planning with.

    Nothing of any pair is needed. ``rates_bps``: the best rate that a worker has shown; absent or None: not
    measured, taken as usual. ``place_of``: the site or address of each. Half are the best by
    themselves, half come as whole places, the most capable first; the two largest are always there.
    """
    if len(devices) <= most:
        return [device.worker for device in devices]
    worth = _worth(devices, rates_bps)
    by_worth = np.lexsort((np.arange(len(devices)), -worth)).tolist()
    by_memory = sorted(by_worth, key=lambda at: -devices[at].memory_limit_bytes)  # stable
    chosen = dict.fromkeys(by_memory[: min(TUNED.largest, most)])
    chosen.update(dict.fromkeys(by_worth[: most // 2]))
    members: dict[str, list[int]] = defaultdict(list)
    few = max(2, most // 8)  # of one place
    for at in by_worth:
        place = place_of.get(devices[at].worker, "")
        if place and len(members[place]) < few:
            members[place].append(at)
    power = {place: float(worth[found].sum()) for place, found in members.items() if len(found) > 1}
    for place in sorted(power, key=lambda name: (-power[name], name)):
        chosen.update(dict.fromkeys(members[place]))
    chosen.update(dict.fromkeys(by_worth))
    return [devices[at].worker for at in sorted(list(chosen)[:most])]


def _worth(devices: Sequence[Device], rates_bps: Mapping[str, float | None]) -> Floats:
    """[devices] GFLOP/s, less by as much as a worker's rate is below the usual one."""
    speed = np.array([d.gflops.get("", DEFAULT_GFLOPS) / d.scale for d in devices])
    shown = np.array([rates_bps.get(d.worker) or np.nan for d in devices], dtype=np.float64)
    usual = float(np.median(shown[~np.isnan(shown)])) if not np.isnan(shown).all() else 1.0
    worth: Floats = speed * np.minimum(1.0, np.where(np.isnan(shown), usual, shown) / usual)
    return worth
