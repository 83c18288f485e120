"""Seconds of single ops on this device, forward and backward, for the planner.

An op runs as it will in a stage: through the executor's own call, on random inputs of the right
shapes, under the job's precision, with its parameters' gradients accumulating. The timings of a
stage's ops are meant to add up to the stage, so

- each op is timed over a sustained window after a warm-up, by the mean and by the clock that
  training counts its stage by: a CPU quota slows what lasts and spares what is short;
- all ops are timed in rounds, each in another order, until the two fastest rounds agree: other
  work on the machine only ever slows, and it comes and goes;
- inputs are taken in turn from several sets, so that weights come from memory as they do when
  a whole stage runs between two uses, where a single set would stay in the nearest cache;
- the cost of entering the autograd engine, paid once a micro-batch and not once an op, is
  measured and taken off every backward.
"""

from __future__ import annotations

import random
import time
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atoll.errors import AtollError
from atoll.execute import DTYPES, Executor
from atoll.job import Precision
from atoll.messages.to_worker import OpProbe
from atoll.opdag import FLOATING, Kind, LeafRef, OpNode, Source, TensorMeta, leaf_refs, op_refs
from atoll.program import Received, StageProgram
from atoll.rehearse import RehearsalLimits, rehearse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SUSTAINED_S = 0.025  # of one op's timed window, after its warm-up
MAX_ROUNDS = 5
AGREE_WITHIN = 0.05  # of the sums of the two fastest rounds
MIN_REPETITIONS = 3
MAX_REPETITIONS = 2000
SETS_BYTES = 32 << 20  # what the input sets of one op should exceed together
MAX_SETS = 8
_POSITION = 1 << 20  # of the probed op, beyond every position it may refer to


@dataclass(frozen=True, slots=True)
class OpTiming:
    """Seconds of an op on this device."""

    forward_s: float
    backward_s: float  # 0 where the output requires no gradient


def time_ops(
    probes: Sequence[OpProbe],
    device: torch.device | str = "cpu",
    precision: Precision = Precision.FP32,
    budget_s: float = 30.0,
    max_bytes: int = 1 << 30,
    sustained_s: float = SUSTAINED_S,
    clock: Callable[[], float] = time.perf_counter,
    watch: Callable[[str], object] = lambda _: None,
) -> dict[str, OpTiming]:
    """Time each op, without those that fail, exceed ``max_bytes`` or come after ``budget_s``.

    An op's window is at least ``sustained_s`` and MIN_REPETITIONS runs of forward and backward,
    so the budget may be exceeded by one op. Figures are means of an op's two fastest windows.
    ``clock`` is read in the calling thread, where the ops run; the budget goes by the wall's. ``watch``
    is called with an op's name before it is run.
    """
    place = torch.device(device)
    ends_s = time.monotonic() + budget_s
    overhead = _engine_overhead(place, clock)
    left = [p for p in probes if 3 * _probe_bytes(p) <= max_bytes and _known_dtypes(p)]
    left = [p for p in map(_functional, left) if _rehearsed(p, precision, place, max_bytes)]
    rounds: list[dict[str, OpTiming]] = []
    while len(rounds) < MAX_ROUNDS and not _agree(rounds):
        random.Random(len(rounds)).shuffle(left)
        timings: dict[str, OpTiming] = {}
        for probe in left:
            if time.monotonic() > ends_s:
                # A round that was cut short has no figure of the ops it did not reach.
                return _merged([*rounds, timings]) if rounds else timings
            watch(f"op {probe.node.target!r} ({probe.node.name[:80]})")
            try:
                bench = _Bench(probe, place, precision, max_bytes)
                timings[probe.signature] = bench.time(sustained_s, overhead, clock)
            except (RuntimeError, IndexError, TypeError, ValueError, AtollError):
                # Random values need not be valid arguments of every op; the planner falls back on
                # its analytic figure for what is missing here.
                continue
        left = [probe for probe in left if probe.signature in timings]
        rounds.append(timings)
    return _merged(rounds)


