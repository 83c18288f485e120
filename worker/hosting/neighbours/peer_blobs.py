"""Blobs of peers that keep or lend them, and ours for them, behind everything else that the links carry.

Who fetches asks for a piece at a time, a few at once, so nothing queues at the sender. The network admits
only peers that the coordinator named. What is kept as a copy is given away, as its hash is known to whoever
the coordinator told; of what is lent, an update to the one worker that it is for. What comes is as
trustworthy as any peer's word: the cache looks at its hash.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from atoll.errors import ConnectionFailed
from atoll.messages.to_worker import Paths, PeerLink
from protos.blob_transfer import Chunk
from worker.hosting import TUNED
from worker.hosting.neighbours.connecting import connect_one
from worker.transport.frames import Direction, MessageKey

if TYPE_CHECKING:
    from worker.blobs import NearBlobs
    from worker.cancel import Cancel
    from worker.transport.network import PeerNetwork

JOB = "~copies"  # no job's name
ASK, PIECE, ABSENT, COMING, ASK_GENTLY = range(5)  # MessageKey.micro; its step is the question's number
QUESTIONS = frozenset({ASK, ASK_GENTLY})
MOST_UNDER_WAY = 4 * TUNED.peer_pieces_at_once  # pieces on their way to one peer: confirmations may be late
MAX_QUEUED = 256  # questions of all peers
MAX_LENT, MAX_KNOWN = 256, 4096  # blobs, and ways to peers: the oldest go
T = TypeVar("T")
_ASK = struct.Struct("!32sQ")  # hash, offset
_PIECE = struct.Struct("!Q")  # size of the blob

Answer = tuple[int, int, bytes | None]
"""Question, the blob's size, bytes; None: they cannot be had here, or with a size of ``SOON`` not yet."""
SOON = -1


@dataclass(frozen=True, slots=True)
class _Open:
    peer: str
    answers: queue.SimpleQueue[Answer]


@dataclass(frozen=True, slots=True)
class _Question:
    peer: str
    number: int
    name: str
    offset: int
    gently: bool  # the answer may delay training by its share of the time and no more


