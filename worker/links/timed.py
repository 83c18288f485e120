"""A network that notes when messages leave and arrive, for the job's timeline.

A send lasts from the call to the end of queueing; a receive from a message's first byte to its
last, as this worker saw them.
"""

from __future__ import annotations

from worker.links.links import Network
from worker.spans import Span, Spans
from worker.transport.contract import Receiver
from worker.transport.frames import MessageKey


class TimedNetwork:
    """``Network`` of one plan version's links, with its spans."""

    def __init__(self, network: Network, spans: Spans) -> None:
        self._network, self._spans = network, spans
        self._timed: dict[str, _Timed] = {}

    def register(self, job: str, receiver: Receiver) -> None:
        self._timed[job] = _Timed(receiver, self._spans)
        self._network.register(job, self._timed[job])

    def unregister(self, job: str, receiver: Receiver) -> None:
        timed = self._timed.get(job)
        if timed is not None and timed.receiver is receiver:
            self._network.unregister(job, timed)

    def forget(self, job: str, plan_version: int | None = None) -> None:
        self._network.forget(job, plan_version)

    def send(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
        more: bool = False,
    ) -> None:
        with self._spans.timed("send", key.step, key.micro, peer, len(payload)):
            self._network.send(peer, key, header, payload, timeout_s, more)


class _Timed:
    """``Receiver`` in front of the links' own."""

    def __init__(self, receiver: Receiver, spans: Spans) -> None:
        self.receiver, self._spans = receiver, spans
        self._begun_s: dict[tuple[str, MessageKey], float] = {}  # of messages under way: few

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        buffer = self.receiver.expect(peer, key, total)
        if buffer is not None:
            self._begun_s[peer, key] = self._spans.now_s()
        return buffer

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        now_s = self._spans.now_s()
        begun_s = self._begun_s.pop((peer, key), now_s)
        self.receiver.deliver(peer, key, header, payload)
        self._spans.add(Span("recv", key.step, key.micro, begun_s, now_s, peer, len(payload)))

    def lost(self, peer: str, reason: str) -> None:
        for entry in [entry for entry in self._begun_s if entry[0] == peer]:
            self._begun_s.pop(entry, None)
        self.receiver.lost(peer, reason)
