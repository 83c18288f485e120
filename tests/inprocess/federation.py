"""A whole federation in one process: real strategies, the real trainer, no network.

Does what workers and coordinator do in a round: the reference that their runs are held to, and the tool of
experiments on heterogeneity, strategies and codecs. One trainer serves all clients in turn; updates go
through the files that would travel where the uplink has a codec.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from atoll.compression import OFF
from atoll.errors import UsageError
from atoll.federated import BCRS, parse_uplink, residual_counts
from atoll.messages.from_worker import EvaluatedRow
from atoll.program import stage_programs
from atoll.sampling import client_key
from compressors.model_file import NONE, Coding, read_update, write_update
from strategies.checking import check_feedback
from strategies.files import lossy_names, parted, update_arrays, update_metas
from strategies.layout import own_parts
from strategies.privacy.private import strategy_of
from strategies.privacy.sampling import drawn, in_slot
from strategies.selection import Outcome, candidates_of, smoothed
from strategies.selectors import make_selector
from strategies.values import Broadcast, ClientState, ClientUpdate
from worker.federated.local_model import Client, LocalData, LocalModel
from worker.federated.trainer import LOSS, LocalTrainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from atoll.federated import Federated, Floors
    from atoll.job import TrainingSpec
    from atoll.opdag import OpDag, StateMeta
    from strategies.base import Strategy
    from strategies.layout import Array, Arrays
    from strategies.values import ServerState

    Fields = Mapping[str, Array]

RoundSeconds = Callable[[str, int, int, int], float]
"""(client, local steps, bytes down, bytes up) -> seconds of its round, more than 0."""
STEP_S = 0.01


def alike(client: str, steps: int, down_bytes: int, up_bytes: int) -> float:
    """Seconds of a round where all machines are alike and links cost nothing."""
    return STEP_S * steps


@dataclass(frozen=True, slots=True)
class _Residuals:
    """Error-feedback residual of a client's update of ``round``, by tensor."""

    round: int
    errors: dict[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """Metrics of a round. ``loss``: of local training, mean over the participants' samples; bytes are
    those of the files that would travel."""

    round: int
    participants: tuple[str, ...]
    loss: float
    steps: Mapping[str, int]
    uploaded_bytes: Mapping[str, int]
    downloaded_bytes: int  # a participant
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by client


def local_model(
    train: OpDag,
    evaluation: OpDag | None,
    tensors: Mapping[str, Tensor],
    training: TrainingSpec,
) -> LocalModel:
    """Build what clients compute with, from a capture's two graphs and its state."""
    graphs = [train] if evaluation is None else [train, evaluation]
    states: dict[str, StateMeta] = {}
    for graph in reversed(graphs):  # the training graph knows what is trained and written
        states.update({**graph.parameters, **graph.buffers})
    programs = [stage_programs(graph, (0,))[0] for graph in graphs]
    ordered = {name: states[name] for name in tensors if name in states}
    evaluator = programs[1] if evaluation is not None else None
    return LocalModel(programs[0], evaluator, training, ordered, tensors, train.inputs)


class LocalFederation:
    """Clients by name, each with its arrays by field, under one strategy.

    ``inputs``: input of the model -> field; by default fields are named after inputs. ``held_out_data``
    is the owner's own, by input, for ``evaluate``. ``seconds``: a model of rounds, which selectors learn from
    as they do from measured ones. ``floors``: what every client demands, as its worker would. UsageError for
    data that does not fit.
    """

    def __init__(
        self,
        model: LocalModel,
        federated: Federated,
        clients: Mapping[str, Fields],
        *,
        inputs: Mapping[str, str] | None = None,
        held_out_data: Fields | None = None,
        seconds: RoundSeconds = alike,
        device: torch.device | str = "cpu",
        floors: Floors | None = None,
    ) -> None:
        if not clients:
            raise UsageError("a federation without clients; give the data of at least one")
        self.model, self.federated = model, federated
        self.strategy: Strategy = strategy_of(federated)
        self.trainer = LocalTrainer(model, self.strategy, federated, device, floors=floors)
        named = dict(inputs) if inputs is not None else {name: name for name in model.inputs}
        seed = model.training.seed
        self.clients = {
            name: Client.of(name, LocalData(fields, named, model.inputs), federated.held_out, seed)
            for name, fields in clients.items()
        }
        for name, client in self.clients.items():
            if client.data.n_samples > federated.max_samples:
                raise UsageError(
                    f"client {name} has {client.data.n_samples} samples, at most {federated.max_samples} may "
                    "count; raise Federated(max_samples=...)"
                )
        self._owner = None
        if held_out_data is not None:
            own = {name: name for name in model.inputs}
            self._owner = Client.whole("owner", LocalData(held_out_data, own, model.inputs))
        layout = self.trainer.layout
        weights = {n: model.tensors[n].detach().cpu().numpy().copy() for n in layout.metas}
        parts = own_parts(model.layout(), federated.local)
        self.state: ServerState = self.strategy.init(parts, weights, len(clients))
        self.client_states = dict.fromkeys(clients, ClientState())
        self.selector = make_selector(federated.selector, federated.selector_options)
        self._selection = self.selector.init()
        self._secret = secrets.token_hex(32)
        self._seconds = seconds
        self._round_s: dict[str, float] = {}  # of those that took part
        check_feedback(self.strategy, federated)
        self._uplink = parse_uplink(federated.uplink)
        self._left: dict[str, _Residuals] = {}

    @property
    def weights(self) -> Arrays:
        """The common model: what an owner exports, by state-dict name."""
        return {**self._still(), **self.state.weights}

    def run_round(self, ratios: Mapping[str, float] | None = None) -> RoundMetrics:
        """Choose, train, aggregate. ``ratios``: by client, instead of the uplink's own (BCRS)."""
        chosen = self.choose()
        broadcast = self.strategy.configure(self.state)
        updates: list[ClientUpdate] = []
        up_bytes: dict[str, int] = {}
        down_bytes = nbytes(broadcast.weights, *broadcast.extra.values())
        outcomes: dict[str, Outcome] = {}
        for name in chosen:
            found = self.trainer.train(self.clients[name], broadcast, self.client_states[name])
            coding = self.coding((ratios or {}).get(name))
            update, up_bytes[name] = self._sent(name, found.update, coding)
            updates.append(replace(update, client=name))
            self.client_states[name] = found.state
            took_s = self.took_s(name, update.steps, down_bytes, up_bytes[name])
            outcomes[name] = Outcome(found.square_loss, update.n_samples, took_s)
        self.close(self.strategy.aggregate(self.state, updates), outcomes)
        total = sum(update.n_samples for update in updates) or 1
        return RoundMetrics(
            broadcast.round,
            chosen,
            sum(u.metrics[LOSS] * u.n_samples for u in updates) / total,
            {u.client: u.steps for u in updates},
            up_bytes,
            down_bytes,
            {u.client: u.metrics for u in updates},
        )

    def close(self, after: ServerState, outcomes: Mapping[str, Outcome]) -> None:
        """End a round with the state ``after``; selectors learn from ``outcomes``."""
        self._selection = self.selector.learn(self._selection, self.state.round, outcomes)
        self.state = after

    def took_s(self, name: str, steps: int, down_bytes: int, up_bytes: int) -> float:
        """Smoothed seconds of a client's rounds with the last one by the model of rounds."""
        took_s = self._seconds(name, steps, down_bytes, up_bytes)
        self._round_s[name] = smoothed(self._round_s.get(name, 0.0), took_s)
        return self._round_s[name]

    def coding(self, ratio: float | None = None) -> Coding:
        """Coding of a client's update; ``ratio`` instead of the uplink's own."""
        mode = self._uplink.mode
        name = {OFF: NONE, BCRS: "topk"}.get(mode, mode)
        lossy = lossy_names(self.trainer.layout)
        wanted = ratio or self._uplink.ratio or 1.0
        return Coding(name, wanted, lossy, self.federated.error_feedback)

    def _sent(self, name: str, update: ClientUpdate, coding: Coding) -> tuple[ClientUpdate, int]:
        """``update`` as the server reads it, and the bytes that took."""
        arrays = update_arrays(update)
        if coding.codec == NONE:
            return update, nbytes(arrays)
        before = self._left.get(name, _Residuals(update.round, {}))
        left = _Residuals(update.round, before.errors if residual_counts(before.round, update.round) else {})
        seed = client_key(f"{name}/{update.round}")
        with TemporaryDirectory(prefix="atoll-") as folder:
            path = Path(folder) / "update"
            stored = write_update(path, arrays, coding, seed, left.errors.get, left.errors.__setitem__)
            metas = update_metas(self.strategy, self.trainer.layout)
            weights, slots = parted(read_update(path, metas, coding))
        self._left[name] = left
        return replace(update, delta=weights, extra=slots), stored.size

    def choose(self) -> tuple[str, ...]:
        """The participants of the next round."""
        names, seed = sorted(self.clients), self.model.training.seed
        count = self.federated.clients or len(names)
        candidates = candidates_of({n: len(self.clients[n].split.train) for n in names}, self._round_s)
        at = self.state.round
        if self.federated.privacy is not None:
            if tree := self.federated.privacy.tree:
                return in_slot({name: name for name in names}, at, tree, "job")
            secret = f"{self._secret}/{at}"
            return drawn(names, self.federated.privacy.sampling, self.federated.clients, secret)
        asked = self.selector.ask(candidates, count, at, seed)
        losses = {name: self._loss_of(name) for name in asked}
        chosen, self._selection = self.selector.choose(self._selection, candidates, count, at, seed, losses)
        return chosen

    def evaluate(self) -> EvaluatedRow:
        """The common model on the owner's held-out data."""
        if self._owner is None:
            raise UsageError("no held-out data; give held_out_data")
        return self.trainer.evaluate(self._owner, self.strategy.configure(self.state), ClientState())

    def evaluate_clients(self, names: Sequence[str] | None = None) -> dict[str, EvaluatedRow]:
        """Evaluate what each client would use, on its own held-out share."""
        broadcast = self.strategy.configure(self.state)
        return {name: self._evaluated(name, broadcast) for name in names or sorted(self.clients)}

    def _evaluated(self, name: str, broadcast: Broadcast) -> EvaluatedRow:
        return self.trainer.evaluate(self.clients[name], broadcast, self.client_states[name])

    def _loss_of(self, name: str) -> float:
        return self._evaluated(name, self.strategy.configure(self.state)).loss

    def _still(self) -> dict[str, Array]:
        return {n: self.model.tensors[n].detach().cpu().numpy() for n in self.trainer.layout.metas}


def nbytes(*sets: Arrays) -> int:
    """Bytes of arrays."""
    return sum(array.nbytes for arrays in sets for array in arrays.values())
