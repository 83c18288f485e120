"""Op-DAG and its parts between pb2 and atoll's types; what arrives is bounded and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from atoll.errors import BadFrame, UsageError
from atoll.federated import MAX_METRICS
from atoll.opdag import (
    DTYPE_BYTES,
    Arg,
    Autocast,
    Kind,
    LeafRef,
    OpDag,
    OpNode,
    OpRef,
    Source,
    StateMeta,
    TensorMeta,
    TorchLiteral,
    leaf_refs,
    op_refs,
)
from atoll.rows import same_form
from protos import atoll_job_pb2 as pb
from protos import bounds
from protos.bounds import Limits

_U64 = 2**64 - 1
_LITERAL_KINDS = frozenset({"dtype", "layout", "memory_format", "device"})


def meta_to_proto(meta: TensorMeta) -> pb.TensorMeta:
    """Shape and dtype as a message."""
    return pb.TensorMeta(shape=meta.shape, dtype=meta.dtype)


def meta_from_proto(message: pb.TensorMeta, limits: Limits) -> TensorMeta:
    """Shape and dtype; BadFrame for an unknown dtype or more than ``limits.tensor_bytes``."""
    if message.dtype not in DTYPE_BYTES:
        raise BadFrame(f"tensor dtype {message.dtype[:64]!r} is unknown; known are {', '.join(DTYPE_BYTES)}")
    shape = tuple(bounds.count("tensor shape", message.shape, limits.dims))
    nbytes = prod(shape) * DTYPE_BYTES[message.dtype]
    # A zero elsewhere must not hide an absurd extent.
    if nbytes > limits.tensor_bytes or any(extent > limits.tensor_bytes for extent in shape):
        raise BadFrame(f"tensor of shape {shape}: {nbytes} bytes > {limits.tensor_bytes}")
    return TensorMeta(shape, message.dtype)


def arg_to_proto(arg: Arg) -> pb.Arg:
    """Convert an argument; UsageError for an integer beyond 64 bits."""
    match arg:
        case OpRef(op):
            return pb.Arg(op=op)
        case LeafRef(source, name):
            return pb.Arg(leaf=pb.LeafRef(source=source.value, name=name))
        case TorchLiteral(kind, name):
            return pb.Arg(torch=pb.TorchLiteral(kind=kind, name=name))
        case bool():  # before int: a bool is one
            return pb.Arg(boolean=arg)
        case int():
            if not -(2**63) <= arg < 2**63:
                raise UsageError(f"integer argument {arg} does not fit in 64 bits")
            return pb.Arg(integer=arg)
        case float():
            return pb.Arg(real=arg)
        case str():
            return pb.Arg(text=arg)
        case None:
            return pb.Arg(none=True)
        case tuple():
            return pb.Arg(tuple=pb.ArgTuple(items=[arg_to_proto(item) for item in arg]))


def arg_from_proto(message: pb.Arg, limits: Limits, depth: int = 0) -> Arg:
    """Read an argument; BadFrame when nested deeper than ``limits.nesting``."""
    match message.WhichOneof("value"):
        case "op":
            return OpRef(message.op)
        case "leaf":
            source = bounds.one_of("leaf source", message.leaf.source, Source)
            return LeafRef(source, bounds.name("leaf name", message.leaf.name, limits))
        case "torch":
            if message.torch.kind not in _LITERAL_KINDS:
                raise BadFrame(f"literal kind {message.torch.kind[:64]!r} is unknown")
            name = bounds.text("literal name", message.torch.name, limits.name_chars)
            return TorchLiteral(message.torch.kind, name)
        case "integer":
            return message.integer
        case "real":
            return message.real
        case "boolean":
            return message.boolean
        case "text":
            return bounds.text("text argument", message.text, limits.text_chars)
        case "none":
            return None
        case "tuple":
            if depth >= limits.nesting:
                raise BadFrame(f"argument nested deeper than {limits.nesting}")
            items = bounds.count("tuple argument", message.tuple.items, limits.args)
            return tuple(arg_from_proto(item, limits, depth + 1) for item in items)
        case _:
            raise BadFrame("argument without a value")


def node_to_proto(node: OpNode) -> pb.OpNode:
    """Convert an op call."""
    message = pb.OpNode(
        name=node.name,
        kind=node.kind.value,
        target=node.target,
        args=[arg_to_proto(arg) for arg in node.args],
        kwargs=[pb.NamedArg(name=name, value=arg_to_proto(arg)) for name, arg in node.kwargs],
        outputs=[meta_to_proto(meta) for meta in node.outputs],
        is_tuple=node.is_tuple,
        requires_grad=node.requires_grad,
        grad_enabled=node.grad_enabled,
        random=node.random,
        flops_forward=_unsigned("flops_forward", node.flops_forward),
        flops_backward=_unsigned("flops_backward", node.flops_backward),
        bytes_moved=_unsigned("bytes_moved", node.bytes_moved),
        bytes_repeatable=_unsigned("bytes_repeatable", node.bytes_repeatable),
        bytes_saved=_unsigned("bytes_saved", node.bytes_saved),
        module_path=node.module_path,
        source_line=node.source_line,
    )
    if node.autocast is not None:
        message.autocast.CopyFrom(pb.Autocast(enabled=node.autocast.enabled, dtype=node.autocast.dtype))
    return message


def node_from_proto(message: pb.OpNode, limits: Limits) -> OpNode:
    """Read an op call; its references are checked where it is known what they may name."""
    autocast = None
    if message.HasField("autocast"):
        dtype = message.autocast.dtype
        if dtype not in DTYPE_BYTES:
            raise BadFrame(f"autocast dtype {dtype[:64]!r} is unknown")
        autocast = Autocast(message.autocast.enabled, dtype)
    return OpNode(
        name=bounds.name("op name", message.name, limits),
        kind=bounds.one_of("op kind", message.kind, Kind),
        target=bounds.name("op target", message.target, limits),
        args=tuple(arg_from_proto(a, limits) for a in bounds.count("op args", message.args, limits.args)),
        kwargs=tuple(
            (bounds.name("keyword", k.name, limits), arg_from_proto(k.value, limits))
            for k in bounds.count("op kwargs", message.kwargs, limits.args)
        ),
        outputs=tuple(
            meta_from_proto(m, limits) for m in bounds.count("op outputs", message.outputs, limits.outputs)
        ),
        is_tuple=message.is_tuple,
        requires_grad=message.requires_grad,
        grad_enabled=message.grad_enabled,
        autocast=autocast,
        random=message.random,
        flops_forward=message.flops_forward,
        flops_backward=message.flops_backward,
        bytes_moved=message.bytes_moved,
        bytes_repeatable=bounds.within("bytes_repeatable", message.bytes_repeatable, 0, message.bytes_saved),
        bytes_saved=message.bytes_saved,
        module_path=bounds.text("module path", message.module_path, limits.text_chars),
        source_line=bounds.text("source line", message.source_line, limits.text_chars),
    )


def state_to_proto(states: Mapping[str, StateMeta]) -> list[pb.NamedMeta]:
    """Named parameters, buffers or constants, sorted by name."""
    return [
        pb.NamedMeta(
            name=name,
            meta=meta_to_proto(states[name].meta),
            requires_grad=states[name].requires_grad,
            mutated=states[name].mutated,
        )
        for name in sorted(states)
    ]


def metas_to_proto(metas: Mapping[str, TensorMeta]) -> list[pb.NamedMeta]:
    """Named shapes, sorted by name."""
    return [pb.NamedMeta(name=name, meta=meta_to_proto(metas[name])) for name in sorted(metas)]


def state_from_proto(messages: Iterable[pb.NamedMeta], limits: Limits) -> dict[str, StateMeta]:
    """Named parameters, buffers or constants; BadFrame when a name repeats."""
    found: dict[str, StateMeta] = {}
    for message in bounds.count("named tensors", list(messages), limits.items):
        name = bounds.name("tensor name", message.name, limits)
        if name in found:
            raise BadFrame(f"tensor name {name!r} repeats")
        meta = meta_from_proto(message.meta, limits)
        found[name] = StateMeta(meta, message.requires_grad, message.mutated)
    return found


def metas_from_proto(messages: Iterable[pb.NamedMeta], limits: Limits) -> dict[str, TensorMeta]:
    """Named shapes; BadFrame when a name repeats."""
    return {name: state.meta for name, state in state_from_proto(messages, limits).items()}


def dag_to_proto(dag: OpDag) -> pb.OpDag:
    """The whole DAG; equal DAGs give equal messages, whatever the order of their maps."""
    message = pb.OpDag(
        ops=[node_to_proto(node) for node in dag.ops],
        inputs=metas_to_proto(dag.inputs),
        parameters=state_to_proto(dag.parameters),
        buffers=state_to_proto(dag.buffers),
        constants=metas_to_proto(dag.constants),
        loss=dag.loss,
        unsplittable=[pb.Range(begin=begin, end=end) for begin, end in dag.unsplittable],
        constant_ops=sorted(dag.constant_ops),
        aliases=[pb.Alias(alias=alias, name=dag.aliases[alias]) for alias in sorted(dag.aliases)],
        training=dag.training,
        metrics=[pb.NamedOp(name=name, op=dag.metrics[name]) for name in sorted(dag.metrics)],
        weight=dag.weight,
    )
    if dag.tail is not None:
        message.tail.CopyFrom(dag_to_proto(dag.tail))
    return message


def metrics_from_proto(messages: Iterable[pb.NamedOp], n_ops: int, limits: Limits) -> dict[str, int]:
    """Named scalar outputs; BadFrame when a name repeats or a position is out of range."""
    listed = bounds.count("metrics", list(messages), MAX_METRICS)
    found = {
        bounds.name("metric", m.name, limits): bounds.within(
            f"position of metric {m.name[:64]!r}", m.op, 0, n_ops - 1
        )
        for m in listed
    }
    if len(found) < len(listed):
        raise BadFrame("a metric's name repeats")
    return found


def dag_from_proto(message: pb.OpDag, limits: Limits) -> OpDag:
    """The whole DAG; every position and name it mentions exists, references point backwards, and its tail is
    the same graph with other shapes."""
    tail = None
    if message.HasField("tail"):
        if message.training or message.tail.HasField("tail"):
            raise BadFrame("an op-DAG with a tail that only an evaluation has, once")
        tail = dag_from_proto(message.tail, limits)
    ops = tuple(node_from_proto(node, limits) for node in bounds.count("ops", message.ops, limits.ops))
    if not ops:
        raise BadFrame("an op-DAG without ops")
    n_ops = len(ops)
    ranges = []
    for r in bounds.count("unsplittable ranges", message.unsplittable, limits.ops):
        end = bounds.within("end of an unsplittable range", r.end, 1, n_ops)
        ranges.append((bounds.within("begin of an unsplittable range", r.begin, 0, end - 1), end))
    constant_ops = bounds.count("constant ops", message.constant_ops, n_ops)
    aliases = {
        bounds.name("alias", a.alias, limits): bounds.name("alias target", a.name, limits)
        for a in bounds.count("aliases", message.aliases, limits.items)
    }
    dag = OpDag(
        ops=ops,
        inputs=metas_from_proto(message.inputs, limits),
        parameters=state_from_proto(message.parameters, limits),
        buffers=state_from_proto(message.buffers, limits),
        constants=metas_from_proto(message.constants, limits),
        loss=bounds.within("position of the loss", message.loss, 0, n_ops - 1),
        unsplittable=tuple(ranges),
        constant_ops=frozenset(bounds.within("constant op", op, 0, n_ops - 1) for op in constant_ops),
        aliases=aliases,
        training=message.training,
        metrics=metrics_from_proto(message.metrics, n_ops, limits),
        weight=bounds.within("position of the weight", message.weight, 0, n_ops - 1)
        if message.HasField("weight")
        else None,
        tail=tail,
    )
    _check_references(dag)
    if tail is not None and not same_form(dag, tail):
        raise BadFrame("an op-DAG's tail is another graph")
    return dag


def _check_references(dag: OpDag) -> None:
    """Raise BadFrame unless every reference names an earlier op or a leaf of the DAG."""
    leaves: dict[Source, Iterable[str]] = {
        Source.INPUT: dag.inputs.keys(),
        Source.PARAMETER: dag.parameters.keys(),
        Source.BUFFER: dag.buffers.keys(),
        Source.CONSTANT: dag.constants.keys(),
    }
    for position, node in enumerate(dag.ops):
        for op in op_refs(node):
            if op >= position:
                raise BadFrame(f"op {position} ({node.name}) reads op {op}, which does not come before it")
        for leaf in leaf_refs(node):
            if leaf.name not in leaves[leaf.source]:
                raise BadFrame(f"op {position} ({node.name}) reads unknown {leaf.source.value} {leaf.name!r}")
    known = dag.parameters.keys() | dag.buffers.keys() | dag.constants.keys()
    for alias, name in dag.aliases.items():
        if name not in known:
            raise BadFrame(f"alias {alias!r} names unknown tensor {name!r}")
    told = {f"metric {metric!r}": op for metric, op in dag.metrics.items()}
    if dag.weight is not None:
        told["the loss's weight"] = dag.weight
    for what, op in told.items():
        if dag.ops[op].is_tuple or [meta.elements for meta in dag.ops[op].outputs] != [1]:
            raise BadFrame(f"{what} is op {op} ({dag.ops[op].name}), which is no scalar")


def _unsigned(what: str, value: int) -> int:
    if not 0 <= value <= _U64:
        raise UsageError(f"{what} = {value} does not fit in 64 unsigned bits")
    return value
