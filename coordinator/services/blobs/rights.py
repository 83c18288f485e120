"""Who may fetch which blobs, and put how much.

A worker fetches what the messages of the job it works for named to it, and puts what that job asks of
it: an update a round, or its stage's part of a few checkpoints. The owner puts what he likes and fetches
what a job of his rests on: no single client's update is among that. Whatever is refused, is refused
alike for blobs that are here and for those that are not.

Roles are immutable values, taken on the event loop and looked at in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.errors import ConnectionFailed, StorageError
from atoll.gradient_exchange import first_uses, kept_name, trained_elements
from atoll.opdag import DTYPE_BYTES
from atoll.program import programs_of
from coordinator.federated.driver import FederatedDriver
from coordinator.messages import peer_tensors
from coordinator.messages.jobs import ENDED
from coordinator.pipeline.assigning import tensors_of
from coordinator.pipeline.driver import PipelineDriver
from coordinator.pipeline.history import sources
from coordinator.storage.graph_store import leaf_metas
from strategies.secure.vector import word_bytes

if TYPE_CHECKING:
    from atoll.opdag import StateMeta, TensorMeta
    from atoll.plan import Plan
    from atoll.program import StageProgram
    from coordinator.federated.state import FederationState
    from coordinator.messages.instructions import StageCopy
    from coordinator.messages.jobs import JobState
    from coordinator.scheduler import Scheduler
    from coordinator.storage.graph_store import GraphStore

CHECKPOINTS = 4  # of a stage that may be under way: the next, and those whose reports wait to be read
STATE_TENSORS = 3  # beside a checkpoint's value, each float32: an optimizer's, ...
PEER_TENSORS = 4  # ... and of a peer with local steps its rule's
HEADER_BYTES = 64 << 10  # of a tensor's file
UPDATE_MARGIN = 0.25  # of the dense size: what a codec may need more than the values themselves
UPDATE_TENSOR_BYTES = 16 << 10  # of a tensor's name, header and alignment


@dataclass(frozen=True, slots=True)
class Allowance:
    """Of what a worker puts and nothing needs yet."""

    n_bytes: int
    blobs: int


@dataclass(frozen=True)
class StageRole:
    """A worker that holds a stage."""

    state: JobState
    rank: int
    graphs: GraphStore

    def named(self) -> frozenset[str]:
        """The blobs of its stage's tensors."""
        kept = [self.state.checkpoint, *sources(self.state, self.rank)]
        leaves = self.leaves()
        plan = self.state.adopted
        parts = [tensors_of(plan, self.rank, checkpoint) for checkpoint in kept]
        own = frozenset(tensors[name] for tensors in parts for name in leaves if name in tensors)
        if not plan.keeps:
            return own
        replica = plan.places[self.rank].replica
        return own.union(*(peer_tensors.kept(tensors, leaves, replica).values() for tensors in parts))

    def allowance(self) -> Allowance:
        """Its part of some checkpoints."""
        metas = [state.meta for state in (*self.leaves().values(), *self._kept().values())]
        local = self.state.local
        once = sum(most_bytes(meta, local=local) for meta in metas)
        return Allowance(CHECKPOINTS * once, CHECKPOINTS * len(metas))

    def snapshot(self) -> dict[str, StateMeta]:
        """Return the declared states of the tensors that it stores in a checkpoint; a tied one the stage of
        its first holder does."""
        kept, plan = self._kept(), self.state.adopted
        if plan.keeps and plan.places[self.rank].replica:
            return kept
        (*_, programs), states = self._programs(), self.leaves()
        own = {program.stage for program in programs}
        followed = {tied.name for p in programs for tied in p.tied if tied.holders[0] not in own}
        names = (name for program in programs for name in (*program.parameters, *program.buffers))
        return {name: states[name] for name in names if name not in followed} | kept

    def _kept(self) -> dict[str, StateMeta]:
        """Return the declared states of what its rule of exchange keeps, by the names of a checkpoint."""
        plan = self.state.adopted
        if not plan.keeps:
            return {}
        (*_, programs), states = self._programs(), self.leaves()
        trained = trained_elements(first_uses(programs), states, self.state.spec.training.optimizer)
        replica = plan.places[self.rank].replica
        return {kept_name(name, replica): states[name] for name in trained}

    def shared(self) -> frozenset[str]:
        """Return the tensors that a stage before it stores as well: buffers that no step writes."""
        *before, programs = self._programs()
        earlier = {name for others in before for other in others for name in other.buffers}
        return frozenset(name for program in programs for name in program.buffers) & earlier

    def _programs(self) -> list[list[StageProgram]]:
        """Return the training programs of its replica's stages up to its own."""
        plan = self.state.adopted
        first = self.rank - plan.places[self.rank].stage
        stages = self.graphs.programs(plan)[first : self.rank + 1]
        return [[program for program, _ in pieces] for pieces in stages]

    def leaves(self) -> dict[str, StateMeta]:
        """Declared states of the tensors that its stage reads."""
        return leaves_of(self.graphs, self.state.adopted, self.rank)


