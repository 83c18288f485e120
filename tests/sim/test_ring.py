"""A plan that uses every worker: what a loss costs, with snapshots that its ranks keep for each other."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from atoll.job import JobSpec
from coordinator.messages.events import StateStored
from coordinator.messages.facts import CheckpointStored, StepCommitted, from_record
from coordinator.messages.jobs import FromRank, JobState
from coordinator.pipeline import ring, snapshots
from coordinator.pipeline.changes.recovery import Price, loss_words
from tests.parameters import sampled
from tests.sim.checks import Violation
from tests.sim.faults import Crash, Fault, KillCoordinator, Outage
from tests.sim.world import Scenario, World

JOB = "job-1"
MOST_AGAIN_S = 30.0
MINUTE_S = 65.0  # of training, from when the job has begun at the latest
STEPS = 180


class Default(World):
    """Jobs that leave it to us when checkpoints are stored."""

    def submit(self, job: str, spec: JobSpec, after_s: float) -> None:
        training = replace(spec.training, checkpoint_every=0, eval_every=0, spot_checks=0.0)
        super().submit(job, replace(spec, training=training), after_s)


def ran(seed: int, *faults: Fault, workers: int = 3) -> World:
    world = Default(Scenario(seed, workers=workers, steps=STEPS, faults=faults))
    world.run()
    assert world.coordinator.shadow.jobs[JOB].outcome == "finished"
    return world


def done_again(world: World) -> list[tuple[int, float]]:
    """Return the steps, and the seconds of training, that were done again, by each time that happened."""
    at_s: dict[int, float] = {}
    found: list[tuple[int, float]] = []
    for record in world.coordinator.folder.records:
        fact = from_record(record)
        if not isinstance(fact, StepCommitted):
            continue
        newest = max(at_s, default=-1)
        if fact.step <= newest:
            found.append((newest + 1 - fact.step, at_s[newest] - at_s.get(fact.step - 1, min(at_s.values()))))
            at_s = {step: when for step, when in at_s.items() if step < fact.step}
        at_s[fact.step] = record.at_s
    return found


@pytest.mark.parametrize("seed", sampled(4, range(20)))
def test_a_worker_of_three_is_killed_and_at_most_half_a_minute_is_done_again(seed: int) -> None:
    random = Random(seed)
    world = ran(seed, Crash(round(MINUTE_S + 20.0 * random.random(), 2), 0.0, f"w{random.randrange(3)}"))
    ((steps, seconds),) = done_again(world)
    assert steps > 0
    assert seconds <= MOST_AGAIN_S


def test_neighbours_that_are_lost_together_send_the_job_back_to_its_checkpoint() -> None:
    """Both copies of a part are gone."""
    world = ran(1, Outage(MINUTE_S, 0.0, "w0", "w1"))
    ((_, seconds),) = done_again(world)
    assert seconds > MOST_AGAIN_S


def test_who_was_away_for_a_moment_still_has_its_copies() -> None:
    world = ran(1, Outage(MINUTE_S, 8.0, "w0", "w1"))
    ((_, seconds),) = done_again(world)
    assert seconds <= MOST_AGAIN_S


def test_a_snapshot_that_nobody_else_keeps_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each rank keeps its own part, and no other's."""
    honest = ring.keepers_of
    monkeypatch.setattr(ring, "keepers_of", lambda *of: tuple((own, own) for own, _ in honest(*of)))
    world = ran(4, Crash(MINUTE_S, 0.0, "w1"))
    ((_, seconds),) = done_again(world)
    assert seconds > MOST_AGAIN_S


def test_parts_of_two_steps_are_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a rank's part is that of the snapshot before."""
    honest = snapshots.kept

    def bug(state: JobState, event: FromRank[StateStored]) -> Any:
        before = state.ring.held
        if before is not None and event.rank == 0:
            event = replace(event, message=replace(event.message, tensors=before.parts[0]))
        return honest(state, event)

    monkeypatch.setattr(snapshots, "kept", bug)
    with pytest.raises(Violation, match="is not that of an undisturbed run"):
        ran(5, Crash(MINUTE_S, 0.0, "w1"))


def test_no_snapshot_is_taken_where_somebody_idle_takes_over() -> None:
    world = ran(2, Crash(MINUTE_S, 0.0, "w1"), workers=5)
    assert done_again(world) == []
    assert [fact.step for fact in world.facts(CheckpointStored)] == [STEPS]


def test_links_without_time_for_a_snapshot_are_left_to_training_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = list[str]()
    honest = ring.Rings._look

    def look(self: ring.Rings, state: JobState) -> None:
        honest(self, state)
        words.append(loss_words(state, [Price(0.0)]))

    monkeypatch.setattr(ring.Rings, "_look", look)
    monkeypatch.setattr(ring, "predicted_s", lambda *_: 2000.0)
    world = ran(1, Crash(MINUTE_S, 0.0, "w1"))
    ((_, seconds),) = done_again(world)
    assert seconds > MOST_AGAIN_S
    assert "no snapshots: in what links have to spare beside training one takes 2000 s" in words[-1]


def test_a_snapshot_that_takes_longer_than_it_is_worth_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links were measured quicker than they are."""
    monkeypatch.setattr(snapshots, "kept", lambda state, event: (state, []))
    monkeypatch.setattr(ring, "predicted_s", lambda *_: 1.0)
    monkeypatch.setattr(ring, "worth_it", lambda took_s, *_: took_s < 25.0)
    rings = list[Any]()
    honest = ring.Rings._look

    def look(self: ring.Rings, state: JobState) -> None:
        honest(self, state)
        rings.append(state.ring)

    monkeypatch.setattr(ring.Rings, "_look", look)
    ran(1)
    given_up = [one for one in rings if one.failed]
    assert all(one.failed.startswith("no snapshots") and 25.0 <= one.took_s < 30.0 for one in given_up)
    assert max(one.asked_s for one in rings) < given_up[0].asked_s + 20 * given_up[0].took_s


def test_a_coordinator_that_was_killed_has_new_snapshots_soon() -> None:
    world = ran(3, KillCoordinator(MINUTE_S - 40.0, 0.5), Crash(MINUTE_S, 0.0, "w2"))
    ((_, seconds),) = done_again(world)
    assert seconds <= MOST_AGAIN_S
