"""Starting a contained process, bounding and killing it, and how it ended."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hostos.app_guard import Guarded, kill_all
from worker.hosting.contained.limits import OOM_SCORE, MemoryBound, descendants
from worker.hosting.contained.output import Output
from worker.hosting.contained.sandbox import Sandbox, View, probe

KILLED = "not by this worker: the system or a control group ran short of memory, or somebody killed it"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended, in words, and what it printed last, cleaned."""

    code: int | None  # its exit code; None when a signal ended it
    signal: str = ""  # that signal's name
    cause: str = ""  # whom or what it was ended by, where that is known
    memory_bytes: int = 0  # beyond rest, where the cause is its memory bound or want of memory
    lines: tuple[str, ...] = ()

    @property
    def memory(self) -> bool:
        """Whether it was ended for want of memory."""
        return self.memory_bytes > 0

    def __str__(self) -> str:
        """One line: "SIGSEGV", "exit code 3", "SIGKILL: its memory bound: ..."."""
        how = self.signal or f"exit code {self.code}"
        return f"{how}: {self.cause}" if self.cause else how


class Launched:
    """A process, and all that it starts: they end together, and when this process does.

    A guard stands above it (hostos/app_guard.py) and, where bubblewrap works, a PID namespace around it.
    Methods may be called from any thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        descriptors: Sequence[int],
        view: View,
        environment: Mapping[str, str],
        *,
        sandbox: Sandbox | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``command``: absolute path and arguments; ``descriptors``: of ours that it inherits under their
        numbers, and that stay open here. ``sandbox``: None for what ``probe`` finds. ``at_end``
        is called once all processes ended, in a thread."""
        self.sandbox = probe(view.device) if sandbox is None else sandbox
        self._view = view
        self._lock = threading.Lock()
        self._cause, self._memory = "", False
        self._bound: MemoryBound | None = None
        self._ending: Ending | None = None
        self._guarded = Guarded(
            self.sandbox.wrapped(command, view) if self.sandbox else command,
            descriptors,
            environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            oom_score=OOM_SCORE,
        )
        self._process = self._guarded.process
        _no_core_dump(self._process.pid)
        self._output = Output(self._process)
        # Always there, so that leftovers and the control group go even if nobody asks how it ended.
        threading.Thread(target=self._tell, args=(at_end,), name="atoll-child-end", daemon=True).start()

    @property
    def pid(self) -> int:
        """The guard's number; the process's own is below it."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def limit_added(self, added_bytes: int, shared_bytes: int = 0) -> MemoryBound | None:
        """Bound what it adds to the memory that it holds now, idle and ready; None when it has ended.

        ``shared_bytes``: size of the memory that it shares with us. Once for each process.
        """
        with self._lock:
            if self._bound is not None:
                raise ValueError("the memory of this process is bounded already")
            if not self.alive:
                return None
            self._bound = MemoryBound(self.pid, added_bytes, shared_bytes, self._view.device, self._over)
            if self._bound.group is not None:
                self._guarded.remove_after(self._bound.group.folder)
            return self._bound

    @property
    def bound(self) -> MemoryBound | None:
        """Of its memory, since ``limit_added``."""
        return self._bound

    def kill(self, cause: str = "") -> None:
        """End it and all it started; returns when they are gone. Any number of times."""
        with self._lock:
            if self.alive:  # else its number may be another's by now
                self._cause = self._cause or cause or "by this worker"
                kill_all(descendants(self.pid))  # at once; the guard finds what this missed
        self._guarded.end()

    def ended(self) -> Ending | None:
        """Return how it ended, None while it lives."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        """Wait for its end, for at most ``timeout_s``, and return how it ended; None while it lives."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._guarded.end()  # what a killed guard left
        lines = tuple(self._output.tail())
        with self._lock:
            if self._ending is None:
                self._ending = self._found(code, lines)
            return self._ending

    def _found(self, code: int, lines: tuple[str, ...]) -> Ending:
        cause, memory_bytes = self._cause, 0
        if self._bound is not None:
            shortage = self._bound.breach()
            cause = shortage or cause
            if shortage or self._memory:
                memory_bytes = self._bound.killed_bytes
            self._bound.close()
        # Bubblewrap ends with 128 + the signal's number.
        number = -code if code < 0 else code - 128 if self.sandbox else 0
        name = next((s.name for s in signal.Signals if s == number), "")
        if name == "SIGKILL":
            cause = cause or KILLED
        return Ending(None if name else code, name, cause, memory_bytes, lines)

    def _over(self, cause: str, memory: bool) -> None:
        with self._lock:
            if not self._cause:
                self._cause, self._memory = cause, memory
        self.kill()

    def _tell(self, at_end: Callable[[], None]) -> None:
        self.wait()
        at_end()


def _no_core_dump(process: int) -> None:
    """A dump would hold other people's tensors, and be large."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            resource.prlimit(process, resource.RLIMIT_CORE, (0, 0))
