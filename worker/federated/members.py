"""The clients that this machine trains in a federated job: its owner, or a population's members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import structlog

from atoll.errors import BadFrame, UsageError
from compressors.container import drop_pages
from worker.federated.local_model import Client, LocalData

if TYPE_CHECKING:
    from atoll.opdag import TensorMeta
    from strategies.layout import Array
    from worker.data.population import Population
    from worker.federated.trainer import LocalTrainer

log = structlog.get_logger()


class Members:
    """Clients by name. ``owner``: the only one where the data set was not parted. A population's are made
    when they are asked for: in memory is the one in training."""

    def __init__(
        self,
        owner: str,
        fields: Mapping[str, Array],
        inputs: Mapping[str, str],
        metas: Mapping[str, TensorMeta],
        held_out: float,
        seed: int,
        population: Population | None = None,
    ) -> None:
        """UsageError for data that does not fit the model."""
        self._fields, self._inputs, self._metas = fields, inputs, metas
        self._held_out, self._seed = held_out, seed
        self.hash = "" if population is None else population.sha256
        self._rows = {} if population is None else population.rows_of()
        self._owner = None if population is not None else self._made(owner, None)
        self.usable: dict[str, int] = {}  # registered samples of those that may take part

    def check(self, trainer: LocalTrainer) -> None:
        """Find out who may take part. UsageError when nobody's update would keep the owner's floors."""
        if self._owner is not None:
            trainer.check_client(self._owner)
            return
        why: UsageError | None = None
        for name, rows in self._rows.items():
            try:
                trainer.check_client(self._made(name, rows))
            except UsageError as error:
                why = error
            else:
                self.usable[name] = len(rows)
        if not self.usable:
            raise UsageError(f"none of {len(self._rows)} clients may take part: {why}")
        if why is not None:
            left = len(self._rows) - len(self.usable)
            log.warning("clients.left_out", clients=left, of=len(self._rows), reason=str(why))

    @property
    def owner(self) -> Client:
        """The only client. UsageError for a population."""
        if self._owner is None:
            raise UsageError("a population takes part by its clients; the order names none")
        return self._owner

    def client(self, name: str) -> Client:
        """One of the clients that an order names. BadFrame for one that is not here."""
        if self._owner is not None and name == self._owner.name:
            return self._owner
        if name not in self.usable:
            raise BadFrame(f"client {name!r} is not one of this machine's {len(self.usable)}")
        return self._made(name, self._rows[name])

    def rest(self) -> None:
        """Give the system the memory in which samples were read; those that are asked for are read again."""
        drop_pages(self._fields.values())

    def in_turn(self, names: Iterable[str]) -> Iterator[Client]:
        """Yield those of ``names`` as ``client`` does; samples of one are held at a time. A page is mapped
        with those around it: a tenth of the samples, here and there, would hold all data in memory."""
        for name in names:
            yield self.client(name)
            self.rest()

    def _made(self, name: str, rows: Array | None) -> Client:
        data = LocalData(self._fields, self._inputs, self._metas, rows)
        return Client.of(name, data, self._held_out, self._seed)
