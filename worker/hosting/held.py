"""What the parts of a compute host share: the job that it holds, the process that computes, the device."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from hostos.budget import Budget
from protos import atoll_control_pb2 as control
from worker.hosting.contained.limits import computed_s
from worker.hosting.watch import OpWatch
from worker.machine.own_share import MemoryShare, memory_share
from worker.machine.sensors.energy import EnergyMeter
from worker.machine.speed_file import SpeedFile
from worker.session import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.errors import AtollError
    from atoll.messages.to_worker import PeerLink
    from protos import atoll_compute_pb2 as pb
    from worker.config import WorkerConfig
    from worker.data.pinned import PinnedRows
    from worker.federated.owner.consent import Consent
    from worker.hosting.contained.child import Child
    from worker.hosting.neighbours.gate import Gate
    from worker.hosting.requests import HostPorts, Served
    from worker.ranks.gathering import Gathering

# Bytes for the coordinator: of spans and logs, of which more is left out; of all, which nothing honest nears.
SAID_BURST, SAID_PER_S = 16 << 20, 1 << 20
MOST_BURST, MOST_PER_S = 256 << 20, 16 << 20


@dataclass
class Held:
    """A job that is computed here, or was until its process died."""

    job: str
    federated: events.Participate | None = None
    standby: bool = False
    version: int = 0
    step: int = 0  # or round
    turn: str = ""  # of a federated job: what is being done
    rows: PinnedRows | None = None  # of a job whose data stay here
    gateway: str = ""  # the worker that may have the round's update


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

    @property
    def counters(self) -> tuple[Callable[[], float], float]:
        """CPU seconds that it has taken, to be asked, and its GPUs' joules: for an ``EnergyMeter``."""
        return partial(computed_s, self.child.launched.pid), self.child.status.gpu_j

    def restart_peak(self) -> None:
        """Count anew: another stage is given to it. A GPU's allocator does so by itself."""
        if (bound := self.child.launched.bound) is not None:
            bound.restart_peak()

    def leave_gate(self) -> None:
        """Let no message of its job pass any more."""
        if self.gate is not None:
            self.gate.close()
            self.gate = None

    def abandon(self, reason: str) -> None:
        """End what is done for the process and its job."""
        self.leave_gate()
        if self.served is not None:
            self.served.cancel_all(reason)


class HostState:
    """State of a compute host. Who changes it, or reads two fields that belong together, holds ``lock``."""

    def __init__(self, config: WorkerConfig, consent: Consent, ranks: Gathering | None = None) -> None:
        """``ranks``: the other hosts of a site."""
        self.config, self.consent, self.ranks = config, consent, ranks
        self.worker = ""  # until it has joined; then with its ports
        self.ports: HostPorts
        self.speeds = SpeedFile(config.device_dir)
        self.energy = EnergyMeter()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.numbers = itertools.count(1)
        self.now: Now | None = None
        self.held: Held | None = None
        self.links: tuple[PeerLink, ...] = ()
        self.probes: set[int] = set()  # requests to time ops that are not answered
        self.device: control.DeviceFacts | None = None
        self.own_bytes = 0  # that the worker takes itself of the device's memory
        self.rates: list[control.CodecSpeed] = []
        self.failed: AtollError | None = None
        self.last_death = ""
        self.share = 1.0  # of the time that may be computed
        self.wants_codecs = False

    @property
    def gate(self) -> Gate | None:
        """The gate of the stage that is held."""
        return None if self.now is None else self.now.gate

    def memory_under(self, config: WorkerConfig | None = None) -> MemoryShare:
        """Return how the device's memory is shared under the limits of ``config``, None: as they are now."""
        facts = self.device or control.DeviceFacts()
        found_bytes = facts.memory_limit_bytes // self.apart
        return memory_share(config or self.config, facts.kind, found_bytes, self.own_bytes).times(self.apart)

    @property
    def apart(self) -> int:
        """Processes of the device each of which has memory of its own, with limits of its own."""
        facts = self.device
        several = facts is not None and (self.ranks is not None or facts.kind != "cpu")
        return max(1, facts.processes) if facts is not None and several else 1

    def tell(self, message: pb.ToCompute) -> None:
        """Send a message to the process, where there is one."""
        now = self.now
        if now is not None:
            now.child.send(message)

    def at(self, version: int, step: int) -> None:
        """Note how far the job that is held is."""
        if self.held is not None:
            self.held.version, self.held.step = version, step

    def report(self, reason: str, *, gone: bool, memory_bytes: int = 0) -> None:
        """Report that the job that is held cannot go on; ``gone``: nor can it be repeated."""
        held = self.held
        if held is None:
            return
        if held.federated is None:
            broke = events.StageFailed(held.job, held.version, held.step, reason, "", memory_bytes, gone)
            self.ports.post(broke)
        elif held.turn:
            during, held.turn = held.turn, ""
            self.ports.post(events.ClientFailed(held.job, held.step, reason, during))
