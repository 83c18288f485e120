"""The daemon's side of computing where nothing is computed: a machine that takes Flower apps alone.

No process loads torch for jobs that never come. The coordinator plans without it; a job that comes all
the same is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.messages.from_worker import OpsProbed
from protos import atoll_control_pb2 as control
from worker.config import make_state_dir
from worker.hosting.host import ComputeHost
from worker.hosting.requests import HostPorts
from worker.machine.device import cpu_device, device_facts
from worker.session import events, instructions

REASON = "this worker takes Flower apps only (--apps-only)"


class AppsOnly(ComputeHost):
    """A compute host that computes nothing."""

    def prepare(self) -> None:
        """Find the machine's facts. Raises StorageError, and UsageError for more memory than there is."""
        make_state_dir(self._state.config.state_dir)
        self._state.device = device_facts(cpu_device(self._state.config))

    def start(
        self, worker: str, ports: HostPorts, stopping: Callable[[], bool] = lambda: False
    ) -> control.DeviceFacts:
        """Return the machine's facts."""
        self._state.worker, self._state.ports = worker, ports
        return self.device

    def do(self, instruction: instructions.Instruction) -> None:
        """Refuse what is to be computed; ways are timed as by everybody."""
        match instruction:
            case events.ProbeOps(request, ops) if ops.ops:
                self._state.ports.post(OpsProbed(request, {}, REASON))
            case events.ProbeOps() | events.ProbeLink():
                super().do(instruction)
            case events.Assign(job, version):
                self._state.ports.post(events.StageFailed(job, version, 0, REASON))
            case events.Participate(job):
                self._state.ports.post(events.ClientFailed(job, 0, REASON, "load"))
            case _:
                pass  # it concerns a computation that there is not