def leaves_of(graphs: GraphStore, plan: Plan, rank: int) -> dict[str, StateMeta]:
    """Return the declared states of the tensors that a rank's stage reads."""
    mine = programs_of(graphs.programs(plan)[rank])
    states, tensors = leaf_metas(mine, graphs.graphs(plan.dag_hash, plan.eval_dag_hash).states())
    return {name: states[name] for name in tensors}


def most_bytes(meta: TensorMeta, *, local: bool = False) -> int:
    """Return the bound of a tensor's file with its optimizer state; ``local``: of a peer with local steps."""
    beside = STATE_TENSORS + PEER_TENSORS * local
    return meta.nbytes + 4 * beside * meta.elements + HEADER_BYTES


@dataclass(frozen=True)
class KeeperRole:
    """An idle worker that keeps copies of stages; it puts those that are a snapshot's which the job goes back
    to."""

    copies: tuple[StageCopy, ...]
    puts: tuple[StageCopy, ...]
    graphs: GraphStore

    def named(self) -> frozenset[str]:
        """The blobs of those stages' tensors."""
        return frozenset(
            copy.tensors[name]
            for copy in self.copies
            for name in leaves_of(self.graphs, copy.plan, copy.rank)
            if name in copy.tensors
        )

    def allowance(self) -> Allowance:
        """The parts that it was asked for."""
        metas = [
            state.meta
            for copy in self.puts
            for name, state in leaves_of(self.graphs, copy.plan, copy.rank).items()
            if name in copy.tensors
        ]
        return Allowance(sum(map(most_bytes, metas)), len(metas))


@dataclass(frozen=True)
class ClientRole:
    """A worker that takes part in a federated job."""

    state: FederationState

    def named(self) -> frozenset[str]:
        """The job's own tensors, and the broadcast of the round."""
        found, model = set(self.state.spec.tensors.values()), self.state.model
        if model is not None:
            found |= {model.full.hash, *([model.delta.hash] if model.delta is not None else [])}
        return frozenset(found)

    def allowance(self) -> Allowance:
        """One update, or what is masked of it."""
        secure = self.state.federated.rule.secure
        word = 0 if secure is None else word_bytes(secure.bits)
        dense = sum(meta.elements * (word or DTYPE_BYTES[meta.dtype]) for meta in self.state.up)
        margin = int(dense * UPDATE_MARGIN) + UPDATE_TENSOR_BYTES * (len(self.state.up) + 4)
        return Allowance(dense + margin, 1)


Role = StageRole | KeeperRole | ClientRole


def role_of(scheduler: Scheduler, graphs: GraphStore, worker: str) -> Role | None:
    """What ``worker`` does now; None where no job uses it."""
    known = scheduler.roster.workers.get(worker)
    job = known.member.job if known is not None else ""
    driver = scheduler.driver_of(job)
    if known is not None and known.idle:
        beside = [driver.beside for driver in scheduler.drivers if isinstance(driver, PipelineDriver)]
        copies = tuple(copy for one in beside for copy in one.copies.of(worker))
        puts = put_by(scheduler, worker)
        return KeeperRole(copies, puts, graphs) if copies or puts else None
    if driver is None or scheduler.jobs[job].phase in ENDED or not driver.uses(job, worker):
        return None
    match driver:
        case FederatedDriver():
            return ClientRole(driver.jobs[job])
        case PipelineDriver():
            state = driver.jobs[job]
            rank, case = state.rank_of(worker), driver.beside.checks.case_of(job, worker)
            for other in (case, state.standby_of(worker)):
                if other is not None:  # beside the plan it loads what the rank had then
                    rank, state = other.rank, replace(state, run=replace(state.run, source=other.source))
            if state.plan is None or rank is None:
                return None
            return StageRole(state, rank, graphs)
    raise LookupError(f"{job}: no rights are known for what {type(driver).__name__} drives")


