"""State machines as tables: handlers by (phase, event type), registered by their event's annotation.

    TRANSITIONS: Transitions[JobState, [float], Outcome] = Transitions(Phase, Event)

    @TRANSITIONS.on(Phase.PLANNING)
    def _adopt(state: JobState, event: Planned, now_s: float) -> Outcome: ...

``Transitions[State, [more parameters], Result]`` types the handlers. A union registers each of its
members, and an envelope ``FromStage[Loaded]`` what it carries: the key is ``(phase, Loaded)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_type_hints

StateT = TypeVar("StateT")
EventT = TypeVar("EventT")
ResultT = TypeVar("ResultT")
More = ParamSpec("More")
TodoT = TypeVar("TodoT")


def first(todo: Iterable[TodoT], outcome: tuple[StateT, list[TodoT]]) -> tuple[StateT, list[TodoT]]:
    """Return a machine's outcome, with what is to be done before the rest of it."""
    state, rest = outcome
    return state, [*todo, *rest]


class Transitions(
    dict[tuple[Enum, type], Callable[Concatenate[StateT, Any, More], ResultT]], Generic[StateT, More, ResultT]
):
    """Handlers of one machine; checked while its module is imported, so a wrong one never runs.

    ``phases`` has every phase as a member, ``events`` is the union of every event. An annotation is
    resolved when its handler is registered: the names in it must be imported by then, and not under
    TYPE_CHECKING alone, else NameError.
    """

    def __init__(self, phases: type[Enum], events: Any) -> None:
        super().__init__()
        self.phases = phases
        self.events = frozenset(_kinds(events))

    def on(
        self, *phases: Enum
    ) -> Callable[
        [Callable[Concatenate[StateT, EventT, More], ResultT]],
        Callable[Concatenate[StateT, EventT, More], ResultT],
    ]:
        """Register the decorated handler for each of ``phases`` and each type its second parameter has.

        Raises TypeError for what is no phase or no event of this machine, for an event without
        annotation, and for a pair that has a handler already.
        """

        def register(
            handler: Callable[Concatenate[StateT, EventT, More], ResultT],
        ) -> Callable[Concatenate[StateT, EventT, More], ResultT]:
            event = [*inspect.signature(handler).parameters][1]
            kinds = [*_kinds(get_type_hints(handler).get(event))]
            for key in ((phase, kind) for phase in phases for kind in kinds):
                self._add(key, handler)
            return handler

        return register

    def include(self, other: Transitions[StateT, More, ResultT]) -> None:
        """Take over every handler of ``other``, as if it were registered here. Raises TypeError as ``on``."""
        for key, handler in other.items():
            self._add(key, handler)

    def _add(
        self, key: tuple[Enum, type], handler: Callable[Concatenate[StateT, Any, More], ResultT]
    ) -> None:
        phase, kind = key
        if not isinstance(phase, self.phases):
            raise TypeError(f"{handler.__qualname__}: {phase!r} is no {self.phases.__name__}")
        if kind not in self.events:
            raise TypeError(f"{handler.__qualname__}: {kind} is not an event of this machine")
        if key in self:
            raise TypeError(
                f"{handler.__qualname__}: ({phase}, {kind.__name__}) has {self[key].__qualname__} already"
            )
        self[key] = handler


def _kinds(annotation: Any) -> Iterator[Any]:
    """Event types that an annotation names; of an envelope the types of its content."""
    members = get_args(annotation)
    if not members:
        yield annotation
    for member in members:
        yield from _kinds(member)
