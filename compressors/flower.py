"""Compressed uploads inside any Flower run: a mod on the clients, a wrapper around the server's strategy.

    app = ClientApp(mods=[compress_mod("topk:10")])              # outermost: before mods that read arrays
    strategy = Compressed(FedAvg(...))                           # any strategy, Flower's own too

Of each array in a reply to ``train`` that the request had too, the change (reply - request) travels as
a packet of the codec. What a codec leaves out is kept in ``Context.state`` and added to the next change
(error feedback), except where the codec is exact, unbiased or keeps its own residual. Exact codecs carry
the array itself. Small, whole-number and unknown arrays travel as they are. The wrapper restores dense
arrays under the same keys before the inner strategy sees a reply, so every strategy works unchanged.

``Compressed(inner, "topk:10")`` tells the clients which codec to use; ``compress_mod()`` then obeys.

A packet travels as an ``Array`` with stype ``atoll.packet:CODEC[:RATIO]``: two bytes of header length,
the packet's header, its payload. The receiver knows shape and dtype from what it sent and bounds every
length by them; a reply that does not fit is left out with the reason. Requests are not compressed:
weights with something lost would change what is trained. A residual is kept as soon as the reply is
made, since Flower does not tell a node whether its reply was taken, and dropped once it is too old
(``atoll.federated.residual_counts``).

Needs the extra ``atoll[flower]``; imports nothing of Flower but its public API.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from atoll.compression import Compression
from atoll.errors import BadFrame, UsageError
from atoll.federated import residual_counts
from compressors import CODECS, make_compressor
from compressors.base import MAX_HEADER_BYTES, Compressor, State, check_packet, meta_of, parse_packet
from compressors.catalogue import Codec, Use, takes
from compressors.error_feedback import ErrorFeedback

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from atoll.opdag import TensorMeta

ClientCall = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientCall], Message]

log = logging.getLogger("flwr")  # where Flower shows what a run does

STYPE = "atoll.packet:"
NUMPY = "numpy.ndarray"
CODEC = "atoll-codec"
"""Key of a request's config: the codec that the server wants."""
RESIDUAL = "atoll.residual"
"""Records of a node's Context: what was left out, by which codec, and in which round."""
ROUND = "server-round"
"""Key of a request's config, which Flower's strategies set, and of that record."""
_LENGTH = struct.Struct("<H")


@dataclass(frozen=True)
class Coding:
    """A codec with its settings. UsageError for one that cannot carry a client's change."""

    text: str
    facts: Codec
    codec: Compressor

    @classmethod
    def of(cls, text: str) -> Coding:
        """``text``: CODEC or CODEC:RATIO."""
        wanted = Compression.parse(text)
        facts = CODECS.get(wanted.mode)
        if facts is None or facts.shared_state or not (facts.exact or Use.DELTA in facts.valid_for):
            usable = [c.name for c in CODECS.values() if Use.DELTA in c.valid_for and not c.shared_state]
            raise UsageError(f"codec {text[:64]!r} cannot carry updates; take one of {', '.join(usable)}")
        if facts.rated and wanted.ratio is None:
            raise UsageError(f"codec {text[:64]!r} needs a ratio; write {wanted.mode}:10")
        return cls(str(wanted), facts, make_compressor(facts.name, wanted.ratio or 1.0))

    def feeding_back(self) -> Compressor:
        """The codec that a client uses: with a residual where one is of use."""
        if self.facts.exact or self.facts.unbiased or self.facts.stateful:
            return self.codec
        return ErrorFeedback(codec=self.codec)


def compress_mod(codec: str = "", *, error_feedback: bool = True) -> Mod:
    """A client mod that packs what a ClientApp answers to ``train``.

    ``codec``: as in "topk:10"; "" takes what the server's ``Compressed`` asks for, and nothing
    where it asks for none. ``error_feedback`` False: what is left out is lost, as OPWA expects.
    """
    fixed = Coding.of(codec) if codec else None

    def mod(message: Message, context: Context, call_next: ClientCall) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type.partition(".")[0] != "train" or not reply.has_content():
            return reply
        coding = fixed or _asked(message)
        if coding is not None:
            _pack_reply(message, reply, context, coding, error_feedback)
        return reply

    return mod


