"""Starting, asking and killing the process of a ClientApp."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from protos import atoll_apps_pb2 as pb
from protos.child_process import ChildProcess
from worker.hosting.contained.environment import shown_environment
from worker.hosting.contained.output import Output


class AppProcess:
    """A child that runs one ClientApp, under a guard: it and all it started die together, and with us."""

    def __init__(
        self, setup: pb.ChildSetup, threads: int, printed: Callable[[str], None], shown: Sequence[str] = ()
    ) -> None:
        """``shown``: environment variables that this machine's owner lets apps see. ``printed`` is called
        with every line that the app prints, cleaned and cut."""
        self.outbox = Path(setup.outbox_dir)
        self._child = ChildProcess(
            ("-m", "worker.apps.child"),
            _environment(threads, shown),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.pipe, self.kill = self._child.pipe, self._child.end
        self._output = Output(self._child.process, printed)
        self.pipe.send(pb.ToChild(setup=setup))

    @property
    def alive(self) -> bool:
        return self._child.alive

    def last_words(self) -> str:
        """Describe how the process ended and what it printed last, once it is gone."""
        return "\n".join([f"its process ended with {self._child.ending()}", *self._output.tail()])


def _environment(threads: int, shown: Sequence[str] = ()) -> dict[str, str]:
    # An app on a guest's machine calls nobody, and its folder stays as it was accepted.
    offline = [name for name in os.environ if name.endswith("_OFFLINE")]
    return {
        **shown_environment(threads, ("HOME", "PYTHONPATH", "TMPDIR", "USER", *offline, *shown), ("FLWR_",)),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
