"""Choose the few workers of a large fleet among which a plan is searched.

The full search looks at pairs of devices and at orders of them, so its time grows faster than the fleet.
Here pipelines are grown greedily from several seeds, each by the device that makes a rough guess of the step
the smallest, and the chosen are the members of the best of them, with some to spare. A guess needs one row of
the fleet's links for every device added: fast links keep a site's workers together without a search for
groups. ``candidates`` goes before that, where a fleet is so large that no table of its links can be built.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from coordinator.planning.ratios import assumed_ratio

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.problem import Problem

    Floats = NDArray[np.float64]

SEEDS = 16  # pipelines grown
FASTEST = 4  # devices that are always chosen, for what they do alone, ...
LARGEST = 2  # ... and with the most memory, for what must stay together
SPARE = 1.5  # devices taken of a grown pipeline, over those that it is best with
TYPICAL_CUT = 0.25  # quantile of the bytes at all cuts: the search prefers cheap ones
SHORT = 10.0  # cost of lacking all the memory, in steps
ROOM = 1.25  # memory of the chosen over what the model needs: cuts never fill every device


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
        return np.array([float(device.memory_limit_bytes) for device in self.fleet.devices])

    @cached_property
    def needed_bytes(self) -> float:
        """Bytes of the model with one micro-batch in flight."""
        return self.job.memory.bytes(0, self.job.n_ops, 1)

    def workers(self, most: int) -> list[str]:
        """Return at most ``most`` workers in join order; more where only more hold the model."""
        order = self._ranked(most)
        held = np.cumsum(self.limits[order])
        while most < len(order) and held[most - 1] < ROOM * self.needed_bytes:
            most *= 2
        if most > len(order):
            return [device.worker for device in self.fleet.devices]
        return [self.fleet.devices[at].worker for at in sorted(order[:most])]

    def _ranked(self, most: int) -> list[int]:
        """All devices, those first that pipelines of at most ``most`` are best made of."""
        by_speed = np.lexsort((np.arange(len(self.seconds)), self.seconds))
        by_memory = np.lexsort((self.seconds, -self.limits))
        grown = sorted((self._grown(seed, most) for seed in self._seeds()), key=lambda g: (g[0], g[2]))
        chosen = dict.fromkeys([*by_speed[:FASTEST].tolist(), *by_memory[:LARGEST].tolist()])
        for _, best, members in grown:
            chosen.update(dict.fromkeys(members[: int(SPARE * best) + 1]))
        for _, _, members in grown:
            chosen.update(dict.fromkeys(members))
        chosen.update(dict.fromkeys(by_speed.tolist()))
        return list(chosen)

    def _seeds(self) -> list[int]:
        """The fastest device of each of the places whose fastest members compute most together."""
        members: dict[str, list[int]] = defaultdict(list)
        for at in np.lexsort((np.arange(len(self.seconds)), self.seconds)).tolist():
            members[self._places[at]].append(at)
        few = max(2, round(self.needed_bytes / max(float(np.median(self.limits)), 1.0)))
        power = {place: float((1.0 / self.seconds[found[:few]]).sum()) for place, found in members.items()}
        fastest = [members[place][0] for place in sorted(power, key=lambda p: (-power[p], members[p][0]))]
        return fastest[:SEEDS]

    @cached_property
    def _places(self) -> list[str]:
        """Each device's declared site, else the largest shared uplink that it is behind, else itself."""
        behind: dict[str, tuple[int, str]] = {}
        for uplink in self.fleet.uplinks:
            if len(uplink.members) > 1:
                for worker in uplink.members:
                    behind[worker] = max(behind.get(worker, (0, "")), (len(uplink.members), uplink.name))
        return [
            f"site {d.site}" if d.site else f"uplink {behind[d.worker][1]}" if d.worker in behind else d.worker
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
            float(np.quantile(live[inner], TYPICAL_CUT)) * bits
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

    def _grown(self, seed: int, most: int) -> tuple[float, int, list[int]]:
        """Grow a pipeline: its least guessed step, the number of members it has then, and all members."""
        members, left = [seed], np.ones(len(self.seconds), dtype=bool)
        left[seed] = False
        occupied, toll = self._links(seed)
        total, rate, tolls, slowest = self.seconds[seed], 1.0 / self.seconds[seed], 0.0, 0.0
        held = self.limits[seed]
        best, size = float(self._guess(total, rate, tolls, slowest, held)), 1
        while len(members) < min(most, len(self.seconds)):
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
            if guess[at] < best * (1 - 1e-9):
                best, size = float(guess[at]), k
            near, there = self._links(at)
            occupied, toll = np.minimum(occupied, near), np.minimum(toll, there)
        return best, size, members

    def _guess(self, alone_s: Floats, rate: Floats, tolls: Floats, slowest: Floats, held: Floats) -> Floats:
        """Seconds of a step if the work could be split at will: fill and M - 1 periods, or one fill for as
        many micro-batches as memory keeps in flight.

        ``alone_s``: mean seconds of the model on one member; ``rate``: micro-batches a second of all together;
        ``tolls``: seconds over all links and back; ``slowest``: of a link; ``held``: bytes of memory.
        """
        n_micro = self.job.n_micro
        each = max(self.job.memory.per_micro_bytes(0, self.job.n_ops), 1.0)
        in_flight = np.clip((held - self.job.memory.state_bytes(0, self.job.n_ops)) / each, 1.0, n_micro)
        fill = alone_s + tolls
        step = fill + (n_micro - 1) * np.maximum(np.maximum(1.0 / rate, slowest), fill / in_flight)
        lacking = np.maximum(0.0, 1.0 - held / (ROOM * self.needed_bytes))
        found: Floats = step * (1.0 + SHORT * lacking)
        return found
