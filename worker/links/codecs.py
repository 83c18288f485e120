"""Codec of each message between two stages, and what a gradient shares with its value.

Both ends derive the same answer from the plan's LinkSpecs and their stage's program, so nothing is
negotiated: a boundary tensor takes the codec of its directed pair of stages where
``catalogue.takes`` is true, everything else travels exactly. A gradient whose value has one
consuming stage goes back over the pair that the value came by; with ``Mask.SAME`` it carries the
value's positions only, and no indices. The consumer computed on the decoded value, so that is the
true gradient of the masked net: the elements that were not sent do not depend on what the producer
kept to itself. Where gradients of several consumers fold, positions are chosen independently.

A codec's state begins with every step and goes from micro-batch to micro-batch, so a step that
is run again, here or on another worker, sends the same bits. Source: FusionLLM compresses
activations and their gradients harder on slow links (AdaTopK); that a gradient keeps its value's
positions is a choice of our own, derived in papers/decentralized.md 1.7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from atoll.errors import UsageError
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Mask
from compressors import catalogue, make_compressor
from compressors.base import (
    Compressor,
    Packet,
    SparseCompressor,
    State,
    Support,
    check_packet,
    meta_of,
    zero_packet,
)
from compressors.catalogue import Use
from worker.links.codec_use import CodecUse
from worker.machine.cpu import CpuMeter, Taken
from worker.transport.frames import EXCHANGED, MEASURED, Direction, End, MessageKey, about

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.program import PiecePrograms, StageProgram

NOTHING = TensorMeta((0,), "uint8")  # a zero mark's shape is the declared one: it need not travel


@dataclass(frozen=True, slots=True, eq=False)
class Coding:
    """Coding of one kind of message. ``codec`` is a SparseCompressor where a flag is set."""

    codec: Compressor
    on_support: bool = False  # a gradient at the positions its value had
    keeps_support: bool = False  # a value whose gradient comes back that way
    bounded: bool = False  # bytes in a row, as many as the declared shape has at most

    @property
    def exact(self) -> bool:
        return self.codec.name == "none"

    def max_payload_bytes(self, meta: TensorMeta) -> int:
        """No payload of this message is longer."""
        if self.on_support:
            return cast("SparseCompressor", self.codec).max_payload_bytes_on(meta)
        return self.codec.max_payload_bytes(meta)

    def check(self, packet: Packet, meta: TensorMeta) -> None:
        """BadFrame unless the packet is what both ends agreed on for a tensor of ``meta``."""
        shown = NOTHING if packet.zero else meta
        if self.bounded and packet.meta.elements <= meta.elements:
            shown = TensorMeta((packet.meta.elements,), meta.dtype)
        check_packet(packet, self.codec.name, shown, self.max_payload_bytes(meta))


EXACT = Coding(make_compressor("none"))
BYTES = Coding(make_compressor("none"), bounded=True)


def lossy(links: Iterable[LinkSpec]) -> bool:
    """True when values lose precision on their way forward. Raises UsageError for an unknown codec."""
    return any(spec.source < spec.target and not catalogue.codec(spec.codec).exact for spec in links)


def packet_seed(seed: int, key: MessageKey) -> int:
    """The same message always gets the same seed, on a second run and under a new version too."""
    for part in (key.step, key.micro, key.edge, int(key.direction)):
        seed = (seed * 1_000_003 + part + 1) % (1 << 63)
    return seed


def _support_of(key: MessageKey) -> tuple[int, int, int]:
    """(step, micro, op) of a value and of its gradient."""
    return key.step, key.micro, about(key)


class StageCodecs:
    """Codecs, states and supports of one stage's messages under one plan version.

    ``coding`` may be asked from any thread; all else belongs to the thread that computes.
    """

    def __init__(
        self,
        pieces: Iterable[PiecePrograms] = (),
        links: Iterable[LinkSpec] = (),
        ends: Sequence[End] = (),
        seed: int = 0,
        cpu: CpuMeter | None = None,
        *,
        exchanges_bytes: bool = False,
    ) -> None:
        """``ends`` of all the pipeline's pieces; without ``pieces`` everything travels exactly. ``cpu``: of
        the thread that computes. ``exchanges_bytes``: parts and totals are a round's messages, coded already.

        UsageError for a codec that is unknown or that no link can carry.
        """
        self.use: dict[str, CodecUse] = {}
        self._seed, self._cpu, self._ends = seed, cpu or CpuMeter(), ends
        self._pairs = _Pairs(links)
        self._exchanged = BYTES if exchanges_bytes else EXACT
        self._outgoing: dict[tuple[str, Direction, int], Coding] = {}
        self._incoming: dict[tuple[str, Direction, int], Coding] = {}
        self._supports: dict[tuple[int, int, int], Support] = {}  # (step, micro, op)
        self._states: dict[tuple[Direction, int, Coding], tuple[int, int, State]] = {}
        self._last: tuple[MessageKey, Coding, Tensor, Packet] | None = None
        for program, evaluation in pieces if self._pairs else ():
            self._learn(program)
            if evaluation is not None:
                self._learn_evaluation(evaluation)

    def coding(self, peer: str, key: MessageKey, *, sending: bool) -> Coding:
        """Coding of the message to (``sending``) or from ``peer``."""
        if key.direction in EXCHANGED:
            return self._exchanged
        table = self._outgoing if sending else self._incoming
        return table.get((peer, key.direction, key.edge), EXACT)

    def encode(self, peer: str, key: MessageKey, tensor: Tensor | None) -> Packet:
        """The packet to ``peer``; None is the zero-gradient mark.

        With an exact coding the packet may share the tensor's memory.
        """
        coding = self.coding(peer, key, sending=True)
        with self._computing(coding) as taken:
            packet = self._encode(coding, key, tensor)
        if key.direction in MEASURED:
            use = self.use.setdefault(peer, CodecUse())
            use.encode_s += taken.seconds
            use.dense_bytes += 0 if tensor is None else tensor.numel() * tensor.element_size()
            use.wire_bytes += packet.wire_bytes
        return packet

    def decode(self, peer: str, key: MessageKey, packet: Packet) -> Tensor | None:
        """The tensor of a checked packet, on the CPU; None is the zero mark. Raises BadFrame."""
        if packet.zero:
            return None
        coding = self.coding(peer, key, sending=False)
        with self._computing(coding) as taken:
            tensor = self._decode(coding, key, packet)
        if key.direction in MEASURED:
            self.use.setdefault(peer, CodecUse()).decode_s += taken.seconds
        return tensor

    def take_use(self) -> dict[str, CodecUse]:
        """``use`` since the last call."""
        taken = dict(self.use)
        self.use.clear()
        return taken

    def step_done(self, step: int) -> None:
        """Supports of ``step`` and before are not wanted any more."""
        self._supports = {at: s for at, s in self._supports.items() if at[0] > step}
        self._last = None

    # ---------------------------------------------------------------- one message

    def _computing(self, coding: Coding) -> AbstractContextManager[Taken]:
        return nullcontext(Taken()) if coding in (EXACT, BYTES) else self._cpu.computing()

    def _encode(self, coding: Coding, key: MessageKey, tensor: Tensor | None) -> Packet:
        if tensor is None:
            return zero_packet(coding.codec.name, NOTHING)
        if coding in (EXACT, BYTES):
            return coding.codec.compress(tensor)[0]
        if self._last is not None:
            last_key, last_coding, last_tensor, packet = self._last
            # A value with several consumers leaves once for each, in a row.
            if last_tensor is tensor and last_key == key and last_coding is coding:
                return packet
        seed = packet_seed(self._seed, key)
        if coding.on_support:
            support = self._supports[_support_of(key)]
            return cast("SparseCompressor", coding.codec).compress_on(tensor, support, seed=seed)
        packet, state = coding.codec.compress(tensor, self._state(coding, key, tensor), seed=seed)
        self._states[key.direction, key.edge, coding] = (key.step, key.micro, state)
        self._last = (key, coding, tensor, packet)
        self._keep_support(coding, key, packet)
        return packet

    def _decode(self, coding: Coding, key: MessageKey, packet: Packet) -> Tensor:
        if coding.on_support:
            support = self._supports[_support_of(key)]
            return cast("SparseCompressor", coding.codec).decompress_on(packet, support)
        self._keep_support(coding, key, packet)
        return coding.codec.decompress(packet)

    def _keep_support(self, coding: Coding, key: MessageKey, packet: Packet) -> None:
        if coding.keeps_support and key.direction is Direction.FORWARD:
            support = cast("SparseCompressor", coding.codec).support(packet)
            self._supports[_support_of(key)] = support

    def _state(self, coding: Coding, key: MessageKey, tensor: Tensor) -> State:
        step, micro, state = self._states.get((key.direction, key.edge, coding), (-1, -1, None))
        if (step, micro + 1) == (key.step, key.micro) and micro >= 0:
            return state
        return coding.codec.init(meta_of(tensor))

    # ---------------------------------------------------------------- from the plan

    def _learn(self, program: StageProgram) -> None:
        me, metas = program.stage, {op: node.outputs[0] for op, node in program.ops if node.outputs}
        forward, backward = Direction.FORWARD, Direction.BACKWARD
        for p in program.produced:
            meta, alone = metas[p.op], p.requires_grad and len(p.targets) == 1
            for target in p.targets:
                self._note(me, target, forward, p.op, self._pairs.value(me, target, meta, alone))
            if p.requires_grad:
                coding = self._pairs.gradient(p.grad_from, me, meta, alone)
                self._note(p.grad_from, me, backward, p.op, coding)
        for r in program.received:
            alone = r.requires_grad and r.grad_from is None and r.grad_to == r.source
            self._note(r.source, me, forward, r.op, self._pairs.value(r.source, me, r.meta, alone))
            if r.requires_grad:
                coding = self._pairs.gradient(me, r.grad_to, r.meta, alone)
                self._note(me, r.grad_to, backward, r.op, coding)
                if r.grad_from is not None:
                    coding = self._pairs.gradient(r.grad_from, me, r.meta, False)
                    self._note(r.grad_from, me, backward, r.op, coding)

    def _learn_evaluation(self, program: StageProgram) -> None:
        """Note evaluation's codecs: values use training's; acknowledgements carry nothing and need none."""
        me, metas = program.stage, {op: node.outputs[0] for op, node in program.ops if node.outputs}
        direction = Direction.EVALUATION_CODED
        for p in program.produced:
            for target in p.targets:
                self._note(me, target, direction, p.op, self._pairs.value(me, target, metas[p.op], False))
        for r in program.received:
            coding = self._pairs.value(r.source, me, r.meta, False)
            self._note(r.source, me, direction, r.op, coding)

    def _note(self, source: int, target: int, direction: Direction, op: int, coding: Coding) -> None:
        """Note the codec of a message from one piece to another: one of them is this stage's."""
        sender, receiver, edge = self._ends[source], self._ends[target], self._ends[target].edge(op)
        self._outgoing[receiver.worker, direction, edge] = coding
        self._incoming[sender.worker, direction, edge] = coding


