"""Which machines make a replica or a peer together: parts of a fleet, whole sites where there are as many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.planning import TUNED
from coordinator.planning.search.clusters import groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from coordinator.planning.costs.fleet import Fleet

Parts = tuple[tuple[str, ...], ...]
"""Workers of each replica."""


def partitions(fleet: Fleet, count: int, weights: Sequence[float] = ()) -> Iterator[Parts]:
    """Disjoint parts of about equal speed, or of equal ``weights`` of devices: whole sites together, and
    the fleet in order of its sites."""
    if count > len(fleet.devices):
        return
    speed = weights or [device.gflops.get("", 1.0) / device.scale for device in fleet.devices]
    sites = [list(group) for group in groups(fleet.bandwidth_bps)]
    if len(sites) >= count:
        bins: list[list[int]] = [[] for _ in range(count)]
        for site in sorted(sites, key=lambda site: -sum(speed[i] for i in site)):
            min(bins, key=lambda held: sum(speed[i] for i in held)).extend(site)
        yield _named(fleet, bins)
    order = [i for site in sites for i in site]
    whole, reached = sum(speed), 0.0
    chunks: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        chunks[min(count - 1, int(count * (reached + speed[i] / 2) / whole))].append(i)
        reached += speed[i]
    if all(chunks):
        yield _named(fleet, chunks)


@dataclass(frozen=True)
class Rooms:
    """Memory of machines that might hold a model together, in bytes."""

    of: Mapping[str, float]  # by worker
    need: float  # of the model, by a group
    alone: float  # ... by one machine

    def hold(self, part: Sequence[str]) -> bool:
        """Whether these may hold the model; a plan has the last word."""
        return self.all_of(part) >= (self.alone if len(part) == 1 else self.need)

    def all_of(self, part: Sequence[str]) -> float:
        """Bytes of all of them."""
        return sum(self.of[worker] for worker in part)


def peer_groups(fleet: Fleet, rooms: Rooms, counts: Sequence[int]) -> list[Parts]:
    """Return ways to make peers of machines that may hold the model together, as many as one of ``counts``:
    at least one of several machines in each way.

    Machines that hold the model by themselves are peers of one machine in some of the ways, and belong to
    groups in the others.
    """
    alone = [device.worker for device in fleet.devices if rooms.hold([device.worker])]
    others = [device.worker for device in fleet.devices if device.worker not in alone]
    found: dict[Parts, None] = {}
    for apart in ([], alone) if alone else ([],):
        rest = fleet.subset(others) if apart else fleet
        if not rest.devices:
            continue
        own = [rooms.of[device.worker] for device in rest.devices]
        ways = [_filled(rest, own, times * rooms.need) for times in TUNED.group_rooms]
        for count in (count - len(apart) for count in counts if count > len(apart)):
            ways += [*partitions(rest, count), *partitions(rest, count, own), _spread(rest, count, own)]
        for parts in ways:
            whole = (*((worker,) for worker in apart), *filter(rooms.hold, parts))
            if len(whole) in counts and any(len(part) > 1 for part in whole):
                ordered = sorted(whole, key=lambda part: fleet.index[part[0]])
                found.setdefault(tuple(ordered), None)
    return list(found)


def moved(parts: Parts, rooms: Rooms) -> Iterator[Parts]:
    """Yield these parts with a machine of one in another one or left out, and with two in each other's place,
    where all still may hold the model."""
    for a, part in enumerate(parts):
        for worker in part:
            without = tuple(other for other in part if other != worker)
            if without and rooms.hold(without):
                yield _replaced(parts, {a: without})
                for b in range(len(parts)):
                    if b != a:
                        yield _replaced(parts, {a: without, b: (*parts[b], worker)})
            for b in range(a + 1, len(parts)):
                for other in parts[b]:
                    kept = tuple(one for one in parts[b] if one != other)
                    first, second = (*without, other), (*kept, worker)
                    if rooms.hold(first) and rooms.hold(second):
                        yield _replaced(parts, {a: first, b: second})


def _replaced(parts: Parts, new: Mapping[int, tuple[str, ...]]) -> Parts:
    return tuple(new.get(at, part) for at, part in enumerate(parts))


def _spread(fleet: Fleet, count: int, room: Sequence[float]) -> Parts:
    """Parts of about equal memory, wherever their machines are: the largest first, each to the emptiest."""
    found: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(room)), key=lambda at: (-room[at], at)):
        min(found, key=lambda part: sum(room[i] for i in part)).append(at)
    return _named(fleet, [part for part in found if part])


def _filled(fleet: Fleet, room: Sequence[float], need: float) -> Parts:
    """Groups that each reach ``need`` with neighbours of one site, and what sites have left over with each
    other; who is left in a site that has a group joins its last one."""
    found: list[list[int]] = []
    left: list[int] = []
    for site in groups(fleet.bandwidth_bps):
        closed, open_ = _runs(site, room, need)
        if closed:
            closed[-1] += open_
        else:
            left += open_
        found += closed
    found += _runs(left, room, need)[0]
    return _named(fleet, found)


def _runs(members: Sequence[int], room: Sequence[float], need: float) -> tuple[list[list[int]], list[int]]:
    """(runs of members that each reach ``need``, who is left at the end)."""
    found: list[list[int]] = []
    run: list[int] = []
    for member in members:
        run.append(member)
        if sum(room[at] for at in run) >= need:
            found.append(run)
            run = []
    return found, run


def _named(fleet: Fleet, parts: Sequence[Sequence[int]]) -> Parts:
    return tuple(tuple(fleet.devices[i].worker for i in sorted(part)) for part in parts)
