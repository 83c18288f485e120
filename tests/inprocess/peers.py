"""Ranks that each train the whole model, in one process, and exchange by any rule, on simulated time.

The same Stage, rules and rounds as over real links. One step of a rank is a forward and backward of its own
micro-batches; a rule of gradients exchanges before the optimizer's step, others exchange after every
``exchange.every`` steps. Buffers that training writes (batch-norm statistics) stay with each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from atoll.collective import group_size
from atoll.errors import UsageError
from atoll.exchange import Content, Exchange, ExchangeRound, Partners, Pattern, check_exchange
from atoll.microbatch import one_f_one_b
from atoll.program import PiecePrograms
from strategies.exchanges import exchange_facts, make_rule
from tests.inprocess.exchange import Answer, later, run_round
from tests.strategies.exchanges.butterfly import butterfly_groups
from worker.exchange.flat import by_name, flat_of, flat_values, row_of, set_values
from worker.stage.stage import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.job import TrainingSpec
    from atoll.opdag import StateMeta
    from atoll.program import StageProgram
    from tests.inprocess.network import SimulatedNetwork
    from worker.exchange.schedule import Groups

    Inputs = Mapping[str, Tensor]

Batches = Callable[[int, int], Sequence["Inputs"]]
"""(rank, step) -> that rank's micro-batches of the step."""
GroupsOf = Callable[[int], "Groups"]
"""(round) -> who exchanges with whom."""
Seconds = Callable[[int, int], float]
"""(rank, step) -> simulated seconds of the rank's forward and backward."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step of all ranks. ``time_s``: simulated, when the last rank was done; ``sent_bytes`` by rank."""

    step: int
    losses: tuple[float, ...]
    time_s: float
    sent_bytes: tuple[int, ...]
    weights: tuple[float, ...] = ()  # of the losses, where they are of sums over a count

    @property
    def loss(self) -> float:
        """Mean over the ranks."""
        return math.fsum(self.losses) / len(self.losses)


@dataclass(frozen=True)
class WholeModel:
    """A model as one stage: its program, how it is trained, and its tensors as ``Stage`` takes them."""

    program: StageProgram
    training: TrainingSpec
    tensors: Mapping[str, Mapping[str, Tensor]]
    eval_program: StageProgram | None = None
    states: Mapping[str, StateMeta] | None = None


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A round's answers, used after step ``used_at``; ``ready_s`` [ranks]: when each has them."""

    used_at: int
    answers: Mapping[int, Answer]
    ready_s: Sequence[float]


