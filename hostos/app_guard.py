"""A small process between ours and an app's, so that nothing an app starts outlives ours.

The app's process may be killed by the kernel when its parent dies, but not what it started. The guard
adopts every orphan among its descendants (PR_SET_CHILD_SUBREAPER). So leaving the group or the
session, or a double fork, leads nowhere. When the app's process ends, or the pipe that our process
holds closes, by a kill -9 too, it kills them all and ends as the app's process ended. Elsewhere than
on Linux it kills the app's process group.

This file is also the guard's program: run alone (python -I -S), it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

END_WITHIN_S = 5.0  # a guard that has not ended everything by then is helped
_PAUSE_FIRST_S, _PAUSE_MOST_S = 0.001, 0.5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guarded:
    """A command under a guard; ``process`` is the guard, and ends as the command does."""

    def __init__(
        self,
        command: Sequence[str],
        given: Sequence[int],
        environment: Mapping[str, str],
        *,
        stdout: IO[Any] | int | None = None,
        stderr: int | None = None,
        oom_score: int = 0,
    ) -> None:
        """``given``: descriptors that the command inherits; ``oom_score``: from 0 to 1000, how much sooner
        than others a system short of memory ends it."""
        there, self._life = os.pipe()
        self._lock = threading.Lock()
        try:
            told = [str(there), ",".join(map(str, given)), str(oom_score)]
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *told, *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[there, *given],
                env=environment,
                start_new_session=True,  # Ctrl+C is for us, who end the app in order
            )
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(there)

    def remove_after(self, folder: Path) -> None:
        """Have an empty folder, such as a control group's, removed after the command should this process be
        gone by then: a kill -9 leaves none behind."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self._life >= 0:
                os.write(self._life, os.fsencode(folder) + b"\n")

    def end(self) -> None:
        """End the command and all it started; returns when they are gone. Any thread, any number of times."""
        with self._lock:
            if self._life < 0:
                return  # the guard's number may be another's by now
            os.close(self._life)
            try:
                self.process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                kill_all(family(self.process.pid))
                self.process.kill()
                self.process.wait()
            # A guard that was itself killed may leave some of its session. Where it left nobody, its number
            # is free since it was waited for, and a process that has it is a stranger's.
            left = family(self.process.pid)
            if not Path(f"/proc/{self.process.pid}").exists():
                kill_all(left)
            self._life = -1


def family(root: int) -> set[int]:
    """Processes whose ancestor is ``root``, or that are in its session still; without ``root`` itself."""
    parents: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1]), int(fields[3])
    found = {root}
    while more := {p for p, above in parents.items() if found.intersection(above) and p not in found}:
        found |= more
    return found - {root}


def kill_all(processes: Iterable[int]) -> None:
    """Kill them, by groups first: a group that forks without end dies at once, one by one it outruns us."""
    listed, groups = list(processes), set()
    for process in listed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            groups.add(os.getpgid(process))
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for process in listed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


# ---------------------------------------------------------------- the guard's program


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _started(command: list[str], given: list[int], ours: list[int], oom_score: str) -> int:
    """The app's process: a group of its own, and dead when the guard is, however that went."""
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and that is inherited
        for descriptor in ours:
            os.close(descriptor)
        for descriptor in given:
            os.set_inheritable(descriptor, True)
        if oom_score != "0":
            with contextlib.suppress(OSError):  # other systems have no such file
                Path("/proc/self/oom_score_adj").write_text(oom_score)
        if os.getppid() == guard:
            os.execv(command[0], command)  # noqa: S606 - no shell is what is wanted
    finally:
        os._exit(127)


def _wait(child: int, life: int, awake: int, folders: list[bytes]) -> int | None:
    """Return the app's status once it has ended, None when it is to end; add to the ``folders`` to remove."""
    while True:
        ready, _, _ = select.select([life, awake], [], [])
        if life in ready:
            if not (text := os.read(life, 4096)):
                return None
            folders += text.splitlines()
            continue
        if {int(number) for number in os.read(awake, 4096)}.intersection(_ENDING):
            return None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == child:
                    return found[1]


def _end_all(child: int, status: int | None) -> int:
    """Kill until no descendant is left: who has no child has none, for orphans become ours."""
    pause_s, known = _PAUSE_FIRST_S, set[int]()
    with contextlib.suppress(ChildProcessError):
        while True:
            if sys.platform.startswith("linux"):
                found = family(os.getpid())
                kill_all(found)
                pause_s = min(_PAUSE_MOST_S, 2 * pause_s) if found <= known else _PAUSE_FIRST_S
                known |= found
            else:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
            time.sleep(pause_s)
    return signal.SIGKILL if status is None else status


def _end_as(status: int) -> None:
    """End by the same signal or with the same code."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def main() -> None:
    """Entry: the pipe's descriptor, those of the app, its score, its command."""
    life, given = int(sys.argv[1]), [int(d) for d in sys.argv[2].split(",") if d]
    oom_score, command = sys.argv[3], sys.argv[4:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    awake, waking = os.pipe()
    os.set_blocking(waking, False)
    for number in (*_ENDING, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    child = _started(command, given, [life, awake, waking], oom_score)
    for descriptor in given:
        os.close(descriptor)
    folders: list[bytes] = []
    found = _wait(child, life, awake, folders)
    status = _end_all(child, found)
    if found is None:
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    _end_as(status)


if __name__ == "__main__":
    main()
