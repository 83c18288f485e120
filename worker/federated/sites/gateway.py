"""A site's sum: updates that neighbours keep are fetched, decoded, judged as the coordinator would, added.

What travels on is one file of whole numbers, as a population's host sends it. In memory are one update and
the sums. An update that cannot be had or counted is left out: the coordinator asks its client for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import AtollError, BadUpdate, UsageError
from atoll.messages.from_worker import Row
from compressors.container import most_file_bytes
from compressors.model_file import Coding, read_update, write_sums
from strategies.checking import Limits
from strategies.files import judged, sums_arrays, update_metas
from strategies.fixed import Accumulator
from strategies.linear import Linear
from worker.federated.orders import HostAnswer

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.messages.to_worker import KeptUpdate, TrainRound
    from strategies.base import Strategy
    from strategies.layout import Layout, Slots
    from strategies.values import ClientUpdate
    from worker.blobs import BlobStore
    from worker.cancel import Cancel


@dataclass(frozen=True)
class Gateway:
    """All that judges updates of one job; ``max_samples``: that any of them may count."""

    strategy: Strategy
    layout: Layout
    lossy: frozenset[str]
    error_feedback: bool
    max_samples: int
    blobs: BlobStore

    def sum(self, order: TrainRound, extra: Slots, rate: float, path: Path, cancel: Cancel) -> HostAnswer:
        """Write the sum of the updates that ``order`` names; ``extra``: the broadcast's slots, ``rate``: the
        round's. UsageError for a strategy without sums; ConnectionFailed, StorageError, Cancelled."""
        core = self.strategy.core
        if not isinstance(core, Linear):
            raise UsageError(f"{core.name} needs individual updates; a gateway cannot sum them")
        core = core.during(extra)
        held = Accumulator(core.round_grid(order.drawn, order.drawn_samples))
        rows, refused = dict[str, Row](), dict[str, str]()
        for kept in order.gathers:
            cancel.check()
            try:
                held.add(core.contribute(self.layout, self._update(kept, order.round, rate, cancel)))
            except AtollError as error:
                refused[kept.client] = str(error)
                continue
            rows[kept.client] = Row(kept.n_samples, kept.steps, 0.0, 0.0, 0.0, kept.update.size)
        sums = held.sums()
        stored = write_sums(path, sums_arrays(sums)) if rows else None
        return HostAnswer(stored, sums, rows, refused)

    def _update(self, kept: KeptUpdate, at_round: int, rate: float, cancel: Cancel) -> ClientUpdate:
        metas, blob = update_metas(self.strategy, self.layout), kept.update
        if blob.size > most_file_bytes(metas):
            raise BadUpdate(f"an update of {blob.size} bytes; at most {most_file_bytes(metas)} fit")
        self.blobs.fetch_near(kept.client, {blob.hash: blob.size}, cancel)
        path = self.blobs.path(blob.hash)
        if not path.is_file():
            raise BadUpdate(f"{kept.client} could not send it")
        coding = Coding(kept.codec, kept.ratio, self.lossy, self.error_feedback)
        arrays = read_update(path, metas, coding)
        limits = Limits(samples=min(kept.registered, self.max_samples), rate=rate)
        return judged(
            self.strategy,
            self.layout,
            at_round,
            arrays,
            (kept.n_samples, kept.steps, kept.scalars, {}),
            kept.client,
            limits,
        )
