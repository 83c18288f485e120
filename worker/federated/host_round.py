"""A round of several clients on one host: trained in turn from the same broadcast, summed, one answer.

Each client's update goes through the round's codec as its file would, so accuracy and residuals are those of
clients on machines of their own; what travels is the sum alone. In memory are the broadcast, one client's
training and the sums, whatever the number of clients. Source: FedML Parrot; papers/federated.md 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from atoll.errors import BadUpdate, JobFailed, UsageError
from atoll.messages.from_worker import Row
from atoll.sampling import client_key
from compressors.model_file import NONE, Coding, read_update, write_sums, write_update
from strategies.files import parted, sums_arrays, update_arrays, update_metas
from strategies.fixed import Accumulator, Grid
from strategies.linear import Linear
from worker.federated.orders import HostAnswer
from worker.federated.trainer import LOSS

if TYPE_CHECKING:
    from pathlib import Path

    from strategies.layout import Arrays
    from strategies.values import Broadcast, ClientUpdate
    from worker.cancel import Cancel
    from worker.federated.kept.population_states import Held, PopulationStates
    from worker.federated.local_model import Client
    from worker.federated.trainer import LocalTrainer


@dataclass(frozen=True)
class HostRound:
    """A round on a host. ``path``: of the sum's file; ``noise_seed``: of what the strategy draws on a
    client; ``order``: name of the set of clients."""

    broadcast: Broadcast
    grid: Grid
    coding: Coding
    path: Path
    noise_seed: Callable[[str], int] = lambda client: 0
    order: str = ""


def train_clients(
    trainer: LocalTrainer,
    clients: Iterable[Client],
    asked: HostRound,
    states: PopulationStates,
    cancel: Cancel | None = None,
) -> HostAnswer:
    """Train ``clients`` one after another; their sum is written, their states are proposed.

    A client whose training fails, or whose update the grid does not hold, is refused alone. UsageError for a
    strategy that needs individual updates; Cancelled.
    """
    core = trainer.rule.core
    if not isinstance(core, Linear):
        raise UsageError(f"{core.name} needs individual updates; its clients cannot be a population")
    broadcast, coding, path = asked.broadcast, asked.coding, asked.path
    core = core.during(broadcast.extra)
    held, refused = Accumulator(asked.grid), {}
    rows: dict[str, Row] = {}
    with states.begin(broadcast.round, coding.codec, asked.order) as drafts:
        for client in clients:
            began_s = time.perf_counter()
            before = states.load(client.name, broadcast.round, coding.codec)
            try:
                found = trainer.train(
                    client, broadcast, before.state, cancel, noise_seed=asked.noise_seed(client.name)
                )
                update, size, left = _coded(trainer, client.name, found.update, coding, before, path)
                held.add(core.contribute(trainer.layout, update))
            except (BadUpdate, JobFailed, UsageError) as error:
                refused[client.name] = str(error)
                continue
            drafts.put(client.name, found.state, left)
            rows[client.name] = Row(
                update.n_samples,
                update.steps,
                update.metrics[LOSS],
                found.square_loss,
                time.perf_counter() - began_s,
                size,
            )
        sums = held.sums()
        stored = write_sums(path, sums_arrays(sums)) if rows else None
        drafts.finish()
    return HostAnswer(stored, sums, rows, refused, drafts.stateful)


def _coded(
    trainer: LocalTrainer, client: str, update: ClientUpdate, coding: Coding, before: Held, path: Path
) -> tuple[ClientUpdate, int, Arrays]:
    """The update as a server would read it, the bytes of its file, and what the codec left out."""
    arrays, left = update_arrays(update), dict(before.left)
    if coding.codec == NONE:
        return update, sum(array.nbytes for array in arrays.values()), {}

    def keep(name: str, error: torch.Tensor | None) -> None:
        left.pop(name, None)
        if error is not None:
            left[name] = error.reshape(-1).numpy()

    seed = client_key(f"{client}/{update.round}")
    stored = write_update(
        path, arrays, coding, seed, lambda n: torch.from_numpy(left[n]) if n in left else None, keep
    )
    metas = update_metas(trainer.rule, trainer.layout)
    delta, extra = parted(read_update(path, metas, coding))
    slots = {slot: extra.get(slot, {}) for slot in update.extra}
    return replace(update, delta=delta, extra=slots), stored.size, left
