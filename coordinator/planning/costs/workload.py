"""A plan as the timeline sees it: seconds on each stage, bytes on each wire.

``Workload`` is the border between the model (DAG, costs, cut) and time (timeline, lower bound);
it knows neither ops nor tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from atoll.microbatch import Action, Work
from coordinator.planning.costs.quota import WHOLE, Quota

if TYPE_CHECKING:
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.costs.traffic import Cut, Hop, TiedExchange


@dataclass(frozen=True, slots=True)
class Wire:
    """Costs of a transfer beyond its bytes, and the step's fixed costs.

    Defaults are those of this project's transport on a CPU host; bulk rates already are payload.
    """

    per_message_s: float = 3e-4  # framing, copy and dispatch of one tensor, on the link
    header_bytes: int = 96  # frame header and key
    commit_s: float = 1.5e-3  # journal and dispatch at the coordinator
    piece_bytes: float = 16 << 10  # on links that other pairs use too flows take turns, a chunk each ...
    pieces: int = 4  # ... or this part of a bundle: enough for a search

    def bits_of(self, n_bytes: int, messages: int) -> float:
        """Return the bits that messages of ``n_bytes`` together occupy on a link."""
        return 8.0 * (n_bytes + messages * self.header_bytes)

    def pieces_of(self, n_bytes: float) -> int:
        """In how many turns a bundle passes a link that it shares."""
        return max(1, min(self.pieces, ceil(n_bytes / self.piece_bytes)))


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Load of a stage on one device; seconds of one micro-batch."""

    device: int  # in Fleet.devices
    forward_s: float
    backward_s: float
    apply_s: float  # optimizer step
    commit_latency_s: float  # one way to the coordinator
    actions: tuple[Action, ...]
    codec_s: float = 0.0  # of forward_s + backward_s: encoding and decoding
    action_s: float = 0.0  # around each forward or backward: waking, queues, messages' own work
    weights_s: float = 0.0  # of backward_s: weight gradients that can come later
    apart_s: float = 0.0  # more that a backward in two parts takes
    pieces: int = 1  # in which they can be taken: ops with such weights
    bytes_s: float = 0.0  # after each, when its messages have left: their bytes, handled as they travel
    quota: Quota = WHOLE

    @property
    def defers(self) -> bool:
        """Backwards come in two parts."""
        return bool(self.actions) and self.actions[-1].work is Work.WEIGHT

    @property
    def input_s(self) -> float:
        """The part of a backward that other stages wait for: all of it, where it is whole."""
        return self.backward_s - (self.weights_s if self.defers else 0.0)


@dataclass(frozen=True, slots=True)
class Route:
    """The way between two stages: rates in order, the last one the pair's own."""

    resources: tuple[tuple[str, float], ...]  # (name, payload bit/s)
    latency_s: float

    @property
    def rate_bps(self) -> float:
        return min(rate for _, rate in self.resources)


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's work: ``n_micro`` micro-batches through ``stages``."""

    stages: tuple[StageLoad, ...]
    n_micro: int
    forward: tuple[Hop, ...]
    backward: tuple[Hop, ...]
    tied: tuple[TiedExchange, ...]
    routes: dict[tuple[int, int], Route]  # by stage pair; every pair that sends, on two devices
    wire: Wire
    turns: tuple[tuple[int, ...], ...] = ()  # of each device: whose turn it is; empty: as warm-ups say

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, ascending: several where it has several pieces of the pipeline."""
        found: dict[int, list[int]] = {}
        for at, stage in enumerate(self.stages):
            found.setdefault(stage.device, []).append(at)
        return tuple(map(tuple, found.values()))

    @property
    def several(self) -> bool:
        """Whether a device has several stages."""
        return len({stage.device for stage in self.stages}) < len(self.stages)

    def with_actions(self, actions: Sequence[tuple[Action, ...]]) -> Workload:
        """The same work in another order."""
        stages = tuple(replace(stage, actions=a) for stage, a in zip(self.stages, actions, strict=True))
        return replace(self, stages=stages, turns=())


def routes_of(fleet: Fleet, devices: Sequence[int], cut: Cut) -> dict[tuple[int, int], Route]:
    """The route of every stage pair between which ``cut`` sends anything."""
    pairs = {(hop.source, hop.target) for hop in (*cut.forward, *cut.backward)}
    for tied in cut.tied:
        pairs.update(tied.ways)
    apart = sorted((s, t) for s, t in pairs if devices[s] != devices[t])
    return {(s, t): route(fleet, devices[s], devices[t]) for s, t in apart}


def route(fleet: Fleet, source: int, target: int) -> Route:
    """The way from one device to another."""
    return Route(fleet.path(source, target), float(fleet.latency_s[source, target]))