def put_by(scheduler: Scheduler, worker: str) -> tuple[StageCopy, ...]:
    """Return the copies that a worker was asked to put into the store."""
    drivers = [driver for driver in scheduler.drivers if isinstance(driver, PipelineDriver)]
    return tuple(copy for driver in drivers for copy in driver.beside.rings.stores(worker))


@dataclass(slots=True)
class _Put:
    size: int
    own: bool  # no other than a worker had put a byte of it
    whole: bool = False  # this worker has sent every byte


@dataclass(slots=True)
class Accounts:
    """What each worker has put and nothing needs yet."""

    puts: dict[str, dict[str, _Put]] = field(default_factory=dict)

    def counted(self, worker: str, name: str, size: int) -> bool:
        """Whether this blob is among what the worker may go on to put."""
        put = self.puts.get(worker, {}).get(name)
        return put is not None and size <= put.size

    def has_put(self, worker: str, name: str) -> None:
        """The worker has sent all of this blob."""
        if (put := self.puts.get(worker, {}).get(name)) is not None:
            put.whole = True

    def forget(self, worker: str, name: str) -> None:
        """A blob of the worker's is gone."""
        self.puts.get(worker, {}).pop(name, None)

    def whole(self, worker: str) -> frozenset[str]:
        """What the worker has sent all of, of what it may go on to put."""
        return frozenset(name for name, put in self.puts.get(worker, {}).items() if put.whole)

    def admit(
        self,
        worker: str,
        name: str,
        size: int,
        most: Allowance,
        held: Callable[[str], int],
        settled: Collection[str],
        reported: Collection[str],
    ) -> dict[str, bool]:
        """Count a blob of ``size`` that ``worker`` begins or goes on to put.

        Beyond ``most`` its oldest ones give way; returns these: what has arrived of them from ``worker``
        goes, and where the value is true the whole blob does. StorageError for one that is empty or too large
        by itself, ConnectionFailed while none may give way.
        ``held(name)``: bytes that are here; ``settled``: blobs that are needed, and so count no more;
        ``reported``: those whose report waits to be read, which count and do not give way.
        """
        if not 0 < size <= most.n_bytes:
            raise StorageError(
                f"a blob of {size} bytes; what {worker} was asked for has at most {most.n_bytes}: update the "
                "older of worker and coordinator"
            )
        mine = self.puts.setdefault(worker, {})
        for other in [n for n in mine if n != name and n in settled]:
            del mine[other]
        before = mine.get(name)
        if before is None:
            began = not held(name) or any(puts[name].own for puts in self.puts.values() if name in puts)
            put = _Put(size, began)
        else:
            put = replace(before, size=max(size, before.size))
        others = {other: known.size for other, known in mine.items() if other != name}
        blobs, n_bytes, going = len(others) + 1, sum(others.values()) + put.size, list[str]()
        for other in (n for n in others if n not in reported):  # the newest is last
            if blobs <= most.blobs and n_bytes <= most.n_bytes:
                break
            blobs, n_bytes = blobs - 1, n_bytes - others[other]
            going.append(other)
        if blobs > most.blobs or n_bytes > most.n_bytes:
            raise ConnectionFailed("what you put is being read; try again")
        mine.pop(name, None)
        mine[name] = put
        return {other: self._last(mine.pop(other), other, held) for other in going}

    def _last(self, put: _Put, name: str, held: Callable[[str], int]) -> bool:
        """Whether a blob may go with a put that was taken out: no other worker counts all that is here."""
        others = (puts[name].size for puts in self.puts.values() if name in puts)
        return put.own and all(size < held(name) for size in others)
