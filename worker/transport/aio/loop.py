"""The one event loop, in a thread of its own, on which every connection of this process lives.

gRPC wakes each loop of a process for the events of all, so networks of one process share theirs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
STOP_S = 5.0


class SharedLoop:
    """Runs while somebody uses it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; each call needs one of ``release``."""
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                loop.set_exception_handler(_handle)
                self._thread = threading.Thread(target=self._run, args=(loop,), name="peer-loop", daemon=True)
                self._thread.start()
            return self._loop

    def release(self) -> None:
        """Stop the loop after its last user, once its thread is done."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(STOP_S)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
            loop.run_until_complete(_cancel_the_rest())
        finally:
            loop.close()


SHARED = SharedLoop()


def run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the loop and wait for it; not to be called in the loop's thread."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def _cancel_the_rest() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Where another loop of this process uses gRPC, both wake for an event and one finds it taken
    # (grpc/grpc#25364): nothing is lost.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
