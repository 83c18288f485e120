"""A population on several hosts of one process: the algebra of hosts and coordinator, without a network.

Hosts train their clients in turn and send one sum each, through the files that would travel. The next model
has the same bits for any number of hosts, any dealing, and where a host is lost and its clients dealt again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from atoll.messages.from_worker import Row
from compressors.container import dense_metas, read_dense
from compressors.model_file import read_sums
from strategies.files import sums_metas, sums_slots
from strategies.fixed import Accumulator, FixedSums, check_sums, real
from strategies.linear import Linear
from strategies.selection import Outcome
from tests.inprocess.federation import nbytes
from worker.federated.host_round import HostRound, train_clients
from worker.federated.kept.population_states import Kept, PopulationStates
from worker.federated.orders import HostAnswer

if TYPE_CHECKING:
    from pathlib import Path

    from strategies.fixed import Grid
    from strategies.values import Broadcast
    from tests.inprocess.federation import LocalFederation
    from worker.federated.local_model import Client

    Answer = tuple[str, HostAnswer, Path]  # host, and where its sums lie

Deal = Callable[[Mapping[str, int], Mapping[str, str], Sequence[str]], Mapping[str, Sequence[str]]]
"""(local steps by client, host of its state by client, hosts) -> clients by host."""


def in_turn(steps: Mapping[str, int], homes: Mapping[str, str], hosts: Sequence[str]) -> dict[str, list[str]]:
    """Deal clients in the order of their names."""
    names = sorted(steps)
    return {host: names[at :: len(hosts)] for at, host in enumerate(hosts)}


@dataclass(frozen=True, slots=True)
class PopulationRound:
    """Metrics of a round: a row for each client that was counted, and the bytes that hosts uploaded."""

    round: int
    rows: Mapping[str, Row]
    refused: Mapping[str, str]  # why a client that was drawn is not counted
    uploaded_bytes: Mapping[str, int]
    moved: int  # clients whose state went to another host


class MovingStates(PopulationStates):
    """States of which a host takes in those that another had, as if it had fetched them."""

    def adopt(self, client: str, kept: Kept, source: Path) -> None:
        """Take in the state of ``client`` at ``source``; it counts at once, as it did there. BadFrame for
        another file."""
        read_dense(source, dense_metas(source))
        path = self.folder / f"{client}-{kept.round}-moved"
        shutil.copyfile(source, path)
        mine, before = Kept(kept.round, path.name, path.stat().st_size, kept.codec), self._counts.get(client)
        self._count({**self._counts, client: mine})
        self._remove([] if before is None else [before])


class _Lost(Exception):
    """A host ended in mid-round."""


class LocalPopulation:
    """The clients of ``federation`` on ``hosts``, each with its folder of states below ``folder``.

    UsageError for a strategy that needs individual updates, or without a host.
    """

    def __init__(
        self, federation: LocalFederation, hosts: Sequence[str], folder: Path, deal: Deal = in_turn
    ) -> None:
        core = federation.strategy.core
        if not isinstance(core, Linear) or not hosts:
            raise UsageError(f"{core.name} on {len(hosts)} hosts; give a strategy that sums, and a host")
        self.federation, self.hosts, self.folder = federation, tuple(hosts), folder
        self._core, self._deal = core, deal
        self.states = {host: self._opened(host) for host in hosts}
        self.homes: dict[str, str] = {}  # host of each client's state

    def run_round(self, lost: Mapping[str, int] | None = None) -> PopulationRound:
        """Choose, deal, train, sum. ``lost``: hosts that end after so many clients of this round."""
        federation, core = self.federation, self._core
        broadcast = federation.strategy.configure(federation.state)
        chosen = federation.choose()
        core = core.during(broadcast.extra)
        grid = core.round_grid(len(chosen), sum(federation.clients[name].data.n_samples for name in chosen))
        answers, moved = self._answers(chosen, broadcast, grid, dict(lost or {}))
        if not answers and not core.whole:
            raise UsageError(f"none of the {len(chosen)} clients drawn could be trained")
        total, layout = Accumulator(grid), federation.trainer.layout
        for _, answer, path in answers:
            total.add(self._received(answer, path, grid))
        rows = {name: row for _, answer, _ in answers for name, row in answer.rows.items()}
        down_bytes = nbytes(broadcast.weights, *broadcast.extra.values())
        outcomes = {
            name: Outcome(
                row.square_loss,
                row.n_samples,
                federation.took_s(name, row.steps, down_bytes, row.coded_bytes),
            )
            for name, row in rows.items()
        }
        federation.close(
            core.finish(federation.state, real(core.released(total.sums(), layout), layout)), outcomes
        )
        self._settle(broadcast.round, answers)
        refused = {name: why for _, answer, _ in answers for name, why in answer.refused.items()}
        up_bytes = dict.fromkeys(self.hosts, 0)
        for host, answer, _ in answers:
            up_bytes[host] += answer.stored.size if answer.stored else 0
        return PopulationRound(broadcast.round, rows, refused, up_bytes, moved)

    def _answers(
        self, chosen: Sequence[str], broadcast: Broadcast, grid: Grid, lost: dict[str, int]
    ) -> tuple[list[Answer], int]:
        """The sums of all ``chosen``, and how many of them moved; those of lost hosts are dealt again."""
        answers: list[Answer] = []
        left, hosts, moved = list(chosen), list(self.hosts), 0
        while left:
            if not hosts:
                raise UsageError(f"no host is left for {len(left)} clients of the round")
            steps = {name: self.federation.trainer.steps_of(self.federation.clients[name]) for name in left}
            left = []
            for host, names in self._deal(steps, self.homes, hosts).items():
                moved += self._fetch(host, names)
                path = self.folder / f"{host}-{len(answers)}.sums"
                try:
                    answer = train_clients(
                        self.federation.trainer,
                        self._until(names, lost.pop(host, None)),
                        HostRound(broadcast, grid, self.federation.coding(), path),
                        self.states[host],
                    )
                except _Lost:
                    left += names
                    hosts = [other for other in hosts if other != host]
                    self.states[host] = self._opened(host)  # as it finds its folder once it is back
                else:
                    answers += [(host, answer, path)] if answer.rows else []
        return answers, moved

    def _until(self, names: Sequence[str], end: int | None) -> Iterator[Client]:
        """The clients in turn; _Lost after ``end`` of them."""
        for at, name in enumerate(names):
            if at == end:
                break
            yield self.federation.clients[name]
        if end is not None:
            raise _Lost

    def _received(self, answer: HostAnswer, path: Path, grid: Grid) -> FixedSums:
        """The sums as the coordinator reads them."""
        layout = self.federation.trainer.layout
        terms = sums_slots(self._core, layout, read_sums(path, sums_metas(self._core, layout)))
        path.unlink()
        sums = replace(answer.sums, arrays=terms)
        check_sums(sums, self._core.grid(sums.clients, sum(row.n_samples for row in answer.rows.values())))
        return sums

    def _fetch(self, host: str, names: Sequence[str]) -> int:
        """Move states to ``host`` that lie elsewhere; how many."""
        away = [name for name in names if self.homes.get(name, host) != host]
        for name in away:
            source = self.states[self.homes[name]]
            path = source.path(name)
            self.states[host].adopt(name, source.clients[name], path)
        return len(away)

    def _settle(self, at_round: int, answers: Sequence[Answer]) -> None:
        """Tell hosts which of their clients were counted, then drop states that lie elsewhere now."""
        for host in self.hosts:
            counted = {client for name, answer, _ in answers if name == host for client in answer.rows}
            self.states[host].settle(at_round, counted)
            self.homes.update(dict.fromkeys(counted & self.states[host].clients.keys(), host))
        for host, states in self.states.items():
            states.forget([client for client in states.clients if self.homes[client] != host])

    def _opened(self, host: str) -> MovingStates:
        return MovingStates(self.folder / host)
