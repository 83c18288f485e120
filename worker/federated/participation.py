"""Taking part in a federated job: fetch the model, train on this machine's own data, send the update.

The data stays here; what leaves is the update's file, a few numbers, and the mean loss and metrics on
the held-out share. Where the data are a population's, the clients that an order names train in turn, and
the update is one sum over them (``worker.federated.host_round``). What the rule and the codec keep for the
next round is on disk before the update is announced, and counts only once the coordinator says that it was
taken (``worker.federated.kept.client_state``, ``population_states``).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from math import isfinite
from typing import TYPE_CHECKING

import structlog

from atoll.errors import BadFrame, BadUpdate, JobFailed, StorageError, UsageError
from atoll.messages.from_worker import SecureAnswer
from atoll.rehearse import OpCost, rehearse
from atoll.sampling import client_key
from compressors.container import drop_pages
from compressors.model_file import Coding, drawn_supports, packet_seed, read_update, write_update
from strategies.checking import check_feedback
from strategies.clipping import UNCLIPPED, Clipping, unclippable
from strategies.files import (
    broadcast_metas,
    broadcast_of,
    lossy_names,
    parted,
    trained_supports,
    update_arrays,
    update_metas,
)
from strategies.fixed import Accumulator
from strategies.linear import Linear
from strategies.privacy.private import strategy_of
from strategies.returned import check_returned
from strategies.secure.vector import Encoding, encoding_of, secured
from worker.blobs import BlobFile, most_bytes
from worker.federated.broadcasts import Models
from worker.federated.host_round import HostRound, train_clients
from worker.federated.kept.client_state import ClientStore
from worker.federated.kept.last_update import LastUpdate, read_last, work_of, write_last
from worker.federated.kept.population_states import PopulationStates
from worker.federated.local_model import LocalModel
from worker.federated.members import Members
from worker.federated.orders import Assessment, Update
from worker.federated.owner.floors import check_job
from worker.federated.secure.membership import SecureRounds
from worker.federated.sites.gateway import Gateway
from worker.federated.trainer import LocalTrainer
from worker.machine.malloc import give_back
from worker.machine.torch_device import torch_device
from worker.stage import tensor_blobs
from worker.stage.op_marks import OpMarks

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from atoll.execute import Executor
    from atoll.federated import Floors
    from atoll.messages.from_worker import EvaluatedRow
    from atoll.messages.to_worker import EvaluateRound, Participate, SecureOrder, TrainRound
    from compressors.container import Stored
    from strategies.base import Strategy
    from strategies.values import ClientUpdate
    from worker.cancel import Cancel
    from worker.context import ComputeContext
    from worker.federated.broadcasts import Fetched
    from worker.federated.orders import HostAnswer

log = structlog.get_logger()

UPDATE, SUM = "update", "sum"
MODELS = "models"
CLIENTS = "clients"


class Participation:
    """One federated job on this machine, from Participate to Release; not thread-safe."""

    def __init__(
        self,
        joining: Participate,
        context: ComputeContext,
        cancel: Cancel,
        noise_key: bytes,
        clipping: Clipping = UNCLIPPED,
        statistics: int = 0,
    ) -> None:
        """Check, fetch, build. ``noise_key``: this machine's own; nobody else can guess it. ``clipping``: of
        every update. ``statistics``: numbers beside it that the data set's owner allows. Raises what is
        reported to the coordinator: BadFrame, UnsupportedOp or UsageError for what cannot run here,
        StorageError, ConnectionFailed."""
        check(joining)
        self.joining, self._context = joining, context
        config, device, spec = context.config, torch_device(context.device), joining.federated.rule
        strategy = strategy_of(spec)
        check_feedback(strategy, spec)
        floors = replace(config.floors, statistics=statistics)
        check_job(spec, floors)
        costs = _rehearse(joining, device)
        inputs = joining.inputs
        metas = {name: state.meta for name, state in joining.states.items() if name not in inputs}
        # The trainer looks as well; here no byte of the model was fetched yet.
        check_returned(joining.programs, inputs, metas, strategy, floors)
        self.members = Members(
            joining.client or context.worker,
            context.open_data(joining.federated.data),
            joining.federated.inputs,
            inputs,
            spec.held_out,
            joining.training.seed,
            context.open_population(joining.federated.data),
        )
        self._trainer = _trainer(joining, context, cancel, strategy, floors, noised=clipping.noise > 0.0)
        self.members.check(self._trainer)
        executors = self._trainer.executors
        for executor, cost in zip(executors, costs, strict=True):
            _watched(executor, context, cost)
        if spec.evaluate_every and not self.members.hash:
            self._trainer.check_evaluation(self.members.owner)
        layout = self._trainer.layout
        many = "a population sends one sum of many" if self.members.hash else ""
        if spec.sample_privacy is not None and self.members.hash:
            raise UsageError("sample_privacy= accounts for one owner's samples, and this is a population")
        if clipping.norm and (why := unclippable(strategy, layout) or many):
            raise UsageError(f"this data owner clips updates, and {why}")
        self._clipping = clipping
        self._up, self._lossy = update_metas(strategy, layout), lossy_names(layout)
        self._store = ClientStore(config.state_dir, joining.job, config.kept_bytes)
        self._models = Models(
            self._store.folder / MODELS,
            context.blobs,
            broadcast_metas(strategy, layout),
            context.progress.tick,
            lends=bool(spec.gateways),
        )
        # Of a job whose gateway may fail to have it, or that may not train a round again: noise of each
        # sample is drawn anew, so that would be another release.
        self._last = read_last(self._store.folder, self._store.folder / UPDATE)
        self._population: PopulationStates | None = None
        self._secure: SecureRounds | None = None
        if spec.secure is not None:
            secured(strategy)
            who, job, least = context.worker, joining.job, config.floors.clients
            vectors = 0 if spec.privacy is None else joining.training.steps
            self._secure = SecureRounds(who, job, spec.secure, least, self._store.folder, vectors)
        self._noise_key = noise_key
        self._last_sent: int | None = None  # the last round whose update was, perhaps in part
        self._rest()  # until the first broadcast

    def train(self, order: TrainRound, cancel: Cancel) -> Update:
        """Train one round and store the update. Raises as the constructor, JobFailed, Cancelled."""
        if self._secure is not None:
            self._secure.begin(order)
        fetched = self._models.fetch(order.model, cancel)
        nbytes, seconds, began_s = fetched.bytes, fetched.seconds, time.perf_counter()
        path = self._store.folder / (SUM if order.gathers else UPDATE)
        answer, square_loss, stored = self._answer(order, fetched, path, cancel)
        del fetched
        self._rest()  # while the update is sent, and until the next order
        train_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        # The first may be one that was sent before this process began.
        new = self._last_sent is not None and order.round > self._last_sent
        self._last_sent = order.round
        file = None if stored is None else BlobFile(path, stored.hash, stored.size)
        sent = 0 if file is None else self._sent(order, file, cancel, new=new)
        upload_s = time.perf_counter() - began_s
        if self._last is None or order.gathers:
            path.unlink(missing_ok=True)
        return Update(answer, square_loss, stored, train_s, sent, upload_s, nbytes, seconds)

    def _answer(
        self, order: TrainRound, fetched: Fetched, path: Path, cancel: Cancel
    ) -> tuple[ClientUpdate | HostAnswer, float, Stored | None]:
        """Write what is asked for to ``path``; returns its numbers without their arrays."""
        rule = self.joining.federated.rule
        coding = Coding(order.codec, order.ratio, self._lossy, rule.error_feedback)
        if order.gathers:
            extra, rate = parted(fetched.arrays)[1], self.joining.training.learning_rate(order.round)
            found = self._gateway.sum(order, extra, rate, path, cancel)
            return replace(found, sums=replace(found.sums, arrays={})), 0.0, found.stored
        if order.clients:
            host = self._train_clients(order, fetched, coding, path, cancel)
            return replace(host, sums=replace(host.sums, arrays={})), 0.0, host.stored
        last, self._last = self._last, None
        if last is None or last.work != work_of(order) or not path.is_file():
            last = LastUpdate(work_of(order), *self._train_owner(order, fetched, coding, path, cancel))
            if rule.sample_privacy is not None:
                write_last(self._store.folder, last)
        fetched.arrays.clear()
        if rule.gateways or rule.sample_privacy is not None:
            self._last = last
        return last.answer, last.square_loss, last.stored

    def _sent(self, order: TrainRound, file: BlobFile, cancel: Cancel, *, new: bool) -> int:
        """Store a file, or keep it for the gateway; returns the bytes that travelled."""
        blobs, tick = self._context.blobs, self._context.progress.tick
        if order.gateway:
            blobs.lend(file.hash, cancel, file, order.gateway)
            return 0
        return blobs.store([file], cancel, lambda _: tick(), new=new and not order.gathers)

    @property
    def _gateway(self) -> Gateway:
        trainer, rule = self._trainer, self.joining.federated.rule
        found = (trainer.rule, trainer.layout, self._lossy, rule.error_feedback, rule.max_samples)
        return Gateway(*found, self._context.blobs)

    def _train_owner(
        self, order: TrainRound, fetched: Fetched, coding: Coding, path: Path, cancel: Cancel
    ) -> tuple[ClientUpdate, float, Stored]:
        """Write the update of this machine's only client; its numbers."""
        state, left = self._store.load(order.round, order.codec)
        broadcast = broadcast_of(order.round, fetched.arrays)
        try:
            trained = self._trainer.train(
                self.members.owner,
                broadcast,
                state,
                cancel,
                noise_seed=self._noise_seed(order.seed),
                loaded=partial(drop_pages, fetched.arrays.values()),
            )
        except (BadUpdate, JobFailed) as error:
            if self._secure is None or self.joining.federated.rule.privacy is None:
                raise
            # Who is missing shows, and that would tell of its data.
            log.warning("train.failed", job=self.joining.job, round=order.round, reason=str(error))
            trained = self._trainer.nothing(self.members.owner, broadcast, state)
        fetched.arrays.clear()  # before the codec needs memory
        del broadcast, state
        with self._store.begin(order.round, order.codec, coding.left_out(self._up)) as draft:
            arrays = self._clipping.applied(update_arrays(trained.update), self._secret(order))
            stored = write_update(path, arrays, coding, order.seed, left.get, draft.keep)
            if self._secure is not None:
                delta, extra = parted(read_update(path, self._up, coding))
                sent = replace(trained.update, delta=delta, extra=extra)
                stored = self._masked(order, sent, coding, path)
            draft.finish(trained.state)
        numbers = {} if self._secure is not None else trained.update.scalars  # masked with the rest
        return replace(trained.update, delta={}, extra={}, scalars=numbers), trained.square_loss, stored

    def _masked(self, order: TrainRound, update: ClientUpdate, coding: Coding, path: Path) -> Stored:
        """Write what a secure round takes of the update: its contribution in whole numbers, masked."""
        encoding, core = self._encoding(order, coding), secured(self._trainer.rule)
        held = Accumulator(encoding.grid)
        held.add(core.contribute(self._trainer.layout, update))
        assert self._secure is not None  # noqa: S101 - who asks has looked
        return self._secure.write(path, order, self._secure.hidden(held.sums(), core), encoding)

    def _encoding(self, order: TrainRound, coding: Coding) -> Encoding:
        """Words of the round's sums, from what its order says."""
        rule, supports = self.joining.federated.rule, drawn_supports(self._up, coding, order.seed)
        assert rule.secure is not None  # noqa: S101 - who asks has looked
        count, samples = order.drawn, order.drawn_samples
        core, layout = secured(self._trainer.rule), self._trainer.layout
        return encoding_of(core, layout, rule.secure, count, samples, trained_supports(supports))

    def _train_clients(
        self, order: TrainRound, fetched: Fetched, coding: Coding, path: Path, cancel: Cancel
    ) -> HostAnswer:
        """Write the sum over the clients that the order names."""
        core = self._trainer.rule.core
        if not isinstance(core, Linear):
            raise UsageError(f"{core.name} needs individual updates; its clients cannot be a population")
        return train_clients(
            self._trainer,
            self.members.in_turn(order.clients),
            HostRound(
                broadcast_of(order.round, fetched.arrays),
                core.round_grid(order.drawn, order.drawn_samples),
                coding,
                path,
                lambda client: self._noise_seed(client_key(f"{client}/{order.round}")),
                order.order,
            ),
            self._states(),
            cancel,
        )

    def evaluate(self, order: EvaluateRound, cancel: Cancel) -> Assessment:
        """Mean loss and metrics of what each client would use, on its held-out share; a population's clients
        that have too little of it are left out."""
        fetched = self._models.fetch(order.model, cancel)
        began_s = time.perf_counter()
        broadcast = broadcast_of(order.round, fetched.arrays)
        found: dict[str, EvaluatedRow] = {}
        if order.clients:
            for client in self.members.in_turn(order.clients):
                held = self._states().load(client.name, order.round, "")
                with suppress(UsageError):
                    found[client.name] = self._trainer.evaluate(client, broadcast, held.state, cancel)
        else:
            state, _ = self._store.load(order.round, "")
            drop = partial(drop_pages, fetched.arrays.values())
            owner = self.members.owner
            found[""] = self._trainer.evaluate(owner, broadcast, state, cancel, loaded=drop)
        self._rest()
        if not found:
            raise UsageError(f"none of {len(order.clients)} clients has enough held-out data to evaluate on")
        for name, each in found.items():
            if not all(map(isfinite, (each.loss, *each.metrics.values()))):
                raise JobFailed(
                    f"round {order.round}: the held-out loss{name and f' of {name}'} is {each.loss}"
                )
        return Assessment(found, time.perf_counter() - began_s, fetched.bytes, fetched.seconds)

    def secure(self, order: SecureOrder) -> SecureAnswer:
        """The answer of this member of a secure round, or the reason why it gives none."""
        head = (order.job, order.round, order.exchange, order.stage)
        try:
            if self._secure is None:
                raise BadFrame("this job's sums are not secure; nothing of an exchange was agreed to")
            return self._secure.answer(order)
        except (BadFrame, StorageError) as error:
            log.warning("secure.refused", job=order.job, round=order.round, reason=str(error))
            return SecureAnswer(*head, refused=str(error))

    def settle(self, at_round: int, taken: bool, clients: Collection[str] = (), order: str = "") -> None:
        """The coordinator's word on the update of ``at_round``; of a population: who of it was counted, of
        all that was trained or of one ``order``."""
        if taken or self._last is None or self._last.answer.round != at_round:  # else it may be sent again
            self._store.settle(at_round, taken)
        if self.members.hash or self._population is not None:
            self._states().settle(at_round, clients, order)

    def close(self) -> None:
        """The job is over here, or another takes its place; what the rule keeps stays on disk."""
        self._models.clear()

    def _rest(self) -> None:
        """Hold no memory that the next order fills anyway."""
        self._trainer.rest()
        self.members.rest()
        give_back()

    def _states(self) -> PopulationStates:
        if self._population is None:
            folder, most = self._store.folder / CLIENTS, self._context.config.kept_bytes
            self._population = PopulationStates(folder, most)
        return self._population

    def _secret(self, order: TrainRound) -> bytes:
        """Seed of the noise in an update: another model, round or job draws other noise, and the same order
        again the same, so that no two answers differ by what they hide."""
        words = f"{self.joining.job}/{order.round}/{order.model.full.hash}".encode()
        return blake2b(words, key=self._noise_key, digest_size=32).digest()

    def _noise_seed(self, seed: int) -> int:
        """Not to be guessed by whoever knows the order: noise that can be subtracted hides nothing."""
        return packet_seed(int.from_bytes(self._noise_key[:8], "little") ^ seed, self.joining.job)


