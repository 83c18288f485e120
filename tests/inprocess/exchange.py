"""An exchange round in one process: every rank's real rule and real CollectiveRun, messages in memory.

The order of arrival, losses, damage and dead ranks are drawn by the caller; when nothing more can arrive, the
ranks that still wait give up those they wait for, as a deadline makes them do on real links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.errors import BadFrame
from atoll.gateways import column_shares, sites_of
from strategies.exchanges.base import Exchanged, Settled
from strategies.exchanges.catalogue import EXCHANGES
from worker.exchange.round import CollectiveRun, Message
from worker.exchange.schedule import Groups, collective_of, of_sites

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import ExchangeRound, Receipt
    from strategies.exchanges.base import ExchangeRule, State


@dataclass(frozen=True)
class Answer:
    """Outcome of a round at one rank. ``receipts``: one a phase; ``exchanged``: what was settled, for
    a result that is used later (``later``); None where nothing was."""

    result: Tensor
    state: State
    receipts: tuple[Receipt, ...]
    exchanged: Exchanged | None = None


def later(rule: ExchangeRule, answer: Answer, now: Tensor) -> Answer:
    """``answer`` as it is when the content has become ``now`` in the meantime."""
    if answer.exchanged is None:
        return replace(answer, result=now)
    settled = rule.settle(replace(answer.exchanged, now=now))
    assert isinstance(settled, Settled)
    return replace(answer, result=settled.result, state=settled.state)


@dataclass(frozen=True)
class Faults:
    """Disturbances of a round. ``pick`` chooses which of n messages on their way arrives next; ``alter``
    returns the message as it arrives, or None for one that is lost; ``dead`` ranks send nothing."""

    pick: Callable[[int], int] = lambda waiting: 0
    alter: Callable[[Message], Message | None] = lambda message: message
    dead: frozenset[int] = frozenset()


Carry = Callable[[Mapping[int, CollectiveRun]], None]
"""Delivers messages among runs until all are finished."""


def run_round(
    rule: ExchangeRule,
    contents: Mapping[int, Tensor],
    states: Mapping[int, State],
    at: ExchangeRound,
    groups: Groups,
    *,
    shares: Mapping[int, float] | None = None,
    faults: Faults | None = None,
    bring: Carry | None = None,
) -> dict[int, Answer]:
    """Exchange ``contents`` [n] by rank; the answers of all that are not dead, in which a rank that is in no
    group has its own content. ``bring`` delivers the messages, in memory and under ``faults`` without it."""
    faults = faults or Faults()
    met = {rank for group in groups for rank in group}
    answers = {r: Answer(c, states[r], ()) for r, c in contents.items() if r not in met}
    alive = sorted(met - faults.dead)
    contributions = {rank: rule.contribute(contents[rank], states[rank], at, rank) for rank in sorted(met)}
    receipts: dict[int, tuple[Receipt, ...]] = dict.fromkeys(alive, ())
    pattern = EXCHANGES[rule.exchange.rule].pattern
    while contributions:
        first = contributions[alive[0]]
        if sites := sites_of(rule.exchange, {rank: rank for rank in contributions}):
            collective = of_sites(pattern, sites, first, column_shares(sites, {}))
        else:
            collective = collective_of(pattern, groups, first, shares=shares)
        runs = {
            rank: CollectiveRun(rule, collective, rank, at, {rank: contributions[rank]}) for rank in alive
        }
        if bring is None:
            carry(runs, faults)
        else:
            bring(runs)
        contributions = {}
        for rank, run in runs.items():
            receipts[rank] += (run.receipt(),)
        void = _void(groups, receipts) if EXCHANGES[rule.exchange.rule].together else frozenset[int]()
        for rank, run in runs.items():
            if rank in void:
                state = rule.undelivered(run.contribution, states[rank])
                answers[rank] = Answer(contents[rank], state, receipts[rank])
                continue
            exchanged = run.exchanged(states[rank], contents[rank])
            settled = rule.settle(exchanged)
            if isinstance(settled, Settled):
                answers[rank] = Answer(settled.result, settled.state, receipts[rank], exchanged)
            else:
                contributions[rank] = settled
    return answers


def _void(groups: Groups, receipts: Mapping[int, tuple[Receipt, ...]]) -> frozenset[int]:
    """Ranks of groups in which somebody's result is not complete, as a commit would say."""
    return frozenset(
        rank
        for group in groups
        if not all(rank in receipts and receipts[rank][-1].complete for rank in group)
        for rank in group
    )


def carry(runs: Mapping[int, CollectiveRun], faults: Faults | None = None) -> None:
    """Deliver messages among ``runs`` until all are finished."""
    faults = faults or Faults()
    waiting = [message for run in runs.values() for message in run.start()]
    while not all(run.finished for run in runs.values()):
        while waiting:
            message = waiting.pop(faults.pick(len(waiting)))
            arrived = faults.alter(message)
            if arrived is None or arrived.target not in runs:
                continue
            run = runs[arrived.target]
            try:
                waiting.extend(run.receive(arrived))
            except BadFrame as error:
                waiting.extend(run.give_up(message.source, str(error)))
        waiting.extend(_past_deadline(runs))


def _past_deadline(runs: Mapping[int, CollectiveRun]) -> list[Message]:
    """Messages after everybody has given up those from whom nothing will come: whoever is to send a part and
    waits for none itself; where there is none, whoever is to send anything."""
    held_up = {rank for rank, run in runs.items() if run.awaited_parts}
    late = {rank: run.awaited_parts - held_up for rank, run in runs.items()}
    if not any(late.values()):
        late = {rank: run.awaited for rank, run in runs.items()}
    return [
        message
        for rank, run in runs.items()
        for peer in sorted(late[rank])
        for message in run.give_up(peer, "nothing came before the deadline")
    ]


def damaged(message: Message) -> Message:
    """``message`` with one byte of its payload changed."""
    payload = bytearray(message.packet.payload)
    payload[len(payload) // 2] ^= 1
    return replace(message, packet=replace(message.packet, payload=bytes(payload)))
