"""Tensors between the stages of one plan: compress, frame, send, and back.

``worker.links.codecs`` chooses a message's codec for each plan version. From a step on that the
coordinator names, the same stages may exchange under a new version with other codecs.

Only declared messages are taken: key, sender, shape and dtype are known before a step begins. The daemon's
gate (``worker.hosting.neighbours.gate``) gives no memory to what is of another sender, plan version or size.
What is over or here already is dropped, never added twice. A step that is run again sends the same bits under
the same keys, so a message that is still unread serves either run; one that is repeated alone is sent to
nobody.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import BadFrame, StorageError
from atoll.messages.from_worker import DIGEST_BYTES
from atoll.opdag import TensorMeta
from compressors.base import Packet, parse_packet
from protos.text_limits import clean
from worker.links.codec_use import CodecUse
from worker.links.codecs import Coding, StageCodecs
from worker.links.ports import Arrival, Network
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction, MessageKey, of_round

SEND_POLL_S = 0.25
TOGETHER_BYTES = 16 << 10
"""A shorter message waits for those of the same hop, to cost both ends less; a longer one leaves while the
next is encoded."""

MAX_WHY_CHARS = 300
NEVER = 1 << 63
"""``sends_from`` of who repeats steps only."""
TRAINING = frozenset({Direction.FORWARD, Direction.BACKWARD, Direction.TIED_PARTIAL, Direction.TIED_TOTAL})
Record = Callable[[str, MessageKey, bytes, bytes | bytearray | memoryview, float | None], None]


class LinksAborted(Exception):  # not an AtollError: it is shown to no user
    """A wait ended because the links were aborted or closed; the reason is the message."""


@dataclass(slots=True)
class _Expected:
    peer: str
    meta: TensorMeta
    packet: Packet | None = None  # arrived, not read
    unusable: str = ""  # why what arrived is not what was declared


class _Door:
    """The network's way in; ``Links.expect`` already has another meaning."""

    def __init__(self, links: Links) -> None:
        self.expect = links.expect_buffer
        self.deliver = links.deliver
        self.lost = links.lost