def warm_up() -> None:
    """Rehearse an op, run it and differentiate it, as the first stage would, before a process is measured.

    torch imports modules of its compiler as soon as it follows shapes, and sympy as soon as it is given a
    gradient: 70 MiB and some seconds, whatever the model is.
    """
    value = TensorMeta((8, 8), "float32")
    leaves = (LeafRef(Source.INPUT, "x"), LeafRef(Source.PARAMETER, "w"))
    node = OpNode("warm_up", Kind.PARAMETRIC, "aten.linear.default", leaves, (), (value,), requires_grad=True)
    time_ops([OpProbe("warm_up", node, (), {"x": value, "w": value})], sustained_s=0.0)


def _total(timings: Mapping[str, OpTiming]) -> float:
    return sum(t.forward_s + t.backward_s for t in timings.values())


def _agree(rounds: Sequence[Mapping[str, OpTiming]]) -> bool:
    fastest = sorted(map(_total, rounds))[:2]
    return len(fastest) == 2 and fastest[1] <= (1.0 + AGREE_WITHIN) * fastest[0]


def _merged(rounds: Sequence[Mapping[str, OpTiming]]) -> dict[str, OpTiming]:
    """Every op's mean over the two fastest of its windows."""
    found = {}
    for signature in rounds[0]:
        seen = sorted(
            (r[signature] for r in rounds if signature in r), key=lambda t: t.forward_s + t.backward_s
        )[:2]
        forward_s, backward_s = (sum(times) / len(seen) for times in zip(*map(astuple, seen), strict=True))
        found[signature] = OpTiming(forward_s, backward_s)
    return found


