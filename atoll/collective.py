"""Collectives as action lists: who sends what to whom, and in which order it is added.

A vector of elements is cut into segments. Each rank holds contributions under labels (its rank, or the
number of a block of micro-batches) and, once made, the total of a segment. Three actions are enough:

    Send(to, segment, slot, label)   ship the value in ``slot``; the receiver files it under ``label``
    Add(segment, slots)              join the values in these slots, in this order, into the total
    Copy(segment, source)            take the total as ``source`` sent it

Both ends derive the same lists, so no message describes itself beyond (segment, label). Sums are made in
the order of their labels by whoever makes them. So the result does not depend on who is where or on the
order of arrival: a ring, which begins each segment's sum at another rank, cannot give that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import log2
from typing import Generic, NamedTuple, TypeVar

from atoll.errors import UsageError

TOTAL = -1
"""Slot and label of a segment's total."""
ARRIVED = -2
"""Slot in which a total from another rank waits for its Copy."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Half-open range of elements."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Send:
    to: int  # rank
    segment: int
    slot: int
    label: int


@dataclass(frozen=True, slots=True)
class Add:
    segment: int
    slots: tuple[int, ...]  # TOTAL among them: what has been added so far


@dataclass(frozen=True, slots=True)
class Copy:
    segment: int
    source: int  # rank


Action = Send | Add | Copy


class _Known(NamedTuple):
    """Labels in a value, and the messages that followed each other to make it."""

    labels: frozenset[int]
    hops: int


@dataclass(frozen=True)
class Collective:
    """Actions of every rank, in order; those of one segment are performed in this order."""

    segments: tuple[Segment, ...]
    actions: Mapping[int, tuple[Action, ...]]
    labels: Mapping[int, tuple[int, ...]]  # contributions that each rank holds
    # Of each rank, where those of one send each other parts as they are and a sum is coded as it leaves.
    site_of: Mapping[int, int] = field(default_factory=dict)

    def plain(self, source: int, target: int, label: int) -> bool:
        """Whether a message travels as it is, whatever codec the round has."""
        return label != TOTAL and bool(self.site_of) and self.site_of[source] == self.site_of[target]

    def results(self, rank: int) -> tuple[int, ...]:
        """Segments whose total ``rank`` ends with, ascending."""
        return tuple(sorted({a.segment for a in self.actions[rank] if not isinstance(a, Send)}))

    def maker(self, rank: int, segment: int) -> int:
        """Rank that has added the total of a segment which ``rank`` ends with, whoever passed it on."""
        while (rank, segment) in self._copied:
            rank = self._copied[rank, segment]
        return rank

    @cached_property
    def _copied(self) -> dict[tuple[int, int], int]:
        """Rank from which each has a segment's total that it does not add itself."""
        return {
            (rank, action.segment): action.source
            for rank, actions in self.actions.items()
            for action in actions
            if isinstance(action, Copy)
        }

    def sources(self, rank: int) -> dict[tuple[int, int], int]:
        """Rank that sends each (segment, label) that ``rank`` receives."""
        return {
            (action.segment, action.label): sender
            for sender, actions in self.actions.items()
            for action in actions
            if isinstance(action, Send) and action.to == rank
        }

    def expected(self, rank: int, segment: int, slot: int = TOTAL) -> frozenset[int]:
        """Labels in a value that ``rank`` receives or ends with when nothing fails."""
        found = self._held.get((rank, segment, slot))
        return frozenset() if found is None else found.labels

    def hops(self, rank: int, segment: int, label: int) -> int:
        """Messages, the last included, that follow each other until ``rank`` has received this one."""
        return self._held[rank, segment, slot_of(label)].hops

    @cached_property
    def _held(self) -> dict[tuple[int, int, int], _Known]:
        """What every slot comes to hold, by (rank, segment, slot): the actions run on sets of labels."""
        runs = {rank: ActionRun(self, rank, _union) for rank in self.actions}
        held = {
            (rank, at, label): _Known(frozenset((label,)), 0)
            for rank, labels in self.labels.items()
            for label in labels
            for at in range(len(self.segments))
        }
        waiting = list(held.items())
        while waiting:
            (rank, segment, slot), value = waiting.pop()
            held[rank, segment, slot] = value
            if rank in runs:
                runs[rank].hold(segment, slot, value)
                sent = runs[rank].advance(segment)
                waiting += [
                    ((send.to, segment, slot_of(send.label)), _Known(value.labels, value.hops + 1))
                    for send, value in sent
                ]
        if stuck := sorted(rank for rank, run in runs.items() if not run.finished):
            raise ValueError(f"ranks {stuck} wait for each other")
        totals = {
            (rank, at, TOTAL): total
            for rank, run in runs.items()
            for at in range(len(self.segments))
            if (total := run.held(at)) is not None
        }
        return {**held, **totals}


