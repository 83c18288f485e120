"""A lock whose holder may put off what must not happen while it is held."""

from __future__ import annotations

import threading

import pytest

from worker.turns import Turns


def test_what_is_put_off_runs_once_when_the_last_hold_ends_and_without_the_lock() -> None:
    turns, ran = Turns(), []

    def call() -> None:
        other = threading.Thread(target=lambda: ran.append(turns.acquire(timeout=5.0) and turns.release()))
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
        assert changed.wait(5.0)
        ran.append("woken")
    assert ran == ["answered", "woken"]


def test_what_is_put_off_by_what_was_put_off_runs_too() -> None:
    turns, ran = Turns(), []

    def first() -> None:
        with turns:
            turns.put_off(lambda: ran.append("second"))
            ran.append("first")

    with turns:
        turns.put_off(first)
    assert ran == ["first", "second"]


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
