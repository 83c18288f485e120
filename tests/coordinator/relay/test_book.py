"""Bounds of a relay and who is joined with whom, without a socket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import AccessDenied
from coordinator.relay.book import DAY_S, Book, RelayLimits
from protos.relay_tickets import Ticket

DIALS = Ticket(b"p" * 16, b"1" * 8, True, 1000, 100, 2)
WAITS = replace(DIALS, serial=b"2" * 8, dials=False)


def book(**bounds: float) -> Book[str]:
    return Book(RelayLimits(**bounds))  # type: ignore[arg-type]


def test_who_dials_meets_the_newest_that_waits_and_who_waits_the_oldest_dialler() -> None:
    known = book()
    assert known.meet("old", WAITS) == (None, [])
    assert known.meet("new", WAITS) == (None, [])
    assert known.meet("dialler", DIALS) == ("new", [])
    assert known.meet("dialler 2", DIALS) == ("old", [])
    assert known.waiting == 0
    known.meet("first", DIALS)
    known.meet("second", DIALS)
    assert known.meet("waits", WAITS) == ("first", [])
    known.give_up("second", DIALS)
    assert known.waiting == 0
    assert known._waiting == {}


def test_two_of_the_same_end_or_of_other_pairs_are_never_joined() -> None:
    known = book()
    known.meet("a", WAITS)
    assert known.meet("stranger", replace(DIALS, pair=b"q" * 16)) == (None, [])
    assert known.meet("b", WAITS) == (None, [])


def test_a_newer_one_takes_the_place_of_the_oldest_that_waits() -> None:
    known = book(waiting=2)
    assert [known.meet(name, WAITS)[1] for name in "abc"] == [[], [], ["a"]]
    assert known.waiting == 2


def test_a_ticket_holds_so_many_connections_at_once() -> None:
    known = book()
    known.enter(DIALS, 0.0)
    known.enter(DIALS, 0.0)
    with pytest.raises(AccessDenied, match="2 connections"):
        known.enter(DIALS, 0.0)
    known.enter(WAITS, 0.0)
    known.leave(DIALS)
    known.enter(DIALS, 0.0)
    assert known.refused == {"connections": 1}


def test_a_ticket_carries_so_many_bytes_and_is_then_of_no_use() -> None:
    known = book()
    known.enter(DIALS, 0.0)
    known.charge((DIALS, WAITS), 60, 1.0)
    with pytest.raises(AccessDenied, match="100 bytes are used up"):
        known.charge((DIALS, WAITS), 41, 2.0)
    known.charge((DIALS, WAITS), 40, 2.0)
    assert known.joined_bytes == 100
    known.leave(DIALS)
    with pytest.raises(AccessDenied, match="used up"):
        known.enter(DIALS, 3.0)
    fresh = replace(DIALS, serial=b"3" * 8)
    known.enter(fresh, 3.0)
    with pytest.raises(AccessDenied, match="used up"):  # the other end's ticket has its own bound
        known.charge((fresh, WAITS), 1, 3.0)


def test_a_spent_ticket_is_remembered_as_long_as_it_could_be_shown() -> None:
    known = book(tickets=2)
    known.charge((DIALS, WAITS), 100, 0.0)
    for serial in (DIALS, WAITS):
        known.leave(serial)
    with pytest.raises(AccessDenied, match="used up"):
        known.enter(DIALS, 999.0)
    with pytest.raises(AccessDenied, match="knows its 2 tickets"):
        known.enter(replace(DIALS, serial=b"4" * 8), 999.0)
    known.enter(replace(DIALS, serial=b"4" * 8, expires_s=2000), 1001.0)


def test_the_relay_as_a_whole_has_bounds_of_connections_and_of_a_day() -> None:
    known = book(connections=1, day_bytes=50)
    known.enter(DIALS, 0.0)
    with pytest.raises(AccessDenied, match="1 connections"):
        known.enter(WAITS, 0.0)
    known.charge((DIALS, WAITS), 50, 10.0)
    with pytest.raises(AccessDenied, match="50 bytes of a day"):
        known.charge((DIALS, WAITS), 1, 11.0)
    known.charge((DIALS, WAITS), 1, DAY_S + 1.0)


def test_a_rate_is_held_over_time_and_a_pause_earns_one_burst_alone() -> None:
    known = book(rate_bytes_per_s=100.0, burst_s=0.5)
    rich = tuple(replace(t, max_bytes=10**9) for t in (DIALS, WAITS))
    pair = (rich[0], rich[1])
    now_s, sent = 1000.0, 0
    for _ in range(200):
        now_s += known.charge(pair, 10, now_s)
        sent += 10
    assert sent / (now_s - 1000.0) == pytest.approx(100.0, rel=0.05)
    now_s += 3600.0
    assert known.charge(pair, 50, now_s) == 0.0
    assert known.charge(pair, 50, now_s) == pytest.approx(0.5)
