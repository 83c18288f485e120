"""A stage that is lost in the midst of training is repeated by another worker: every bit is as it would be.

Real stages, links and gates in one process; what crosses goes through the arenas and the send logs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from atoll.errors import BadFrame, PlanError, StorageError
from atoll.messages.to_worker import Era, Replay
from atoll.microbatch import ScheduleName
from atoll.plan import LinkSpec, Mask
from compressors import catalogue
from tests.patience import HUNG_S
from tests.worker.compute.bridge import Bridge
from tests.worker.links import plain_codec
from tests.worker.links.hub import Hub
from tests.worker.stage.steps.crew import TRAINING, Case, Crew, assign, case, cut_evenly
from worker.cancel import Cancel
from worker.links.links import LinksAborted
from worker.stage.assignment import Assignment
from worker.stage.steps.run import StageRun
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction, MessageKey

if TYPE_CHECKING:
    from torch import Tensor

    State = dict[str, dict[str, Tensor]]

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 7
SCALES = [1.0, 0.5, 0.25, 1.0, 0.75, 1.0, 0.5]
RELINKED = 2
"""From this step on the links have codecs."""
PAIRS = [(s, t) for s in range(3) for t in range(3) if s != t]
LINKS = tuple(
    LinkSpec(s, t, "largest", 2.0, Mask.SAME if s > t else Mask.NONE)
    if (s, t) in ((0, 1), (1, 0))
    else LinkSpec(s, t, "counting", 1.0)
    for s, t in PAIRS
)


@pytest.fixture(autouse=True)
def codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends gradients at their values' positions, and one whose state goes on within a step."""
    plain_codec.offer(monkeypatch)
    monkeypatch.setattr(catalogue, "MIN_BYTES", 64)


