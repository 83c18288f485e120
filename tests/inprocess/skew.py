"""Stragglers on simulated time: exchanges that do not wait for them, beside those that do.

Each rank computes one gradient after another, in seconds that are drawn; a round starts as soon as the
exchange's quorum is there and its deadline over, or all are, and what it exchanges passes through the real
rule and the real round. With a quorum of 1 everybody waits for the slowest.

    GradientRounds   all ranks, gradients: who is not ready contributes zeros, and applies every result
    ModelRounds      groups, models after a local step: who is not ready contributes the model that it has

Times are seconds; a round takes ``exchange_s`` from its start until its result is used.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from torch import Tensor

from atoll.exchange import Exchange, ExchangeRound, check_exchange
from experiments.exchanges import make_rule
from strategies.exchanges.base import Flat
from tests.inprocess.exchange import Answer, later, run_round
from tests.inprocess.peers import default_groups
from worker.exchange.schedule import Groups

Seconds = Callable[[int, int], float]
"""(rank, how many gradients it has computed) -> seconds of the next one."""
Gradient = Callable[[int, int, Tensor], Tensor]
"""(rank, how many gradients it has computed, its model [n]) -> the next one [n]."""


@dataclass(frozen=True)
class Skewed:
    """Plain SGD at ranks of unequal speed, all beginning with the model ``begin`` [n]."""

    ranks: int
    begin: Tensor
    gradient: Gradient
    lr: float
    seconds: Seconds


@dataclass(frozen=True)
class Outcome:
    """``used``: gradients in a result or a model; ``late``: those whose round had begun without them."""

    time_s: float
    used: int
    late: int
    models: tuple[Tensor, ...] = field(repr=False)

    @property
    def used_per_s(self) -> float:
        return self.used / self.time_s

    def average(self) -> Tensor:
        """Mean of the ranks' models, [n]."""
        return torch.stack(self.models).mean(0)


class GradientRounds:
    """Runs a rule of gradients (eager, mean) over ``peers``."""

    def __init__(self, peers: Skewed, exchange: Exchange, exchange_s: float, seed: int = 0) -> None:
        check_exchange(exchange)
        self._peers, self._exchange, self._exchange_s, self._seed = peers, exchange, exchange_s, seed
        self._rule = make_rule(exchange)
        self._ranks = tuple(range(peers.ranks))
        nothing = torch.zeros_like(peers.begin)
        self._states = dict.fromkeys(self._ranks, self._rule.init(Flat((tuple(nothing.shape),)), nothing))
        self._models = {rank: peers.begin.clone() for rank in self._ranks}
        self._computed, self._used, self._late = dict.fromkeys(self._ranks, 0), 0, 0
        self._computing: list[tuple[float, int, int, Tensor]] = []  # end, rank, its round, gradient
        self._ready: dict[int, Tensor] = {}
        self._kept = 0  # gradients in the states
        self._number, self._free_s = 0, 0.0

    def run(self, gradients: int) -> Outcome:
        """Go on until at least so many gradients are in results."""
        needed = self._exchange.awaited(len(self._ranks))
        for rank in self._ranks:
            self._begin(rank, 0.0)
        closes_s = inf
        while self._used < gradients:
            if not self._computing or self._computing[0][0] > closes_s:  # those of the same moment are in
                self._close(closes_s)
                closes_s = inf
                continue
            at_s, rank, number, gradient = heapq.heappop(self._computing)
            if number < self._number:
                self._keep(rank, number, gradient)
                self._begin(rank, max(at_s, self._free_s))
                continue
            self._ready[rank] = gradient
            if len(self._ready) == len(self._ranks):
                closes_s = at_s
            elif len(self._ready) == needed:
                closes_s = at_s + self._exchange.deadline_s
        return Outcome(self._free_s, self._used, self._late, tuple(self._models.values()))

    def _begin(self, rank: int, at_s: float) -> None:
        done = self._computed[rank]
        gradient = self._peers.gradient(rank, done, self._models[rank])
        end_s = at_s + self._peers.seconds(rank, done)
        heapq.heappush(self._computing, (end_s, rank, self._number, gradient))
        self._computed[rank] = done + 1

    def _keep(self, rank: int, number: int, gradient: Tensor) -> None:
        state = self._states[rank]
        contribution = self._rule.contribute(gradient, state, self._round(number), rank)
        self._states[rank] = self._rule.undelivered(contribution, state)
        self._kept += 1
        self._late += 1

    def _close(self, at_s: float) -> None:
        nothing = torch.zeros_like(self._peers.begin)
        contents = {rank: self._ready.get(rank, nothing) for rank in self._ranks}
        at = self._round(self._number)
        answers = run_round(self._rule, contents, self._states, at, [self._ranks])
        for rank, answer in answers.items():
            self._states[rank] = answer.state
            self._models[rank] = self._models[rank] - self._peers.lr * answer.result
        self._used += len(self._ready) + self._kept
        self._kept = 0
        self._number += 1
        self._free_s = at_s + self._exchange_s
        ready, self._ready = self._ready, {}
        for rank in ready:
            self._begin(rank, self._free_s)

    def _round(self, number: int) -> ExchangeRound:
        return ExchangeRound(number, self._ranks, self._seed)


@dataclass
class _Meeting:
    """One group's round: who has arrived, and its result once it has started."""

    group: tuple[int, ...]
    arrived: set[int] = field(default_factory=set)
    answers: dict[int, Answer] = field(default_factory=dict)
    end_s: float = inf


