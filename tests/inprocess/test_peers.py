"""Ranks in one process: one mean of gradients is one machine's step, and simulated time is the links'."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from atoll.errors import PlanError, UsageError
from atoll.exchange import Exchange
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, built_in
from experiments import exchanges  # noqa: F401 - adds the rules that run in one process alone
from tests.inprocess.network import SimulatedNetwork, uniform_network
from tests.inprocess.peers import LocalPeers, WholeModel
from worker.exchange.flat import flat_values

RANKS = 4
TRAINING = TrainingSpec(
    steps=3, n_micro=2, seed=3, optimizer=Optimizer(OptimizerName.SGD, lr=0.1, momentum=0.9, clip_norm=1.0)
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def mlp(n_micro: int = TRAINING.n_micro) -> Case:
    """Captured once: peers copy what they are given."""
    return built_in("mlp", replace(TRAINING, n_micro=n_micro), 0.0)


def peers(exchange: Exchange, ranks: int = RANKS, **options: object) -> tuple[Case, LocalPeers]:
    case = mlp()
    (program,) = stage_programs(case.dag, (0,))
    model = WholeModel(program, TRAINING, case.tensors, states=case.states)
    return case, LocalPeers(model, exchange, ranks, **options)  # type: ignore[arg-type]


def share(case: Case, rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step that one machine does in RANKS times as many."""
    whole = mlp(RANKS * case.training.n_micro)
    return whole.batches(step)[rank * TRAINING.n_micro : (rank + 1) * TRAINING.n_micro]


def test_the_mean_of_gradients_is_one_machines_step() -> None:
    case, several = peers(Exchange("mean"))
    one_training = replace(TRAINING, n_micro=RANKS * TRAINING.n_micro)
    (program,) = stage_programs(case.dag, (0,))
    one = LocalPeers(WholeModel(program, one_training, case.tensors, states=case.states), Exchange("mean"), 1)
    whole = mlp(one_training.n_micro)
    for step in range(TRAINING.steps):
        figures = several.step(step, lambda rank, at: share(case, rank, at))
        alone = one.step(step, lambda rank, at: whole.batches(at))
        assert figures.loss == pytest.approx(alone.loss, rel=1e-5)
    assert torch.allclose(several.average(), one.average(), atol=1e-6)
    assert several.spread() == 0.0
    assert one.step(9, lambda rank, at: whole.batches(0)).sent_bytes == (0,)


def test_simulated_time_is_compute_and_what_the_links_carry() -> None:
    rate, delay_s = 1e6, 0.05
    case, several = peers(
        Exchange("mean"), network=uniform_network(RANKS, rate, delay_s), seconds=lambda rank, step: 1.0 + rank
    )
    figures = several.step(0, lambda rank, step: share(case, rank, step))
    size = 4 * len(flat_values(several.stages[0].trained))
    assert max(figures.sent_bytes) == pytest.approx(2 * size * (RANKS - 1) / RANKS, rel=0.15)
    # The slowest begins last: its parts go out, then totals come in.
    least_s = RANKS + 2 * delay_s + 2 * size * (RANKS - 1) / RANKS / rate
    assert RANKS + 2 * delay_s < figures.time_s < 1.2 * least_s


def test_a_slow_pair_is_slow_for_its_own_messages_alone() -> None:
    rates = [[1e6] * 2, [1e3, 1e6]]
    network = SimulatedNetwork(rates)
    case, several = peers(Exchange("mean"), 2, network=network)
    figures = several.step(0, lambda rank, step: case.batches(step))
    assert figures.time_s == pytest.approx(figures.sent_bytes[1] / 1e3, rel=0.1)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="rounds would overlap"):
        peers(Exchange("mean", every=2, delay=2))
    case = mlp()
    programs = stage_programs(case.dag, (0, case.dag.cuttable()[0]))
    with pytest.raises(UsageError, match="holds the whole model"):
        LocalPeers(WholeModel(programs[0], TRAINING, case.tensors), Exchange("mean"), 2)


@pytest.mark.parametrize("rule", ["saps", "swarm", "wagma", "eager"])
def test_gossiping_peers_train_together(rule: str) -> None:
    case, several = peers(Exchange(rule, ratio=2.0 if rule == "saps" else 1.0))
    figures = [several.step(step, lambda rank, at: share(case, rank, 0)) for step in range(4)]
    assert figures[-1].loss < figures[0].loss
    assert all(min(one.sent_bytes) > 0 for one in figures)
    spread = several.spread()
    assert spread == 0.0 if rule == "eager" else 0.0 < spread < 0.2


def test_an_exchange_begins_between_two_steps_with_equal_models() -> None:
    case, several = peers(Exchange("mean"))
    several.step(0, lambda rank, at: share(case, rank, at))
    several.begin(Exchange("diloco", every=2))
    start = several.average()
    assert torch.equal(several.rule_states[0].outer, start)
    sent = [several.step(step, lambda rank, at: share(case, rank, at)).sent_bytes for step in (1, 2)]
    assert min(sent[0]) > 0
    assert sent[1] == (0,) * RANKS
    with pytest.raises(UsageError, match="begins with equal models"):
        several.begin(Exchange("mean"))


def test_a_delayed_round_passes_while_ranks_compute() -> None:
    times = {}
    for delay in (0, 2):
        exchange = Exchange("streaming_diloco", every=3, delay=delay)
        case, several = peers(
            exchange, network=uniform_network(RANKS, 1e5, 0.05), seconds=lambda rank, step: 1.0
        )
        batches = [share(case, rank, 0) for rank in range(RANKS)]
        figures = [several.step(step, lambda rank, at, own=batches: own[rank]) for step in range(6)]  # type: ignore[misc]
        times[delay] = [one.time_s for one in figures]
    assert times[0][2] > 3.0  # waits for the round
    assert times[2][2] == 3.0
    assert times[2][4] == 5.0  # used, and long since there
    assert times[2][5] == 6.0
    assert times[0][5] > 6.0 + 1.9 * (times[0][2] - 3.0)
