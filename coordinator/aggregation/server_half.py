"""The server half of a federated job on files: blobs of updates in, blobs of state and broadcast out.

The state's file holds ``weights/NAME`` and ``extra/SLOT/NAME`` as a broadcast's does, and the two
numbers ``about/round`` and ``about/clients``. Updates are taken one at a time in the order of their
clients' names, so that the sum's last bit depends on nothing else; where the strategy is linear, only the
sums and one update are in memory. What an update claims is judged before it counts.

Where a round's clients are a population, hosts send sums in whole numbers of those that they trained
(``strategies.fixed``); updates of single clients join them on the same grid, so the next state has the same
bits whoever trained whom.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from atoll.errors import AtollError, BadUpdate, StorageError, UsageError
from atoll.federated import Downlink
from atoll.job import stepwise_groups
from atoll.opdag import OpDag, StateMeta, TensorMeta
from atoll.program import stage_programs
from compressors.container import Stored, dense_metas, drop_pages, read_dense, write_dense
from compressors.model_file import (
    Coding,
    drawn_supports,
    read_masked,
    read_model,
    read_sums,
    read_update,
    write_delta,
    write_model,
)
from coordinator.messages.instructions import HostSums, Opening
from coordinator.storage.data_provider import map_value
from coordinator.storage.graph_store import Graphs
from strategies.aged import VersionSums, aged
from strategies.checking import Limits
from strategies.files import (
    broadcast_arrays,
    broadcast_metas,
    joined,
    judged,
    lossy_names,
    parted,
    sums_metas,
    sums_slots,
    trained_supports,
    update_metas,
)
from strategies.fixed import FixedSums, Grid, check_sums, real
from strategies.layout import Layout, own_parts
from strategies.linear import SAMPLES, Linear
from strategies.privacy.private import strategy_of
from strategies.secure.exchange import Exchange
from strategies.secure.opening import add_vector, unmask
from strategies.secure.vector import encoding_of, secured
from strategies.sums import Contribution, total
from strategies.values import ServerState

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.storage.blob_store import BlobStore
    from strategies.layout import Array
    from strategies.values import ClientUpdate

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
    weight: float = 1.0  # of its change; an old one's is smaller
    base: str = ""  # blob of the broadcast that it began with; "": the newest


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
    void: str = ""


@dataclass(frozen=True)
class _Round:
    """Updates that came, by client; why some of them cannot be counted is found out meanwhile."""

    offered: Mapping[str, Offered | HostSums]
    dropped: dict[str, str]
    begins: Begins
    drawn: Mapping[str, int] | None  # registered samples by client, where sums are in whole numbers
    opening: Opening | None = None
    void: list[str] = field(
        default_factory=list
    )  # why all of it is worthless, though nobody alone is to blame


class ServerHalf:
    """A job's strategy and its state. Files appear under ``scratch``, named after the job."""

    def __init__(self, job: str, spec: JobSpec, graphs: Graphs, blobs: BlobStore, scratch: Path) -> None:
        """UsageError for a job that is not federated, or a strategy that the model does not fit."""
        if spec.federated is None:
            raise UsageError(f"{job} is not a federated job")
        self.job, self.spec, self.graphs = job, spec, graphs
        self._blobs, self._scratch = blobs, scratch
        self.rule_spec = spec.federated.rule
        self.rule = strategy_of(self.rule_spec)
        self.layout = self.rule.adapt(layout_of(spec, graphs))
        self.rule.fit(self.layout)
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
        offered: Mapping[str, Offered | HostSums],
        n_clients: int,
        least: int,
        begins: Begins = lambda client: None,
        drawn: Mapping[str, int] | None = None,
        opening: Opening | None = None,
    ) -> Summed:
        """Sum what can be counted, if that is at least ``least``; the next state and broadcast. ``drawn``:
        registered samples of the round's clients, for sums in whole numbers. ``opening``: all are masked.

        UsageError when this is not the round in flight; JobFailed when the result is not finite.
        """
        state = self.state
        if state is None or state.round != at_round:
            here = "none" if state is None else state.round
            raise UsageError(f"asked to sum round {at_round}; the round in flight is {here}")
        state = replace(state, n_clients=max(state.n_clients, n_clients))
        dropped: dict[str, str] = {}
        came = _Round(offered, dropped, begins, drawn, opening)
        after = self._summed(state, came, least)
        if after is None:
            return Summed(None, None, None, dropped, "; ".join(came.void))
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
        core, at_round = self.rule.core, state.round
        drawn = came.drawn
        if came.opening is not None:
            return self._summed_masked(state, came, came.opening, least)
        if drawn is None and isinstance(core, Linear) and core.whole:
            offered = {n: told for n, told in came.offered.items() if isinstance(told, Offered)}
            drawn = {name: told.registered for name, told in offered.items()}
        if drawn is not None:
            return self._summed_whole(state, came, drawn, least)
        if self.rule.facts.linear and isinstance(core, Linear):
            linear = core

            def contribution(client: str, told: Offered | HostSums) -> Contribution:
                return linear.contribute(self.layout, self._judged(client, told, at_round))

            sums = total(self._good(came, contribution))
            return linear.finish(state, sums) if sums.clients >= max(1, least) else None
        updates = list(self._good(came, lambda client, told: self._judged(client, told, at_round)))
        return self.rule.aggregate(state, updates) if len(updates) >= least else None

    def _summed_whole(
        self, state: ServerState, came: _Round, drawn: Mapping[str, int], least: int
    ) -> ServerState | None:
        """The next state from sums in whole numbers. UsageError for a strategy without."""
        core = self.rule.core
        if not isinstance(core, Linear):
            raise UsageError(f"{core.name} needs individual updates; its clients cannot be a population")
        core = core.during(state.slots)
        most = self.rule_spec.max_samples
        drawn = {client: min(samples, most) for client, samples in drawn.items()}
        grid = core.round_grid(len(drawn), sum(drawn.values()))
        sums = VersionSums(grid, self.layout, self.rule_spec.weight)
        counted: set[str] = set()

        def count(name: str, told: Offered | HostSums) -> None:
            samples = told.samples if isinstance(told, HostSums) else {name: told.n_samples}
            _check_clients(samples, drawn, counted)
            if isinstance(told, HostSums):
                own = core.round_grid(*told.grid) if any(told.grid) else grid
                behind = partial(self._behind, told.base) if told.base else None
                sums.add(self._sums_of(told, core, own), told.age, own, behind)
            else:
                sums.add(core.contribute(self.layout, self._judged(name, told, state.round)))
            counted.update(samples)

        for _ in self._good(came, count):
            pass
        if sums.clients < max(core.min_updates, least):
            return None
        return core.finish(state, sums.total(partial(core.released, layout=self.layout)))

    def _summed_masked(
        self, state: ServerState, came: _Round, opening: Opening, least: int
    ) -> ServerState | None:
        """The next state from the sum of masked vectors, of all or of none."""
        rule, core = self.rule_spec, secured(self.rule)
        assert rule.secure is not None  # noqa: S101 - the machine opens exchanges of such jobs alone
        offered = {name: told for name, told in came.offered.items() if isinstance(told, Offered)}
        if len(offered) < max(1, least):
            return None
        first = next(iter(offered.values()))
        coding = Coding(first.codec, first.ratio, lossy_names(self.layout), rule.error_feedback)
        supports = trained_supports(drawn_supports(self.update_metas, coding, opening.seed))
        encoding = encoding_of(core, self.layout, rule.secure, opening.drawn, opening.drawn_samples, supports)
        sizes, dtype = encoding.sizes(), encoding.dtype
        total = [np.zeros(sizes[0], dtype), np.zeros(sizes[1], np.uint64)]

        def add(name: str, told: Offered | HostSums) -> None:
            add_vector(total, read_masked(self._blobs.path(offered[name].blob), sizes, dtype))

        for _ in self._good(came, add):
            pass
        if came.dropped:
            return None
        of = Exchange(self.job, state.round, opening.exchange, rule.secure, opening.roster)
        try:
            unmask(total, of, opening.shared, offered, opening.shares)
            found = encoding.sums(total, len(offered))
            n_samples, claimed = sum(told.n_samples for told in offered.values()), found.scalars[SAMPLES]
            if claimed * found.grid.scalar_unit(SAMPLES) != n_samples:
                raise BadUpdate(f"an opened sum that is not of its members' {n_samples} samples")
        except BadUpdate as error:  # nobody can tell whose words are wrong
            came.void.append(f"the sum cannot be opened: {error}")
            return None
        return core.finish(state, real(found, self.layout))

    def _sums_of(self, told: HostSums, core: Linear, grid: Grid) -> FixedSums:
        arrays = read_sums(self._blobs.path(told.blob), sums_metas(core, self.layout))
        terms = sums_slots(core, self.layout, arrays)
        found = FixedSums(grid, terms, told.loads, told.scalars, len(told.samples))
        n_samples = sum(told.samples.values())
        check_sums(found, core.grid(len(told.samples), n_samples))
        claimed = found.scalars[SAMPLES] * grid.scalar_unit(SAMPLES)
        if claimed != n_samples:
            raise BadUpdate(f"a sum over {claimed:g} samples of clients that have {n_samples}")
        return found

    def _good(self, came: _Round, use: Callable[[str, Offered | HostSums], T]) -> Iterator[T]:
        """``use`` of each update that can be counted, one at a time."""
        for client in sorted(came.offered, key=lambda name: (*_version(came.offered[name]), name)):
            came.begins(client)
            try:
                found = use(client, came.offered[client])
            except AtollError as error:
                came.dropped[client] = str(error)
            except Exception as error:  # noqa: BLE001 - a decoder that trips costs one client, not the job
                came.dropped[client] = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
            else:
                yield found
        came.begins("")

    def _judged(self, client: str, told: Offered | HostSums, at_round: int) -> ClientUpdate:
        if isinstance(told, HostSums):
            raise BadUpdate("a sum of several clients in a round that needs individual updates")
        coding = Coding(told.codec, told.ratio, lossy_names(self.layout), self.rule_spec.error_feedback)
        arrays = read_update(self._blobs.path(told.blob), self.update_metas, coding)
        limits = Limits(
            samples=min(told.registered, self.rule_spec.max_samples),
            rate=self.spec.training.learning_rate(at_round),
        )
        numbers = (told.n_samples, told.steps, told.scalars, told.metrics)
        update = judged(self.rule, self.layout, at_round, arrays, numbers, client, limits)
        if not (told.base and self.rule.facts.needs_base):
            return aged(update, told.weight)
        return aged(update, told.weight, self._broadcast(told.base), self._weights)

    @property
    def _weights(self) -> Mapping[str, Array]:
        assert self.state is not None  # noqa: S101 - a round is being summed
        return self.state.weights

    def _broadcast(self, blob: str) -> Mapping[str, Array]:
        """Weights of an older broadcast."""
        return parted(read_model(self._blobs.path(blob), broadcast_metas(self.rule, self.layout)))[0]

    def _behind(self, blob: str) -> dict[str, Array]:
        """An older broadcast less the newest model."""
        return {name: old - self._weights[name] for name, old in self._broadcast(blob).items()}

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


