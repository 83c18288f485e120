"""A lock whose holder may put off what must not happen while it is held."""

from __future__ import annotations

import threading

import pytest

from tests.patience import HUNG_S
from worker.transport.turns import Turns


def test_what_is_put_off_runs_once_when_the_last_hold_ends_and_without_the_lock() -> None:
    turns, ran = Turns(), []

    def call() -> None:
        other = threading.Thread(target=lambda: ran.append(turns.acquire(timeout=HUNG_S) and turns.release()))
        other.start()
        other.join()

    with turns:
        with turns:
            turns.put_off(call)
            turns.put_off(call)
        assert ran == []
    assert ran == [None]  # the other thread could take the lock
    with turns:
        pass
    assert ran == [None]


def test_a_wait_lets_go_so_what_was_put_off_runs_before_it() -> None:
    turns, ran = Turns(), []
    changed = threading.Condition(turns)  # type: ignore[arg-type]

    def answer() -> None:
        with turns:
            ran.append("answered")
            changed.notify()

    with turns, turns:
        turns.put_off(lambda: threading.Thread(target=answer).start())
        assert changed.wait(HUNG_S)
        ran.append("woken")
    assert ran == ["answered", "woken"]


def test_an_error_under_the_lock_lets_go_of_it() -> None:
    turns, ran = Turns(), []

    def fails() -> None:
        with turns:
            turns.put_off(lambda: ran.append("ran"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert ran == ["ran"]
    with turns:
        pass


def test_an_error_in_what_was_put_off_goes_to_the_log_and_keeps_nothing_else_from_running() -> None:
    turns, ran = Turns(), []
    changed = threading.Condition(turns)  # type: ignore[arg-type]

    def fails() -> None:
        raise ZeroDivisionError

    with turns:
        turns.put_off(fails)
        turns.put_off(lambda: ran.append("released"))
    with turns, turns:
        turns.put_off(fails)
        turns.put_off(lambda: ran.append("waiting"))
        changed.wait(0.01)
        turns.put_off(lambda: ran.append("released again"))
    assert ran == ["released", "waiting", "released again"]


def test_what_a_put_off_call_leads_to_waits_until_it_is_done() -> None:
    turns, ran = Turns(), []

    def first() -> None:
        with turns:
            turns.put_off(lambda: ran.append("second"))
        ran.append("first")  # such as a message that was chosen before

    with turns:
        turns.put_off(first)
    assert ran == ["first", "second"]