class _Bench:
    """An op bound to its sets of random inputs."""

    def __init__(self, probe: OpProbe, device: torch.device, precision: Precision, max_bytes: int) -> None:
        self.device = device
        self.node = probe.node
        size = max(1, _probe_bytes(probe))
        n_sets = min(MAX_SETS, max(1, -(-SETS_BYTES // size)), max(1, max_bytes // (3 * size)))
        self.calls = []
        self.kept: list[Tensor] = []
        for at in range(n_sets):
            self.calls.append(self._bound(probe, precision, torch.Generator().manual_seed(at)))

    def time(self, sustained_s: float, overhead_s: float, clock: Callable[[], float]) -> OpTiming:
        with torch.set_grad_enabled(self.node.grad_enabled):
            outputs = _tensors(self.calls[0]())
            seeds = [torch.randn_like(o) if o.requires_grad else None for o in outputs]
            del outputs
            forward_s = _sustained(self.calls, self.device, sustained_s, clock)
            if all(seed is None for seed in seeds):
                return OpTiming(forward_s, 0.0)
            both = [self._with_backward(call, seeds) for call in self.calls]
            both_s = _sustained(both, self.device, sustained_s, clock)
        return OpTiming(forward_s, max(both_s - forward_s - overhead_s, 0.0))

    def _with_backward(self, call: Callable[[], Any], seeds: list[Tensor | None]) -> Callable[[], None]:
        inputs = self.kept

        def run() -> None:
            pairs = [(o, s) for o, s in zip(_tensors(call()), seeds, strict=True) if s is not None]
            torch.autograd.backward([o for o, _ in pairs], [s for _, s in pairs])
            for value in inputs:
                value.grad = None

        return run

    def _bound(self, probe: OpProbe, precision: Precision, generator: torch.Generator) -> Callable[[], Any]:
        refs = op_refs(probe.node)
        program = _program_of(probe, dict(zip(refs, probe.op_inputs, strict=True)))
        bound = _index_bound(probe)
        named = {
            leaf.name: _random(probe.leaves[leaf.name], bound, generator, self.device)
            for leaf in leaf_refs(probe.node)
        }
        executor = Executor(program, self.device, precision)
        executor.load(named)
        received = {}
        for at, (op, meta) in enumerate(zip(refs, probe.op_inputs, strict=True)):
            value = _random(meta, bound, generator, self.device)
            if _guess_gradient(probe.node, at) and probe.node.requires_grad and meta.dtype in FLOATING:
                value.requires_grad_()
                self.kept.append(value)
            received[op] = value
        return executor.bind(named, received)


def _rehearsed(probe: OpProbe, precision: Precision, device: torch.device, max_bytes: int) -> bool:
    """True when the op runs on its shapes and makes what it declares: a peer chose it."""
    metas = {leaf.name: probe.leaves[leaf.name] for leaf in leaf_refs(probe.node)}
    try:
        program = _program_of(probe, dict(zip(op_refs(probe.node), probe.op_inputs, strict=True)))
        inputs = {name: metas[name] for name in program.inputs}
        leaves = {name: meta for name, meta in metas.items() if name not in inputs}
        rehearse(program, leaves, inputs, precision, device, RehearsalLimits(output_bytes=max_bytes))
    except (AtollError, ValueError):
        return False
    return True


def _program_of(probe: OpProbe, metas: dict[int, TensorMeta]) -> StageProgram:
    leaves = leaf_refs(probe.node)

    def names(source: Source) -> tuple[str, ...]:
        return tuple(leaf.name for leaf in leaves if leaf.source is source)

    return StageProgram(
        stage=0,
        n_stages=1,
        ops=((_POSITION, probe.node),),
        constant_ops=frozenset(),
        received=tuple(Received(op, 0, False, None, 0, meta) for op, meta in metas.items()),
        produced=(),
        inputs=names(Source.INPUT),
        parameters=names(Source.PARAMETER),
        buffers=names(Source.BUFFER),
        constants=names(Source.CONSTANT),
        tied=(),
        loss=None,
    )


def _sustained(
    calls: Sequence[Callable[[], Any]],
    device: torch.device,
    sustained_s: float,
    clock: Callable[[], float],
) -> float:
    """Mean seconds of a call over a window of at least ``sustained_s`` and MIN_REPETITIONS,
    after one pass through ``calls``."""
    for call in calls:
        call()
    repetitions = max(MIN_REPETITIONS, len(calls))
    runs = 0
    _wait(device)
    started = clock()
    while True:
        for at in range(repetitions):
            calls[at % len(calls)]()
        _wait(device)
        runs += repetitions
        elapsed = clock() - started
        if elapsed >= sustained_s or runs >= MAX_REPETITIONS:
            return elapsed / runs


def _engine_overhead(device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of one autograd.backward call beyond the nodes that it runs."""
    leaf = torch.zeros((), device=device, requires_grad=True)
    seed = torch.ones((), device=device)

    def chain(length: int) -> Callable[[], None]:
        def run() -> None:
            value = leaf
            for _ in range(length):
                value = value.view_as(value)
            torch.autograd.backward([value], [seed])
            leaf.grad = None

        return run

    one, many = (_sustained([chain(n)], device, SUSTAINED_S / 4, clock) for n in (1, 33))
    return max(one - (many - one) / 32, 0.0)


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]


def _random(meta: TensorMeta, bound: int, generator: torch.Generator, device: torch.device) -> Tensor:
    dtype = DTYPES[meta.dtype]
    if meta.dtype == "bool":
        return torch.ones(meta.shape, dtype=dtype, device=device)
    if meta.dtype in FLOATING:
        return torch.randn(meta.shape, generator=generator).to(device, dtype)
    return torch.randint(0, bound, meta.shape, generator=generator).to(device, dtype)


def _index_bound(probe: OpProbe) -> int:
    """Integers below it are valid indices into whatever table the op reads: embeddings, classes."""
    metas = [m for m in probe.inputs if m.dtype in FLOATING and m.shape]
    smallest = min((size for m in metas for size in m.shape), default=2)
    if probe.node.target.startswith("aten.embedding"):
        smallest = metas[0].shape[0] if metas else 2
    return max(1, min(smallest, 127))


def _guess_gradient(node: OpNode, at: int) -> bool:
    # Attention's fourth input is a mask: with a gradient it would force another kernel.
    return not ("scaled_dot_product_attention" in node.target and at >= 3)


def _functional(probe: OpProbe) -> OpProbe:
    """Replace in-place ops by their functional namesakes: a leaf cannot be written again and again."""
    parts = probe.node.target.split(".")
    if len(parts) == 3 and parts[1].endswith("_"):
        parts[1] = parts[1].rstrip("_")
        return replace(probe, node=replace(probe.node, target=".".join(parts)))
    return probe


def _probe_bytes(probe: OpProbe) -> int:
    return sum(m.nbytes for m in (*probe.inputs, *probe.node.outputs))


def _known_dtypes(probe: OpProbe) -> bool:
    return all(m.dtype in DTYPES for m in probe.inputs)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