class Links:
    """The edges of a stage; thread-safe."""

    def __init__(
        self,
        network: Network,
        job: str,
        plan_version: int,
        codecs: StageCodecs | None = None,
        *,
        device: torch.device | str = "cpu",
        announce: Callable[[list[tuple[Arrival, int]]], object] = lambda _: None,
        record: Record | None = None,
        sends_from: tuple[int, bool] = (0, False),
    ) -> None:
        """``codecs`` None: everything travels exactly. ``announce`` hears of messages before any of them is
        taken, each with the payload bytes that it may have. Messages before ``sends_from`` are given to
        ``record`` instead of being sent: before this step, or the round that has its number."""
        self.job = job
        self._network, self._device, self._announce = network, device, announce
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        # Version -> its first step and codecs; the newest last.
        self._eras: dict[int, tuple[int, StageCodecs]] = {plan_version: (0, codecs or StageCodecs())}
        self._expected: dict[MessageKey, _Expected] = {}
        self._record, self._sends_from = record, sends_from
        self._digests, self._hashed = False, hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._lost: dict[str, str] = {}
        self._not_there = ""  # why a step cannot be repeated
        self._done_step = -1
        self._aborted = ""
        self._door = _Door(self)
        network.register(job, self._door)

    @property
    def plan_version(self) -> int:
        """The newest that messages are taken of."""
        return next(reversed(self._eras))

    # ---------------------------------------------------------------- the compute thread's side

    def expect(self, arrivals: Iterable[Arrival]) -> None:
        """Take these messages from now on. Raises ValueError for another job's or plan's."""
        new: list[tuple[Arrival, int]] = []
        with self._lock:
            for arrival in arrivals:
                key = arrival.key
                if key.job != self.job or key.plan_version not in self._eras:
                    raise ValueError(f"{key} is not of {self.job} version {self.plan_version}")
                if key not in self._expected and key.step > self._done_step:
                    self._expected[key] = _Expected(arrival.peer, arrival.meta)
                    new.append((arrival, self._coding(arrival.peer, key).max_payload_bytes(arrival.meta)))
        self._announce(new)

    def relink(self, plan_version: int, first_step: int, codecs: StageCodecs) -> None:
        """Take messages of this version, too: of ``first_step`` and later ones."""
        with self._lock:
            if plan_version <= self.plan_version:
                raise ValueError(f"version {plan_version} after {self.plan_version}")
            codecs.use = self._codecs(self.plan_version).use
            self._eras[plan_version] = (first_step, codecs)

    def reconfigure(
        self, plan_version: int, first_step: int, codecs: StageCodecs, *, sends: bool = True
    ) -> None:
        """From ``first_step`` on take messages of this version and no others, and send, where one ``sends``
        at all; who was lost, and what was aborted, counts no more."""
        with self._lock:
            if plan_version <= self.plan_version:
                raise ValueError(f"version {plan_version} after {self.plan_version}")
            codecs.use = self._codecs(self.plan_version).use
            self._eras = {plan_version: (first_step, codecs)}
            self._done_step = first_step - 1
            self._expected.clear()
            self._lost.clear()
            self._aborted = ""
            self._sends_from = (first_step if sends else NEVER, False)

    def ask(self, peer: str, key: MessageKey) -> None:
        """Ask ``peer`` for what it sent this stage in ``key``'s step; it may be asked again."""
        self._network.send(peer, key, b"", b"", SEND_POLL_S)

    def codec_use(self) -> dict[str, CodecUse]:
        """Work of the codecs on the way to and from each peer since the last call."""
        return self._codecs(self.plan_version).take_use()

    def send(self, peer: str, key: MessageKey, tensor: Tensor | None, *, more: bool = False) -> None:
        """Queue a tensor, None as the zero-gradient mark; waits while the peer's queue is full.

        ``more``: another one to this peer follows at once. A contiguous CPU tensor is not copied: it
        must not change before ``step_done``. Raises PeerLost, LinksAborted.
        """
        packet = self._codecs(key.plan_version).encode(peer, key, tensor)
        self._transmit(peer, key, packet, more=more and len(packet.payload) < TOGETHER_BYTES)

    def receive(self, key: MessageKey, timeout_s: float) -> Tensor | None:
        """The tensor of a declared message on this worker's device; None is the zero mark.

        Raises TimeoutError after ``timeout_s``, PeerLost when its sender is gone or sent what is not what
        was declared, LinksAborted, KeyError for an undeclared key.
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
            packet, expected.packet = expected.packet, None
        if self._digests and key.direction in TRAINING:
            self._hashed.update(packet.header)
            self._hashed.update(packet.payload)
        try:
            tensor = self._codecs(key.plan_version).decode(expected.peer, key, packet)
        except BadFrame as error:
            raise PeerLost(expected.peer, str(error)) from None
        return None if tensor is None else tensor.to(self._device)

    def hash_inputs(self) -> None:
        """Hash the messages of training from now on, in the order of ``receive``."""
        self._digests = True

    def take_digest(self) -> bytes:
        """Return eight bytes over the messages of training that were received since the last call, in the
        order of ``receive`` and as they came; empty where nothing is hashed."""
        hashed, self._hashed = self._hashed, hashlib.blake2b(digest_size=DIGEST_BYTES)
        return hashed.digest() if self._digests else b""

    def step_done(self, step: int) -> None:
        """Messages of ``step`` and before are not wanted any more."""
        with self._lock:
            self._done_step = max(self._done_step, step)
            self._expected = {key: e for key, e in self._expected.items() if key.step > step}
            ends = [first for first, _ in self._eras.values()][1:]  # each where the next begins
            over = [version for version, end in zip(self._eras, ends, strict=False) if end <= step + 1]
            for version in over:
                del self._eras[version]
            for _, codecs in self._eras.values():
                codecs.step_done(step)

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

    # ---------------------------------------------------------------- the network's side

    def expect_buffer(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        """Memory for a message about to arrive; None when it is over, or here already."""
        with self._lock:
            expected = self._expected.get(key)
            if expected is None or expected.packet is not None:
                return None
        # Aligned as tensors want it, and not cleared first; the view keeps it alive.
        return memoryview(torch.empty(total, dtype=torch.uint8).numpy() if total else bytearray())  # type: ignore[arg-type]

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        """A whole message: keep it for ``receive``."""
        if key.direction is Direction.REPLAY:
            why = f"{peer}: {clean(header.decode(errors='replace'), MAX_WHY_CHARS)}"
            with self._lock:
                self._not_there = self._not_there or why
                self._arrived.notify_all()
            return
        packet, unusable = None, ""
        try:
            packet = parse_packet(header, payload)
            self._check(peer, key, packet)
        except BadFrame as error:
            unusable = str(error)
        with self._lock:
            expected = self._expected.get(key)
            if expected is None:
                return
            expected.unusable = expected.unusable or unusable
            if packet is not None and not unusable:
                expected.packet = expected.packet or packet
            self._arrived.notify_all()

    def lost(self, peer: str, reason: str) -> None:
        """Wake the thread that waits for this peer."""
        with self._lock:
            self._lost[peer] = reason
            self._arrived.notify_all()

    def _check(self, peer: str, key: MessageKey, packet: Packet) -> None:
        with self._lock:
            expected = self._expected.get(key)
            if expected is None:
                return
            coding = self._coding(peer, key)
        coding.check(packet, expected.meta)

    # ---------------------------------------------------------------- inside

    def _raise_if_hopeless(self, expected: _Expected) -> None:
        if self._aborted:
            raise LinksAborted(self._aborted)
        if self._not_there:
            raise StorageError(self._not_there)
        if expected.unusable:
            raise PeerLost(expected.peer, expected.unusable)
        if expected.peer in self._lost:
            raise PeerLost(expected.peer, self._lost[expected.peer])

    def _transmit(self, peer: str, key: MessageKey, packet: Packet, *, more: bool = False) -> None:
        header = packet.header
        while True:
            with self._lock:
                if self._aborted:
                    raise LinksAborted(self._aborted)
                if peer in self._lost:
                    raise PeerLost(peer, self._lost[peer])
            try:
                if self._record is not None and (key.step, of_round(key)) < self._sends_from:
                    self._record(peer, key, header, packet.payload, SEND_POLL_S)
                else:
                    self._network.send(peer, key, header, packet.payload, SEND_POLL_S, more)
            except TimeoutError:
                continue  # full: look whether anybody still wants it
            return

    def _codecs(self, version: int) -> StageCodecs:
        return self._eras[version][1]

    def _coding(self, peer: str, key: MessageKey) -> Coding:
        """Coding of an expected message; the lock is held."""
        return self._codecs(key.plan_version).coding(peer, key, sending=False)
