"""Transition tables: what a handler is registered for, and what is refused at import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

import pytest

from atoll.transitions import Transitions


class Phase(StrEnum):
    IDLE = "idle"
    BUSY = "busy"


class Other(StrEnum):
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Begin:
    pass


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    pass


@dataclass(frozen=True, slots=True)
class Foreign:
    pass


M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class FromStage(Generic[M]):
    message: M


Event = Begin | FromStage[Ready] | FromStage[Failed]
Table = Transitions[str, [float], str]


def table() -> Table:
    return Transitions(Phase, Event)


def begin(state: str, event: Begin, now_s: float) -> str:
    return f"{state} began at {now_s}"


def test_a_handler_is_found_by_phase_and_annotated_event():
    made = table()
    assert made.on(Phase.IDLE)(begin) is begin
    assert dict(made) == {(Phase.IDLE, Begin): begin}
    assert made[Phase.IDLE, Begin]("j", Begin(), 2.0) == "j began at 2.0"
    assert made.get((Phase.BUSY, Begin)) is None


def test_a_handler_stands_for_every_phase_it_names():
    made = table()
    made.on(*Phase)(begin)
    assert set(made) == {(Phase.IDLE, Begin), (Phase.BUSY, Begin)}


def test_a_union_registers_each_of_its_members():
    made = table()

    @made.on(Phase.BUSY)
    def either(state: str, event: Begin | FromStage[Ready], now_s: float) -> str:
        return state

    assert set(made) == {(Phase.BUSY, Begin), (Phase.BUSY, Ready)}


def test_an_envelope_registers_what_it_carries():
    made = table()

    @made.on(Phase.BUSY)
    def carried(state: str, event: FromStage[Ready | Failed], now_s: float) -> str:
        return type(event.message).__name__

    assert set(made) == {(Phase.BUSY, Ready), (Phase.BUSY, Failed)}
    assert made[Phase.BUSY, Failed]("j", FromStage(Failed()), 0.0) == "Failed"
    assert made.events == {Begin, Ready, Failed}


def foreign(state: str, event: Foreign, now_s: float) -> str:
    return state


def unannotated(state: str, event, now_s: float) -> str:  # type: ignore[no-untyped-def]
    return state


def bare(state: str, event: FromStage, now_s: float) -> str:  # type: ignore[type-arg]
    return state


@pytest.mark.parametrize(
    ("phase", "handler", "why"),
    [
        (Other.IDLE, begin, "begin: <Other.IDLE: 'idle'> is no Phase"),
        ("idle", begin, "begin: 'idle' is no Phase"),
        (Phase.IDLE, foreign, "foreign: .*Foreign.* is not an event of this machine"),
        (Phase.IDLE, unannotated, "unannotated: None is not an event of this machine"),
        (Phase.IDLE, bare, "bare: .*FromStage.* is not an event of this machine"),
    ],
)
def test_what_is_no_phase_or_no_event_is_refused_at_registration(
    phase: Any, handler: Callable[..., str], why: str
):
    made = table()
    with pytest.raises(TypeError, match=why):
        made.on(phase)(handler)
    assert not made


def test_a_name_that_cannot_be_resolved_is_refused_at_registration():
    def unknown(state: str, event: Nowhere, now_s: float) -> str:  # type: ignore[name-defined]  # noqa: F821
        return state

    with pytest.raises(NameError, match="Nowhere"):
        table().on(Phase.IDLE)(unknown)


def test_a_second_handler_of_a_pair_is_refused_at_registration():
    made = table()
    made.on(Phase.IDLE)(begin)
    with pytest.raises(TypeError, match=r"begin: \(idle, Begin\) has begin already"):
        made.on(Phase.BUSY, Phase.IDLE)(begin)


def test_a_table_takes_over_anothers_handlers_once():
    made, part = table(), table()
    part.on(Phase.IDLE)(begin)
    made.include(part)
    assert dict(made) == dict(part)
    with pytest.raises(TypeError, match="has begin already"):
        made.include(part)
