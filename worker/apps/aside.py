"""Processes of an app whose task takes longer than its share of the time, beside the one that serves.

A worker's nodes are served in turn. One that is slow would hold its neighbours up until their time was over,
too; so once it has had its share, its process goes on aside, and another one serves the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.errors import BadFrame
from protos import atoll_apps_pb2 as pb
from protos.child_pipe import Gone
from protos.text_limits import REASON_CHARS
from worker.apps.process import AppProcess
from worker.cancel import Cancel

MOST = 2  # processes aside at a time, each as large as the app is
LOOK_S = 0.25  # between looks for others that wait
# Flower's error codes.
REPLY_UNAVAILABLE, APP_CRASHED = 4, 8


@dataclass(slots=True)
class Task:
    """A message for the ClientApp."""

    task: pb.AppTask
    epoch: int
    due_s: float  # monotonic
    cancel: Cancel = field(default_factory=Cancel)
    down_bytes: int = 0


Answered = Callable[[Task, AppProcess, pb.AppReply], None]


class Aside:
    """The slow ones of one run; from any thread."""

    def __init__(self, answered: Answered) -> None:
        """``answered`` is called in a thread of the task's own, before its process ends."""
        self._answered = answered
        self._lock = threading.Lock()
        self._processes: dict[str, AppProcess] = {}  # by message
        self._nodes: dict[str, int] = {}  # by message
        self._closed = False

    def outlasts(self, process: AppProcess, entry: Task, waiting: Callable[[], int]) -> bool:
        """Wait for a reply to begin. True once so many wait that the task has had its share of its time, and
        its process can go on aside."""
        began_s = time.monotonic()
        try:
            while (now_s := time.monotonic()) < entry.due_s:
                if process.pipe.ready(min(LOOK_S, entry.due_s - now_s)):
                    return False
                share_s = (entry.due_s - began_s) / (waiting() + 1)
                if share_s <= time.monotonic() - began_s and self._has_room():
                    return time.monotonic() < entry.due_s
        except Gone:
            pass
        return False

    def _has_room(self) -> bool:
        with self._lock:
            return len(self._processes) < MOST

    def take(self, entry: Task, process: AppProcess) -> None:
        """Wait for the task's reply in a thread of its own."""
        with self._lock:
            if self._closed:
                process.kill()
                return
            self._processes[entry.task.message] = process
            self._nodes[entry.task.message] = entry.task.node
        name = f"atoll-app-aside-{entry.task.message[:16]}"
        threading.Thread(target=self._await, args=(entry, process), name=name, daemon=True).start()

    def _await(self, entry: Task, process: AppProcess) -> None:
        reply, _ = reply_of(process, entry)
        self._answered(entry, process, reply)

    def holds(self, node: int) -> bool:
        """Whether a task of this node is aside."""
        with self._lock:
            return node in self._nodes.values()

    def done(self, message: str) -> None:
        """End the process of a task that was answered, or is awaited no more."""
        with self._lock:
            process = self._processes.pop(message, None)
            self._nodes.pop(message, None)
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End all of them, and take no more."""
        with self._lock:
            self._closed = True
            processes = list(self._processes.values())
            self._processes.clear()
            self._nodes.clear()
        for process in processes:
            process.kill()


def reply_of(process: AppProcess, entry: Task) -> tuple[pb.AppReply, bool]:
    """The app's reply, or why there is none; and whether its process can serve another task."""
    left_s = entry.due_s - time.monotonic()
    try:
        if left_s > 0:
            return process.pipe.receive(pb.FromChild(), left_s).reply, True
    except TimeoutError:
        pass
    except (Gone, BadFrame) as error:
        words = process.last_words() if isinstance(error, Gone) else str(error)
        return pb.AppReply(error=APP_CRASHED, reason=words[-REASON_CHARS:]), False
    late = "no reply within the message's time to live"
    return pb.AppReply(error=REPLY_UNAVAILABLE, reason=late), False