def _trainer(
    joining: Participate,
    context: ComputeContext,
    cancel: Cancel,
    strategy: Strategy,
    floors: Floors,
    *,
    noised: bool,
) -> LocalTrainer:
    """Return what trains the job on this machine; fetches its tensors. Raises as ``Participation``."""
    inputs = joining.inputs
    model = LocalModel(
        joining.program,
        joining.eval_program,
        joining.training,
        {n: s for n, s in joining.states.items() if n not in inputs},
        _tensors(joining, context, cancel),
        inputs,
    )
    return LocalTrainer(
        model,
        strategy,
        joining.federated.rule,
        torch_device(context.device),
        floors=floors,
        noised=noised,
        tick=context.progress.tick,
        made=lambda executor, costs: _watched(executor, context, costs),
    )


def _watched(executor: Executor, context: ComputeContext, costs: Mapping[int, OpCost]) -> None:
    executor.watch = OpMarks(context.status, executor.program, costs, context.duty)


def check(joining: Participate) -> None:
    """The rules that coordinator and client both check; BadFrame says which is broken."""
    for program in joining.programs:
        if program.n_stages != 1 or program.received or program.produced:
            raise BadFrame(f"stage {program.stage} of {program.n_stages}; a client runs the whole model")
        if program.loss is None:
            raise BadFrame("a program without its loss")
    if joining.training.n_micro != 1:
        raise BadFrame(f"{joining.training.n_micro} micro-batches a step; a client takes one")
    tensors = {n for p in joining.programs for n in (*p.parameters, *p.buffers, *p.constants)}
    inputs = {n for p in joining.programs for n in p.inputs}
    undescribed = sorted((tensors | inputs) - set(joining.states))
    missing = sorted(tensors - set(joining.tensors))
    if undescribed or missing or tensors & inputs:
        raise BadFrame(f"no shape for {undescribed[:3]}, no blob for {missing[:3]}")
    for name in sorted(inputs):
        shape = joining.states[name].meta.shape
        if not shape or shape[0] != joining.batch or name not in joining.federated.inputs:
            raise BadFrame(f"input {name!r} of shape {shape}, micro-batches of {joining.batch}")


def _rehearse(joining: Participate, device: torch.device) -> list[Mapping[int, OpCost]]:
    costs: list[Mapping[int, OpCost]] = []
    for program in joining.programs:
        names = (*program.parameters, *program.buffers, *program.constants)
        leaves = {name: joining.states[name].meta for name in names}
        inputs = {name: joining.states[name].meta for name in program.inputs}
        costs.append(rehearse(program, leaves, inputs, joining.training.precision, device))
    return costs


def _tensors(joining: Participate, context: ComputeContext, cancel: Cancel) -> dict[str, Tensor]:
    """The job's own values, mapped."""
    names = sorted({n for p in joining.programs for n in (*p.parameters, *p.buffers, *p.constants)})
    wanted: dict[str, int] = {}
    for name in names:
        blob = joining.tensors[name]
        wanted[blob] = max(wanted.get(blob, 0), most_bytes(joining.states[name]))
    context.blobs.fetch(wanted, cancel, lambda _: context.progress.tick())
    found = {}
    for name in names:
        loaded = tensor_blobs.load(context.blobs, name, joining.tensors[name], joining.states[name])
        found[name] = loaded["value"]
    return found
