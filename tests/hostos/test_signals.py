"""Signals that come while another one's handler runs wait for it, whatever locks it holds."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from coordinator.cli.processes import ended_by_signals
from hostos.signals import endings, heeded
from tests.interrupts import ROOT
from tests.patience import HUNG_S, eventually
from worker.daemon import Daemon

BOTH = (signal.SIGINT, signal.SIGTERM)


class Interrupted(threading.Event):
    """An event whose lock is held when the next signal comes."""

    def __init__(self) -> None:
        super().__init__()
        self._held = threading.Lock()
        self.sets = self.waits = 0

    def set(self) -> None:
        if not self._held.acquire(blocking=False):
            self.waits += 1  # on this thread it would be for ever
            return
        try:
            self.sets += 1
            if self.sets == 1:
                signal.raise_signal(signal.SIGINT)
        finally:
            self._held.release()
        super().set()


def test_a_worker_takes_a_second_signal_while_it_handles_the_first() -> None:
    stopping = Interrupted()
    daemon = Daemon.__new__(Daemon)
    daemon._stopping, daemon._members = stopping, []
    restore = daemon._catch_signals()
    try:
        signal.raise_signal(signal.SIGTERM)
        eventually(lambda: stopping.sets > 1 or stopping.waits)
    finally:
        restore()
    assert stopping.waits == 0, "a handler waited for a lock that the one below it held"


def test_each_signal_reaches_its_handler_and_the_handlers_before_come_back() -> None:
    before, came = [signal.getsignal(number) for number in BOTH], list[int]()
    restore = heeded({number: lambda number=number: came.append(number) for number in BOTH})  # type: ignore[misc]
    try:
        for number in (*BOTH, *BOTH):
            signal.raise_signal(number)
        eventually(lambda: len(came) == 4)
    finally:
        restore()
    assert came == [*BOTH, *BOTH]
    assert [signal.getsignal(number) for number in BOTH] == before
    eventually(lambda: all(thread.name != "atoll-signals" for thread in threading.enumerate()))


STUCK = """
import threading, time
import worker.daemon
from worker.daemon import Daemon
worker.daemon.LEAVES_WITHIN_S = 0.0
daemon = Daemon.__new__(Daemon)
daemon._stopping, daemon._members = threading.Event(), []
daemon._catch_signals()
print("ready", flush=True)
daemon._stopping.wait()
print("leaving", flush=True)
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("number", BOTH)
def test_a_worker_that_hangs_while_it_leaves_ends_at_the_next_signal(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == "leaving\n"
            process.send_signal(number)
            assert process.wait(HUNG_S) == 128 + number
        finally:
            process.kill()


def test_a_closed_terminal_asks_to_leave_unless_the_process_was_started_to_outlive_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert endings() == (*BOTH, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert endings() == BOTH
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        cleaned: list[bool] = []

        def closed() -> None:
            try:
                signal.raise_signal(signal.SIGHUP)
            finally:
                signal.raise_signal(signal.SIGHUP)  # a terminal that closes sends two
                cleaned.append(True)

        with pytest.raises(SystemExit), ended_by_signals():
            closed()
        assert cleaned == [True]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
