"""Which idle workers a job gets: LWF-1 over places, and first fit beside it for comparison.

LWF-1 (arXiv 2002.10105): a job of one worker takes the least loaded, a larger one whole places, the least
loaded first, so that few of its bytes cross links that others use. A worker runs one job, so idle ones have
no load of their own; that of a place is what its other workers still have to do, which will meet on its link.
Of places that hold a job the tightest is taken, which keeps large ones whole for large jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from coordinator.sharing.claims import Machine

Placing = Callable[[Sequence[Machine], int, Mapping[str, float], Collection[str]], tuple[str, ...]]


def first_fit(
    idle: Sequence[Machine], count: int, load_s: Mapping[str, float], had: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the first ``count`` of the idle workers."""
    return tuple(machine.name for machine in idle[:count])


def least_work_first(
    idle: Sequence[Machine], count: int, load_s: Mapping[str, float], had: Collection[str] = ()
) -> tuple[str, ...]:
    """Return ``count`` of the idle workers, by LWF-1; ``load_s``: work left, by place.

    Those that the job had before come first where they suffice. Of places that hold the job whole the
    tightest is taken, then the least loaded; where none does, as few places as possible.
    """
    own = [machine for machine in idle if machine.name in had]
    if len(own) >= count:
        idle = own
    places: dict[str, list[Machine]] = defaultdict(list)
    for machine in idle:
        places[machine.place].append(machine)
    whole = [place for place, free in places.items() if len(free) >= count]
    if whole:
        best = min(whole, key=lambda place: (len(places[place]), load_s.get(place, 0.0), place))
        return tuple(machine.name for machine in places[best][:count])
    found: list[str] = []
    by_room = sorted(places, key=lambda place: (-len(places[place]), load_s.get(place, 0.0), place))
    for place in by_room:
        found += [machine.name for machine in places[place][: count - len(found)]]
    return tuple(found)


def fewest_places(machines: Iterable[Machine], count: int) -> int:
    """Return over how many places ``count`` of these workers are spread at least; 0 where there are fewer."""
    left, found = count, 0
    for _, size in Counter(machine.place for machine in machines).most_common():
        if left <= 0:
            break
        left, found = left - size, found + 1
    return found if left <= 0 else 0
