"""Peers with steps of their own on real worker processes: the bits of the rule in one process.

The default tests of it share a fleet in ``test_three_workers``.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from atoll.exchange import Exchange, ExchangeRound, Pattern
from atoll.job import Optimizer, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, Run, built_in, difference
from benchmarks.real_workers import LoopbackFleet, as_job
from coordinator.client.prepare import prepare
from coordinator.messages.facts import PlanAdopted, RoundMet, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal
from strategies.exchanges import exchange_facts, make_rule
from strategies.exchanges.partners import groups_at
from tests.e2e.test_reconfigured import disturb
from tests.inprocess.exchange import run_round
from tests.inprocess.peers import LocalPeers, WholeModel
from worker.exchange.flat import flat_values, set_values
from worker.exchange.schedule import Groups

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(
    steps=6,
    n_micro=4,
    seed=17,
    optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5),
    exchange="diloco",
    local_steps=3,
)
SHARES = (range(1), range(1, 2), range(2, 4))
CUT = "cut:@1/@1/@2"


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(3) as started:
        yield started


def in_one_process(case: Case, exchange: Exchange) -> Run:
    """The rule among three peers that share out each step as the plan does, and meet whom it says."""
    (program,) = stage_programs(case.dag, (0,))
    model = WholeModel(program, case.training, case.tensors, states=case.states)
    ranks, last = (0, 1, 2), exchange.round_of(case.training.steps - 1)

    def meeting(number: int) -> Groups:
        if not exchange.gossips:
            return [ranks]
        groups = groups_at(exchange, ranks, len(ranks), case.training.seed, number) if number < last else ()
        both_read = exchange_facts(exchange.rule).pattern is Pattern.PUBLISHED
        return [*groups, *(group[::-1] for group in groups if both_read and len(group) > 1)]

    peers = LocalPeers(model, exchange, len(SHARES), micros=SHARES, groups=meeting)
    losses = []
    for step in range(case.training.steps):
        figures = peers.step(step, lambda rank, at: [case.batches(at)[m] for m in SHARES[rank]])
        weights = figures.weights or [float(len(share)) for share in SHARES]
        whole = math.fsum(weight * loss for weight, loss in zip(weights, figures.losses, strict=True))
        losses.append((whole / math.fsum(weights),))
    if exchange.gossips:  # whose last round makes one model
        models = {rank: flat_values(stage.trained) for rank, stage in enumerate(peers.stages)}
        rule, at = make_rule(Exchange("wagma")), ExchangeRound(last, ranks)
        answers = run_round(rule, models, dict.fromkeys(ranks), at, [ranks])
        set_values(peers.stages[0].trained, answers[0].result)
    state = peers.stages[0].snapshot()
    return Run(tuple(losses), {name: {"value": held["value"]} for name, held in state.items()})


def same(found: Run, expected: Run) -> None:
    """Fail unless the models have the same bits; the mean of the losses, by what each peer has counted, may
    differ in its last one."""
    assert difference(found, expected, 0) == 0.0
    for one, other in zip(found.figures, expected.figures, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-12)


def gossip_ends_in_the_bits_of_its_rule(fleet: LoopbackFleet, how: str) -> None:
    case = built_in("gpt2", replace(TRAINING, exchange=how, local_steps=2), 0.1)
    shown: list[str] = []
    found = fleet.train(prepare(as_job(case), partitioner=CUT), shown)
    assert fleet.plan is not None
    assert fleet.plan.exchange is not None
    assert bool(fleet.plan.exchange.pairs) == how.startswith("saps")
    with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
        facts = [from_record(record) for record in journal.replay()]
    rounds = [fact for fact in facts if isinstance(fact, RoundMet) and fact.job == fleet.job]
    assert [fact.step for fact in rounds] == [1, 3, 5]
    assert [fact.groups for fact in rounds] == [
        groups_at(fleet.plan.exchange, (0, 1, 2), 3, TRAINING.seed, number) for number in (0, 1)
    ] + [()]
    assert any("next, round" in words for words in shown)
    same(found, in_one_process(case, fleet.plan.exchange))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["swarm", "wagma"])
def test_gossip_ends_in_the_bits_of_its_rule_in_one_process(fleet: LoopbackFleet, rule: str) -> None:
    gossip_ends_in_the_bits_of_its_rule(fleet, rule)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["diloco", "saps:4", "swarm"])
def test_a_killed_peer_costs_no_step_and_an_idle_worker_joins_in_its_place(how: str) -> None:
    longer = replace(TRAINING, steps=150, exchange=how)
    case = built_in("gpt2", longer, 0.1)
    struck = ""
    with LoopbackFleet(4) as fleet:
        job = fleet.client.submit(prepare(as_job(case), partitioner=CUT)).job
        holders: list[str] = []
        shown: list[str] = []
        for update in fleet.client.watch(job):
            holders = [s.workers[0] for r in update.plan.replicas for s in r.stages] or holders
            shown.append(update.exchange)
            if not struck and update.step > 12:
                struck = holders[1]
                disturb(fleet, struck, signal.SIGKILL)
        assert update.state == "finished", update.reason
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == list(range(2, 150, 3))
    assert sum(isinstance(fact, PlanAdopted) for fact in facts) == 1  # nothing began anew
    rounds = [fact for fact in facts if isinstance(fact, RoundMet)]
    without = [fact for fact in rounds if fact.missing]
    assert without
    assert all(list(fact.missing) == [struck] for fact in without)
    assert all(len(fact.included) == 2 for fact in without)
    assert len(rounds[-1].included) == 3
    assert struck not in rounds[-1].included
    assert any("without" in words for words in shown)


@pytest.mark.slow
def test_a_job_goes_on_with_each_peers_own_state(fleet: LoopbackFleet) -> None:
    half = replace(built_in("gpt2", TRAINING, 0.1), training=replace(TRAINING, steps=3))
    whole = built_in("gpt2", TRAINING, 0.1)
    fleet.train(prepare(as_job(half), partitioner=CUT))
    found = fleet.train(prepare(as_job(whole), partitioner=CUT, resume_of=fleet.job))
    expected = in_one_process(whole, Exchange("diloco", every=3))
    assert difference(found, Run(expected.figures[3:], expected.state), 1) == 0.0
