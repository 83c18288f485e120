"""CollectiveRun: one rank's part in one phase of an exchange round, without a socket or a clock.

    messages = run.start()
    messages = run.receive(message)          of a peer, in any order
    messages = run.give_up(rank, reason)     lost, late, or caught with what it should not send
    run.exchanged(...), run.receipt()        once ``finished``

Whoever calls it carries the messages and keeps the deadline. A peer that was given up contributes nothing
more: its parts are left out of the totals made here, and segments that it should have sent stay without
one. Each total travels with the labels that it holds, so every rank knows whose work is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from atoll.collective import TOTAL, ActionRun, Collective, Segment, slot_of
from atoll.errors import BadFrame
from atoll.exchange import DIGEST_BYTES, ExchangeRound, Receipt
from compressors.none import Uncompressed
from compressors.vector import UNCOMPRESSED, Vector, joined, pack, unpack
from strategies.exchanges.base import Contribution, Exchanged, Piece

if TYPE_CHECKING:
    from torch import Tensor

    from compressors.base import Packet
    from strategies.exchanges.base import ExchangeRule, State

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Message:
    """One value of one segment on its way. ``digest`` of packet and labels, so that damage is a fault of the
    round and never a result."""

    round: int
    phase: int
    source: int  # rank
    target: int
    segment: int
    label: int
    included: tuple[int, ...]  # labels in the value, ascending
    packet: Packet
    digest: bytes

    @property
    def wire_bytes(self) -> int:
        """Packet, labels and digest; the transport's framing comes on top."""
        return self.packet.wire_bytes + 2 * len(self.included) + DIGEST_BYTES


@dataclass(frozen=True)
class _Value:
    vector: Vector
    included: frozenset[int]
    packet: Packet | None = None  # as it arrived, or as it was sent before


