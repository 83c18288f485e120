"""Signals whose handlers may do anything: a thread runs them, what the system calls only wakes it.

A handler of Python's runs between two instructions of the main thread, those of another handler too. A lock
that the first one holds, such as the one inside ``threading.Event``, the second one waits for, for ever.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Mapping


def endings() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to leave: Ctrl+C, SIGTERM, and SIGHUP, which comes when its
    terminal closes, unless it was started to outlive that (``nohup``)."""
    found = [signal.SIGINT, signal.SIGTERM]
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return tuple(found)


def heeded(handlers: Mapping[int, Callable[[], None]]) -> Callable[[], None]:
    """Have a thread call the handler of each signal that comes, one after the other; return what puts the
    handlers from before back. For the main thread alone."""
    reading, waking = socket.socketpair()
    waking.setblocking(False)  # what does not fit waits behind thousands of the same kind
    before = {number: signal.signal(number, _wakes) for number in handlers}
    woken_before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)

    def run() -> None:
        with reading, waking:
            while came := reading.recv(1):
                if (handler := handlers.get(came[0])) is not None:
                    handler()

    threading.Thread(target=run, name="atoll-signals", daemon=True).start()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken_before)
        waking.shutdown(socket.SHUT_WR)  # which ends the thread

    return restore


def _wakes(number: int, frame: object) -> None:
    """Do nothing: the byte that wakes the thread was written before Python comes here."""