V = TypeVar("V")


class ActionRun(Generic[V]):
    """Performs one rank's actions on values of any kind: sets of labels, tensors, coded vectors.

    ``add(segment, values)`` joins values in the order of their slots. An action waits for the slots that it
    uses as far as they are ``awaited``; a slot that was given up is left out. A value is let go at its last
    use; totals stay.
    """

    def __init__(self, collective: Collective, rank: int, add: Callable[[int, list[V]], V]) -> None:
        self._add = add
        self._left: dict[int, list[Action]] = {}  # by segment, reversed
        for action in reversed(collective.actions[rank]):
            self._left.setdefault(action.segment, []).append(action)
        self.segments = sorted(self._left)
        reads = ((action.segment, slot) for action in collective.actions[rank] for slot in _uses(action))
        self.awaited = {(segment, slot) for segment, slot in reads if slot != TOTAL}
        self._slots: dict[tuple[int, int], V] = {}

    @property
    def finished(self) -> bool:
        """Whether nothing is left to be done."""
        return not any(self._left.values())

    def held(self, segment: int) -> V | None:
        """The total of a segment, as far as there is one."""
        return self._slots.get((segment, TOTAL))

    def hold(self, segment: int, slot: int, value: V) -> None:
        """Take in what a slot was awaited for."""
        self.awaited.discard((segment, slot))
        self._slots[segment, slot] = value

    def advance(self, segment: int) -> Iterator[tuple[Send, V]]:
        """Perform what can be performed; yields what is sent."""
        left = self._left.get(segment, [])
        while left and not any((segment, slot) in self.awaited for slot in _uses(left[-1])):
            action = left.pop()
            later = {slot for other in left for slot in _uses(other)}
            found = [self._taken(segment, slot, later) for slot in _uses(action)]
            values = [value for value in found if value is not None]
            if isinstance(action, Copy):
                self._slots.pop((segment, TOTAL), None)  # a tree's subtotal is nobody's result
            if values and isinstance(action, Send):
                yield action, values[0]
            elif values:
                total = values[0] if isinstance(action, Copy) else self._add(segment, values)
                self._slots[segment, TOTAL] = total

    def _taken(self, segment: int, slot: int, later: AbstractSet[int]) -> V | None:
        """The value of a slot, which stays only where it is used later, or is the total."""
        key = segment, slot
        return self._slots.get(key) if slot == TOTAL or slot in later else self._slots.pop(key, None)


def _uses(action: Action) -> tuple[int, ...]:
    """Slots that an action reads."""
    match action:
        case Send():
            return (action.slot,)
        case Add():
            return action.slots
        case Copy():
            return (ARRIVED,)


def _union(_: int, values: list[_Known]) -> _Known:
    return _Known(frozenset[int]().union(*(v.labels for v in values)), max(v.hops for v in values))


def slot_of(label: int) -> int:
    """Slot in which a received value is filed."""
    return ARRIVED if label == TOTAL else label


def even_shares(n: int) -> tuple[float, ...]:
    """Return ``n`` equal shares."""
    return (1.0 / n,) * n


def owner_shares(rates: Sequence[float]) -> tuple[float, ...]:
    """Shares of the elements that each rank adds, so that the slowest link is busy the shortest time.

    Minimises xi subject to (1 + (N - 2) w_i) / b_i <= xi, sum w = 1, w >= 0, ``rates`` b in bytes/s (the
    smaller of up and down; 0: this rank owns nothing). In closed form w_i(xi) = max(0, (xi b_i - 1) /
    (N - 2)), xi by bisection; a link that needs longer than xi for its own contribution alone bounds the
    exchange, whatever the shares. Any split between two is as good.
    Source: papers/compression.md 7 (hivemind's load balancing, closed form).
    Raises UsageError when no rank can own anything.
    """
    n = len(rates)
    if n == 0 or max(rates) <= 0.0:
        raise UsageError(f"no owner among {n} ranks: every rate is 0")
    able = [max(0.0, rate) for rate in rates]
    if n <= 2:
        whole = sum(able)
        return tuple(rate / whole for rate in able)

    def shares(xi: float) -> list[float]:
        return [max(0.0, (xi * rate - 1.0) / (n - 2)) for rate in able]

    low, high = 0.0, (2.0 * n - 2.0) / max(able)  # one owner alone has share (xi b - 1) / (n - 2) >= 1
    for _ in range(200):
        middle = (low + high) / 2.0
        if sum(shares(middle)) < 1.0:
            low = middle
        else:
            high = middle
    found = shares(high)
    return tuple(share / sum(found) for share in found)