class _Pairs:
    """The codecs of directed pairs of stages."""

    def __init__(self, links: Iterable[LinkSpec]) -> None:
        self._specs = {(spec.source, spec.target): spec for spec in links if spec.codec != "none"}
        self._codings: dict[tuple[str, float, bool, bool], Coding] = {}
        for spec in self._specs.values():
            _check_use(spec)

    def __bool__(self) -> bool:  # whether any pair compresses
        return bool(self._specs)

    def value(self, source: int, target: int, meta: TensorMeta, alone: bool) -> Coding:
        """Coding of a value from ``source`` to ``target``; ``alone``: its only consumer."""
        spec = self._taking(source, target, meta)
        if spec is None:
            return EXACT
        return self._coding(spec, keeps_support=alone and self._same_mask(target, source, meta))

    def gradient(self, source: int, target: int, meta: TensorMeta, alone: bool) -> Coding:
        """Coding of a gradient from ``source`` to ``target``; ``alone``: of the value's only consumer."""
        spec = self._taking(source, target, meta)
        if spec is None:
            return EXACT
        return self._coding(spec, on_support=alone and self._same_mask(source, target, meta))

    def _taking(self, source: int, target: int, meta: TensorMeta) -> LinkSpec | None:
        spec = self._specs.get((source, target))
        return spec if spec is not None and catalogue.takes(catalogue.codec(spec.codec), meta) else None

    def _same_mask(self, source: int, target: int, meta: TensorMeta) -> bool:
        """True when gradients from ``source`` to ``target`` travel on their values' positions."""
        back, forth = self._taking(source, target, meta), self._taking(target, source, meta)
        return (
            back is not None
            and forth is not None
            and back.mask is Mask.SAME
            and catalogue.codec(back.codec).size_on is not None
            and catalogue.codec(forth.codec).size_on is not None
        )

    def _coding(self, spec: LinkSpec, *, on_support: bool = False, keeps_support: bool = False) -> Coding:
        named = (spec.codec, spec.ratio, on_support, keeps_support)
        if named not in self._codings:
            codec = make_compressor(spec.codec, spec.ratio)
            self._codings[named] = Coding(codec, on_support, keeps_support)
        return self._codings[named]


def _check_use(spec: LinkSpec) -> None:
    """Check again, as the planner did, that a link's codec is valid for what it carries."""
    facts = catalogue.codec(spec.codec)
    use = Use.ACTIVATION if spec.source < spec.target else Use.GRADIENT
    if use not in facts.valid_for:
        raise UsageError(
            f"codec {spec.codec} is not valid for {use}s, which stage {spec.source} sends to "
            f"{spec.target}; choose another with --compress"
        )
    if facts.shared_state:
        raise UsageError(
            f"codec {spec.codec} needs a state that both ends share, which a link does not keep; "
            "choose another with --compress"
        )