class LocalPeers:
    """``ranks`` copies of a one-stage program under one exchange. UsageError for a program of several stages
    or a rule that cannot have as many ranks; PlanError for an exchange out of its ranges."""

    def __init__(
        self,
        model: WholeModel,
        exchange: Exchange,
        ranks: int,
        *,
        groups: GroupsOf | None = None,
        network: SimulatedNetwork | None = None,
        seconds: Seconds = lambda rank, step: 0.0,
        micros: Sequence[range] | None = None,
    ) -> None:
        """``micros``: of a step that each rank has, as the peers of a plan share it out; without, each draws
        its own, as many as the training declares."""
        program, training = model.program, model.training
        if program.n_stages != 1:
            raise UsageError(f"a program of {program.n_stages} stages; a peer holds the whole model")
        self.training = training
        self.ranks = tuple(range(ranks))
        self._micros = micros or [range(training.n_micro)] * ranks
        self.stages = [
            Stage(
                [PiecePrograms(program, model.eval_program)],
                replace(training, n_micro=len(own), blocks=1)
                if micros
                else replace(training, seed=training.seed + rank),
                model.tensors,
                states=model.states,
                actions=one_f_one_b(len(own), 0, first=own.start),
            )
            for rank, own in enumerate(self._micros)
        ]
        self.network, self._seconds = network, seconds
        self._groups = groups or self._default_groups
        self._rounds = 0
        self._first: int | None = None  # step that was the first here
        self._under_way: list[_UnderWay] = []
        self.shares: tuple[float, ...] = ()  # of the ranks in the next round; none: all alike
        self.begin(exchange)

    def begin(self, exchange: Exchange) -> None:
        """Exchange by ``exchange`` from the next step on. UsageError while the ranks' models differ or a
        result is still to be used: a rule begins with equal models."""
        check_exchange(exchange)
        first, *others = (flat_values(stage.trained) for stage in self.stages)
        if self._under_way or not all(torch.equal(first, other) for other in others):
            raise UsageError(f"exchange {exchange.rule!r} begins with equal models and no round under way")
        self.exchange = exchange
        self.rule, self.facts = make_rule(exchange), exchange_facts(exchange.rule)
        if self.facts.content is Content.GRADIENT and self.stages[0].program.weight is not None:
            raise UsageError(
                f"{exchange.rule} exchanges gradients, which are of sums here: return the loss as a mean"
            )
        flat = row_of(self.stages[0].trained)
        own = torch.zeros_like(first) if self.facts.content is Content.GRADIENT else first
        self.rule_states = {rank: self.rule.init(flat, own) for rank in self.ranks}

    def step(self, step: int, batches: Batches, late: Collection[int] = ()) -> StepFigures:
        """Compute ``step`` at every rank, exchange when it is due, and report. The first step may be any: a
        job goes on from there. ``late``: ranks that do not take it."""
        if self._first is None:
            self._first, self._rounds = step, self.exchange.round_of(step)
        losses, weights, norms = [], [], []
        for rank, stage in enumerate(self.stages):
            if rank in late:
                continue
            stage.begin_step(step)
            for micro, batch in zip(self._micros[rank], batches(rank, step), strict=True):
                stage.forward(micro, batch, {})
                stage.backward(micro, {})
            report = stage.finish_step()
            losses.append(report.step_loss.mean)
            weights.append(report.step_loss.weight)
            norms.append(report.square_norms)
            if self.network is not None:
                self.network.compute(rank, self._seconds(rank, step))
        sent = [0] * len(self.ranks)
        if self.facts.content is Content.GRADIENT:
            contents = {rank: _gradients(stage) for rank, stage in enumerate(self.stages)}
            answers = self._round(contents, sent)
            for rank, stage in enumerate(self.stages):
                self.rule_states[rank] = answers[rank].state
                for name, part in by_name(stage.trained, answers[rank].result.clone()).items():
                    stage.trained[name].grad = part
                norms[rank] = _square_norms(stage)
        taken = [stage for rank, stage in enumerate(self.stages) if rank not in late]
        for stage, squares, weight in zip(taken, norms, weights, strict=True):
            stage.apply(self.training.optimizer.gradient_scale(squares, weight))
        if self.facts.content is not Content.GRADIENT:
            self._exchange_models(step, sent)
        time_s = max(self.network.clock) if self.network is not None else 0.0
        counted = self.stages[0].program.weight is not None
        return StepFigures(step, tuple(losses), time_s, tuple(sent), tuple(weights) if counted else ())

    def evaluate(self, batches: Sequence[Inputs], *, average: bool = True) -> float:
        """Mean held-out loss of the ranks' average model, or of rank 0's."""
        stage = self.stages[0]
        own = flat_values(stage.trained)
        if average:
            set_values(stage.trained, self.average())
        for micro, batch in enumerate(batches):
            stage.evaluate_micro(micro, batch, {})
        found = stage.held_out_figures()
        set_values(stage.trained, own)
        if found is None:
            raise UsageError("nothing to evaluate on")
        return found.loss

    def average(self) -> Tensor:
        """Mean of the ranks' parameters, [n]."""
        values = [flat_values(stage.trained) for stage in self.stages]
        return values[0] if len(values) == 1 else torch.stack(values).mean(0)

    def spread(self) -> float:
        """Largest distance of an element from the ranks' mean."""
        mean = self.average()
        return max(float((flat_values(stage.trained) - mean).abs().max()) for stage in self.stages)

    def _exchange_models(self, step: int, sent: list[int]) -> None:
        whole = (self.exchange.round_of(step) + 1) * self.exchange.every
        # One that begins between a contribution and its use has it after its first step.
        if step + 1 == whole or (step == self._first and step + 1 > whole):
            contents = {rank: flat_values(stage.trained) for rank, stage in enumerate(self.stages)}
            before = list(self.network.clock) if self.network is not None else []
            answers = self._round(contents, sent)
            ready = list(self.network.clock) if self.network is not None else []
            if self.network is not None and self.exchange.delay:
                self.network.clock[:] = before  # ranks compute while the round is under way
            self._under_way.append(_UnderWay(whole + self.exchange.delay - 1, answers, ready))
        while self._under_way and self._under_way[0].used_at <= step:
            due = self._under_way.pop(0)
            if self.network is not None:
                self.network.clock[:] = map(max, self.network.clock, due.ready_s)
            for rank, stage in enumerate(self.stages):
                answer = due.answers[rank]
                if self.exchange.delay:
                    answer = later(self.rule, answer, flat_values(stage.trained))
                self.rule_states[rank] = answer.state
                set_values(stage.trained, answer.result)

    def _default_groups(self, number: int) -> Groups:
        return default_groups(self.exchange, self.ranks, self.training.seed, number)

    def _round(self, contents: Mapping[int, Tensor], sent: list[int]) -> dict[int, Answer]:
        at = ExchangeRound(self._rounds, self.ranks, self.training.seed, self.shares)
        self._rounds += 1
        bring = None if self.network is None else self.network.carry
        answers = run_round(self.rule, contents, self.rule_states, at, self._groups(at.number), bring=bring)
        for rank, answer in answers.items():
            sent[rank] += sum(receipt.sent_bytes for receipt in answer.receipts)
        return answers


def default_groups(exchange: Exchange, ranks: Sequence[int], seed: int, number: int) -> Groups:
    """All ranks, the butterfly's groups, or pairs drawn by (seed, round), as the rule exchanges."""
    facts = exchange_facts(exchange.rule)
    everybody = facts.everybody_every and (number + 1) % facts.everybody_every == 0
    if facts.partners is Partners.ALL or everybody:
        return [tuple(ranks)]
    if facts.partners is Partners.GROUPS:
        return list(butterfly_groups(ranks, group_size(len(ranks)), number))
    drawn = np.random.Generator(np.random.Philox(key=seed, counter=number)).permutation(len(ranks))
    order = [ranks[at] for at in drawn]
    if facts.pattern is Pattern.PUBLISHED:
        return list(zip(order, [*order[1:], order[0]], strict=True))
    return list(zip(order[0::2], order[1::2], strict=False))


def _gradients(stage: Stage) -> Tensor:
    """A stage's gradients in one row, zero where there is none."""
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in stage.trained.items()}
    return flat_of(stage.trained, found)


def _square_norms(stage: Stage) -> tuple[float, ...]:
    """Sums of squares of the gradients as they stand, in float64."""
    return tuple(
        float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        for parameter in stage.trained.values()
        if parameter.grad is not None
    )
