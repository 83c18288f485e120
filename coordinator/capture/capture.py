"""A torch module becomes op-DAGs: one for training, one for evaluation, over the same state.

Capture runs on the owner's machine. ``capture`` exports both modes with the loss inside, brings
them into canonical form and measures every op once; ``coordinator.capture.self_check`` then proves the
result against the module. ``op_uses`` lists a model's ops for `atoll ops`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from atoll.errors import CaptureError, UnsupportedOp, UsageError
from atoll.exported import uncompiled
from atoll.federated import MAX_METRICS, checked_name
from atoll.hidden_matrices import hidden_matrices
from atoll.job import Precision, TrainingSpec
from atoll.opdag import Kind, LeafRef, OpDag, OpNode, Source, StateMeta, TensorMeta, leaf_refs, rows_of
from atoll.ops import ALLOWED
from atoll.rows import inputs_at, same_form
from atoll.schemas import is_random
from coordinator.capture.cut_rules import Region, settle, written_buffers
from coordinator.capture.export_errors import remedies
from coordinator.capture.op_costs import measured
from coordinator.capture.outcome import Loss, resized, sums_items
from coordinator.capture.python_state import PythonState
from coordinator.capture.rewrites import without_causal_masks
from coordinator.capture.torch_export import Constants, Exported, check_dense, device_of, export, meta_of

MAX_LISTED = 20  # unsupported ops named in one message


@dataclass(frozen=True)
class Captured:
    """Both graphs, and every tensor that they or the module's state dict name.

    ``state`` holds detached tensors that share the module's memory, under the module's own
    names; lifted constants are "constant/N".
    """

    train: OpDag
    evaluation: OpDag
    state: Mapping[str, Tensor]
    precision: Precision
    frozen: frozenset[str]
    items: bool = False  # losses are sums that the module was asked for: ``outcome.sums_items``


@dataclass(frozen=True, slots=True)
class OpUse:
    """An op of a model: how often, and where it is first used."""

    target: str
    count: int
    module_path: str
    source_line: str
    supported: bool


@dataclass(frozen=True)
class _Metas:
    """Shapes and types of what graphs read."""

    inputs: Mapping[str, TensorMeta]
    state: Mapping[str, TensorMeta]

    def of(self, leaf: LeafRef) -> TensorMeta:
        return (self.inputs if leaf.source is Source.INPUT else self.state)[leaf.name]


@dataclass(frozen=True)
class _Source:
    """A module as capture sees it: names made canonical, frozen parameters known."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    precision: Precision
    canonical: Mapping[str, str]
    frozen: frozenset[str]
    constants: Constants
    metrics: tuple[str, ...]
    items: bool = False  # the module is asked for sums of its loss: ``outcome.sums_items``

    def export(self, training: bool) -> Exported:
        metrics = () if training else self.metrics
        found = export(
            Loss(self.module, tuple(self.inputs), metrics, items=self.items, differentiated=training),
            self.inputs,
            training=training,
            precision=self.precision,
            frozen=self.frozen,
            canonical=self.canonical,
            constants=self.constants,
        )
        device = device_of(self.module, self.inputs)
        return replace(found, nodes=without_causal_masks(found.nodes, self.constants.tensors, device))

    def export_both(self) -> dict[bool, Exported]:
        """Graphs by mode: one export where the module does not ask for its mode and metrics add nothing."""
        training = self.export(True)
        if training.reads_mode or self.metrics:
            return {True: training, False: self.export(False)}
        return {True: training, False: training}


