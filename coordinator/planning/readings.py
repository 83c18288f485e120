"""Machines of several cards read the other way: a site as one worker per card, cards joined fast as a site.

Who is a worker is decided where workers are started, so no plan can change it. Which is faster depends on the
model: a site divides every stage by collectives, workers of their own send activations once a boundary. The
exact ways of each reading are planned, and the best one is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from atoll.errors import AtollError
from coordinator.planning import TUNED
from coordinator.planning.inside.cards import alike_devices, card_fleet, joined_fleet, near_cards
from coordinator.planning.planner import remembering
from coordinator.planning.ways import Way, WayKind, compare_ways

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.planner import PlanRequest


@dataclass(frozen=True, slots=True)
class Reading:
    """The best exact way with other workers on the same machines, beside that of the fleet as it is."""

    sites: tuple[str, ...]  # that are read otherwise
    cards: tuple[int, ...]  # of each
    joined: bool  # each as one worker; otherwise a worker per card
    way: Way  # with ``why_not`` where it is not planned
    given: Way | None  # None: there is no room in the fleet as it is

    @property
    def gain(self) -> float:
        """Return how many times as fast as the fleet as it is; 0 where it is not planned."""
        if self.way.why_not:
            return 0.0
        return inf if self.given is None else self.way.micros_per_s / self.given.micros_per_s

    @property
    def better(self) -> bool:
        """Return whether it is worth starting workers otherwise."""
        return self.gain * TUNED.other_reading >= 1.0


def other_readings(request: PlanRequest, ways: Sequence[Way]) -> tuple[Reading, ...]:
    """Return readings of the fleet other than the given one that have a plan, the fastest first, and last
    those of too many workers to be planned; none of a fleet without sites and without cards that may be one.

    ``ways``: those of the fleet as it is, empty where it has no room for any. Where only ways that change the
    model have room, nothing is compared. Each reading costs as much as its ways do.
    """
    given = next((way for way in ways if way.exact and not way.why_not), None)
    if given is None and ways:
        return ()
    tell = request.twins.tell if request.twins is not None else lambda words: None
    found = []
    for sites, cards, joined, fleet in _readings(request.fleet):
        if (count := len(fleet.devices)) > TUNED.read_workers:
            many = f"{count} workers are more than {TUNED.read_workers}"
            way = Way(WayKind.PIPELINE, "", why_not=f"{many}; describe them in a fleet file of their own")
            found.append(Reading(sites, cards, joined, way, given))
            continue
        asked = remembering(replace(request, fleet=fleet, twins=None), tell)
        asked.divisions.update(request.divisions)
        try:
            way = compare_ways(asked)[0]
        except AtollError:  # it has no room for the model
            continue
        found.append(Reading(sites, cards, joined, way, given))
    return tuple(sorted(found, key=lambda reading: -reading.way.micros_per_s))


def _readings(fleet: Fleet) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], bool, Fleet]]:
    """Yield names, cards of each, whether these are joined, and the fleet: each kind of sites, all sites,
    and last cards as sites."""
    kinds = alike_devices(device for device in fleet.devices if device.mesh is not None)
    asked = kinds if 1 < len(kinds) <= TUNED.read_kinds else []
    if kinds:
        asked = [*asked, [device for kind in kinds for device in kind]]
    for kind in asked:
        sites = tuple(device.worker for device in kind)
        yield sites, tuple(device.processes for device in kind), False, card_fleet(fleet, sites)
    if groups := near_cards(fleet):
        yield tuple(groups), tuple(map(len, groups.values())), True, joined_fleet(fleet, groups)
