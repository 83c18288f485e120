"""The real daemons, with named points of their protocols at which a test has processes killed.

    python -m tests.e2e.points FOLDER coordinator.cli serve ...
    python -m tests.e2e.points FOLDER worker.cli join ...

A point is a call of one of the ports that every daemon has anyway (the journal, the session's machine, the
compute host, what a stage sends), just before or just after it: ``coordinator.journal.StepCommitted.after``.
The product knows nothing of points: they are wrapped around it here. A file in FOLDER that is called as a
point arms it. Whoever comes there next takes the file, and sends SIGKILL to the processes that it lists, 0
standing for itself. The compute process, which a wrapped worker starts wrapped as well, finds FOLDER only
without a sandbox.

While FOLDER has a file ``pace``, each stage rests so many seconds before a step, so that a job lasts as long
as a test has points. A coordinator that starts where FOLDER has a file ``steady`` finds no worker faster than
the one whose place it could take.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

PASSED, PACE, STEADY = "passed", "pace", "steady"
Label = Callable[..., Sequence[str]]  # of a call's arguments


class Points:
    """Points of one process, under the first word ``role``."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._role = folder, role

    def reach(self, name: str) -> None:
        """Pass a point: kill, where it is armed."""
        name = f"{self._role}.{name}"
        taken = self._folder / PASSED / name
        try:
            (self._folder / name).rename(taken)
        except FileNotFoundError:
            return
        for process in map(int, taken.read_text().split()):
            with suppress(ProcessLookupError):
                os.kill(process or os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, label: Label) -> None:
        """Make a point before and after each call of a function, by the names that ``label`` has for it."""
        whole = getattr(owner, name)

        @wraps(whole)
        def passed(*args: Any, **kwargs: Any) -> Any:
            names = label(*args, **kwargs)
            for each in names:
                self.reach(f"{each}.before")
            result = whole(*args, **kwargs)
            for each in names:
                self.reach(f"{each}.after")
            return result

        setattr(owner, name, passed)

    def rest(self) -> None:
        """Rest as long as the test says."""
        with suppress(FileNotFoundError, ValueError):  # it is being written
            time.sleep(float((self._folder / PACE).read_text()))


def always(name: str) -> Label:
    """The same name for every call."""
    return lambda *args, **kwargs: (name,)


def of_kind(name: str) -> Label:
    """The name, and the kind of the call's only argument."""
    return lambda _, argument, *rest: (f"{name}.{type(argument).__name__}",)


def coordinator(points: Points, *, steady: bool) -> None:
    from coordinator import server, shell
    from coordinator.pipeline.changes import newcomers
    from coordinator.services.workers import work
    from coordinator.storage import journal
    from coordinator.storage.blob_store import BlobStore

    said: Counter[tuple[object, ...]] = Counter()
    lock = threading.Lock()

    def saying(message: Any, *_: Any) -> Sequence[str]:
        """Which of a plan's workers hears a message: the first, the second, ..."""
        of = getattr(message, "plan", message)  # whose version it is
        version = getattr(of, "version", None)
        what = (type(message), getattr(message, "job", None), version, getattr(message, "step", None))
        with lock:
            said[what] += 1
            return (f"say.{type(message).__name__}.{said[what]}",)

    points.around(
        journal.Journal, "append", lambda _, records: [f"journal.{record.kind}" for record in records]
    )
    points.around(journal.Journal, "claim", always("claim"))
    points.around(journal.Journal, "fold", always("snapshot"))
    points.around(BlobStore, "write", always("blob"))
    points.around(shell.Shell, "attach", always("attach"))
    points.around(work, "to_worker", saying)
    if steady:
        newcomers.LEAST_GAIN = 1.0
    server.SNAPSHOT_EVERY = 50  # type: ignore[attr-defined]
    journal.SNAPSHOTS = 1_000_000  # so many are kept, and with them every record


def worker(points: Points, folder: Path) -> None:
    from worker.blobs import BlobFiles
    from worker.control.stream import Stream
    from worker.hosting.contained import child
    from worker.hosting.host import ComputeHost
    from worker.hosting.neighbours.send_log import SendLog
    from worker.session import machine

    points.around(machine, "handle", of_kind("hear"))
    points.around(ComputeHost, "do", of_kind("order"))
    points.around(Stream, "send", lambda _, message: (f"send.{message.WhichOneof('body')}",))
    points.around(SendLog, "append", always("log"))
    points.around(SendLog, "records", always("serve"))
    points.around(BlobFiles, "store", always("store"))
    command: Any = (sys.executable, "-P", "-m", "tests.e2e.points", str(folder), "worker.compute")
    child.COMMAND = command


def compute(points: Points) -> None:
    from worker.compute.ports import DaemonNetwork
    from worker.session import pipe
    from worker.stage import tensor_blobs
    from worker.stage.steps.run import StageRun

    points.around(pipe, "reported", lambda event: (f"post.{type(event).__name__}",))
    points.around(DaemonNetwork, "send", lambda _, peer, key, *rest, **more: (f"pass.{key.direction.name}",))
    points.around(DaemonNetwork, "record", always("record"))
    points.around(DaemonNetwork, "connect", always("connect"))
    points.around(tensor_blobs, "store_files", always("store"))
    for name in ("apply", "snapshot", "replay", "reconfigure"):
        points.around(StageRun, name, always(name))
    run_step = StageRun.run_step

    def paced(*args: Any) -> Any:
        points.rest()
        return run_step(*args)

    StageRun.run_step = paced  # type: ignore[assignment, method-assign]


def main() -> None:
    """Run the module that is named third, wrapped."""
    folder, module = Path(sys.argv[1]), sys.argv[2]
    (folder / PASSED).mkdir(parents=True, exist_ok=True)
    sys.argv[1:3] = []
    if module == "worker.compute":
        compute(Points(folder, "compute"))
    elif module == "worker.cli":
        worker(Points(folder, "worker"), folder)
    else:
        coordinator(Points(folder, "coordinator"), steady=(folder / STEADY).exists())
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
