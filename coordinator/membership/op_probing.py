"""Which ops each worker has timed, and its round trip to the coordinator: pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.config import Probing
from coordinator.planning.costs.fleet import LinkEstimate

RTT_SAMPLES = 3
NOMINAL = LinkEstimate(20e6, 0.03)


@dataclass(slots=True)
class OpsRequest:
    """Ops that a worker is timing now."""

    worker: str
    job: str
    precision: str
    signatures: tuple[str, ...]
    sent_s: float
    deadline_s: float


@dataclass(slots=True)
class OpProbing:
    """Op timings by worker and precision, and the round trip to the coordinator."""

    config: Probing
    timings: dict[tuple[str, str], dict[str, tuple[float, float]]] = field(default_factory=dict)
    failed: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    requests: dict[int, OpsRequest] = field(default_factory=dict)
    rtt_s: dict[str, list[float]] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)  # forward, of every op that any job showed
    _asked: Counter[str] = field(default_factory=Counter)  # requests by worker

    def missing(self, worker: str, precision: str, signatures: Iterable[str]) -> tuple[str, ...]:
        """Signatures that this worker has neither timed nor failed to time."""
        known = self.timings.get((worker, precision), {})
        failed = self.failed.get((worker, precision), set())
        return tuple(s for s in signatures if s not in known and s not in failed)

    def asked(self, worker: str) -> bool:
        """Return whether an answer of this worker is awaited."""
        return worker in self._asked

    def begin(self, number: int, request: OpsRequest) -> None:
        """Await the answer to a request."""
        self.requests[number] = request
        self._asked[request.worker] += 1

    def end(self, number: int) -> OpsRequest:
        """Await the answer to a request no longer."""
        request = self.requests.pop(number)
        self._asked[request.worker] -= 1
        if not self._asked[request.worker]:
            del self._asked[request.worker]
        return request

    def give_up(self, request: OpsRequest) -> None:
        """Those ops are estimated from FLOPs and bytes instead."""
        self.failed.setdefault((request.worker, request.precision), set()).update(request.signatures)

    def expire(self, now_s: float) -> list[OpsRequest]:
        """Requests whose deadline passed."""
        late = [number for number, request in self.requests.items() if now_s > request.deadline_s]
        found = [self.end(number) for number in late]
        for request in found:
            self.give_up(request)
        return found

    def round_trip(self, worker: str) -> LinkEstimate:
        """The coordinator as a link: the shortest round trip measured."""
        samples = self.rtt_s.get(worker)
        return LinkEstimate(NOMINAL.bandwidth_bps, min(samples) / 2 if samples else NOMINAL.latency_s)

    def forget(self, worker: str) -> None:
        """Drop requests of a worker that left; its timings stay, the device is the same."""
        if self.asked(worker):
            for number in [n for n, request in self.requests.items() if request.worker == worker]:
                self.end(number)
