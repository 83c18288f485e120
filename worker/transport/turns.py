"""A re-entrant lock; what is put off while it is held runs once its holder has let it go.

What must follow a change of guarded state but may take long, such as handing a message to gRPC,
would keep everybody else from the lock, or need a thread of its own that is woken for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog

log = structlog.get_logger()


class _Running(threading.local):
    """What this thread is to run of what was put off, while it runs it."""

    queue: deque[Callable[[], None]] | None = None


_running = _Running()


class Turns:
    """Works as a lock of ``threading.Condition``, too: a wait lets go, so what was put off runs first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._put_off: list[Callable[[], None]] = []

    def put_off(self, call: Callable[[], None]) -> None:
        """Run ``call`` in this thread when it lets go of the lock, which it holds; the same one but once.
        What is put off meanwhile runs after it. An error goes to the log: whoever happens to let go
        has nothing to do with it."""
        if call not in self._put_off:
            self._put_off.append(call)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._depth += 1
        return taken

    def release(self) -> None:
        self._depth -= 1
        if self._depth or not self._put_off:
            self._lock.release()
            return
        calls = self._take()
        self._lock.release()
        _run(calls)

    @staticmethod
    def run(call: Callable[[], None]) -> None:
        """Run ``call`` now, or after the one that this thread is running; the lock is not held. What it puts
        off runs after it."""
        _run((call,))

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self) -> list[Callable[[], None]]:
        calls, self._put_off = self._put_off, []
        return calls

    # What a Condition asks of a lock that may be held more than once.

    def _release_save(self) -> tuple[int, Any]:
        depth, self._depth = self._depth, 0
        calls = self._take()
        state = self._lock._release_save()  # type: ignore[attr-defined]
        if calls:
            _run(calls, at_once=True)
        return depth, state

    def _acquire_restore(self, saved: tuple[int, Any]) -> None:
        depth, state = saved
        self._lock._acquire_restore(state)  # type: ignore[attr-defined]
        self._depth = depth

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def _run(calls: Iterable[Callable[[], None]], *, at_once: bool = False) -> None:
    """One after the other; those that a running one leads to after it, unless ``at_once``: the thread is
    about to wait."""
    before = _running.queue
    if before is not None and not at_once:
        before.extend(calls)
        return
    queue = _running.queue = deque(calls)
    try:
        while queue:
            call = queue.popleft()
            try:
                call()
            except Exception:
                log.exception("peer.put_off_failed")
    finally:
        _running.queue = before
