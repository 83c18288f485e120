"""The server half of a federated job on files: blobs of updates in, blobs of state and broadcast out.

The state's file holds ``weights/NAME`` and ``extra/SLOT/NAME`` as a broadcast's does, and the two
numbers ``about/round`` and ``about/clients``. Updates are taken one at a time in the order of their
clients' names, so that the sum's last bit depends on nothing else; where the strategy is linear, only the
sums and one update are in memory. What an update claims is judged before it counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from atoll.errors import AtollError, StorageError, UsageError
from atoll.federated import Downlink
from atoll.job import stepwise_groups
from atoll.opdag import OpDag, StateMeta, TensorMeta
from atoll.program import stage_programs
from compressors.container import Stored, dense_metas, drop_pages, read_dense, write_dense
from compressors.model_file import Coding, read_update, write_delta, write_model
from coordinator.storage.data_provider import map_value
from coordinator.storage.graph_store import Graphs
from strategies import make_strategy
from strategies.checking import Limits, check_update
from strategies.files import broadcast_arrays, joined, lossy_names, parted, update_metas
from strategies.layout import Layout
from strategies.linear import Linear
from strategies.sums import Contribution, total
from strategies.values import ClientUpdate, ServerState

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.storage.blob_store import BlobStore
    from strategies.layout import Array

ABOUT_ROUND, ABOUT_CLIENTS = "about/round", "about/clients"
T = TypeVar("T")
Begins = Callable[[str], None]  # called with the client whose update is taken next, "" for anything else


@dataclass(frozen=True, slots=True)
class Offered:
    """A client's update as the coordinator knows it."""

    blob: str
    n_samples: int
    steps: int
    registered: int
    codec: str
    ratio: float
    scalars: Mapping[str, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is to become a blob."""

    path: Path
    stored: Stored


@dataclass(frozen=True)
class Summed:
    """Result of a round. ``state`` None: too few updates could be counted, nothing changed."""

    state: Written | None
    model: Written | None
    delta: Written | None
    dropped: Mapping[str, str]


@dataclass(frozen=True)
class _Round:
    """Updates that came, by client; why some of them cannot be counted is found out meanwhile."""

    offered: Mapping[str, Offered]
    dropped: dict[str, str]
    begins: Begins


class ServerHalf:
    """A job's strategy and its state. Files appear under ``scratch``, named after the job."""

    def __init__(self, job: str, spec: JobSpec, graphs: Graphs, blobs: BlobStore, scratch: Path) -> None:
        """UsageError for a job that is not federated, or a strategy that the model does not fit."""
        if spec.federated is None:
            raise UsageError(f"{job} is no federated job")
        self.job, self.spec, self.graphs = job, spec, graphs
        self._blobs, self._scratch = blobs, scratch
        self.rule_spec = spec.federated.rule
        self.rule = make_strategy(self.rule_spec.strategy, self.rule_spec.options)
        self.layout = self.rule.adapt(layout_of(spec, graphs))
        self.state: ServerState | None = None
        self._model = ("", {})  # type: tuple[str, dict[str, Array]]

    @property
    def update_metas(self) -> dict[str, TensorMeta]:
        return update_metas(self.rule, self.layout)

    def open(self, state: str, n_clients: int) -> Written:
        """Go on at a stored state, or with "" at the job's initial tensors; returns the broadcast."""
        self.state = self._stored(self._blobs.path(state)) if state else self._initial(n_clients)
        written, _ = self._write_model(self.state)
        return written

    def aggregate(
        self,
        at_round: int,
        offered: Mapping[str, Offered],
        n_clients: int,
        least: int,
        begins: Begins = lambda client: None,
    ) -> Summed:
        """Sum what can be counted, if that is at least ``least``; the next state and broadcast.

        UsageError when this is not the round in flight; JobFailed when the result is not finite.
        """
        state = self.state
        if state is None or state.round != at_round:
            here = "none" if state is None else state.round
            raise UsageError(f"asked to sum round {at_round}; the round in flight is {here}")
        state = replace(state, n_clients=max(state.n_clients, n_clients))
        dropped: dict[str, str] = {}
        after = self._summed(state, _Round(offered, dropped, begins), least)
        if after is None:
            return Summed(None, None, None, dropped)
        kept = self._write_state(after)
        del after
        self.state = self._stored(kept.path)  # mapped: between rounds it costs no memory
        model, delta = self._write_model(self.state)
        return Summed(kept, model, delta, dropped)

    def weights(self) -> dict[str, Array]:
        """Return the tensors that central evaluation sets: the global model as a client without a past would
        use it."""
        assert self.state is not None  # noqa: S101 - opened before it is evaluated
        broadcast = self.rule.configure(self.state)
        return dict(self.rule.evaluate_with(broadcast, self.rule.client_init(self.layout)))

    def rest(self) -> None:
        """Give back what was read of files, until it is needed again."""
        if self.state is not None:
            slots = self.state.slots.values()
            drop_pages([*self.state.weights.values(), *(a for slot in slots for a in slot.values())])

    # ------------------------------------------------------------ sums

    def _summed(self, state: ServerState, came: _Round, least: int) -> ServerState | None:
        core = self.rule.core
        if self.rule.facts.linear and isinstance(core, Linear):
            linear = core

            def contribution(update: ClientUpdate) -> Contribution:
                return linear.contribute(self.layout, update)

            sums = total(self._good(came, state.round, contribution))
            return linear.finish(state, sums) if sums.clients >= max(1, least) else None
        updates = list(self._good(came, state.round, lambda update: update))
        return self.rule.aggregate(state, updates) if len(updates) >= least else None

    def _good(self, came: _Round, at_round: int, use: Callable[[ClientUpdate], T]) -> Iterator[T]:
        """``use`` of each update that can be counted, one at a time."""
        for client in sorted(came.offered):
            came.begins(client)
            try:
                found = use(self._judged(client, came.offered[client], at_round))
            except AtollError as error:
                came.dropped[client] = str(error)
            except Exception as error:  # noqa: BLE001 - a decoder that trips costs one client, not the job
                came.dropped[client] = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
            else:
                yield found
        came.begins("")

    def _judged(self, client: str, told: Offered, at_round: int) -> ClientUpdate:
        coding = Coding(told.codec, told.ratio, lossy_names(self.layout), self.rule_spec.error_feedback)
        arrays = read_update(self._blobs.path(told.blob), self.update_metas, coding)
        delta, extra = parted(arrays)
        slots = {slot: extra.get(slot, {}) for slot in self.rule.extra_up(self.layout)}
        update = ClientUpdate(
            at_round, told.n_samples, told.steps, delta, slots, told.scalars, told.metrics, client
        )
        limits = Limits(
            samples=min(told.registered, self.rule_spec.max_samples),
            rate=self.spec.training.learning_rate(at_round),
        )
        check_update(self.rule, self.layout, at_round, update, limits)
        return update

    # ------------------------------------------------------------ files

    def _initial(self, n_clients: int) -> ServerState:
        values = {name: self._tensor(name) for name in self.layout.metas}
        return self.rule.init(layout_of(self.spec, self.graphs), values, max(1, n_clients))

    def _tensor(self, name: str) -> Array:
        return map_value(self._blobs.path(self.spec.tensors[name]), private=True)

    def _stored(self, path: Path) -> ServerState:
        arrays = read_dense(path, dense_metas(path))
        about = {name: int(arrays.pop(name)) for name in (ABOUT_ROUND, ABOUT_CLIENTS)}
        weights, slots = parted(arrays)
        wanted = set(self.rule.init(self.layout, _zeros(self.layout), about[ABOUT_CLIENTS]).weights)
        if set(weights) != wanted:
            odd = sorted(set(weights) ^ wanted)
            raise StorageError(f"the stored state is of another model: {len(odd)} tensors, first {odd[0]}")
        return ServerState(about[ABOUT_ROUND], self.layout, weights, slots, about[ABOUT_CLIENTS])

    def _write_state(self, state: ServerState) -> Written:
        arrays: dict[str, Array] = joined(state.weights, state.slots)
        arrays[ABOUT_ROUND] = np.asarray(state.round, np.int64)
        arrays[ABOUT_CLIENTS] = np.asarray(state.n_clients, np.int64)
        path = self._path("state")
        return Written(path, write_dense(path, arrays, durable=True))

    def _write_model(self, state: ServerState) -> tuple[Written, Written | None]:
        """The broadcast of ``state``, and what leads to it from the one before where that is wanted."""
        arrays = broadcast_arrays(self.rule.configure(state))
        path = self._path("model")
        downlink = self.rule_spec.downlink
        stored = write_model(path, arrays, lossless=downlink != Downlink.OFF)
        _sync(path)
        delta = None
        if downlink == Downlink.DELTA:
            base_hash, base = self._model
            if base_hash and base_hash != stored.hash:
                where = self._path("delta")
                delta = Written(where, write_delta(where, arrays, base, base_hash))
            self._model = (stored.hash, arrays)
        return Written(path, stored), delta

    def _path(self, what: str) -> Path:
        return self._scratch / f"aggregator-{self.job}-{what}"


def layout_of(spec: JobSpec, graphs: Graphs) -> Layout:
    """Roles of the model's tensors before a strategy adapts them: the same that every client derives."""
    programs = [stage_programs(dag, [0])[0] for dag in _dags(graphs)]
    used = {name for p in programs for name in (*p.parameters, *p.buffers)}
    states: dict[str, StateMeta] = {}
    for dag in reversed(_dags(graphs)):  # which is frozen or mutated, training decides
        states |= dag.buffers | dag.parameters
    groups = stepwise_groups(programs[0].parameters, spec.training.optimizer)
    frozen = frozenset(name for name, group in groups.items() if group.frozen)
    return Layout.of_state({name: states[name] for name in sorted(used)}, frozen)


def _dags(graphs: Graphs) -> list[OpDag]:
    return [dag for dag in (graphs.train, graphs.evaluation) if dag is not None]


def _zeros(layout: Layout) -> dict[str, Any]:
    return {name: np.zeros(meta.shape, meta.dtype) for name, meta in layout.metas.items()}


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
