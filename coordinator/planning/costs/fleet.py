"""The machines a plan may use: devices in join order, the links between them, shared uplinks.

A Fleet is a value: the live one is built from probes, one described in a file by ``fleet_file.read_fleet``.
A transfer from a to b passes, first in first out, every uplink that has a but not b (upwards), the relay,
if one joins them, and every uplink that has b but not a (downwards). Last comes the pair's own rate.
It arrives one latency later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from atoll.device_class import DeviceClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Pair = tuple[str, str]  # (source, target)


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Rate and delay of one direction between two workers."""

    bandwidth_bps: float  # payload bits per second, > 0
    latency_s: float  # one way


@dataclass(frozen=True, slots=True)
class RelayLine:
    """A rate that all pairs which pass one relay share, both directions together."""

    name: str
    pairs: frozenset[Pair]
    bps: float


@dataclass(frozen=True, slots=True)
class Uplink:
    """A rate that a set of workers share towards everyone outside the set, each direction its own.

    One member: a host's own uplink. Several: a home router, a campus, a cluster's gateway.
    """

    name: str
    members: tuple[str, ...]
    up_bps: float
    down_bps: float


UNKNOWN = LinkEstimate(bandwidth_bps=20e6, latency_s=0.03)  # a home uplink, until probed
HOPED = LinkEstimate(bandwidth_bps=1e9, latency_s=0.001)  # where one worker has nobody to compare with
TCP_SHARE = 0.95  # payload share of a configured rate (decentralized.md 0.1)
LOSS_HOURS = 4.0  # of a worker of which nothing is known, until it is lost: a volunteer's evening


