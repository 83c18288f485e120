"""DAGs and stage programs of the jobs at hand, read from the blob store and kept for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from atoll.opdag import OpDag, StateMeta, leaf_refs
from atoll.program import PiecePrograms, StageProgram, stage_programs
from coordinator.federated.checks import check_inputs
from coordinator.messages import peer_tensors
from coordinator.messages.events import Needs
from coordinator.planning.costs.memory import leaf_bytes
from coordinator.planning.costs.op_seconds import probe_ops
from coordinator.storage.checkpoints import defect, torn
from protos.convert import dag_from_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.dataset_spec import DataSpec
    from atoll.job import JobSpec, TrainingSpec
    from atoll.messages.to_worker import OpProbe
    from atoll.plan import Plan, Replica
    from coordinator.storage.blob_store import BlobStore

MAX_DAG_BYTES = 256 * 2**20
KEPT = 16


@dataclass(frozen=True)
class Graphs:
    """A job's DAGs and its distinct ops by signature."""

    train: OpDag
    evaluation: OpDag | None
    probes: Mapping[str, OpProbe]

    @property
    def flops(self) -> dict[str, int]:
        """Signature -> forward FLOPs."""
        return {signature: probe.node.flops_forward for signature, probe in self.probes.items()}

    def needs(self, training: TrainingSpec) -> Needs:
        """Return what training asks of a fleet at least."""
        dag, held = self.train, 0.0
        for leaf in {leaf for node in dag.ops for leaf in leaf_refs(node)}:
            held += leaf_bytes(dag, leaf, training.optimizer)[0]
        flops = sum(node.flops_forward + node.flops_backward for node in dag.ops)
        return Needs(flops * training.n_micro, int(held))

    def states(self) -> dict[str, StateMeta]:
        """Shapes of every leaf of both DAGs, inputs included."""
        found: dict[str, StateMeta] = {}
        for dag in (self.train, self.evaluation):
            if dag is not None:
                found |= {name: StateMeta(meta) for name, meta in (dag.inputs | dag.constants).items()}
        for dag in (self.evaluation, self.train):  # which is frozen or mutated, training decides
            if dag is not None:
                found |= dag.buffers | dag.parameters
        return found


Programs = tuple[tuple[PiecePrograms, ...], ...]
"""Programs of every rank's pieces under one plan."""


class GraphStore:
    """Graphs by their hashes, programs by plan; safe for several threads."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._graphs: OrderedDict[tuple[str, str], Graphs] = OrderedDict()
        self._programs: OrderedDict[tuple[str, int], Programs] = OrderedDict()

    def graphs(self, dag_hash: str, eval_dag_hash: str) -> Graphs:
        """Read and check both DAGs. StorageError when one is missing, BadFrame when malformed."""
        key = (dag_hash, eval_dag_hash)
        with self._lock:
            if key in self._graphs:
                self._graphs.move_to_end(key)
                return self._graphs[key]
        train = self._read(dag_hash)
        evaluation = self._read(eval_dag_hash) if eval_dag_hash else None
        found = Graphs(train, evaluation, {p.signature: p for p in probe_ops(train)})
        with self._lock:
            self._graphs[key] = found
            while len(self._graphs) > KEPT:
                self._graphs.popitem(last=False)
        return found

    def programs(self, plan: Plan) -> Programs:
        """Return the programs of all ranks of ``plan``."""
        key = (plan.job, plan.version)
        with self._lock:
            if key in self._programs:
                return self._programs[key]
        graphs = self.graphs(plan.dag_hash, plan.eval_dag_hash)
        evaluation = graphs.evaluation
        if evaluation is not None and any(r.eval_stop != len(evaluation.ops) for r in plan.replicas):
            evaluation = None
        found = tuple(own for r in plan.replicas for own in _programs(r, graphs.train, evaluation))
        with self._lock:
            self._programs[key] = found
            while len(self._programs) > KEPT:
                self._programs.popitem(last=False)
        return found

    def check(self, spec: JobSpec, resumed: JobSpec | None = None) -> Graphs:
        """Check that everything a job names is here and fits together, also with the job ``resumed`` that it
        continues; UsageError names what does not."""
        graphs = self.graphs(spec.dag_hash, spec.eval_dag_hash)
        _check_tensors(spec, graphs)
        _check_inputs(spec, graphs)
        if resumed is not None:
            _check_resumed(spec, graphs, self.graphs(resumed.dag_hash, resumed.eval_dag_hash))
        blobs = [
            *spec.tensors.values(),
            *(f.blob for d in (spec.data, spec.eval_data) if d for f in d.fields),
        ]
        missing = [blob for blob in dict.fromkeys(blobs) if not self._store.has(blob)]
        if missing:
            raise UsageError(f"{len(missing)} blobs are not here, first {missing[0][:12]}; upload them first")
        return graphs

    def torn(self, spec: JobSpec, tensors: Mapping[str, str], *, hashes: bool = False) -> str:
        """Return why a checkpoint of this job cannot be loaded, "" when it can (``storage.checkpoints``).
        StorageError where the store cannot say now."""
        states = self.graphs(spec.dag_hash, spec.eval_dag_hash).states()
        needed = spec.tensors.keys() if spec.federated is None else ()
        return torn(self._store, tensors, states, needed, hashes=hashes)

    def forged(self, tensors: Mapping[str, str], leaves: Mapping[str, StateMeta]) -> str:
        """Return what is wrong with what a stage says it stored, "" when nothing is; ``leaves``: what it
        is to store. StorageError as ``torn``."""
        return next(
            filter(
                None,
                (
                    defect(self._store, name, blob, leaves[name])
                    if name in leaves
                    else f"{name!r} is not a tensor that its stage stores"
                    for name, blob in tensors.items()
                ),
            ),
            "",
        )

    def _read(self, name: str) -> OpDag:
        size = self._store.size(name)
        if size > MAX_DAG_BYTES:
            raise UsageError(f"op-DAG {name[:12]} has {size} bytes; at most {MAX_DAG_BYTES} are accepted")
        return dag_from_bytes(self._store.read(name))


def _programs(replica: Replica, train: OpDag, evaluation: OpDag | None) -> Programs:
    """Return the programs of each stage's pieces."""
    found: list[list[PiecePrograms]] = [[] for _ in replica.stages]
    held_out = stage_programs(evaluation, replica.eval_starts) if evaluation is not None else ()
    for at, (one, program) in enumerate(
        zip(replica.pieces, stage_programs(train, replica.starts), strict=True)
    ):
        found[one.stage].append(PiecePrograms(program, held_out[at] if held_out else None))
    return tuple(map(tuple, found))