@uncompiled()
def capture(
    module: nn.Module,
    example_inputs: Mapping[str, Tensor],
    training: TrainingSpec | None = None,
    metrics: tuple[str, ...] = (),
    *,
    sums: bool = True,
    tail: bool = True,
) -> Captured:
    """Capture ``module(**example_inputs)`` in training and evaluation mode, there with ``metrics``.

    Where the loss is a sum over a count (``outcome``), the graphs say so. Without ``sums`` it has to be a
    mean: of clients, whose steps are of one micro-batch each. ``tail``: the evaluation is captured once more,
    with one row more (``atoll.rows``); it is left out where the module does not run so, or has another graph.
    The module is left as it was. CaptureError names the op, module path and source line of what
    cannot be captured; UnsupportedOp lists every op outside the allow-list.
    """
    source = _source(module, example_inputs, training, _metric_names(metrics))
    before = PythonState(module)
    source = replace(source, items=sums and sums_items(module, source.inputs))
    before.restore()
    graphs = source.export_both()
    unsupported = [use for use in _uses(graphs.values()) if not use.supported]
    if unsupported:
        raise _unsupported(unsupported)
    mutated = written_buffers(graphs[True].nodes)
    mutated |= written_buffers(graphs[False].nodes)
    _refuse_stale(source, mutated)
    state = _state(source)
    metas = _Metas(
        {name: meta_of(tensor, f"input {name!r}") for name, tensor in source.inputs.items()},
        {name: meta_of(tensor, f"tensor {name!r}") for name, tensor in state.items()},
    )
    device = device_of(module, source.inputs)
    dags = {}
    for mode, graph in graphs.items():
        region = settle(graph.nodes, graph.loss, mutated, metas.of, mode, graph.metrics, graph.weight)
        dag = _dag(source, region, metas, mode)
        if mode:
            dag = _with_hidden_matrices(dag)
        dags[mode] = measured(dag, source.inputs, state, source.precision, device)
    _check_trainable(dags[True])
    _check_weights(dags, sums)
    found = dags[False]
    if tail:
        found = replace(found, tail=_tail(source, found, mutated, metas))
    return Captured(dags[True], found, state, source.precision, source.frozen, source.items)


@uncompiled()
def op_uses(module: nn.Module, example_inputs: Mapping[str, Tensor]) -> tuple[OpUse, ...]:
    """Every op of both modes, unsupported ones first, then by name."""
    source = _source(module, example_inputs, None)
    return _uses(source.export_both().values())


def _uses(graphs: Collection[Exported]) -> tuple[OpUse, ...]:
    counts: Counter[str] = Counter()
    first: dict[str, OpNode] = {}
    for graph in graphs:
        once = Counter(node.target for node in graph.nodes)
        counts |= once  # the larger of the two modes
        for node in graph.nodes:
            first.setdefault(node.target, node)
    uses = [
        OpUse(target, counts[target], node.module_path, node.source_line, target in ALLOWED)
        for target, node in first.items()
    ]
    return tuple(sorted(uses, key=lambda use: (use.supported, use.target)))


def _unsupported(uses: list[OpUse]) -> UnsupportedOp:
    lines = [
        f"  {use.target} x{use.count}, first in {use.module_path or 'the module'} at {use.source_line or '?'}"
        for use in uses[:MAX_LISTED]
    ]
    if len(uses) > MAX_LISTED:
        lines.append(f"  and {len(uses) - MAX_LISTED} more")
    return UnsupportedOp(
        "\n".join(
            (
                f"{len(uses)} ops of the model are not on the allow-list; replace them by plain tensor ops "
                "(`atoll ops MODEL.py` lists all):",
                *lines,
                *remedies(" ".join(use.target for use in uses)),
            )
        )
    )


def _metric_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if type(names) is not tuple or len(names) > MAX_METRICS or len(set(names)) < len(names):
        raise UsageError(f"metrics {names!r}; give a tuple of at most {MAX_METRICS} different names")
    own = {"loss", "weight"} & set(names)
    if own:
        raise UsageError(f"the {own.pop()} is always told; leave it out of the job's metrics")
    return tuple(checked_name("metric", name) for name in names)


