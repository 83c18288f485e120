"""Jobs, graphs, plans and programs as messages and as bytes. ``protos.coding`` does it by their type hints;
here stand their few irregular fields, and in ``protos.checks`` what must hold among several."""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from atoll.bounded import MAX_ARGS, MAX_ITEMS, MAX_NAME_CHARS, MAX_STAGES, MAX_TEXT_CHARS
from atoll.dataset_spec import DataSpec
from atoll.errors import BadFrame
from atoll.exchange import PairTable
from atoll.federated import FederatedSpec, Option
from atoll.job import JobSpec, TrainingSpec
from atoll.opdag import Arg, LeafRef, OpDag, OpNode, OpRef, Source, TensorMeta, TorchLiteral
from atoll.plan import LinkSpec, Plan, Replica, StageSpec, one_replica
from atoll.program import StageProgram
from protos import atoll_job_pb2 as pb
from protos import bounds, checks, coding
from protos.coding import CODES, Form

MAX_NESTING = 8  # of tuples within an argument
LITERAL_KINDS = frozenset({"dtype", "layout", "memory_format", "device"})
_KINDS = (
    *(OpDag, OpNode, TensorMeta, StageProgram, Plan, LinkSpec),
    *(JobSpec, TrainingSpec, DataSpec, FederatedSpec),
)
KINDS = {kind.__name__: kind for kind in _KINDS}
"""What travels under its class's name."""
_T = TypeVar("_T")


def to_proto(value: Any) -> Any:
    """Return the message for a value. Raises UsageError for what it cannot carry."""
    return coding.write(value, getattr(pb, type(value).__name__))


def from_proto(message: Any) -> Any:
    """Return the value that a peer's message stands for. Raises BadFrame; UsageError of a type's own."""
    return coding.read(KINDS[message.DESCRIPTOR.name], message)


def encode(value: Any) -> bytes:
    """Deterministic bytes of a value, for files and journals."""
    encoded: bytes = to_proto(value).SerializeToString(deterministic=True)
    return encoded


def decode(kind: type[_T], data: bytes) -> _T:
    """The value of type ``kind`` that ``encode`` wrote; BadFrame when it is none."""
    message = getattr(pb, kind.__name__)()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise BadFrame(f"{len(data)} bytes are no {kind.__name__}: {error}") from None
    return coding.read(kind, message)


def dag_bytes(dag: OpDag) -> bytes:
    """The one serialisation of a DAG: equal DAGs give equal bytes in every process."""
    return encode(dag)


def dag_from_bytes(data: bytes) -> OpDag:
    """The DAG stored in ``data``; BadFrame when it is no DAG or out of bounds."""
    return decode(OpDag, data)


def content_hash(data: bytes) -> str:
    """sha256 in hexadecimal: the name of a blob."""
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------- irregular fields


def _argument(message: pb.Arg, depth: int = 0) -> Arg:
    match message.WhichOneof("value"):
        case "op":
            return OpRef(message.op)
        case "leaf":
            source = bounds.one_of("leaf source", message.leaf.source, Source)
            return LeafRef(source, bounds.name("leaf name", message.leaf.name))
        case "torch":
            if message.torch.kind not in LITERAL_KINDS:
                raise BadFrame(f"literal kind {message.torch.kind[:64]!r} is unknown")
            return TorchLiteral(
                message.torch.kind, bounds.text("literal name", message.torch.name, MAX_NAME_CHARS)
            )
        case "text":
            return bounds.text("text argument", message.text, MAX_TEXT_CHARS)
        case "none":
            return None
        case "tuple":
            if depth >= MAX_NESTING:
                raise BadFrame(f"argument nested deeper than {MAX_NESTING}")
            items = bounds.count("tuple argument", message.tuple.items, MAX_ARGS)
            return tuple([_argument(item, depth + 1) for item in items])
        case None:
            raise BadFrame("argument without a value")
        case kind:
            plain: Arg = getattr(message, kind)
            return plain


def _written_argument(arg: Arg) -> dict[str, Any]:
    match arg:
        case OpRef(op):
            return {"op": op}
        case LeafRef(source, name):
            return {"leaf": {"source": source, "name": name}}
        case TorchLiteral(kind, name):
            return {"torch": {"kind": kind, "name": name}}
        case None:
            return {"none": True}
        case tuple():
            return {"tuple": {"items": [_written_argument(item) for item in arg]}}
    return _plain(arg)


def _plain(value: Option) -> dict[str, Any]:
    """A bool is an int, so it is looked for first."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "real")):
        if isinstance(value, kind):
            return {name: value}
    return {"text": value}


def _option(message: pb.Option) -> Option:
    kind = message.WhichOneof("value")
    if kind is None:
        raise BadFrame(f"option {message.name[:64]!r} has no value")
    value: Option = getattr(message, kind)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadFrame(f"option {message.name[:64]!r} = {value}; a finite number is accepted")
    return value


def _worker(message: pb.StageSpec) -> str:
    if len(message.workers) != 1:
        raise BadFrame(f"a stage with {len(message.workers)} workers, not one")
    return bounds.name("worker", message.workers[0])


def _pairs(message: pb.Exchange) -> PairTable | None:
    return coding.read(PairTable, message) if message.pair_rates else None


def _written_pairs(pairs: PairTable | None) -> dict[str, Any]:
    return {} if pairs is None else coding.fields_of(pairs, pb.Exchange.DESCRIPTOR)


def _replicas(message: pb.Plan) -> tuple[Replica, ...]:
    """The pipeline of a plan that has one, or the replicas of one that has several."""
    if message.replicas:
        if message.stages or message.links or len(message.replicas) == 1:
            raise BadFrame(f"a plan of {len(message.replicas)} replicas in the form of another number")
        bounds.count("stages", [s for r in message.replicas for s in r.stages], MAX_STAGES)
        return tuple(coding.read(Replica, replica) for replica in message.replicas)
    stages = tuple(coding.read(StageSpec, s) for s in bounds.count("stages", message.stages, MAX_STAGES))
    links = tuple(coding.read(LinkSpec, s) for s in bounds.count("links", message.links, MAX_ITEMS))
    return one_replica(message.n_micro, stages, links)


def _written_replicas(replicas: tuple[Replica, ...]) -> dict[str, Any]:
    written = [coding.fields_of(replica, pb.Replica.DESCRIPTOR) for replica in replicas]
    if len(written) > 1:
        return {"replicas": written}
    return {"stages": written[0]["stages"], "links": written[0]["links"]}


CODES.update(
    {
        "argument": Form(_argument, _written_argument),
        "option": Form(_option, _plain),
        "one worker": Form(_worker, lambda worker: {"workers": [worker]}),
        "pairs": Form(_pairs, _written_pairs),
        "replicas": Form(_replicas, _written_replicas),
    }
)
coding.CHECKS.update(checks.CHECKS)