class PeerBlobs:
    """``Receiver`` of questions and answers. ``get`` may be called from any thread but the network's."""

    def __init__(
        self,
        network: PeerNetwork,
        path: Callable[[str], Path],
        offered: Callable[[], Collection[str]],
        coming: Collection[str] = (),
    ) -> None:
        """``offered()``: names of the blobs that peers may have, each at ``path(name)``; ``coming``: of those
        that are being fetched."""
        self._network, self._path, self._offered, self._coming = network, path, offered, coming
        self._lent: dict[str, str] = {}  # blob -> who may have it, "" every peer
        self._ways: dict[str, PeerLink] = {}
        self._numbers = itertools.count(secrets.randbits(48))
        self._lock = threading.RLock()  # a block may end wherever a thread drops it
        self._open: dict[int, _Open] = {}
        self._under_way: Counter[str] = Counter()  # pieces, by peer
        self._closed = threading.Event()
        # Who is to take over waits for its pieces, and not behind those that wait for a link.
        self._questions: dict[bool, queue.Queue[_Question | None]] = {
            gently: queue.Queue(MAX_QUEUED) for gently in (False, True)
        }
        for gently in self._questions:
            name = "atoll-spare-out" if gently else "atoll-copies-out"
            threading.Thread(target=self._serve, args=(gently,), name=name, daemon=True).start()
        network.register(JOB, self)

    def close(self) -> None:
        """Answer nothing more."""
        self._network.unregister(JOB, self)
        self._closed.set()
        for questions in self._questions.values():
            questions.put(None)

    # ------------------------------------------------------------ what we want

    def near(self, holder: PeerLink, *, gently: bool = False) -> NearBlobs:
        """Return what a peer keeps as a source of blobs; ``gently``: it trains with us, and what it sends is
        to delay that little."""
        return _Near(self, holder, gently=gently)

    def know(self, link: PeerLink) -> None:
        """Remember the way to a peer that the coordinator named."""
        _put(self._ways, link.worker, link, MAX_KNOWN)

    def lender(self, worker: str, cancel: Cancel) -> NearBlobs:
        """Return what a peer lends, which is waited for while it fetches that itself."""
        return _Near(self, self._ways.get(worker) or PeerLink(worker, Paths()), cancel)

    def get(
        self,
        link: PeerLink,
        wanted: list[tuple[str, int]],
        cancel: Cancel | None = None,
        *,
        gently: bool = False,
    ) -> Iterator[Chunk]:
        """Yield the chunks of each blob, from its offset on. Raises ConnectionFailed where the peer is away,
        does not answer or does not have one. With ``cancel`` wait for what it will have soon; Cancelled."""
        begins_s = time.monotonic() + TUNED.lent_within_s
        connect_one(self._network, link.worker, link.paths, TUNED.peer_connect_s)
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        left, asked = deque(wanted), dict[int, tuple[str, int]]()
        try:
            while left or asked:
                while left and len(asked) < TUNED.peer_pieces_at_once:
                    blob = left.popleft()
                    asked[self._ask(link.worker, *blob, answers, gently=gently)] = blob
                number, size, data = self._answer(link.worker, answers)
                name, offset = asked.pop(number)
                soon = size == SOON or time.monotonic() < begins_s
                if data is None and soon and cancel is not None:
                    cancel.wait(TUNED.lent_poll_s)
                    left.append((name, offset))
                    continue
                if data is None or (not data and offset < size):
                    raise ConnectionFailed(f"{link.worker} cannot send blob {name[:12]}")
                yield Chunk(name, size, offset, data)
                if offset + len(data) < size:
                    left.appendleft((name, offset + len(data)))
        finally:
            with self._lock:
                for number in asked:
                    self._open.pop(number, None)

    def _ask(
        self, peer: str, name: str, offset: int, answers: queue.SimpleQueue[Answer], *, gently: bool
    ) -> int:
        number = next(self._numbers)
        with self._lock:
            self._open[number] = _Open(peer, answers)
        self._send(peer, number, ASK_GENTLY if gently else ASK, _ASK.pack(bytes.fromhex(name), offset), b"")
        return number

    def _answer(self, peer: str, answers: queue.SimpleQueue[Answer]) -> Answer:
        try:
            return answers.get(timeout=TUNED.peer_answer_s)
        except queue.Empty:
            raise ConnectionFailed(f"{peer} sent nothing of a copy for {TUNED.peer_answer_s:g} s") from None

    # ------------------------------------------------------------ what peers want

    def lend(self, blob: str, borrower: str) -> None:
        """Let a peer, or with "" every one, have a blob as soon as it is here."""
        with self._lock:
            _put(self._lent, blob, borrower, MAX_LENT)

    def _lends(self, question: _Question) -> bool:
        with self._lock:
            return self._lent.get(question.name) in ("", question.peer)

    def _serve(self, gently: bool) -> None:
        """Thread: one piece after the other."""
        while (question := self._questions[gently].get()) is not None:
            self._send_piece(question, self._spare(question.peer) if gently else TUNED.peer_piece_bytes)

    def _spare(self, peer: str) -> int:
        """Wait until a piece may leave that delays training; return its bytes."""
        while True:
            n_bytes, wait_s = self._network.spare(peer)
            if wait_s <= 0.0 or self._closed.wait(min(wait_s, TUNED.most_rest_s)):
                return min(n_bytes, TUNED.peer_piece_bytes)

    def _send_piece(self, question: _Question, most_bytes: int) -> None:
        piece = self._read(question, most_bytes)
        if piece is None:
            soon = question.name in self._coming and self._lends(question)
            self._reply(question, COMING if soon else ABSENT, 0, memoryview(b""))
            return
        size, block = piece
        with self._lock:
            self._under_way[question.peer] += 1
        # The transport lets go of it when the peer has confirmed it.
        weakref.finalize(block, self._confirmed, question.peer).atexit = False
        self._reply(question, PIECE, size, memoryview(block))  # type: ignore[arg-type]

    def _read(self, question: _Question, most_bytes: int) -> tuple[int, np.ndarray] | None:
        """Return a blob's size and a piece of it; None where the peer may not have it or nobody can."""
        if question.name not in self._offered() and not self._lends(question):
            return None
        try:
            with self._path(question.name).open("rb") as file:
                size = file.seek(0, 2)
                block = np.empty(max(0, min(most_bytes, size - question.offset)), np.uint8)
                file.seek(question.offset)
                read = file.readinto(memoryview(block))  # type: ignore[arg-type]
        except OSError:
            return None
        return (size, block) if read == len(block) else None

    def _reply(self, question: _Question, kind: int, size: int, payload: memoryview) -> None:
        try:
            self._send(question.peer, question.number, kind, _PIECE.pack(size), payload)
        except ConnectionFailed:
            return  # it asks somebody else

    def _send(self, peer: str, number: int, kind: int, header: bytes, payload: bytes | memoryview) -> None:
        key = MessageKey(JOB, 0, number, kind, 0, Direction.COPY)
        try:
            self._network.send(peer, key, header, payload, TUNED.peer_send_s)
        except TimeoutError:
            raise ConnectionFailed(f"no room for a message to {peer}") from None

    def _confirmed(self, peer: str) -> None:
        with self._lock:
            self._under_way[peer] -= 1
            if self._under_way[peer] <= 0:
                del self._under_way[peer]

    # ------------------------------------------------------------ the transport

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview | None:
        if key.direction is not Direction.COPY:
            return None
        if key.micro in QUESTIONS:
            return None if total else memoryview(bytearray())
        with self._lock:
            asked = self._open.get(key.step)
        if asked is None or asked.peer != peer or total > TUNED.peer_piece_bytes:
            return None
        return memoryview(bytearray(total))

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        if key.micro in QUESTIONS:
            self._asked(peer, key.step, header, gently=key.micro == ASK_GENTLY)
            return
        with self._lock:
            asked = self._open.get(key.step)
            if asked is None or asked.peer != peer:
                return
            del self._open[key.step]
        whole = key.micro == PIECE and len(header) == _PIECE.size
        size = _PIECE.unpack(header)[0] if whole else SOON if key.micro == COMING else 0
        asked.answers.put((key.step, size, bytes(payload) if whole else None))

    def _asked(self, peer: str, number: int, header: bytes, *, gently: bool) -> None:
        with self._lock:
            busy = self._under_way[peer] >= MOST_UNDER_WAY
        if busy or len(header) != _ASK.size:
            return  # no honest peer's
        name, offset = _ASK.unpack(header)
        try:
            self._questions[gently].put_nowait(_Question(peer, number, name.hex(), offset, gently))
        except queue.Full:
            return  # it asks somebody else

    def lost(self, peer: str, reason: str) -> None:
        with self._lock:
            gone = {number: one for number, one in self._open.items() if one.peer == peer}
            for number in gone:
                del self._open[number]
        for number, one in gone.items():
            one.answers.put((number, 0, None))


@dataclass(frozen=True, slots=True)
class _Near:
    """One peer's copies."""

    blobs: PeerBlobs
    holder: PeerLink
    cancel: Cancel | None = None
    gently: bool = False

    def get(self, wanted: list[tuple[str, int]]) -> Iterator[Chunk]:
        return self.blobs.get(self.holder, wanted, self.cancel, gently=self.gently)


def _put(held: dict[str, T], name: str, value: T, most: int) -> None:
    """Put a value last; beyond ``most`` the first goes."""
    held.pop(name, None)
    held[name] = value
    if len(held) > most:
        del held[next(iter(held))]
