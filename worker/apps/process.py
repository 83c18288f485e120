"""Starting, asking and killing the process of a ClientApp."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import atoll
from protos import atoll_apps_pb2 as pb
from protos.app_guard import Guarded
from protos.app_pipe import Pipe
from protos.text_limits import clean

TAIL_LINES = 40
MAX_LINE_BYTES, MAX_LINE_CHARS = 4000, 1000
# All that an app sees of the environment: no credentials of clouds, agents or proxies, whatever their names.
_SHOWN = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV")
_SHOWN_TOO = ("CUDA_", "LC_", "NVIDIA_", "FLWR_")


class AppProcess:
    """A child that runs one ClientApp, under a guard: it and all it started die together, and with us."""

    def __init__(self, setup: pb.ChildSetup, threads: int, printed: Callable[[str], None]) -> None:
        """``printed`` is called with every line that the app prints, cleaned and cut."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._guarded = Guarded(
                [sys.executable, "-P", "-m", "worker.apps.child", str(theirs.fileno())],
                [theirs.fileno()],
                _environment(threads),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._process = self._guarded.process
        self.pipe = Pipe(ours)
        self._printed = printed
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader = threading.Thread(target=self._read, name="atoll-app-output", daemon=True)
        self._reader.start()
        self.pipe.send(pb.ToChild(setup=setup))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it and all it started at once; safe from any thread and more than once."""
        self._guarded.end()
        self.pipe.close()

    def last_words(self) -> str:
        """Describe how the process ended and what it printed last, once it is gone."""
        code = self._process.wait()
        self._reader.join(1.0)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "\n".join([f"its process ended with {how}", *self._tail])

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None  # noqa: S101 - a pipe was asked for
        with output:
            while line := output.readline(MAX_LINE_BYTES):
                text = clean(line.decode(errors="replace").rstrip(), MAX_LINE_CHARS)
                if text:
                    self._tail.append(text)
                    self._printed(text)


def _environment(threads: int) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name in _SHOWN or name.startswith(_SHOWN_TOO)
    }
    root = str(Path(atoll.__file__).resolve().parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH", "")]))
    if threads:
        kept["OMP_NUM_THREADS"] = kept["MKL_NUM_THREADS"] = str(threads)
    # An app on a guest's machine calls nobody, its prints come at once, its folder stays as it was accepted.
    return {
        **kept,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