def cut(elements: int, shares: Sequence[float], multiple: int = 1) -> tuple[Segment, ...]:
    """Cut [0, elements) in proportion to ``shares``, at multiples of ``multiple``; segments may be empty."""
    whole = sum(shares)
    borders, reached = [0], 0.0
    for share in shares:
        reached += share
        at = round(elements * reached / whole / multiple) * multiple
        borders.append(min(elements, max(at, borders[-1])))
    borders[-1] = elements
    return tuple(Segment(start, stop) for start, stop in pairwise(borders))


def owners(
    labels: Mapping[int, Sequence[int]], segments: Sequence[Segment], owner_of: Sequence[int]
) -> Collective:
    """Reduce by segment owners: parts to each owner, added by ascending label, the total back to all.

    ``labels`` by rank; ``owner_of`` a rank by segment. Carries 2 (R - 1) / R of the vector up and down a rank
    at equal shares, in two latencies. Each rank begins with the owner after itself, so that no owner gets
    all parts at once. Source: hivemind's butterfly with a fixed order (papers/compression.md 7).
    """
    ranks = sorted(labels)
    every = sorted(label for held in labels.values() for label in held)
    if len(set(every)) != len(every) or any(label < 0 for label in every):
        raise UsageError(f"contributions with labels {every}: each at least 0 and held once")
    actions: dict[int, tuple[Action, ...]] = {}
    used = [at for at, segment in enumerate(segments) if segment.size]
    for rank in ranks:
        others = _after(ranks, rank)
        mine = [at for at in used if owner_of[at] == rank]
        parts = _parts(labels[rank], others, used, owner_of)
        totals: list[Action] = []
        for at in mine:
            totals.append(Add(at, tuple(every)))
            totals.extend(Send(peer, at, TOTAL, TOTAL) for peer in others)
        copies: list[Action] = [Copy(at, owner_of[at]) for at in used if owner_of[at] != rank]
        actions[rank] = (*parts, *totals, *copies)
    return Collective(tuple(segments), actions, {rank: tuple(sorted(labels[rank])) for rank in ranks})


def _parts(
    held: Sequence[int], others: Sequence[int], used: Sequence[int], owner_of: Sequence[int]
) -> list[Action]:
    """What a rank that holds these labels sends to the owners of segments, in the order of ``others``."""
    return [
        Send(peer, at, label, label)
        for peer in others
        for at in used
        if owner_of[at] == peer
        for label in sorted(held)
    ]


def site_owners(
    labels: Mapping[int, Sequence[int]], segments: Sequence[Segment], sites: Sequence[Sequence[int]]
) -> Collective:
    """Reduce by sites in turn: each adds its parts to the sum of those before, the total goes back the way.

    ``sites``: ranks of each, in the order of their labels, of which none lies between another site's. Rank
    ``sites[j][s]`` is the gateway of segment s in site j: it alone sends the segment to other sites. So a
    link between two neighbouring sites carries the vector once each way, where ``owners`` carries a site's
    every part and to its every rank the total. The sum of the sites before travels under the lowest label:
    it is the begin of the same sum in ascending order, hence its bits. 2 (S - 1) latencies between S sites.
    Raises UsageError for sites out of order or with fewer ranks than segments.
    """
    held = [sorted(label for rank in site for label in labels[rank]) for site in sites]
    every = [label for site in held for label in site]
    if every != sorted(set(every)) or any(label < 0 for label in every):
        raise UsageError(f"sites with contributions {held}: ascending from site to site, each held once")
    used = [at for at, segment in enumerate(segments) if segment.size]
    if any(len(site) < len(segments) for site in sites):
        raise UsageError(f"{len(segments)} segments and a site of {min(map(len, sites))} ranks")
    actions: dict[int, tuple[Action, ...]] = {}
    for number, site in enumerate(sites):
        for rank in site:
            others = _after(site, rank)
            parts = _parts(labels[rank], others, used, site)
            own = [at for at in used if site[at] == rank]
            passed: list[Action] = []
            for at in own:
                passed.append(Add(at, (*every[:1], *held[number]) if number else tuple(held[number])))
                if number + 1 < len(sites):
                    onward = sites[number + 1][at]
                    passed += [Send(onward, at, TOTAL, every[0]), Copy(at, onward)]
                back = [sites[number - 1][at]] if number else []
                passed += [Send(peer, at, TOTAL, TOTAL) for peer in (*back, *others)]
            copies: list[Action] = [Copy(at, site[at]) for at in used if at not in own]
            actions[rank] = (*parts, *passed, *copies)
    return Collective(tuple(segments), actions, {rank: tuple(sorted(labels[rank])) for rank in actions})


