"""Starting, asking and killing the process of a ClientApp."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from hostos.app_guard import Guarded
from protos import atoll_apps_pb2 as pb
from protos.child_pipe import Pipe
from worker.hosting.environment import shown_environment
from worker.hosting.output import Output


class AppProcess:
    """A child that runs one ClientApp, under a guard: it and all it started die together, and with us."""

    def __init__(
        self, setup: pb.ChildSetup, threads: int, printed: Callable[[str], None], shown: Sequence[str] = ()
    ) -> None:
        """``shown``: environment variables that this machine's owner lets apps see. ``printed`` is called
        with every line that the app prints, cleaned and cut."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._guarded = Guarded(
                [sys.executable, "-P", "-m", "worker.apps.child", str(theirs.fileno())],
                [theirs.fileno()],
                _environment(threads, shown),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._process = self._guarded.process
        self.pipe = Pipe(ours)
        self._output = Output(self._process, printed)
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
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "\n".join([f"its process ended with {how}", *self._output.tail()])


def _environment(threads: int, shown: Sequence[str] = ()) -> dict[str, str]:
    # An app on a guest's machine calls nobody, and its folder stays as it was accepted.
    offline = [name for name in os.environ if name.endswith("_OFFLINE")]
    return {
        **shown_environment(threads, ("HOME", "PYTHONPATH", "TMPDIR", "USER", *offline, *shown), ("FLWR_",)),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