def _asked(message: Message) -> Coding | None:
    for config in message.content.config_records.values():
        wanted = config.get(CODEC)
        if isinstance(wanted, str) and wanted:
            return Coding.of(wanted)
    return None


def _pack_reply(
    message: Message, reply: Message, context: Context, coding: Coding, error_feedback: bool
) -> None:
    """Replace arrays of ``reply`` by packets, and keep what they leave out."""
    codec = coding.feeding_back() if error_feedback else coding.codec
    at_round = _round_of(message)
    before = _kept(context, coding, at_round)
    after: dict[str, Array] = {}
    for key, arrays in reply.content.array_records.items():
        sent = message.content.array_records.get(key, ArrayRecord())
        for name, array in list(arrays.items()):
            base = sent.get(name)
            if base is None or array.stype != NUMPY or (base.shape, base.dtype) != (array.shape, array.dtype):
                continue
            tensor = torch.from_numpy(array.numpy())
            if not takes(coding.facts, meta_of(tensor)):
                continue
            # torch's own memory either way: an exact codec also writes down how numpy's is aligned.
            tensor = tensor.clone() if coding.facts.exact else tensor - torch.from_numpy(base.numpy())
            state = _restored(codec, meta_of(tensor), before, f"{key}/{name}")
            seed = _seed(message, context, key, name)
            packet, state = codec.compress(tensor, state, seed=seed)
            packet = replace(packet, codec=coding.facts.name)
            arrays[name] = _to_array(packet.header, packet.payload, coding.text)
            after.update(_to_keep(state, f"{key}/{name}"))
    context.state[RESIDUAL] = ArrayRecord(after)
    facts = ConfigRecord({CODEC: coding.text})
    if at_round is not None:
        facts[ROUND] = at_round
    context.state[f"{RESIDUAL}.codec"] = facts


def _seed(message: Message, context: Context, key: str, name: str) -> int:
    """Return the seed of random roundings: another for every round, node and array, the same when a run is
    repeated."""
    rounds = [c[ROUND] for c in message.content.config_records.values() if ROUND in c]
    node = context.node_config.get("partition-id", context.node_id)
    text = f"{rounds or message.metadata.message_id}/{node}/{key}/{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _round_of(message: Message) -> int | None:
    """None where the server does not say."""
    told = (config.get(ROUND) for config in message.content.config_records.values())
    return next((value for value in told if type(value) is int), None)


def _kept(context: Context, coding: Coding, at_round: int | None) -> ArrayRecord:
    """Residuals of the same codec that are not too old; all others are dropped. Where a round is not known,
    no residual is too old."""
    by = context.state.config_records.get(f"{RESIDUAL}.codec", ConfigRecord())
    held, left_in = context.state.array_records.get(RESIDUAL), by.get(ROUND)
    if held is None or by.get(CODEC) != coding.text:
        return ArrayRecord()
    if type(left_in) is int and at_round is not None and not residual_counts(left_in, at_round):
        return ArrayRecord()
    return held


def _restored(codec: Compressor, meta: TensorMeta, kept: ArrayRecord, key: str) -> State:
    """The codec's state for one tensor, its tensors as they were kept."""
    state = codec.init(meta)
    if state is None:
        return None
    found = {f.name: kept.get(f"{key}#{f.name}") for f in fields(state)}
    return replace(state, **{n: torch.from_numpy(a.numpy()) for n, a in found.items() if a is not None})


def _to_keep(state: State, key: str) -> dict[str, Array]:
    if state is None:
        return {}
    held = {field.name: getattr(state, field.name) for field in fields(state)}
    return {f"{key}#{n}": Array(value.numpy()) for n, value in held.items() if isinstance(value, Tensor)}