@dataclass(frozen=True, slots=True)
class Mesh:
    """Processes of one worker that compute a stage together, each on a device of its own.

    Of an all-reduce of theirs: seconds, and the bytes a second that each sends beyond.
    """

    size: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Device:
    """A worker as the planner sees it.

    Seconds of an op: ``timings[signature]`` where it was probed, else the analytic fallback of
    ``op_seconds`` from the rates; both times ``scale``, what training measured over what was predicted.
    """

    worker: str
    memory_limit_bytes: int
    name: str = ""
    site: str = ""
    gflops: Mapping[str, float] = field(default_factory=dict)  # by op class; "" is the default
    memory_gbps: float = 10.0  # GB/s
    op_overhead_s: float = 20e-6
    timings: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scale: float = 1.0
    codec_scale: float = 1.0  # the same of its codecs
    cores: float = 0.0  # that it may use at once; 0: not told, taken for enough
    quota_period_s: float = 0.0  # after which a quota of CPU time counts anew; 0: none
    handling_scale: float = 1.0  # the same of what messages take (``message_costs``)
    coordinator: LinkEstimate = UNKNOWN
    # Codec -> dense bytes/s of (encoding, decoding); ``codec_costs.DEFAULT_SPEEDS`` otherwise.
    codec_speeds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    device_class: DeviceClass | None = None  # None: not known, of a fleet described in a file
    memory_scale: float = 1.0  # bytes that the job's stages take over the model's, as measured
    heap_share: float = 0.0  # bytes of the heap that a stage takes over its model's, of these
    beside: tuple[tuple[str, int], ...] = ()  # bytes that any stage takes beside its model's, by name
    mesh: Mesh | None = None  # of several devices, whose memory is the limit; ops' seconds are one's

    @property
    def processes(self) -> int:
        """Processes that compute its stage."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def label(self) -> str:
        return self.name or self.worker

    @property
    def stage_limit_bytes(self) -> float:
        """The most bytes of a stage, with what it takes beside its model.

        What was learnt of the job is counted here alone.
        """
        return self.memory_limit_bytes / self.memory_scale

    @property
    def model_limit_bytes(self) -> float:
        """The most bytes of a stage by the memory model, in each of its processes."""
        own = self.stage_limit_bytes / self.processes - self.beside_bytes
        return max(0.0, own) / (1.0 + self.heap_share)

    @property
    def beside_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self.beside)


@dataclass(frozen=True, eq=False)
class Fleet:
    """Devices in join order and what joins them; matrices are indexed [source, target].

    ``payload_share``: part of every rate that carries payload: 1.0 for measured goodput,
    ``TCP_SHARE`` for configured rates. ``losses_per_s``: how often one of its workers is lost.
    """

    devices: tuple[Device, ...]
    bandwidth_bps: Floats
    latency_s: Floats
    uplinks: tuple[Uplink, ...] = ()
    payload_share: float = 1.0
    relays: tuple[RelayLine, ...] = ()
    probed: Fleet | None = None  # the same at the rates of probes, where training's messages got less
    losses_per_s: float = 1.0 / (LOSS_HOURS * 3600.0)

    def __post_init__(self) -> None:
        n = len(self.devices)
        if self.bandwidth_bps.shape != (n, n) or self.latency_s.shape != (n, n):
            raise ValueError(f"{n} devices need {n} x {n} link matrices")

    @cached_property
    def index(self) -> dict[str, int]:
        """Worker -> its place in ``devices``."""
        return {device.worker: i for i, device in enumerate(self.devices)}

    @cached_property
    def _uplinks_of(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in self.devices]
        for u, uplink in enumerate(self.uplinks):
            for worker in uplink.members:
                if worker in self.index:
                    held[self.index[worker]].append(u)
        return tuple(map(tuple, held))

    def path(self, source: int, target: int) -> tuple[tuple[str, float], ...]:
        """(resource, bit/s) that a transfer passes in order; the pair's own rate comes last."""
        ups, downs = self._uplinks_of[source], self._uplinks_of[target]
        found = [(f"{self.uplinks[u].name} up", self.uplinks[u].up_bps) for u in ups if u not in downs]
        ends = (self.devices[source].worker, self.devices[target].worker)
        found += [(relay.name, relay.bps) for relay in self.relays if ends in relay.pairs]
        found += [(f"{self.uplinks[u].name} down", self.uplinks[u].down_bps) for u in downs if u not in ups]
        pair = f"{self.devices[source].label}>{self.devices[target].label}"
        found.append((pair, float(self.bandwidth_bps[source, target])))
        return tuple((name, rate * self.payload_share) for name, rate in found)

    def alike(self, other: Fleet) -> bool:
        """Return whether the other one is this but for names: each device in its place, and each link."""
        return (
            len(self.devices) == len(other.devices)
            and (self.payload_share, self.losses_per_s) == (other.payload_share, other.losses_per_s)
            and all(_unnamed(a) == _unnamed(b) for a, b in zip(self.devices, other.devices, strict=True))
            and np.array_equal(self.bandwidth_bps, other.bandwidth_bps)
            and np.array_equal(self.latency_s, other.latency_s)
            and self._shared == other._shared
            and (self.probed is None) == (other.probed is None)
            and (self.probed is None or other.probed is None or self.probed.alike(other.probed))
        )

    @cached_property
    def _shared(self) -> tuple[object, ...]:
        """What several links pass, by places of the devices."""
        at = self.index
        uplinks = [
            (tuple(sorted(at[w] for w in line.members if w in at)), line.up_bps, line.down_bps)
            for line in self.uplinks
        ]
        relays = [
            (sorted((at[a], at[b]) for a, b in relay.pairs if a in at and b in at), relay.bps)
            for relay in self.relays
        ]
        return uplinks, relays

    @cached_property
    def behind(self) -> tuple[tuple[Uplink, NDArray[np.bool_]], ...]:
        """Each uplink, and which of the devices are behind it."""
        found = []
        for uplink in self.uplinks:
            inside = np.zeros(len(self.devices), dtype=bool)
            inside[[self.index[w] for w in uplink.members if w in self.index]] = True
            found.append((uplink, inside))
        return tuple(found)

    @cached_property
    def effective_bps(self) -> Floats:
        """[source, target] payload rate of a transfer that is alone."""
        rate = self.bandwidth_bps.copy()
        for uplink, inside in self.behind:
            rows = np.flatnonzero(inside)
            rate[rows] = np.where(inside, rate[rows], np.minimum(rate[rows], uplink.up_bps))
            columns = rate[:, rows]
            rate[:, rows] = np.where(inside[:, None], columns, np.minimum(columns, uplink.down_bps))
        for relay in self.relays:
            for a, b in relay.pairs:
                if a in self.index and b in self.index:
                    at = self.index[a], self.index[b]
                    rate[at] = min(rate[at], relay.bps)
        return rate * self.payload_share

    def subset(self, workers: Sequence[str]) -> Fleet:
        """The fleet of these workers only, in the order given; their uplinks keep their names."""
        chosen, inside = np.array([self.index[w] for w in workers], dtype=np.intp), set(workers)
        return Fleet(
            tuple(self.devices[i] for i in chosen),
            self.bandwidth_bps[np.ix_(chosen, chosen)],
            self.latency_s[np.ix_(chosen, chosen)],
            tuple(uplink for uplink in self.uplinks if not inside.isdisjoint(uplink.members)),
            self.payload_share,
            tuple(relay for relay in self.relays if any(inside.issuperset(pair) for pair in relay.pairs)),
            self.probed.subset(workers) if self.probed is not None else None,
            self.losses_per_s,
        )


def _unnamed(device: Device) -> Device:
    return replace(device, worker="", name="", site="")
