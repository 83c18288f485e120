"""What a compute host knows of the job that it holds, and of the process that computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostos.budget import Budget
from worker.hosting.watch import OpWatch

if TYPE_CHECKING:
    from protos import atoll_control_pb2 as control
    from worker.hosting.child import Child
    from worker.hosting.gate import Gate
    from worker.hosting.requests import Served
    from worker.session import instructions

# Bytes for the coordinator: of spans and logs, of which more is left out; of all, which nothing honest nears.
SAID_BURST, SAID_PER_S = 16 << 20, 1 << 20
MOST_BURST, MOST_PER_S = 256 << 20, 16 << 20


@dataclass
class Held:
    """A job that is computed here, or was until its process died."""

    job: str
    federated: instructions.JoinFederation | None = None
    standby: bool = False
    version: int = 0
    step: int = 0  # or round
    turn: str = ""  # of a federated job: what is being done


@dataclass
class Now:
    """What one process has of ours."""

    child: Child
    served: Served | None = None  # before the worker has joined
    gate: Gate | None = None
    watch: OpWatch = field(default_factory=OpWatch)
    ready: bool = False
    answered_s: float = 0.0
    said: Budget = field(default_factory=lambda: Budget(SAID_BURST, SAID_PER_S))
    most: Budget = field(default_factory=lambda: Budget(MOST_BURST, MOST_PER_S))
    joined: str = ""  # the federated job that it was started for
    assigned: int = 0  # number of the last assignment
    loading: int = 0  # and of the one that it last said to have begun

    def peak_bytes(self, device: control.DeviceFacts | None) -> int:
        """The most bytes that it has held beyond rest since ``restart_peak``, by whoever counts them: a GPU's
        allocator, or the kernel."""
        if device is not None and device.kind != "cpu":
            return self.child.status.peak_bytes
        bound = self.child.launched.bound
        return 0 if bound is None else bound.peak_bytes

    def restart_peak(self) -> None:
        """Count anew: another stage is given to it. A GPU's allocator does so by itself."""
        if (bound := self.child.launched.bound) is not None:
            bound.restart_peak()