class World:
    """Three stages, each of a worker of its own, until some are lost."""

    def __init__(self, made: Case, schedule: ScheduleName, folder: Path) -> None:
        self.made, self.folder, self.hub = made, folder, Hub()
        training = replace(TRAINING, steps=STEPS)
        self.assignments = assign(made, cut_evenly(made.dag, 3), training, schedule)
        self.bridges: dict[str, Bridge] = {}
        for a in self.assignments:
            self.join(a, 0)
        self.crew = Crew(made, self.assignments, lambda name: self.bridges[name].network)
        self.heard()
        self.version = 1
        self.states: dict[int, State] = {}
        self.moves: list[tuple[int, int]] = []  # version, first step

    def join(self, a: Assignment, first_step: int) -> None:
        me = a.worker_of(a.stage)
        self.bridges[me] = Bridge(
            self.hub, me, self.stages(a), folder=self.folder / me, version=a.version, first_step=first_step
        )

    def heard(self) -> None:
        """All gates know what their stages take: only then is a stage reported to be loaded."""
        for bridge in self.bridges.values():
            bridge.network.connect("job", 1, Cancel())

    @staticmethod
    def stages(a: Assignment) -> dict[str, int]:
        return {spec.worker: at for at, spec in enumerate(a.plan.stages) if at != a.stage}

    def train(self, first: int, stop: int, *, links: Sequence[LinkSpec] = LINKS) -> None:
        for step in range(first, stop):
            self.crew.all("run_step", step, Cancel())
            if step == RELINKED - 2:
                self.version += 1
                self.crew.all("relink", self.version, RELINKED, links)
            self.crew.all("apply", step, SCALES[step])
            if step == 3:
                self.crew.all("evaluate", step, Cancel())
            self.states[step + 1] = self.crew.snapshot()

    def lose(self, lost: Sequence[int], step: int) -> None:
        """These stages stand still within ``step``; what others wait for does not come."""
        cancels = {at: Cancel() for at in range(3) if at not in lost}

        def run(at: int) -> None:
            with pytest.raises((PeerLost, LinksAborted)):
                self.crew.runs[at].run_step(step, cancels[at])

        threads = [threading.Thread(target=run, args=(at,)) for at in cancels]
        for thread in threads:
            thread.start()
        gone = [self.assignments[at].worker_of(at) for at in lost]
        for at in cancels:
            name = self.assignments[at].worker_of(at)
            for peer in gone:
                self.bridges[name].gate.lost(peer, "killed")
            self.crew.links[at].abort("the plan is reconfigured")
        for thread in threads:
            thread.join(HUNG_S)
        for name in gone:
            self.bridges.pop(name).close()

    def reconfigure(self, lost: Sequence[int], step: int, checkpoint: int) -> None:
        """Newcomers hold the stages that are lost, and repeat them from a checkpoint."""
        before, self.version = self.version, self.version + 1
        stages = list(self.assignments[0].plan.stages)
        for at in lost:
            stages[at] = replace(stages[at], worker=f"{stages[at].worker}+")
        replica = replace(self.crew.runs[0].at(step).plan.only, stages=tuple(stages))
        plan = replace(self.assignments[0].plan, version=self.version, replicas=(replica,))
        self.assignments = [
            replace(a, version=self.version, plan=plan, first_step=step) for a in self.assignments
        ]
        eras = [Era(1, 0, ()), Era(2, RELINKED, LINKS)]
        eras += [Era(v, s, LINKS) for v, s in self.moves if v < self.version]
        replay = Replay(checkpoint, tuple(eras), tuple(SCALES[checkpoint:step]), (step,))
        self.moves.append((self.version, step))
        assert before in {era.version for era in eras}
        for at, run in enumerate(self.crew.runs):
            a = self.assignments[at]
            if at not in lost:
                self.bridges[a.worker_of(at)].gate.reconfigure(self.stages(a), self.version, step)
                run.reconfigure(run.assignment.reconfigured(plan, run.assignment.links, step))
        for at in lost:
            self.assignments[at] = replace(self.assignments[at], replay=replay)
            self.join(self.assignments[at], checkpoint)
            state = self.states.get(checkpoint)
            tensors = None if state is None else {**self.made.tensors, **state}
            self.crew.runs[at] = self.crew.run_of(self.assignments[at], tensors)
            self.crew.links[at] = self.crew.links.pop()
            self.crew.runs[at].open(checkpoint)
        self.heard()
        self.repeat([self.crew.runs[at] for at in lost], step)

    def repeat(self, runs: Sequence[StageRun], step: int) -> None:
        stored: list[int] = []
        failed: list[Exception] = []

        def one(run: StageRun) -> None:
            try:
                run.replay(Cancel(), stored.append, lambda _: None)
            except StorageError as error:
                failed.append(error)

        threads = [threading.Thread(target=one, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HUNG_S)
        assert not any(thread.is_alive() for thread in threads)
        if failed:
            raise failed[0]
        assert stored == [step - 1] * len(runs)
        self.heard()

    def packets(self) -> dict[MessageKey, set[bytes]]:
        """What was sent, whatever the version."""
        found: dict[MessageKey, set[bytes]] = {}
        for key, sent in self.hub.packets.items():
            if key.direction is not Direction.REPLAY:
                found.setdefault(key._replace(plan_version=0), set()).update(sent)
        return found

    def close(self) -> None:
        for bridge in self.bridges.values():
            bridge.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def begin(name: str, schedule: ScheduleName = ScheduleName.ONE_F_ONE_B) -> World:
        made.append(World(case(name), schedule, tmp_path / str(len(made))))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def assert_same(found: State, expected: State) -> None:
    assert {n: sorted(t) for n, t in found.items()} == {n: sorted(t) for n, t in expected.items()}
    for name, tensors in expected.items():
        for key, value in tensors.items():
            assert torch.equal(found[name][key], value), (name, key)


@pytest.mark.parametrize(
    ("name", "schedule", "losses"),
    [
        ("branches", ScheduleName.ONE_F_ONE_B, [((1,), 4, 0)]),
        ("branches", ScheduleName.ZERO_BUBBLE, [((0,), 4, 1), ((1,), 6, 1)]),
        ("branches", ScheduleName.GPIPE, [((2,), 3, 0), ((2,), 5, 3)]),
        ("branches", ScheduleName.ONE_F_ONE_B, [((2,), 4, 1), ((0,), 5, 1)]),
        ("branches", ScheduleName.ONE_F_ONE_B, [((0, 1), 5, 1)]),
    ],
    ids=["middle", "first then middle", "last twice", "both ends", "two at once"],
)
def test_who_takes_a_stage_over_ends_with_the_bits_of_a_run_that_lost_nobody(
    world: Callable[..., World],
    name: str,
    schedule: ScheduleName,
    losses: list[tuple[tuple[int, ...], int, int]],
) -> None:
    """Under codecs that changed meanwhile, with dropout, batch norm, tied parameters and values that skip a
    stage; the log of who took a stage over serves the next."""
    undisturbed = world(name, schedule)
    undisturbed.train(0, STEPS)
    disturbed, done = world(name, schedule), 0
    for lost, step, checkpoint in losses:
        disturbed.train(done, step)
        disturbed.lose(lost, step)
        disturbed.reconfigure(lost, step, checkpoint)
        assert_same(disturbed.crew.snapshot(), undisturbed.states[step])
        done = step
    disturbed.train(done, STEPS)
    assert_same(disturbed.crew.snapshot(), undisturbed.states[STEPS])
    assert disturbed.packets() == undisturbed.packets()
    early, late = undisturbed.states[4], undisturbed.states[STEPS]
    assert any(not torch.equal(early[n]["value"], late[n]["value"]) for n in early)


def test_a_step_that_left_the_log_ends_the_replay_with_the_reason(world: Callable[..., World]) -> None:
    disturbed = world("branches")
    disturbed.train(0, 4)
    disturbed.bridges["w-0"].gate.trim_log(3)
    disturbed.lose((1,), 4)
    with pytest.raises(StorageError, match="w-0: step 1 is not in the send log, which begins at 3"):
        disturbed.reconfigure((1,), 4, 1)


def test_a_neighbour_that_hears_of_the_plan_later_is_asked_again(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.stage.steps.replay.AGAIN_S", 0.3)
    undisturbed, disturbed = world("branches"), world("branches")
    undisturbed.train(0, STEPS)
    disturbed.train(0, 4)
    disturbed.lose((1,), 4)
    gate = disturbed.bridges["w-2"].gate
    asked, may_ask = [], gate._may_ask

    def deaf(peer: str, key: object) -> bool:
        asked.append(key)
        return len(asked) > 3 and may_ask(peer, key)  # type: ignore[arg-type]

    monkeypatch.setattr(gate, "_may_ask", deaf)
    disturbed.reconfigure((1,), 4, 1)
    disturbed.train(4, STEPS)
    assert len(set(asked)) < len(asked)
    assert_same(disturbed.crew.snapshot(), undisturbed.states[STEPS])


def test_neither_other_stages_nor_another_step_can_be_gone_on_with(world: Callable[..., World]) -> None:
    disturbed = world("branches")
    disturbed.train(0, 2)
    run = disturbed.crew.runs[0]
    plan = run.assignment.plan
    moved = [replace(spec, stop=spec.stop + 1) for spec in plan.stages]
    other = replace(plan, version=9, replicas=(replace(plan.only, stages=tuple(moved)),))
    with pytest.raises(PlanError, match="other stages"):
        run.assignment.reconfigured(other, (), 2)
    later = run.assignment.reconfigured(replace(plan, version=9), run.assignment.links, 3)
    with pytest.raises(BadFrame, match="2 steps, and is to go on after 3"):
        run.reconfigure(later)