class CollectiveRun:
    """Runs ``collective`` at ``rank``; ``contributions`` by the labels that this rank holds. ``whole``:
    nobody is given up, so that a value which lacks a contribution is its sender's fault."""

    def __init__(
        self,
        rule: ExchangeRule,
        collective: Collective,
        rank: int,
        at: ExchangeRound,
        contributions: Mapping[int, Contribution],
        *,
        whole: bool = False,
    ) -> None:
        if set(contributions) != set(collective.labels[rank]):
            raise ValueError(
                f"contributions {sorted(contributions)}, the collective has {collective.labels[rank]}"
            )
        self._rule, self._collective, self.rank, self._at = rule, collective, rank, at
        self._own, self._whole = contributions, whole
        self.contribution = self._settings = min(contributions.items())[1]
        self._sources = collective.sources(rank)
        self._awaited = set(self._sources)
        self._faults: dict[int, str] = {}
        self._sent_bytes = self._received_bytes = 0
        self._run: ActionRun[_Value] = ActionRun(collective, rank, self._added)
        self._kept_back: dict[int, list[Vector]] = {}  # by segment
        self._sent: dict[int, dict[int, Vector]] = {label: {} for label in contributions}
        for number in self._run.segments:
            segment = collective.segments[number]
            for label, contribution in contributions.items():
                self._run.hold(number, label, self._coded(label, number, segment, contribution))

    # ---------------------------------------------------------------- the round

    def start(self) -> list[Message]:
        """What can be sent before anything has arrived."""
        return [message for number in self._run.segments for message in self._advance(number)]

    def receive(self, message: Message) -> list[Message]:
        """Take a peer's message; what can be sent now. BadFrame for one of another round or phase, one that
        nobody should send, a damaged or an ill-formed one, or one of local steps that is not finite; its
        sender is then to be given up. A repeated or late one has no effect."""
        key = (message.segment, message.label)
        if (message.round, message.phase) != (self._at.number, self._settings.phase):
            raise BadFrame(
                f"message of round {message.round}.{message.phase}, this is {self._at.number}."
                f"{self._settings.phase}"
            )
        if self._sources.get(key) != message.source or message.target != self.rank:
            raise BadFrame(f"rank {message.source} has no part {message.label} of segment {message.segment}")
        if key not in self._awaited:
            return []
        if message.digest != digest_of(message.packet, message.included):
            raise BadFrame(f"part {message.label} of segment {message.segment} does not match its digest")
        included = frozenset(message.included)
        slot = slot_of(message.label)
        allowed = self._collective.expected(self.rank, message.segment, slot)
        if not included or not included <= allowed or (self._whole and included != allowed):
            raise BadFrame(f"a value that claims contributions {sorted(included)} of {sorted(allowed)}")
        if message.included != tuple(sorted(included)):
            raise BadFrame(f"a value with {len(message.included)} labels that do not ascend")
        codec = self._settings.total_codec if message.label == TOTAL else self._settings.codec
        if self._collective.plain(message.source, self.rank, message.label):
            codec = UNCOMPRESSED
        segment = self._collective.segments[message.segment]
        vector = unpack(message.packet, segment.size, codec)
        if self._rule.exchange.local:
            self._check_joinable(message, vector)
        self._awaited.discard(key)
        self._received_bytes += message.wire_bytes
        self._run.hold(message.segment, slot, _Value(vector, included, message.packet))
        return list(self._advance(message.segment))

    def give_up(self, rank: int, reason: str) -> list[Message]:
        """Go on without what ``rank`` has not sent; what can be sent now."""
        missing = {key for key in self._awaited if self._sources[key] == rank}
        if not missing:
            return []
        self._faults.setdefault(rank, reason)
        self._awaited -= missing
        self._run.awaited -= {(number, slot_of(label)) for number, label in missing}
        return [message for number in sorted({n for n, _ in missing}) for message in self._advance(number)]

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks from which something is still to come."""
        return frozenset(self._sources[key] for key in self._awaited)

    def awaits(self, segment: int, label: int) -> bool:
        """Whether this message is still to come."""
        return (segment, label) in self._awaited

    @property
    def awaited_parts(self) -> frozenset[int]:
        """Ranks from which a part is still to come; totals follow only once their makers have all parts."""
        return frozenset(self._sources[key] for key in self._awaited if key[1] != TOTAL)

    @property
    def finished(self) -> bool:
        return self._run.finished

    # ---------------------------------------------------------------- its outcome

    def exchanged(self, state: State, now: Tensor) -> Exchanged:
        """Outcome for ``settle``, of a rank with one contribution or (its first label's) of several."""
        label, contribution = min(self._own), self.contribution
        sent = joined(
            contribution.vector.size,
            [(self._collective.segments[n].start, v) for n, v in sorted(self._sent[label].items())],
        )
        kept_back = tuple(
            (self._collective.segments[number].start, vector)
            for number, vectors in sorted(self._kept_back.items())
            for vector in vectors
        )
        return Exchanged(self.rank, self._at, contribution, sent, self._pieces(), state, now, kept_back)

    def receipt(self) -> Receipt:
        """What this rank's result holds."""
        pieces = self._pieces()
        numbers = self._collective.results(self.rank)
        makers = {number: self._collective.maker(self.rank, number) for number in numbers}
        wanted = [self._collective.expected(self.rank, number) for number in numbers]
        expected = frozenset[int]().union(*wanted)
        held = expected.intersection(*(piece.included for piece in pieces))
        elements = sum(piece.segment.size for piece in pieces)
        whole = sum(p.segment.size for p, labels in zip(pieces, wanted, strict=True) if p.included == labels)
        digests = [_piece_digest(piece) for piece in pieces]
        of_maker: dict[int, list[bytes]] = {}
        for number, digest in zip(numbers, digests, strict=True):
            of_maker.setdefault(makers[number], []).append(digest)
        return Receipt(
            self._at.number,
            self.rank,
            tuple(sorted(expected)),
            tuple(sorted(held)),
            whole / elements if elements else 1.0,
            self._sent_bytes,
            self._received_bytes,
            _joined_digest(digests),
            tuple(sorted(self._faults.items())),
            {maker: _joined_digest(made) for maker, made in sorted(of_maker.items())},
        )

    def release(self) -> None:
        """Let go of everything at once: it refers to itself, and a collector would come later."""
        self.__dict__.clear()

    def _pieces(self) -> tuple[Piece, ...]:
        found = []
        for number in self._collective.results(self.rank):
            value = self._run.held(number)
            segment = self._collective.segments[number]
            found.append(Piece(segment, value.vector, value.included) if value else Piece(segment, None))
        return tuple(found)

    # ---------------------------------------------------------------- one segment

    def _advance(self, number: int) -> Iterator[Message]:
        for send, value in self._run.advance(number):
            yield self._message(number, send.to, send.label, value)

    def _check_joinable(self, message: Message, vector: Vector) -> None:
        """Raise BadFrame for elements that leave none finite of those they are joined with, and for models
        with positions: no such rule sends any, and they have not been through the codec."""
        if vector.sparse and self._rule.exchange.gossips:
            raise BadFrame(f"part {message.label} of segment {message.segment} comes with positions")
        # A part by its share of the sum, else its owner is caught with a total that others made infinite;
        # half of that, as sums and codecs round.
        n_labels = len(self._collective.expected(self.rank, message.segment))
        bound = LARGEST if message.label == TOTAL else LARGEST / 2 * len(message.included) / n_labels
        low, high = map(float, torch.aminmax(vector.values)) if len(vector.values) else (0.0, 0.0)
        if not (-bound <= low and high <= bound):
            raise BadFrame(f"part {message.label} of segment {message.segment} holds what is not finite")

    def _added(self, number: int, values: list[_Value]) -> _Value:
        merged = self._rule.merge([value.vector for value in values], self._settings)
        if merged.kept_back is not None:
            self._kept_back.setdefault(number, []).append(merged.kept_back)
        included = frozenset[int]().union(*(value.included for value in values))
        vector, packet = merged.total, None
        site_of = self._collective.site_of
        if site_of and all(site_of[label] == site_of[self.rank] for label in included):
            if self._collective.maker(self.rank, number) == self.rank:
                return _Value(vector, included)  # to which it adds those of other sites
            # What the codec leaves out of a site's sum stays with its gateway.
            packet = pack(vector, self._settings.codec, seed=self._seed(min(included)))
            sent = unpack(packet, vector.size, self._settings.codec)
            if not isinstance(self._settings.codec, Uncompressed):
                left = Vector(vector.size, vector.values - sent.values)
                self._kept_back.setdefault(number, []).append(left)
            vector = sent
        elif not vector.sparse:  # its owner uses what the others will decode
            packet = pack(vector, self._settings.total_codec, seed=self._seed(TOTAL))
            vector = unpack(packet, vector.size, self._settings.total_codec)
        return _Value(vector, included, packet)

    def _message(self, number: int, to: int, label: int, value: _Value) -> Message:
        plain = self._collective.plain(self.rank, to, label)
        packet = value.packet or pack(value.vector, UNCOMPRESSED if plain else self._settings.codec)
        included = tuple(sorted(value.included))
        message = Message(
            self._at.number,
            self._settings.phase,
            self.rank,
            to,
            number,
            label,
            included,
            packet,
            digest_of(packet, included),
        )
        self._sent_bytes += message.wire_bytes
        return message

    def _coded(self, label: int, number: int, segment: Segment, contribution: Contribution) -> _Value:
        """This rank's own part as its codec leaves it: what others will decode is what is added here too.
        Where a site's sum is coded as it leaves, its parts are not."""
        vector = contribution.vector.part(segment.start, segment.stop)
        if self._collective.site_of:
            self._sent[label][number] = vector
            return _Value(vector, frozenset((label,)))
        packet = pack(vector, contribution.codec, seed=self._seed(label))
        if not vector.sparse:
            vector = unpack(packet, segment.size, contribution.codec)
        self._sent[label][number] = vector
        return _Value(vector, frozenset((label,)), packet)

    def _seed(self, label: int) -> int:
        return self._at.draw_seed(f"{self._settings.phase} {label}")


def digest_of(packet: Packet, included: Sequence[int]) -> bytes:
    """Digest of a packet and the labels that it claims to hold."""
    state = blake2b(repr(tuple(included)).encode(), digest_size=DIGEST_BYTES)
    state.update(packet.header)
    state.update(packet.payload)
    return state.digest()


def _piece_digest(piece: Piece) -> bytes:
    state = blake2b(f"{piece.segment.start} {sorted(piece.included)}".encode(), digest_size=DIGEST_BYTES)
    if piece.total is not None:
        for part in (piece.total.positions, piece.total.values):
            state.update(b"-" if part is None else part.contiguous().numpy().data)
    return state.digest()


def _joined_digest(digests: Sequence[bytes]) -> str:
    return blake2b(b"".join(digests), digest_size=DIGEST_BYTES).hexdigest()
