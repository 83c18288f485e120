"""Steps of peers estimated in a millisecond, to rank the ways in which machines may be grouped to them.

    step = max over peers of (share x slot + fill) + what of an exchange is not hidden / steps between two

A peer's slot is that of a pipeline in which every machine has a share by its speed, or of its slowest link.
An exchange is taken to pass between one machine of each peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coordinator.planning import TUNED
from coordinator.planning.peers.exchange_codecs import with_codec
from coordinator.planning.peers.gossip_plans import (
    hidden_steps,
    round_of,
    site_numbers,
    through_gateways,
    whole_models,
)
from coordinator.planning.peers.partitions import Rooms, moved, peer_groups
from coordinator.planning.peers.transfers import shares_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from atoll.exchange import Exchange
    from coordinator.planning.peers.partitions import Parts
    from coordinator.planning.problem import Problem

    Floats = NDArray[np.float64]


class Sharing(NamedTuple):
    """Peers that share out a step, where their shares end, and the predicted seconds of a step."""

    step_s: float
    parts: Sequence[tuple[str, ...]]  # workers of each peer
    ends: Sequence[int]
    cuts: Sequence[str] = ()  # given ones, by peer; "": none


def _step_s(sharing: Sharing) -> float:
    return sharing.step_s


class Pace(NamedTuple):
    """Machines of a peer that do not hold it up, and the seconds of its micro-batches."""

    slot_s: float  # between two
    fill_s: float  # to fill and empty the pipeline
    members: tuple[int, ...]


@dataclass(frozen=True)
class Sketches:
    """Ways to group the machines of ``problem``, which is of one micro-batch and the whole model."""

    problem: Problem
    exchange: Exchange
    n_micro: int
    seed: int
    rooms: Rooms
    wholes: dict[tuple[str, ...], Pace] = field(default_factory=dict)  # of machines, whatever the exchange
    _paces: dict[tuple[str, ...], Pace] = field(default_factory=dict)
    _rounds: dict[tuple[int, ...], float] = field(default_factory=dict)

    @cached_property
    def _micro_s(self) -> list[float]:
        """Seconds of a micro-batch by device, through the whole model."""
        return [float(seconds) for seconds in self.problem.compute[:, -1]]

    @cached_property
    def _cut_bytes(self) -> float:
        """Bytes of a boundary, of the cheap ones that a search prefers."""
        live = self.problem.traffic.live_bytes[self.problem.positions[1:-1]]
        return float(np.quantile(live, TUNED.typical_cut)) if len(live) else 0.0

    @cached_property
    def _rate(self) -> list[list[float]]:
        """[devices][devices] bits/s of the slower direction, 0 from a device to itself."""
        rate = self.problem.fleet.effective_bps.copy()
        np.fill_diagonal(rate, 0.0)
        found: list[list[float]] = np.minimum(rate, rate.T).tolist()
        return found

    @cached_property
    def _latency(self) -> list[list[float]]:
        """[devices][devices] seconds."""
        found: list[list[float]] = self.problem.fleet.latency_s.tolist()
        return found

    @cached_property
    def _sites(self) -> tuple[int, ...]:
        """Site of each device."""
        return site_numbers(self.problem.fleet)

    @cached_property
    def _shared_lines(self) -> bool:
        """Whether several machines leave by one line."""
        return any(len(uplink.members) > 1 for uplink in self.problem.fleet.uplinks)

    def ranked(self, counts: Sequence[int], also: Iterable[Parts] = ()) -> list[Sharing]:
        """Return ways to make as many peers as one of ``counts``, some of several machines, and what comes of
        moving machines between the peers of the best while that shortens the step; best first. ``also``:
        further ways, of those that may hold the model."""
        others = (parts for parts in also if all(map(self.rooms.hold, parts)))
        ways = [*peer_groups(self.problem.fleet, self.rooms, counts), *others]
        found = {parts: self.of(parts) for parts in dict.fromkeys(map(self._sorted, ways))}
        left = TUNED.group_sketches
        for best in sorted(found.values(), key=_step_s)[: TUNED.group_starts]:
            while left > 0:
                near = dict.fromkeys(map(self._sorted, moved(tuple(best.parts), self.rooms)))
                new = [parts for parts in near if parts not in found][:left]
                found |= {parts: self.of(parts) for parts in new}
                left -= len(new)
                better = min((found[parts] for parts in near if parts in found), key=_step_s, default=best)
                if better.step_s >= best.step_s:
                    break
                best = better
        several = (one for one in found.values() if any(len(part) > 1 for part in one.parts))
        return sorted(several, key=_step_s)

    def of(self, parts: Parts) -> Sharing:
        """Return the sketch of these peers."""
        paces = [self._pace(part) for part in parts]
        shares = shares_of(self.n_micro, [1.0 / pace.slot_s for pace in paces])
        compute_s = max(n * pace.slot_s + pace.fill_s for n, pace in zip(shares, paces, strict=True))
        late_s = max(0.0, self._joint_s(paces, compute_s) - hidden_steps(self.exchange) * compute_s)
        return Sharing(compute_s + late_s / self.exchange.every, parts, list(accumulate(shares)))

    def _joint_s(self, paces: Sequence[Pace], compute_s: float) -> float:
        """Seconds of an exchange by the first machine of each peer: of the model where several share a line,
        else of what each machine of the smallest peer has of it."""
        ends = tuple(pace.members[0] for pace in paces)
        fleet = self.problem.fleet
        abreast = 1 if self._shared_lines else min(len(pace.members) for pace in paces)
        key = (abreast, *ends)
        if key not in self._rounds:
            n_bytes = self.problem.memory.trained(0, self.problem.n_ops)[0] / abreast
            whole = whole_models(fleet, ends, n_bytes)
            held = through_gateways(fleet, whole, self.exchange, self._sites)
            coded = with_codec(fleet, held, self.exchange, compute_s)
            self._rounds[key] = round_of(fleet, held, coded, self.seed)[1]
        return self._rounds[key]

    def _sorted(self, parts: Parts) -> Parts:
        """The same with peers and their machines in the fleet's order."""
        index = self.problem.fleet.index
        each = [tuple(sorted(part, key=index.__getitem__)) for part in parts]
        return tuple(sorted(each, key=lambda part: index[part[0]]))

    def _pace(self, part: tuple[str, ...]) -> Pace:
        """Without machines, one after the other, with which a micro-batch takes longer."""
        if part not in self._paces:
            best = part
            while len(best) > 1:
                fewer = (tuple(other for other in best if other != one) for one in best)
                found = min(filter(self.rooms.hold, fewer), key=self._whole, default=best)
                if self._whole(found) >= self._whole(best):
                    break
                best = found
            self._paces[part] = self._whole(best)
        return self._paces[part]

    def _whole(self, part: tuple[str, ...]) -> Pace:
        """The pace with all of them."""
        if part not in self.wholes:  # neighbours of a way have most of their parts in common
            self.wholes[part] = self._whole_anew(part)
        return self.wholes[part]

    def _whole_anew(self, part: tuple[str, ...]) -> Pace:
        problem = self.problem
        members = tuple(problem.fleet.index[worker] for worker in part)
        slot_s = 1.0 / sum(1.0 / self._micro_s[at] for at in members)
        if len(members) == 1:
            return Pace(slot_s, 0.0, members)
        # Lists, as most parts are of a few machines, and there are a hundred thousand.
        best = min(max(map(self._rate[at].__getitem__, members)) for at in members)
        slot_s = max(slot_s, 8.0 * self._cut_bytes / best)
        delay_s = max(max(map(self._latency[at].__getitem__, members)) for at in members)
        return Pace(slot_s, (len(part) - 1) * (slot_s + 2.0 * delay_s), members)
