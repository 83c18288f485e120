"""The only code that sees both pb2 and atoll's types: ``to_proto`` and ``from_proto``.

``to_proto`` raises UsageError for a value that the wire cannot carry. ``from_proto`` treats its
message as a peer's: counts, nesting, lengths, positions, names and sizes are checked against
``Limits``, and BadFrame (or UsageError from a type's own rules) names the number that is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

from google.protobuf.message import DecodeError, Message

from atoll.dataset_spec import DataSpec
from atoll.errors import BadFrame
from atoll.federated import FederatedSpec
from atoll.job import JobSpec, TrainingSpec
from atoll.opdag import OpDag, OpNode, TensorMeta
from atoll.plan import Plan
from atoll.program import StageProgram
from protos import atoll_job_pb2 as pb
from protos.bounds import DEFAULT_LIMITS, Limits
from protos.convert_federated import federated_from_proto, federated_to_proto
from protos.convert_graph import (
    dag_from_proto,
    dag_to_proto,
    meta_from_proto,
    meta_to_proto,
    metas_from_proto,
    metas_to_proto,
    node_from_proto,
    node_to_proto,
    state_from_proto,
    state_to_proto,
)
from protos.convert_job import (
    data_from_proto,
    data_to_proto,
    job_from_proto,
    job_to_proto,
    training_from_proto,
    training_to_proto,
)
from protos.convert_plan import plan_from_proto, plan_to_proto, program_from_proto, program_to_proto

__all__ = [
    "DEFAULT_LIMITS",
    "Limits",
    "content_hash",
    "dag_bytes",
    "dag_from_bytes",
    "decode",
    "encode",
    "from_proto",
    "metas_from_proto",
    "metas_to_proto",
    "state_from_proto",
    "state_to_proto",
    "to_proto",
]

_TO: dict[type, Callable[[Any], Message]] = {
    OpDag: dag_to_proto,
    OpNode: node_to_proto,
    TensorMeta: meta_to_proto,
    TrainingSpec: training_to_proto,
    DataSpec: data_to_proto,
    JobSpec: job_to_proto,
    FederatedSpec: federated_to_proto,
    Plan: plan_to_proto,
    StageProgram: program_to_proto,
}
_FROM: dict[type, Callable[[Any, Limits], Any]] = {
    pb.OpDag: dag_from_proto,
    pb.OpNode: node_from_proto,
    pb.TensorMeta: meta_from_proto,
    pb.TrainingSpec: training_from_proto,
    pb.DataSpec: data_from_proto,
    pb.JobSpec: job_from_proto,
    pb.FederatedSpec: federated_from_proto,
    pb.Plan: plan_from_proto,
    pb.StageProgram: program_from_proto,
}
_MESSAGE: dict[type, type[Message]] = {
    OpDag: pb.OpDag,
    TrainingSpec: pb.TrainingSpec,
    DataSpec: pb.DataSpec,
    JobSpec: pb.JobSpec,
    Plan: pb.Plan,
    StageProgram: pb.StageProgram,
}
_T = TypeVar("_T")


@overload
def to_proto(value: OpDag) -> pb.OpDag: ...
@overload
def to_proto(value: OpNode) -> pb.OpNode: ...
@overload
def to_proto(value: TensorMeta) -> pb.TensorMeta: ...
@overload
def to_proto(value: TrainingSpec) -> pb.TrainingSpec: ...
@overload
def to_proto(value: DataSpec) -> pb.DataSpec: ...
@overload
def to_proto(value: JobSpec) -> pb.JobSpec: ...
@overload
def to_proto(value: FederatedSpec) -> pb.FederatedSpec: ...
@overload
def to_proto(value: Plan) -> pb.Plan: ...
@overload
def to_proto(value: StageProgram) -> pb.StageProgram: ...
def to_proto(value: Any) -> Any:
    """The message for a value of the shared vocabulary."""
    return _TO[type(value)](value)


@overload
def from_proto(message: pb.OpDag, limits: Limits = ...) -> OpDag: ...
@overload
def from_proto(message: pb.OpNode, limits: Limits = ...) -> OpNode: ...
@overload
def from_proto(message: pb.TensorMeta, limits: Limits = ...) -> TensorMeta: ...
@overload
def from_proto(message: pb.TrainingSpec, limits: Limits = ...) -> TrainingSpec: ...
@overload
def from_proto(message: pb.DataSpec, limits: Limits = ...) -> DataSpec: ...
@overload
def from_proto(message: pb.JobSpec, limits: Limits = ...) -> JobSpec: ...
@overload
def from_proto(message: pb.FederatedSpec, limits: Limits = ...) -> FederatedSpec: ...
@overload
def from_proto(message: pb.Plan, limits: Limits = ...) -> Plan: ...
@overload
def from_proto(message: pb.StageProgram, limits: Limits = ...) -> StageProgram: ...
def from_proto(message: Any, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The value that a peer's message stands for, checked against ``limits``."""
    return _FROM[type(message)](message, limits)


def encode(value: OpDag | TrainingSpec | DataSpec | JobSpec | Plan | StageProgram) -> bytes:
    """Deterministic bytes of a value, for files and journals."""
    return to_proto(value).SerializeToString(deterministic=True)


def decode(kind: type[_T], data: bytes, limits: Limits = DEFAULT_LIMITS) -> _T:
    """The value of type ``kind`` that ``encode`` wrote; BadFrame when it is none."""
    message = _MESSAGE[kind]()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise BadFrame(f"{len(data)} bytes are no {kind.__name__}: {error}") from None
    value = _FROM[type(message)](message, limits)
    assert isinstance(value, kind)  # noqa: S101 - the two tables agree
    return value


def dag_bytes(dag: OpDag) -> bytes:
    """The one serialisation of a DAG: equal DAGs give equal bytes in every process."""
    return encode(dag)


def dag_from_bytes(data: bytes, limits: Limits = DEFAULT_LIMITS) -> OpDag:
    """The DAG stored in ``data``; BadFrame when it is no DAG or out of bounds."""
    return decode(OpDag, data, limits)


def content_hash(data: bytes) -> str:
    """sha256 in hexadecimal: the name of a blob."""
    return hashlib.sha256(data).hexdigest()