def _source(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    training: TrainingSpec | None,
    metrics: tuple[str, ...] = (),
) -> _Source:
    if not isinstance(module, nn.Module):
        raise CaptureError(f"the model is a {type(module).__name__}, not a torch.nn.Module")
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"example input {name!r} is a {type(value).__name__}, not a tensor; fix other arguments in "
                "the module itself"
            )
    if torch.get_default_dtype() is not torch.float32:
        raise CaptureError(
            f"torch's default type is {torch.get_default_dtype()} here and float32 on workers, where the "
            "same ops would give other types; leave it, and convert the module and its inputs instead"
        )
    if not inputs:
        raise CaptureError("there are no example inputs; give one tensor for each argument that data fills")
    canonical = _canonical_names(module)
    _refuse_state(module, inputs)
    _refuse_overlaps(module)
    frozen = {canonical[n] for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    if training is not None:
        for name in set(canonical.values()):
            group = training.optimizer.group_of(name)
            if group is not None and group.frozen:
                frozen.add(name)
    parameters = {canonical[n] for n, _ in module.named_parameters(remove_duplicate=False)}
    precision = training.precision if training is not None else Precision.FP32
    frozen &= parameters
    examples = {name: _as_served(value) for name, value in inputs.items()}
    return _Source(module, examples, precision, canonical, frozenset(frozen), Constants(), metrics)


def _as_served(example: Tensor) -> Tensor:
    """A copy as data arrives at a worker: contiguous, no other input's memory, outside autograd.

    Two inputs that are one tensor would be one input of the graph.
    """
    return example.detach().clone(memory_format=torch.contiguous_format)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every parameter and buffer name -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names[name] = first.setdefault(id(tensor), name)
    return names


def _refuse_state(module: nn.Module, inputs: Collection[str]) -> None:
    """Refuse tensors that are not dense, and names of inputs: workers know what a stage reads by name."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_dense(repr(name), tensor)
        if name in inputs:
            raise CaptureError(
                f"{name!r} is an argument of forward() and a tensor of the module; give one of them another "
                "name"
            )


def _refuse_overlaps(module: nn.Module) -> None:
    """Two different parameters or buffers on one memory would part ways on the workers."""
    spans = sorted(
        (*_span(t), name, id(t))
        for name, t in (*module.named_parameters(), *module.named_buffers())
        if t.numel()
    )
    for (_, end, name, one), (begin, _, other, two) in pairwise(spans):
        if begin < end and one != two:
            raise CaptureError(
                f"{name!r} and {other!r} are different tensors on the same memory; make them one parameter, "
                "or copy one of them"
            )


def _refuse_stale(source: _Source, written: Collection[str]) -> None:
    """Refuse a constant on the memory of what training changes, as in a plain loop it would change with it.

    So are views made before forward, ``self.q, self.k = self.qk[:8], self.qk[8:]``.
    """
    changing = [
        (_span(tensor), name)
        for name, tensor in (*source.module.named_parameters(), *source.module.named_buffers())
        if tensor.numel() and (name in written or (tensor.requires_grad and name not in source.frozen))
    ]
    held = [tensor for tensor in source.constants.held if tensor.numel()]
    for begin, end in map(_span, held):
        for (first, last), name in changing:
            if begin < last and first < end:
                raise CaptureError(
                    f"forward reads a view of {name!r} that was made before the call: training changes it, "
                    f"and the graph would keep its values; take the view in forward (self.{name}[:2])"
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * _extent(tensor)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last that the tensor reaches."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _state(source: _Source) -> dict[str, Tensor]:
    """The state dict under all its names, non-persistent buffers and lifted constants."""
    module = source.module
    found = {
        name: t.detach() for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)
    }
    for name, buffer in module.named_buffers():
        found.setdefault(name, buffer.detach())
    for name, parameter in module.named_parameters():
        found.setdefault(name, parameter.detach())
    return {**found, **source.constants.tensors}


def _dag(source: _Source, region: Region, metas: _Metas, training: bool) -> OpDag:
    used = {leaf for node in region.nodes for leaf in leaf_refs(node)}

    def names(kind: Source) -> list[str]:
        mine = {leaf.name for leaf in used if leaf.source is kind}
        return [name for name in metas.state if name in mine]

    return OpDag(
        ops=tuple(_kinded(node, at == region.loss) for at, node in enumerate(region.nodes)),
        inputs=dict(metas.inputs),
        parameters={
            name: StateMeta(metas.state[name], requires_grad=name not in source.frozen)
            for name in names(Source.PARAMETER)
        },
        buffers={
            name: StateMeta(metas.state[name], mutated=name in region.mutated)
            for name in names(Source.BUFFER)
        },
        constants={name: metas.state[name] for name in names(Source.CONSTANT)},
        loss=region.loss,
        unsplittable=region.unsplittable,
        constant_ops=region.constant_ops,
        aliases={name: first for name, first in source.canonical.items() if name != first},
        training=training,
        metrics=dict(region.metrics),
        weight=region.weight,
    )


def _with_hidden_matrices(dag: OpDag) -> OpDag:
    """The training graph whose parameters say which of them an optimizer of hidden matrices steps."""
    found = hidden_matrices(dag)
    states = {name: replace(s, hidden_matrix=name in found) for name, s in dag.parameters.items()}
    return replace(dag, parameters=states)


def _kinded(node: OpNode, is_loss: bool) -> OpNode:
    parametric = any(leaf.source is Source.PARAMETER for leaf in leaf_refs(node))
    kind = Kind.LOSS if is_loss else Kind.PARAMETRIC if parametric else Kind.NON_PARAMETRIC
    return replace(node, kind=kind, random=is_random(node))


def _tail(source: _Source, evaluation: OpDag, mutated: frozenset[str], metas: _Metas) -> OpDag | None:
    # One row is not a number to compare with: some models have another graph for it.
    rows = rows_of(metas.inputs) + 1
    inputs = resized(source.inputs, rows)
    if not inputs or rows < 3:
        return None
    constants = set(source.constants.tensors)
    try:
        graph = replace(source, inputs=inputs).export(False)
        if set(source.constants.tensors) != constants:
            return None  # one that depends on the number of rows
        metas = replace(metas, inputs=inputs_at(metas.inputs, rows))
        region = settle(graph.nodes, graph.loss, mutated, metas.of, False, graph.metrics, graph.weight)
    except CaptureError:
        return None
    dag = _dag(source, region, metas, training=False)
    return dag if same_form(evaluation, dag) else None


def _check_weights(dags: Mapping[bool, OpDag], sums: bool) -> None:
    weighted = [dags[mode].weight is not None for mode in (True, False)]
    if any(weighted) and not sums:
        raise UsageError(
            "the module returns a loss as a sum over its weight, but a client's step is one micro-batch: "
            "in a federated job return the mean (loss / weight) and no weight"
        )
    if weighted[0] != weighted[1]:
        modes = ("training", "evaluation") if weighted[0] else ("evaluation", "training")
        raise CaptureError(
            f"the module returns a weight in {modes[0]} mode, but not in {modes[1]}, as if its loss were a "
            "mean there; return loss and weight in both"
        )


def _check_trainable(dag: OpDag) -> None:
    for name, parameter in dag.parameters.items():
        if parameter.requires_grad and parameter.meta.dtype.startswith("complex"):
            raise CaptureError(
                f"parameter {name!r} is {parameter.meta.dtype}; workers train real numbers: keep it as "
                "nn.Parameter(torch.view_as_real(w)) and use torch.view_as_complex of it in forward"
            )
    if not dag.ops[dag.loss].requires_grad:
        raise CaptureError(
            "the loss depends on no trainable parameter: all are frozen, detached or unused; within "
            "checkpoint(...), give use_reentrant=False"
        )
