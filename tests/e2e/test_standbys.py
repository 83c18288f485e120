"""Real workers stand by, and take the place of who is killed or leaves: the bits of an undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.oracle import built_in, run_local
from benchmarks.real_workers import LoopbackFleet, as_job, cut_at
from coordinator.client.prepare import prepare
from coordinator.messages.facts import PlanAdopted, Reconfigured, StepCommitted, from_record
from coordinator.storage.journal import StoredJournal
from tests.e2e.test_reconfigured import FIRST, LAST, MIDDLE, TRAINING, disturb, logged, thirds

STEPS = 2000  # who stood by and fell behind rests for two minutes, and then has to come to stand by again
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "losses",
    [
        [(MIDDLE, signal.SIGKILL)],
        [(FIRST, signal.SIGTERM), (LAST, signal.SIGKILL)],
    ],
    ids=["killed", "left then killed"],
)
def test_the_standby_takes_over_with_the_same_bits(
    tmp_path: Path, losses: Sequence[tuple[int, signal.Signals]]
) -> None:
    torch.set_num_threads(1)
    case = built_in("branches", replace(TRAINING, steps=STEPS), 0.1)
    due, holders, awaited = list(losses), list[str](), list[str]()
    struck = 0  # version of the plan that was last disturbed; a faster worker may make another one meanwhile
    with LoopbackFleet(6, options=("--log-json",)) as fleet:
        reply = fleet.client.submit(prepare(as_job(case), partitioner=cut_at(thirds(case)), standbys=3))
        for update in fleet.client.watch(reply.job):
            holders = [stage.workers[0] for stage in update.plan.stages] or holders
            if due and update.plan_version > struck and update.state == "training":
                stage = update.stages[due[0][0]]
                if stage.standby and " behind; " in stage.standby_why:
                    awaited.append(stage.standby)
                    struck = update.plan_version
                    disturb(fleet, holders[due[0][0]], due.pop(0)[1])
        assert due == []
        assert update.state == "finished", update.reason
        path = tmp_path / "model.safetensors"
        fleet.client.export(reply.job, path)
        with closing(StoredJournal(fleet.state / "journal.sqlite")) as journal:
            facts = [(record.at_s, from_record(record)) for record in journal.replay()]
        reconfigured = logged(fleet, "stage.reconfigured")
    commits = [(at_s, fact.step) for at_s, fact in facts if isinstance(fact, StepCommitted)]
    assert [step for _, step in commits] == list(range(STEPS))
    assert sum(isinstance(fact, PlanAdopted) for _, fact in facts) == 1
    moves = [fact for _, fact in facts if isinstance(fact, Reconfigured)]
    for (stage, _), worker in zip(losses, awaited, strict=True):
        assert any(move.workers[stage] == worker and not move.newcomers for move in moves)
    assert len(reconfigured) >= 3 * len(losses)
    pauses = sorted(after - before for (before, _), (after, _) in pairwise(commits))
    print(f"longest pauses between commits: {[round(s, 2) for s in pauses[-len(losses) :]]} s")
    found, expected = load_file(path), run_local(case, (0,)).state
    trained = [name for name in expected if name in found]
    assert trained
    for name in trained:
        assert torch.equal(found[name], expected[name]["value"]), name
