"""Threads of the compute process: tasks one after the other, each with a ``Cancel`` until it is done."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum

import structlog

from worker.cancel import Cancel, Cancelled
from worker.links.links import LinksAborted

log = structlog.get_logger()

Task = Callable[[Cancel], None]


class Thread(StrEnum):
    """Threads by what they do; a snapshot is written and then stored while the stage computes on."""

    COMPUTE = "compute"
    WRITE = "write"
    STORE = "store"


class Tasks:
    """A queue and a thread for each of ``Thread``. ``submit`` and ``cancel`` may come from any thread."""

    def __init__(
        self, begins: Callable[[Cancel], None], idle: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Of the compute thread: ``begins`` is called before each task, ``idle`` is held while it waits."""
        self._begins, self._idle = begins, idle
        self._queues = {kind: queue.SimpleQueue[tuple[Task, Cancel] | None]() for kind in Thread}
        self._lock = threading.Lock()
        self._pending: dict[Cancel, Thread] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(kind,), name=f"atoll-{kind}", daemon=True)
            for kind in Thread
        ]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End once what is queued is done; False when a task that is running cannot be awaited."""
        for tasks in self._queues.values():
            tasks.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> bool:
        """True while a task waits for the compute thread."""
        return not self._queues[Thread.COMPUTE].empty()

    def submit(self, task: Task, to: Thread = Thread.COMPUTE) -> None:
        """Queue a task."""
        cancel = Cancel()
        with self._lock:
            self._pending[cancel] = to
        self._queues[to].put((task, cancel))

    def cancel(self, reason: str, *, stores: bool = False) -> None:
        """Cancel what runs and what waits; ``stores``: snapshots on their way to the store as well."""
        with self._lock:
            found = [cancel for cancel, kind in self._pending.items() if stores or kind is Thread.COMPUTE]
        for cancel in found:
            cancel.set(reason)

    def _work(self, kind: Thread) -> None:
        while (entry := self._next(kind)) is not None:
            task, cancel = entry
            if kind is Thread.COMPUTE:
                self._begins(cancel)
            try:
                task(cancel)
            except (Cancelled, LinksAborted) as ended:
                log.info("work.cancelled", reason=str(ended))
            finally:
                with self._lock:
                    del self._pending[cancel]

    def _next(self, kind: Thread) -> tuple[Task, Cancel] | None:
        if kind is not Thread.COMPUTE:
            return self._queues[kind].get()
        with self._idle():
            return self._queues[kind].get()
