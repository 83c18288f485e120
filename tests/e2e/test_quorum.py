"""Rounds that begin early, on real worker processes: the bits of one process with these steps and shares."""

from __future__ import annotations

from contextlib import closing

import pytest

from atoll.exchange import Exchange
from atoll.job import Optimizer, TrainingSpec
from atoll.program import stage_programs
from benchmarks.oracle import Case, Run, built_in
from benchmarks.real_workers import LoopbackFleet, as_job
from coordinator.client.prepare import prepare
from coordinator.messages.facts import RoundMet, from_record
from coordinator.storage.journal import StoredJournal
from tests.e2e.test_local_steps import same
from tests.inprocess.peers import LocalPeers, WholeModel

pytestmark = pytest.mark.usefixtures("one_thread")
SHARES = (range(1), range(1, 2), range(2, 8))  # the last peer's steps take six times as long
EVERY = 5
TRAINING = TrainingSpec(
    steps=15,
    n_micro=8,
    seed=17,
    optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5),
    exchange="diloco",
    local_steps=EVERY,
    quorum=2,
)


def in_one_process(case: Case, rounds: list[RoundMet], workers: list[str]) -> Run:
    """The same peers, each with the steps that the journal says that it has taken."""
    (program,) = stage_programs(case.dag, (0,))
    model = WholeModel(program, case.training, case.tensors, states=case.states)
    peers = LocalPeers(model, Exchange("diloco", every=EVERY), len(SHARES), micros=SHARES)
    for number, met in enumerate(rounds):
        taken = [met.late.get(worker, EVERY) for worker in workers]
        samples = [steps * len(share) for steps, share in zip(taken, SHARES, strict=True)]
        peers.shares = tuple(each / max(samples) for each in samples)
        for at in range(EVERY):
            late = [rank for rank, steps in enumerate(taken) if at >= steps]
            peers.step(
                number * EVERY + at, lambda rank, step: [case.batches(step)[m] for m in SHARES[rank]], late
            )
    state = peers.stages[0].snapshot()
    return Run((), {name: {"value": held["value"]} for name, held in state.items()})


@pytest.mark.slow
def test_a_slow_peer_brings_what_it_has_and_all_have_the_bits_of_one_process() -> None:
    case = built_in("gpt2", TRAINING, 0.1)
    with LoopbackFleet(3) as fleet:
        found = fleet.train(prepare(as_job(case), partitioner="cut:@1/@1/@6"))
        assert fleet.plan is not None
        workers = [replica.stages[0].worker for replica in fleet.plan.replicas]
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [from_record(record) for record in journal.replay()]
    rounds = [fact for fact in facts if isinstance(fact, RoundMet)]
    assert [(fact.step, len(fact.included)) for fact in rounds] == [(4, 3), (9, 3), (14, 3)]
    assert any(fact.late.get(workers[2], EVERY) < EVERY for fact in rounds)
    wanted = in_one_process(case, rounds, workers)
    same(Run((), found.state), wanted)
