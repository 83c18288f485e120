"""A real worker whose gradients are wrong, though finite, is found by two others, named and left out.

What was trained with it is done anew: the job ends with the bits of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest
import torch

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import Case, Run, built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from coordinator.messages.facts import SpotChecked, StepCommitted, WorkRejected, from_record
from coordinator.storage.journal import StoredJournal

SHARE, CHEATS_FROM = 0.2, 25
REPEATING = 40
"""Steps that are committed while two workers load and repeat."""
TRAINING = TrainingSpec(
    steps=100,
    n_micro=4,
    seed=3,
    optimizer=Optimizer(lr=3e-3, clip_norm=0.5),
    checkpoint_every=10,
    spot_checks=SHARE,
)

pytestmark = pytest.mark.slow


class CheatedFleet(LoopbackFleet):
    """``worker1`` computes other gradients, the rest are honest."""

    def join_command(self, name: str) -> list[str]:
        module, *more = super().join_command(name)
        return ["tests.e2e.cheating_worker" if name == "worker1" else module, *more]

    def run_in_place(self, case: Case, starts: Sequence[int]) -> Run:
        """Train a case, cut at ``starts``; nobody takes the cheat's place before it is found."""
        return self.train(prepare(as_job(case), partitioner=cut_at(starts), standbys=0))

    def facts(self, *kinds: type) -> Sequence[object]:
        """Facts of these kinds in the coordinator's journal."""
        with closing(StoredJournal(self.state / "journal.sqlite")) as journal:
            return [fact for fact in map(from_record, journal.replay()) if isinstance(fact, kinds)]


def test_a_worker_with_wrong_gradients_is_named_and_its_work_done_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("CHEATS_FROM", str(CHEATS_FROM))
    case = built_in("branches", TRAINING, 0.1)
    positions = case.dag.cuttable()
    half = (0, positions[len(positions) // 2])
    with CheatedFleet(5) as fleet:
        run = fleet.run_in_place(case, half)
        names = {w.worker: w.name for w in fleet.client.status().workers}
        reasons = {w.name: w.reason for w in fleet.client.status().workers}
        (rejected,) = fleet.facts(WorkRejected)
        agreed = fleet.facts(SpotChecked)
        committed = [fact.step for fact in fleet.facts(StepCommitted) if isinstance(fact, StepCommitted)]
    assert isinstance(rejected, WorkRejected)
    assert names[rejected.worker] == "worker1"
    assert reasons["worker1"].startswith("quarantined: wrong: worker1 ")
    assert rejected.step <= CHEATS_FROM
    again = committed.index(rejected.step, rejected.step + 1)
    print(f"wrong from step {CHEATS_FROM}, found after {committed[again - 1] + 1}, back to {rejected.step}")
    assert committed[again - 1] - CHEATS_FROM <= 2 * 2 / SHARE + REPEATING
    assert agreed
    alone = run_local(case, half)
    assert [row[0] for row in run.figures] == [row[0] for row in alone.figures]
    trained = [name for name in alone.state if name in run.state]  # of tied ones the file has each name
    assert trained
    for name in trained:
        assert torch.equal(run.state[name]["value"], alone.state[name]["value"]), name
