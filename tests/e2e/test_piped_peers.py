"""Peers that are pipelines with steps of their own, on real worker processes: the bits of whole peers."""

from __future__ import annotations

import math
import signal
from contextlib import closing
from dataclasses import replace

import pytest

from atoll.exchange import Exchange
from atoll.job import Optimizer, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, Run, built_in
from benchmarks.real_workers import LoopbackFleet, as_job
from coordinator.client.prepare import prepare
from coordinator.messages.facts import PlanAdopted, Reconfigured, RoundMet, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal
from tests.e2e.test_local_steps import same
from tests.e2e.test_reconfigured import disturb
from tests.inprocess.peers import LocalPeers, WholeModel

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(
    steps=6,
    n_micro=4,
    seed=17,
    optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5),
    exchange="diloco",
    local_steps=3,
)
SHARES = (range(2), range(2, 4))


def cut(case: Case) -> str:
    """Two replicas of three and two stages, each for half of a step."""
    positions = [at for at in case.dag.cuttable() if at]
    third, half = positions[len(positions) // 3], positions[len(positions) // 2]
    later = positions[2 * len(positions) // 3]
    return f"cut:{third},{later}@2/{half}@2"


def whole_peers(case: Case) -> Run:
    (program,) = stage_programs(case.dag, (0,))
    model = WholeModel(program, case.training, case.tensors, states=case.states)
    exchange = Exchange("diloco", every=TRAINING.local_steps)
    peers = LocalPeers(model, exchange, len(SHARES), micros=SHARES)
    losses = []
    for step in range(case.training.steps):
        figures = peers.step(step, lambda rank, at: [case.batches(at)[m] for m in SHARES[rank]])
        weights = figures.weights or [float(len(share)) for share in SHARES]
        whole = math.fsum(weight * loss for weight, loss in zip(weights, figures.losses, strict=True))
        losses.append((whole / math.fsum(weights),))
    state = peers.stages[0].snapshot()
    return Run(tuple(losses), {name: {"value": held["value"]} for name, held in state.items()})


@pytest.mark.slow
def test_replicas_of_three_and_two_stages_end_in_the_bits_of_whole_peers() -> None:
    case = built_in("gpt2", TRAINING, 0.1)
    with LoopbackFleet(5) as fleet:
        found = fleet.train(prepare(as_job(case), partitioner=cut(case)))
        assert fleet.plan is not None
        assert [len(replica.stages) for replica in fleet.plan.replicas] == [3, 2]
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    same(found, whole_peers(case))
    rounds = [fact for fact in facts if isinstance(fact, RoundMet)]
    assert [(fact.step, len(fact.included)) for fact in rounds] == [(2, 5), (5, 5)]


@pytest.mark.slow
def test_a_killed_stage_is_taken_over_within_its_peer_and_costs_the_other_no_step() -> None:
    """The idle worker repeats its peer's own steps and rounds since the checkpoint."""
    case = built_in("gpt2", replace(TRAINING, steps=90, local_steps=9), 0.1)
    struck, holders = "", list[str]()
    with LoopbackFleet(6) as fleet:
        job = fleet.client.submit(prepare(as_job(case), partitioner=cut(case))).job
        for update in fleet.client.watch(job):
            holders = [s.workers[0] for r in update.plan.replicas for s in r.stages] or holders
            if not struck and holders and update.step > 12:
                struck = holders[1]
                disturb(fleet, struck, signal.SIGKILL)
        assert update.state == "finished", update.reason
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    assert [fact.step for fact in facts if isinstance(fact, StepCommitted)] == list(range(8, 90, 9))
    assert sum(isinstance(fact, PlanAdopted) for fact in facts) == 1  # nothing began anew
    (moved,) = [fact for fact in facts if isinstance(fact, Reconfigured)]
    assert "takes over rank 1, repeating" in moved.reason
    rounds = [fact for fact in facts if isinstance(fact, RoundMet)]
    assert all(len(fact.included) == 5 and not fact.missing for fact in rounds)
    assert struck not in rounds[-1].included
