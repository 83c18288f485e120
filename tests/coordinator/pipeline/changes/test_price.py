"""What a loss costs is said with the figures at hand, and by whom the stage would be taken over."""

from __future__ import annotations

import pytest

from coordinator.messages import events as ev
from coordinator.messages.jobs import Price
from coordinator.pipeline.changes.recovery import loss_prices
from coordinator.services.owners.views import job_update
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, spec, store
from tests.sim.scripted import Scripted


def costs(world: Scripted) -> list[Price]:
    return loss_prices(world.state(), world.scheduler.ledger.jobs[JOB], world.scheduler.roster)


def trained(*workers: str, steps: int = 4) -> Scripted:
    """Each stage is busy 0.25 s of a second, and stage 1 takes 3 s to load."""
    world = Scripted(stages=2, fewest=2)
    world.join(*workers)
    world.submit(what=spec(2, checkpoint_every=3))
    assert costs(world) == []
    for worker, took_s in zip(world.holders(), (1.0, 3.0), strict=True):
        world.says(worker, ev.Loaded(JOB, 1, took_s))
    for _ in range(steps):
        world.settle(1.0)
        for worker in world.holders():
            world.ready(worker, square_norms=(1.0,), forward_s=0.125, backward_s=0.125)
    return world


def test_who_repeats_does_so_at_the_speed_of_its_stage_and_all_together_at_that_of_a_step() -> None:
    with_spare, without = trained("a", "b", "c"), trained("a", "b")
    assert [cost.pause_s for cost in costs(with_spare)] == pytest.approx([2 + 1 + 4 * 0.25, 2 + 3 + 4 * 0.25])
    assert [cost.pause_s for cost in costs(without)] == pytest.approx([2 + 15 + 3 + 4 * 1.0] * 2)
    assert "c takes over: 2.0 s to notice, 3.0 s to load, 4 steps of 0.25 s" in costs(with_spare)[1].why
    why = costs(without)[1].why
    assert why.startswith(
        "back to step 0 (no idle worker can take over stage 1): 2.0 s to notice, about 15 s to plan"
    )


def test_a_replica_beside_a_whole_one_costs_the_time_to_notice_it() -> None:
    world = Scripted(stages=1, fewest=1)
    world.join("a", "b")
    world.submit(what=spec(1, n_micro=2, blocks=2, replicas="2"))
    for worker in "ab":
        world.says(worker, ev.Loaded(JOB, 1, 1.0))
    for _ in range(2):
        for worker in "ab":
            world.ready(worker, square_norms=(1.0,), losses=(0.5,))
    for cost in costs(world):
        assert cost.pause_s == 2.0
        assert cost.why == (
            "the other replicas continue without it: 2.0 s to notice; no idle worker can take over stage 0"
        )


def test_messages_count_where_they_take_longer_than_computing() -> None:
    world = trained("a", "b", "c", steps=0)
    world.scheduler.roster.links.table.believe(("a", "c"), 8e6)  # who takes over has links of its own
    link = ev.Goodput("b", 2_000_000, 2.0, 0.0, 2_000_000)
    world.wait(3.0)
    world.ready("a", forward_s=0.1, links=(link,))
    world.ready("b", forward_s=0.1)
    assert costs(world)[1].pause_s == pytest.approx(2 + 3 + 2.0, rel=0.01)


def test_a_checkpoint_makes_a_loss_cheap_and_updates_show_it() -> None:
    world = trained("a", "b", "c")
    store(world, 3)
    assert costs(world)[0].pause_s == pytest.approx(2 + 1 + 1 * 0.25)
    shown = job_update(world.scheduler, JOB, 0.0).stages[0]
    assert (shown.replace_s, shown.replace_why) == (costs(world)[0].pause_s, costs(world)[0].why)
    plain = job_update(world.scheduler, JOB, 0.0, with_costs=False).stages[0]
    assert not plain.HasField("replace_s")