def tree(ranks: Sequence[int], elements: int) -> Collective:
    """Binomial tree over one segment: merged upwards in ceil(log2 P) hops, copied down in as many.

    Where merging keeps k entries, no rank receives more than k ceil(log2 P) of them up and k down.
    Any number of ranks. Source: gTop-k (papers/compression.md 3).
    """
    order = sorted(ranks)
    actions: dict[int, tuple[Action, ...]] = {}
    for place, rank in enumerate(order):
        up: list[Action] = [Add(0, (rank,))]
        down: list[Action] = []
        hop = 1
        while hop < len(order) and not place & hop:
            if place + hop < len(order):
                up.append(Add(0, (TOTAL, order[place + hop])))
                down.insert(0, Send(order[place + hop], 0, TOTAL, TOTAL))
            hop *= 2
        if place:
            parent = order[place - hop]
            up.append(Send(parent, 0, TOTAL, rank))
            down.insert(0, Copy(0, parent))
        actions[rank] = (*up, *down)
    return Collective((Segment(0, elements),), actions, {rank: (rank,) for rank in order})


def gathered(groups: Sequence[Sequence[int]], elements: int | Sequence[Segment]) -> Collective:
    """All of a group send all they have to each other and add all, by ascending rank, in one latency. Carries
    (R - 1) vectors a rank: for small groups, or parts much smaller than their sum. ``elements``: how many, or
    the segments that travel as messages of their own. Raises UsageError for a rank in two groups."""
    segments = (Segment(0, elements),) if isinstance(elements, int) else tuple(elements)
    members = [rank for group in groups for rank in group]
    if len(set(members)) != len(members):
        raise UsageError(f"a rank in two groups: {sorted(members)}")
    actions: dict[int, tuple[Action, ...]] = {}
    for group in groups:
        ranks = sorted(group)
        for rank in ranks:
            listed: list[Action] = []
            for at in range(len(segments)):
                listed += [Send(peer, at, rank, rank) for peer in _after(ranks, rank)]
                listed.append(Add(at, tuple(ranks)))
            actions[rank] = tuple(listed)
    return Collective(segments, actions, {rank: (rank,) for rank in members})


def pairwise_sums(pairs: Sequence[tuple[int, int]], elements: int) -> Collective:
    """Both of a pair send all they have and add both, in one latency. Raises UsageError for a rank in two
    pairs."""
    return gathered(pairs, elements)


def published(readers: Mapping[int, int], elements: int) -> Collective:
    """Each reader adds what its source (``readers`` by reader) published last to its own; nobody answers."""
    ranks = sorted({*readers, *readers.values()})
    actions: dict[int, tuple[Action, ...]] = {}
    for rank in ranks:
        sends = tuple(Send(to, 0, rank, rank) for to, source in sorted(readers.items()) if source == rank)
        reads: tuple[Action, ...] = ()
        if rank in readers:
            reads = (Add(0, tuple(sorted((rank, readers[rank])))),)
        actions[rank] = (*sends, *reads)
    return Collective((Segment(0, elements),), actions, {rank: (rank,) for rank in ranks})


def side_by_side(collectives: Sequence[Collective]) -> Collective:
    """Several groups' collectives as one, their segments numbered on. Raises UsageError for a shared rank."""
    segments: list[Segment] = []
    actions: dict[int, tuple[Action, ...]] = {}
    labels: dict[int, tuple[int, ...]] = {}
    for one in collectives:
        if shared := actions.keys() & one.actions.keys():
            raise UsageError(f"ranks {sorted(shared)} are in two groups")
        for rank, listed in one.actions.items():
            actions[rank] = tuple(_moved(listed, len(segments)))
        labels.update(one.labels)
        segments.extend(one.segments)
    return Collective(tuple(segments), actions, labels)


def group_size(ranks: int) -> int:
    """Power of two nearest to sqrt(ranks), at least 2 (papers/compression.md 7: 8 of 64)."""
    return max(2, 1 << round(log2(ranks) / 2))


def _after(ranks: Sequence[int], rank: int) -> list[int]:
    """The other ranks, beginning after ``rank``."""
    at = ranks.index(rank)
    return [*ranks[at + 1 :], *ranks[:at]]


def _moved(actions: Sequence[Action], by: int) -> Iterator[Action]:
    for action in actions:
        match action:
            case Send(to, segment, slot, label):
                yield Send(to, segment + by, slot, label)
            case Add(segment, slots):
                yield Add(segment + by, slots)
            case Copy(segment, source):
                yield Copy(segment + by, source)
