"""Tensors between the stages of one plan version: compress, frame, send, and back.

Only declared messages are taken: key, sender, shape and dtype are known before a step begins.
Everything else (late, duplicate, of another plan version, of another size) is dropped and counted,
never added twice. What was sent in the current step is kept, so that a neighbour that has lost it
can have it again. A step that is run again sends the same bits under the same keys, so a message
that is still unread serves either run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.errors import BadFrame
from atoll.opdag import TensorMeta
from compressors import make_compressor
from compressors.base import Compressor, Packet, check_packet, parse_packet, zero_packet
from worker.frames import Direction, MessageKey
from worker.peer import PeerLost, Receiver

COMPRESSED = frozenset({Direction.FORWARD, Direction.BACKWARD})
"""Boundary tensors take the link's codec; tied parameters and evaluation stay exact."""
FILLING_AT_ONCE = 2
"""Buffers a key may have at a time: one that a lost connection left, one for its repetition."""
SEND_POLL_S = 0.25
_NOTHING = TensorMeta((0,), "uint8")  # a zero mark's shape is the declared one: it need not travel


class LinksAborted(Exception):  # not an AtollError: nobody sees it
    """A wait ended because the links were aborted or closed; the reason is the message."""


class Arrival(Protocol):
    """A message that will come: its key, whom from, and its tensor."""

    @property
    def key(self) -> MessageKey: ...

    @property
    def peer(self) -> str: ...

    @property
    def meta(self) -> TensorMeta: ...


class Network(Protocol):
    """What links need of a PeerNetwork."""

    def register(self, job: str, receiver: Receiver) -> None: ...

    def unregister(self, job: str, receiver: Receiver) -> None: ...

    def forget(self, job: str, plan_version: int | None = None) -> None: ...

    def send(
        self,
        peer: str,
        key: MessageKey,
        header: bytes,
        payload: bytes | bytearray | memoryview,
        timeout_s: float | None = None,
    ) -> None: ...


@dataclass(slots=True)
class _Expected:
    peer: str
    meta: TensorMeta
    filling: int = 0
    packet: Packet | None = None  # arrived, not read
    error: BadFrame | None = None
    read: bool = False


class _Door:
    """The network's way in; ``Links.expect`` already has another meaning."""

    def __init__(self, links: Links) -> None:
        self.expect = links.expect_buffer
        self.deliver = links.deliver
        self.lost = links.lost