class ModelRounds:
    """Runs a rule of models (wagma) over ``peers``; ``exchange_s`` by the number of ranks in a group.

    A round of all ranks waits for all, one of a group for the quorum.
    """

    def __init__(
        self, peers: Skewed, exchange: Exchange, exchange_s: Callable[[int], float], seed: int = 0
    ) -> None:
        check_exchange(exchange)
        self._peers, self._exchange, self._exchange_s, self._seed = peers, exchange, exchange_s, seed
        self._rule = make_rule(exchange)
        self._ranks = tuple(range(peers.ranks))
        flat = Flat((tuple(peers.begin.shape),))
        self._states = dict.fromkeys(self._ranks, self._rule.init(flat, peers.begin))
        self._models = {rank: peers.begin.clone() for rank in self._ranks}
        self._fresh: dict[int, Tensor] = {}  # after the local step
        self._round_of = dict.fromkeys(self._ranks, 0)
        self._free_s = dict.fromkeys(self._ranks, 0.0)  # the rank's link
        self._meetings: dict[int, dict[int, _Meeting]] = {}  # by round and rank
        self._events: list[tuple[float, int, int]] = []  # time, round, rank that arrives or ~rank that starts
        self._late, self._end_s = 0, 0.0

    def run(self, rounds: int) -> Outcome:
        """So many rounds at every rank."""
        for rank in self._ranks:
            self._begin(rank, 0.0)
        while self._events:
            at_s, number, who = heapq.heappop(self._events)
            if who < 0:
                self._start(at_s, number, ~who, rounds)
            else:
                self._arrive(at_s, number, who, rounds)
        return Outcome(self._end_s, rounds * len(self._ranks), self._late, tuple(self._models.values()))

    def _begin(self, rank: int, at_s: float) -> None:
        number, model = self._round_of[rank], self._models[rank]
        self._fresh[rank] = model - self._peers.lr * self._peers.gradient(rank, number, model)
        heapq.heappush(self._events, (at_s + self._peers.seconds(rank, number), number, rank))

    def _arrive(self, at_s: float, number: int, rank: int, rounds: int) -> None:
        meeting = self._meeting(number, rank)
        if meeting.answers:
            self._late += 1
            answer = later(self._rule, meeting.answers[rank], self._fresh[rank])
            self._go_on(rank, answer, max(at_s, meeting.end_s), rounds)
            return
        meeting.arrived.add(rank)
        members = len(meeting.group)
        needed = members if members == len(self._ranks) else self._exchange.awaited(members)
        if len(meeting.arrived) == members:
            self._when(at_s, number, rank)
        elif len(meeting.arrived) == needed:
            self._when(at_s + self._exchange.deadline_s, number, rank)

    def _start(self, at_s: float, number: int, rank: int, rounds: int) -> None:
        meeting = self._meeting(number, rank)
        if meeting.answers:
            return
        free_s = max(self._free_s[member] for member in meeting.group)
        if free_s > at_s:
            self._when(free_s, number, rank)
            return
        contents = {m: (self._fresh if m in meeting.arrived else self._models)[m] for m in meeting.group}
        at = ExchangeRound(number, self._ranks, self._seed)
        meeting.answers = run_round(self._rule, contents, self._states, at, [meeting.group])
        meeting.end_s = at_s + self._exchange_s(len(meeting.group))
        self._free_s |= dict.fromkeys(meeting.group, meeting.end_s)
        for member in sorted(meeting.arrived):
            self._go_on(member, meeting.answers[member], meeting.end_s, rounds)

    def _go_on(self, rank: int, answer: Answer, at_s: float, rounds: int) -> None:
        self._models[rank], self._states[rank] = answer.result, answer.state
        self._round_of[rank] += 1
        self._end_s = max(self._end_s, at_s)
        if self._round_of[rank] < rounds:
            self._begin(rank, at_s)

    def _when(self, at_s: float, number: int, rank: int) -> None:
        heapq.heappush(self._events, (at_s, number, ~rank))

    def _meeting(self, number: int, rank: int) -> _Meeting:
        if number not in self._meetings:
            groups: Groups = default_groups(self._exchange, self._ranks, self._seed, number)
            meetings = [_Meeting(tuple(group)) for group in groups]
            self._meetings[number] = {member: meeting for meeting in meetings for member in meeting.group}
        return self._meetings[number][rank]


# ---------------------------------------------------------------- seconds


def by_owners_s(size_bytes: float, rate: float, delay_s: float) -> Callable[[int], float]:
    """Seconds of an exchange by segment owners among so many ranks, whose links have ``rate`` bytes/s."""
    return lambda ranks: 2.0 * delay_s + 2.0 * (ranks - 1) / ranks * size_bytes / rate


def slower(base_s: float, factors: dict[int, float], jitter: float = 0.0, seed: int = 0) -> Seconds:
    """``base_s`` times the rank's factor (1 without), times 1 +- ``jitter``, drawn uniformly."""

    def seconds(rank: int, step: int) -> float:
        drawn = np.random.default_rng((seed, step, rank)).uniform(-jitter, jitter)
        return base_s * factors.get(rank, 1.0) * (1.0 + float(drawn))

    return seconds


def drawn_delays(base_s: float, delay_s: float, ranks: int, delayed: int, seed: int = 0) -> Seconds:
    """``base_s``, and ``delay_s`` more at ``delayed`` of the ranks, drawn for each step."""

    def seconds(rank: int, step: int) -> float:
        drawn = np.random.default_rng((seed, step)).choice(ranks, delayed, replace=False)
        return base_s + delay_s * bool((drawn == rank).any())

    return seconds


def heavy_tailed(median_s: float, sigma: float, seed: int = 0) -> Seconds:
    """Log-normal seconds, drawn for each rank and step."""
    return lambda rank, step: (
        median_s * float(np.random.default_rng((seed, step, rank)).lognormal(0.0, sigma))
    )
