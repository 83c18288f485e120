"""Who stands by for a stage repeats each committed step, sends nothing, and takes the stage as it is.

Real stages, links and gates in one process, as where a stage is lost (test_replay).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.errors import BadFrame
from atoll.messages.to_worker import Era, Replay, StepCommit
from tests.worker.compute.in_thread import in_thread
from tests.worker.compute.test_replay import (
    LINKS,
    RELINKED,
    SCALES,
    STEPS,
    World,
    assert_same,
    codecs,
    world,
)
from worker.cancel import Cancel
from worker.stage.steps.run import StageRun
from worker.transport.frames import Direction

__all__ = ["codecs", "world"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread")


class Beside:
    """A worker of a world that stands by for a stage from ``step`` on, with the state of ``checkpoint``."""

    def __init__(self, of: World, at: int, step: int, checkpoint: int) -> None:
        self.world, self.at = of, at
        before = of.assignments[at]
        self.name = f"{before.worker_of(at)}+"
        stages = list(before.plan.stages)
        stages[at] = replace(stages[at], worker=self.name)
        plan = replace(before.plan, replicas=(replace(before.plan.only, stages=tuple(stages)),))
        eras = (Era(1, 0, ()), Era(2, RELINKED, LINKS))
        replay = Replay(checkpoint, eras, tuple(SCALES[checkpoint:step]), ())
        self.assignment = replace(before, plan=plan, first_step=step, replay=replay, standby=True)
        for other in range(len(stages)):
            if other != at:
                of.bridges[before.worker_of(other)].gate.stand_by({self.name: at})
        of.join(self.assignment, checkpoint)
        state = of.states.get(checkpoint)
        self.run: StageRun = of.crew.run_of(
            self.assignment, None if state is None else {**of.made.tensors, **state}
        )
        self.links = of.crew.links.pop()
        self.run.open(checkpoint)
        of.heard()
        self.does(lambda: self.run.replay(Cancel(), lambda _: None, lambda _: None))

    def does(self, work: Callable[[], None]) -> None:
        """Have its compute thread do something."""
        in_thread(work)

    def repeat(self, step: int, newest: int) -> None:
        version = self.run.at(step).version
        commit = StepCommit("job", version, step, SCALES[step], store=False, evaluate=False, last=False)
        self.does(lambda: self.run.repeat(commit, newest, Cancel()))

    def promoted(self, step: int) -> None:
        """The plan is reconfigured; what this one has heard of is repeated before it takes the stage."""
        of = self.world
        of.version += 1
        replica = replace(of.crew.runs[0].at(step).plan.only, stages=self.assignment.plan.stages)
        plan = replace(self.assignment.plan, version=of.version, replicas=(replica,))
        of.assignments = [replace(a, version=of.version, plan=plan, first_step=step) for a in of.assignments]
        for at, run in enumerate(of.crew.runs):
            if at != self.at:
                a = of.assignments[at]
                of.bridges[a.worker_of(at)].gate.reconfigure(of.stages(a), of.version, step)
                run.reconfigure(run.assignment.reconfigured(plan, run.assignment.links, step))
        mine = of.assignments[self.at]
        of.bridges[self.name].gate.reconfigure(of.stages(mine), of.version, step, repeating=True)

    def takes_over(self, step: int) -> None:
        plan = self.world.assignments[self.at].plan
        self.run.reconfigure(self.run.assignment.reconfigured(plan, self.assignment.links, step))
        self.world.crew.runs[self.at], self.world.crew.links[self.at] = self.run, self.links
        self.world.heard()


@pytest.mark.parametrize(("at", "begun", "checkpoint"), [(1, 3, 1), (1, 1, 0), (0, 2, 2), (2, 1, 1)])
def test_a_standby_that_lags_repeats_what_it_has_heard_of_and_ends_with_the_same_bits(
    world: Callable[..., World], at: int, begun: int, checkpoint: int
) -> None:
    """Also where links that were announced before it came change while it stands by."""
    undisturbed, disturbed = world("branches"), world("branches")
    undisturbed.train(0, STEPS)
    disturbed.train(0, begun)
    standby = Beside(disturbed, at, begun, checkpoint)
    for step in range(begun, 5):
        disturbed.train(step, step + 1)
        if step < 4:
            standby.repeat(step, step)
    disturbed.lose((at,), 5)
    standby.promoted(5)
    standby.repeat(4, 4)
    with pytest.raises(BadFrame, match="on the state after 5 steps"):
        standby.repeat(4, 4)
    standby.takes_over(5)
    assert_same(disturbed.crew.snapshot(), undisturbed.states[5])
    disturbed.train(5, STEPS)
    assert_same(disturbed.crew.snapshot(), undisturbed.states[STEPS])
    assert disturbed.packets() == undisturbed.packets()


def test_what_a_standby_is_sent_goes_behind_everything_else_and_it_sends_nothing(
    world: Callable[..., World],
) -> None:
    made = world("branches")
    made.train(0, 2)
    standby = Beside(made, 1, 2, 0)
    for step in (2, 3):
        made.train(step, step + 1)
        standby.repeat(step, step)
    sent = [key for key in made.hub.port(standby.name).sent if key.direction is not Direction.REPLAY]
    assert sent == []
    for neighbour in ("w-0", "w-2"):
        repeated = {key for key in made.hub.port(neighbour).behind if key.direction is not Direction.REPLAY}
        to_stage = {
            key
            for sender, peer, key in made.hub.sent
            if (sender, peer) == (neighbour, "w-1")
            and key.direction not in (Direction.EVALUATION, Direction.EVALUATION_CODED)
        }
        assert repeated == to_stage
    assert_same(standby.run.snapshot(), {n: made.states[4][n] for n in standby.run.snapshot()})


def test_nobody_is_sent_messages_of_a_stage_who_does_not_stand_by_for_it(world: Callable[..., World]) -> None:
    made = world("branches")
    made.train(0, 2)
    Beside(made, 1, 2, 0)
    gate = made.bridges["w-0"].gate
    assert gate._may_ask("w-1+", next(iter(made.hub.packets))._replace(direction=Direction.REPLAY))
    gate.stand_by({})
    assert not gate._may_ask("w-1+", next(iter(made.hub.packets))._replace(direction=Direction.REPLAY))