class Links:
    """All edges of one stage. ``refused`` counts dropped messages by reason; thread-safe."""

    def __init__(
        self,
        network: Network,
        job: str,
        plan_version: int,
        *,
        outgoing: Mapping[str, Compressor] | None = None,
        incoming: Mapping[str, Compressor] | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        """``outgoing`` and ``incoming``: the plan's codec per peer, 'none' where not named."""
        self.job, self.plan_version = job, plan_version
        self.refused: Counter[str] = Counter()
        self._network, self._device, self._seed = network, device, seed
        self._outgoing, self._incoming = outgoing or {}, incoming or {}
        self._exact = make_compressor("none")
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._expected: dict[MessageKey, _Expected] = {}
        self._kept: dict[str, dict[MessageKey, Packet]] = {}
        self._lost: dict[str, str] = {}
        self._done_step = -1
        self._aborted = ""
        self._door = _Door(self)
        network.register(job, self._door)

    # ---------------------------------------------------------------- the compute thread's side

    def expect(self, arrivals: Iterable[Arrival]) -> None:
        """Take these messages from now on. Raises ValueError for another job's or plan's."""
        with self._lock:
            for arrival in arrivals:
                key = arrival.key
                if (key.job, key.plan_version) != (self.job, self.plan_version):
                    raise ValueError(f"{key} is not of {self.job} version {self.plan_version}")
                if key not in self._expected and key.step > self._done_step:
                    self._expected[key] = _Expected(arrival.peer, arrival.meta)

    def send(self, peer: str, key: MessageKey, tensor: Tensor | None) -> None:
        """Queue a tensor, None as the zero-gradient mark; waits while the peer's queue is full.

        A contiguous CPU tensor is not copied: it must not change before ``step_done``.
        Raises PeerLost, LinksAborted.
        """
        codec = self._codec(self._outgoing, peer, key)
        if tensor is None:
            packet = zero_packet(codec.name, _NOTHING)
        else:
            packet, _ = codec.compress(tensor, seed=self._packet_seed(key))
        with self._lock:
            self._kept.setdefault(peer, {})[key] = packet
        self._transmit(peer, key, packet)

    def receive(self, key: MessageKey, timeout_s: float) -> Tensor | None:
        """The tensor of a declared message on this worker's device; None is the zero mark.

        Raises TimeoutError after ``timeout_s``, PeerLost when its sender is gone, BadFrame when
        what came is not what was declared, LinksAborted, KeyError for an undeclared key.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            expected = self._expected[key]
            while expected.packet is None:
                self._raise_if_hopeless(expected)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"no {key.direction.name.lower()} of {key} in {timeout_s:g} s")
                self._arrived.wait(left_s)
            packet, expected.packet, expected.read = expected.packet, None, True
        if packet.zero:
            return None
        return self._codec(self._incoming, expected.peer, key).decompress(packet).to(self._device)

    def resend(self, peer: str) -> int:
        """``peer`` is back: queue everything of the current step again; returns how many messages."""
        with self._lock:
            self._lost.pop(peer, None)
            kept = list(self._kept.get(peer, {}).items())
        for key, packet in kept:
            self._transmit(peer, key, packet)
        return len(kept)

    def step_done(self, step: int) -> None:
        """Messages of ``step`` and before are not wanted any more, nor kept."""
        with self._lock:
            self._done_step = max(self._done_step, step)
            self._expected = {key: e for key, e in self._expected.items() if key.step > step}
            for peer, kept in self._kept.items():
                self._kept[peer] = {key: packet for key, packet in kept.items() if key.step > step}

    def abort(self, reason: str) -> None:
        """End every wait, now and later, with LinksAborted."""
        with self._lock:
            self._aborted = self._aborted or reason
            self._arrived.notify_all()

    def close(self) -> None:
        """Drop what waits either way; messages of this job are refused from now on."""
        self.abort("links closed")
        # The next plan version's links may already be there: only ours goes.
        self._network.unregister(self.job, self._door)
        self._network.forget(self.job, self.plan_version)
        with self._lock:
            self._expected.clear()
            self._kept.clear()

    # ---------------------------------------------------------------- the network's side

    def expect_buffer(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        """Memory for a message about to arrive; None, and a count, when it is not wanted."""
        with self._lock:
            reason = self._unwanted(peer, key, total)
            if reason:
                self.refused[reason] += 1
                return None
            self._expected[key].filling += 1
            if not total:
                return memoryview(bytearray())
            # Aligned as tensors want it, and not cleared first; the view keeps it alive.
            return memoryview(torch.empty(total, dtype=torch.uint8).numpy())  # type: ignore[arg-type]

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        """A whole message: keep it for ``receive``."""
        packet, error = None, None
        try:
            packet = parse_packet(header, payload)
            self._check(peer, key, packet)
        except BadFrame as refused:
            error = refused
        with self._lock:
            expected = self._expected.get(key)
            if expected is None:
                self.refused["late"] += 1
                return
            expected.filling -= 1
            if error is not None:
                self.refused["malformed"] += 1
                expected.error = error
            elif expected.packet is not None:
                self.refused["duplicate"] += 1
            else:
                expected.packet = packet
            self._arrived.notify_all()

    def lost(self, peer: str, reason: str) -> None:
        """Wake whoever waits for this peer."""
        with self._lock:
            self._lost[peer] = reason
            for expected in self._expected.values():
                if expected.peer == peer:
                    expected.filling = 0
            self._arrived.notify_all()

    def _unwanted(self, peer: str, key: MessageKey, total: int) -> str:
        """Why a message is not taken; empty when it is."""
        if key.plan_version != self.plan_version:
            return "stale_plan"
        expected = self._expected.get(key)
        if expected is None:
            return "late" if key.step <= self._done_step else "unknown_key"
        if expected.peer != peer:
            return "wrong_sender"
        if total > self._codec(self._incoming, peer, key).max_payload_bytes(expected.meta):
            return "oversized"
        if expected.packet is not None or expected.filling >= FILLING_AT_ONCE:
            return "duplicate"
        return ""

    def _check(self, peer: str, key: MessageKey, packet: Packet) -> None:
        codec = self._codec(self._incoming, peer, key)
        with self._lock:
            expected = self._expected.get(key)
        if expected is None:
            return
        meta = _NOTHING if packet.zero else expected.meta
        check_packet(packet, codec.name, meta, codec.max_payload_bytes(expected.meta))

    # ---------------------------------------------------------------- inside

    def _raise_if_hopeless(self, expected: _Expected) -> None:
        if self._aborted:
            raise LinksAborted(self._aborted)
        if expected.error is not None:
            raise expected.error
        if expected.peer in self._lost:
            raise PeerLost(expected.peer, self._lost[expected.peer])

    def _transmit(self, peer: str, key: MessageKey, packet: Packet) -> None:
        header = packet.header
        while True:
            with self._lock:
                if self._aborted:
                    raise LinksAborted(self._aborted)
                if peer in self._lost:
                    raise PeerLost(peer, self._lost[peer])
            try:
                self._network.send(peer, key, header, packet.payload, SEND_POLL_S)
            except TimeoutError:
                continue  # full: look whether anybody still wants it
            return

    def _codec(self, codecs: Mapping[str, Compressor], peer: str, key: MessageKey) -> Compressor:
        return codecs.get(peer, self._exact) if key.direction in COMPRESSED else self._exact

    def _packet_seed(self, key: MessageKey) -> int:
        """The same message always gets the same seed, on a second run too."""
        parts = (key.step, key.micro, key.edge, int(key.direction))
        seed = self._seed
        for part in parts:
            seed = (seed * 1_000_003 + part + 1) % (1 << 63)
        return seed