def _check_tensors(spec: JobSpec, graphs: Graphs) -> None:
    for dag in (graphs.train, graphs.evaluation):
        if dag is None:
            continue
        for name in (*dag.parameters, *dag.buffers, *dag.constants):
            if name not in spec.tensors:
                raise UsageError(f"the job names no blob for tensor {name!r}; submit it again")
            if name in dag.inputs:
                raise UsageError(f"{name!r} is an input and a tensor of the model; rename the argument")
    alike = peer_tensors.confused(spec.tensors) if spec.federated is None else None
    if alike is not None:
        raise UsageError(
            f"the model has tensors {alike[0]!r} and {alike[1]!r}, and a checkpoint names a peer's own "
            f"{alike[0]!r} so; rename the module or parameter of {alike[1]!r}"
        )


def _check_inputs(spec: JobSpec, graphs: Graphs) -> None:
    """Every input of a DAG has data of its size."""
    pairs: list[tuple[str, OpDag, DataSpec]] = []
    if spec.federated is not None:
        check_inputs(spec.federated.inputs, graphs.train.inputs)
    elif spec.data.pinned is not None:
        check_inputs(spec.data.pinned.inputs, graphs.train.inputs)
    else:
        pairs.append(("data", graphs.train, spec.data))
    if graphs.evaluation is not None and spec.eval_data is not None:
        pairs.append(("evaluation data", graphs.evaluation, spec.eval_data))
    for what, dag, data in pairs:
        given = {f.input for f in data.fields}
        for name, meta in dag.inputs.items():
            if name not in given:
                raise UsageError(f"the {what} lacks input {name!r}; it has {sorted(given)}")
            if meta.shape and meta.shape[0] != data.batch and prod(meta.shape) > 1:
                raise UsageError(f"input {name!r} of shape {meta.shape}, but micro-batches of {data.batch}")


def _check_resumed(spec: JobSpec, graphs: Graphs, resumed: Graphs) -> None:
    """Every tensor that a checkpoint of the resumed job holds has this job's shape and dtype."""
    held, wanted = resumed.states(), graphs.states()
    # The checkpoint of a federated job has no constants: they are the new job's own.
    own = set(graphs.train.constants) if spec.federated is not None else set()
    kept = sorted(name for name in spec.tensors.keys() - own if name in held and name in wanted)
    odd = [name for name in kept if held[name].meta != wanted[name].meta]
    if odd:
        was, now = held[odd[0]].meta, wanted[odd[0]].meta
        raise UsageError(
            f"{spec.resume_of} holds another model: {len(odd)} tensors differ, first {odd[0]}, there "
            f"{was.dtype} {was.shape}, here {now.dtype} {now.shape}; resume with the model that it trained"
        )


def leaf_metas(
    programs: tuple[StageProgram, ...], states: Mapping[str, StateMeta]
) -> tuple[dict[str, StateMeta], list[str]]:
    """States of every leaf that these programs read, and the names that have a blob."""
    tensors = dict.fromkeys(n for p in programs for n in (*p.parameters, *p.buffers, *p.constants))
    inputs = dict.fromkeys(n for p in programs for n in p.inputs)
    return {name: states[name] for name in (*tensors, *inputs)}, list(tensors)