def _version(told: Offered | HostSums) -> tuple[int, tuple[int, int]]:
    """Rank of an update among versions, the oldest first."""
    return (-told.age, told.grid) if isinstance(told, HostSums) else (0, (0, 0))


def _check_clients(samples: Mapping[str, int], drawn: Mapping[str, int], counted: Collection[str]) -> None:
    """Raise BadUpdate unless all were drawn, none is counted yet, and each has what it may count."""
    if not samples:
        raise BadUpdate("a sum over no clients")
    for client, n_samples in samples.items():
        if client not in drawn:
            raise BadUpdate(f"client {client!r} was not drawn")
        if client in counted:
            raise BadUpdate(f"client {client!r} is counted already")
        if type(n_samples) is not int or not 1 <= n_samples <= drawn[client]:
            raise BadUpdate(f"client {client!r} with {n_samples!r} samples; from 1 to {drawn[client]}")


def layout_of(spec: JobSpec, graphs: Graphs) -> Layout:
    """Roles of the model's tensors before a strategy adapts them: the same that every client derives."""
    programs = [stage_programs(dag, [0])[0] for dag in _dags(graphs)]
    used = {name for p in programs for name in (*p.parameters, *p.buffers)}
    states: dict[str, StateMeta] = {}
    for dag in reversed(_dags(graphs)):  # which is frozen or mutated, training decides
        states |= dag.buffers | dag.parameters
    groups = stepwise_groups(programs[0].parameters, spec.training.optimizer)
    frozen = frozenset(name for name, group in groups.items() if group.frozen)
    found = Layout.of_state({name: states[name] for name in sorted(used)}, frozen)
    return found if spec.federated is None else own_parts(found, spec.federated.rule.local)


def _dags(graphs: Graphs) -> list[OpDag]:
    return [dag for dag in (graphs.train, graphs.evaluation) if dag is not None]


def _zeros(layout: Layout) -> dict[str, Any]:
    return {name: np.zeros(meta.shape, meta.dtype) for name, meta in layout.metas.items()}


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