def _to_array(header: bytes, payload: Any, text: str) -> Array:
    data = b"".join((_LENGTH.pack(len(header)), header, payload))
    return Array("uint8", (len(data),), STYPE + text, data)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrays of one round's counted replies: as they would be dense, and as they came."""

    round: int
    dense_bytes: int
    wire_bytes: int


class Compressed(Strategy):
    """``inner`` with dense arrays whatever the clients sent.

    ``codec``: asked of every client, and another one refused; "" leaves it to the clients' mods.
    """

    def __init__(self, inner: Strategy, codec: str = "") -> None:
        self.inner = inner
        self.codec = Coding.of(codec).text if codec else ""
        self.traffic: list[Traffic] = []
        self._sent: dict[int, RecordDict] = {}
        self._codings: dict[str, Coding] = {}

    def summary(self) -> None:
        log.info("\t├──> Uploads: %s", self.codec or "by each client's mod")
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages; what each node is sent is what its change is added to."""
        if self.codec:
            config[CODEC] = self.codec
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._sent = {message.metadata.dst_node_id: message.content for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's, on dense replies. One that cannot be decoded is left out."""
        dense, before, after = [], 0, 0
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_content():
                wire = _size(reply.content)
                try:
                    self._unpack(self._sent.get(node, RecordDict()), reply.content)
                except BadFrame as error:
                    log.warning("round %d without node %d: %s", server_round, node, error)
                    continue
                before, after = before + _size(reply.content), after + wire
            dense.append(reply)
        self._sent = {}
        self.traffic.append(Traffic(server_round, before, after))
        log.info("aggregate_train: %d bytes of arrays came as %d", before, after)
        return self.inner.aggregate_train(server_round, dense)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def _unpack(self, sent: RecordDict, content: RecordDict) -> None:
        """Restore every packet of a reply. BadFrame for one that is not what was asked."""
        for key, arrays in content.array_records.items():
            bases = sent.array_records.get(key, ArrayRecord())
            for name, array in list(arrays.items()):
                if array.stype.startswith(STYPE):
                    base = bases.get(name)
                    if base is None:
                        raise BadFrame(f"a packet of {name[:128]!r}, which was not sent")
                    arrays[name] = Array(self._restore(base.numpy(), array))

    def _restore(self, base: np.ndarray[Any, Any], array: Array) -> np.ndarray[Any, Any]:
        coding = self._coding(array.stype.removeprefix(STYPE))
        data = memoryview(array.data)
        length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, len(data) - _LENGTH.size):
            raise BadFrame(f"a packet of {len(data)} bytes has no whole header")
        start = _LENGTH.size + length
        packet = parse_packet(data[_LENGTH.size : start], data[start:])
        mine = torch.from_numpy(base)
        meta = meta_of(mine)
        check_packet(packet, coding.facts.name, meta, coding.codec.max_payload_bytes(meta))
        try:
            found = coding.codec.decompress(packet)
        except (ValueError, RuntimeError, ArithmeticError, LookupError) as error:
            # A decoder's own words for what no encoder makes: this reply is left out, the round goes on.
            raise BadFrame(f"a packet of {coding.facts.name} is damaged: {str(error)[:200]}") from None
        whole = found if coding.facts.exact else mine + found
        return np.asarray(whole.numpy())

    def _coding(self, text: str) -> Coding:
        """The codec that a packet names. BadFrame for an unknown one, or not the one that was asked."""
        if self.codec and text != self.codec:
            raise BadFrame(f"a packet by {text[:64]!r}; asked was {self.codec!r}")
        if text not in self._codings:
            try:
                coding = Coding.of(text)
            except (UsageError, ValueError) as error:
                raise BadFrame(str(error)) from None
            if len(self._codings) >= MAX_CODINGS:
                raise BadFrame(f"a packet by {text[:64]!r}, after {MAX_CODINGS} other codecs")
            self._codings[text] = coding
        return self._codings[text]


MAX_CODINGS = 64
"""Codecs with settings that one run may meet: clients may choose by their links, not without end."""


def _size(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
