"""The one event loop, in a thread of its own, on which every connection of this process lives.

gRPC wakes each loop of a process for the events of all, so networks and sessions of one process share theirs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from worker.transport import TUNED

T = TypeVar("T")


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread


class SharedLoop:
    """Runs while somebody uses it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._running: _Running | None = None

    def acquire(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; each call needs one of ``release``."""
        with self._lock:
            self._users += 1
            if self._running is None:
                started: Future[_Running] = Future()
                run = threading.Thread(
                    target=lambda: asyncio.run(_live(started)), name="peer-loop", daemon=True
                )
                run.start()
                self._running = started.result()
            return self._running.loop

    def release(self) -> None:
        """Stop the loop after its last user, once its thread is done; not to be called in it."""
        with self._lock:
            self._users -= 1
            if self._users or self._running is None:
                return
            running, self._running = self._running, None
        running.loop.call_soon_threadsafe(running.stop.set)
        running.thread.join(TUNED.close_within_s)


SHARED = SharedLoop()


def run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the loop and wait for it; not to be called in the loop's thread."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def _live(started: Future[_Running]) -> None:
    running = _Running(asyncio.get_running_loop(), asyncio.Event(), threading.current_thread())
    running.loop.set_exception_handler(_handle)
    started.set_result(running)
    await running.stop.wait()


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Where another loop of this process uses gRPC, both wake for an event and one finds it taken
    # (grpc/grpc#25364): nothing is lost.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
