"""The processes of a demo: daemons and commands of Atoll, each started as a user would, none left behind.

Nothing here waits for a clock: a daemon is waited for until it answers or has ended, a command until it
has ended, however slow or busy the machine is.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from atoll.errors import AtollError
from hostos.closing import Closing
from hostos.signals import endings

LOOK_EVERY_S = 0.2
LEAVE_S = 5.0  # daemons leave within 2 s; whoever is still there is killed
LOG_CHARACTERS = 2000  # of a log's end, shown with a failure


class DemoFailed(AtollError):
    """A demo's process or check did not do what it should."""


class Started(Protocol):
    """The process that a ``Start`` started: this machine's, or what stands for one elsewhere."""

    stdout: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Start(Protocol):
    """Starts this Python with ``arguments`` on a host of the demo, in a session of its own."""

    def __call__(self, host: str, arguments: Sequence[str], **streams: Any) -> Started: ...


def start_here(host: str, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
    """Start this Python on this machine, whatever the host is called."""
    # -P: a folder of the user's that bears a package's name must not come first.
    command = [sys.executable, "-P", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams)


class Processes(Closing):
    """Processes that a demo has started, with one log a process in ``folder``. Use it in ``with``."""

    def __init__(self, folder: Path, start: Start = start_here) -> None:
        self.folder = folder
        self._start = start
        self._daemons: dict[str, Started] = {}
        self._started: list[Started] = []

    def daemon(self, name: str, host: str, arguments: Sequence[str]) -> None:
        """Start a process that must live as long as the demo."""
        self._daemons[name] = self._spawn(name, host, arguments)

    def first_line(self, name: str) -> str:
        """The first line a daemon prints; DemoFailed when it ends without one."""
        stream = self._daemons[name].stdout
        line = stream.readline() if stream is not None else ""
        if not line:
            self._daemons[name].wait()
            self.look()
        return line

    def lines(self, name: str, host: str, arguments: Sequence[str]) -> Iterator[str]:
        """Yield a command's output, line by line as it comes, and "" whenever nothing has come for a while.

        DemoFailed when the command fails or a daemon ends meanwhile.
        """
        process = self._spawn(name, host, arguments)
        found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, found), name="atoll-demo-reader", daemon=True).start()
        while True:
            try:
                line = found.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                line = ""
            if line is None:
                break
            yield line
            self.look()
        if code := process.wait():
            raise DemoFailed(f"{name} ended with exit code {code}:\n{self.log(name)}")

    def run(self, name: str, host: str, arguments: Sequence[str]) -> str:
        """All that a command prints; DemoFailed when it fails or a daemon ends meanwhile."""
        return "".join(self.lines(name, host, arguments))

    def look(self) -> None:
        """DemoFailed when a daemon has ended, with the end of its log."""
        for name, process in self._daemons.items():
            if (code := process.poll()) is not None:
                raise DemoFailed(f"{name} ended early, exit code {code}:\n{self.log(name)}")

    def ended(self) -> list[str]:
        """Names of the daemons that have ended."""
        return [name for name, process in self._daemons.items() if process.poll() is not None]

    def log_path(self, name: str) -> Path:
        """The file with what a process says on its error stream."""
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        """The end of a process's log."""
        path = self.log_path(name)
        return path.read_text(errors="replace")[-LOG_CHARACTERS:].strip() if path.exists() else ""

    def close(self) -> None:
        """Ask every process to leave and kill those that have not after LEAVE_S; may be repeated."""
        with _uninterrupted():
            for process in self._started:
                process.terminate()
            deadline_s = time.monotonic() + LEAVE_S
            for process in self._started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline_s - time.monotonic()))
                if process.poll() is None:
                    process.kill()
                    process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            self._started.clear()

    def _spawn(self, name: str, host: str, arguments: Sequence[str]) -> Started:
        mode = "a" if name in self._daemons else "w"  # one that is started again goes on in its log
        with self.log_path(name).open(mode) as log, _uninterrupted():
            process = self._start(host, arguments, stdout=subprocess.PIPE, stderr=log)
            self._started.append(process)
        return process


def _read(process: Started, found: queue.SimpleQueue[str | None]) -> None:
    """Thread: hand on what the process prints, then None."""
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe
    with suppress(ValueError):  # closed by ``close``
        for line in process.stdout:
            found.put(line)
    found.put(None)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and, unless it is ignored, SIGHUP leave as Ctrl+C does: through what is to be cleaned up."""

    def leave(number: int, _: object) -> NoReturn:
        for other in numbers:  # a terminal that closes sends two, and the second must not end the cleaning up
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = [number for number in endings() if number != signal.SIGINT]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait until the block is done: a process must not be started without being noted, nor left.
    They interrupt the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
