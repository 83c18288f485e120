"""State diagrams and tables of the project's machines, from their ``TRANSITIONS``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from docs.pages.phases import UNKNOWN, targets

MACHINES = {
    "member": "coordinator.membership.member",
    "job": "coordinator.pipeline.machine",
    "federated-job": "coordinator.federated.machine",
    "session": "worker.session.machine",
}
"""Names of machines in the docs -> modules whose ``TRANSITIONS`` maps (phase, event) to a handler."""
FROM_MANY = 5  # phases from which an event leads to one phase: said in a note, not drawn as so many arrows

Table = Mapping[tuple[Enum, type], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Arrow:
    """An event that can lead from one phase to another; ``after`` is None for one held earlier."""

    before: Enum
    event: str
    after: Enum | None


def table(name: str) -> Table:
    """Return the transitions of a machine of ``MACHINES``."""
    found: Table = import_module(MACHINES[name]).TRANSITIONS
    return found


def arrows(transitions: Table) -> list[Arrow]:
    """Return what can happen in the phases that can be reached from the first, changes or not."""
    first = next(iter(type(next(iter(transitions))[0])))
    found = [
        Arrow(before, event.__name__, None if after == UNKNOWN else after)
        for (before, event), handler in transitions.items()
        for after in targets(handler, before)
    ]
    reached, more = {first}, {first}
    while more:
        more = {a.after for a in found if a.before in reached and a.after is not None} - reached
        reached |= more
    order = list(type(first))
    kept = [arrow for arrow in found if arrow.before in reached]
    return sorted(kept, key=lambda a: (order.index(a.before), a.event, str(a.after)))


def phases(found: list[Arrow]) -> list[Enum]:
    """Return the phases that arrows touch, in their own order."""
    touched = {arrow.before for arrow in found} | {a.after for a in found if a.after is not None}
    return [phase for phase in type(next(iter(touched))) if phase in touched]


def diagram(transitions: Table) -> str:
    """Return a mermaid diagram: an arrow for each change of phase, with the events that can cause it."""
    found = arrows(transitions)
    lines = ["stateDiagram-v2", f"    [*] --> {_id(phases(found)[0])}"]
    lines += [f'    state "{phase.value}" as {_id(phase)}' for phase in phases(found)]
    going = {arrow.before for arrow in found if arrow.after is not arrow.before}
    for sources, after, events in _grouped(found):
        if len(sources) == 1:
            lines.append(f"    {_id(sources[0])} --> {_id(after)}: {', '.join(events)}")
        else:
            origin = _any_of(sources, going - {after})
            lines.append(f"    note right of {_id(after)} : {', '.join(events)} from {origin}")
    return "\n".join(lines)


def _grouped(found: list[Arrow]) -> Iterator[tuple[list[Enum], Enum, list[str]]]:
    """Group changes by their phases; those that one event causes in many phases by that event."""
    by_event: dict[tuple[str, Enum], list[Enum]] = defaultdict(list)
    for arrow in found:
        if arrow.after not in (None, arrow.before):
            by_event[arrow.event, arrow.after].append(arrow.before)
    groups: dict[tuple[tuple[Enum, ...], Enum], list[str]] = defaultdict(list)
    for (event, after), sources in by_event.items():
        for part in [tuple(sources)] if len(sources) >= FROM_MANY else [(source,) for source in sources]:
            groups[part, after].append(event)
    for (part, after), events in groups.items():
        yield list(part), after, sorted(events)


def _any_of(sources: list[Enum], going: set[Enum]) -> str:
    rest = [str(phase.value) for phase in type(sources[0]) if phase in going - set(sources)]
    if len(rest) > len(sources):
        return ", ".join(str(phase.value) for phase in sources)
    return f"any phase but {', '.join(rest)}" if rest else "any phase that goes on"


def _id(phase: Enum) -> str:
    return phase.name.lower()


def rows(transitions: Table) -> str:
    """Return a table in markdown: each event of each phase, and the phases that it can lead to."""
    found = arrows(transitions)
    ends: dict[tuple[Enum, str], list[str]] = defaultdict(list)
    for arrow in found:
        after = "depends on the state" if arrow.after is None else str(arrow.after.value)
        ends[arrow.before, arrow.event].append("stays" if arrow.after is arrow.before else after)
    lines = ["| phase | event | next |", "|---|---|---|"]
    lines += [
        f"| {phase.value} | `{event}` | {', '.join(sorted(after, key=_stays_last))} |"
        for (phase, event), after in ends.items()
    ]
    return "\n".join(lines)


def _stays_last(text: str) -> tuple[bool, str]:
    return text == "stays", text
