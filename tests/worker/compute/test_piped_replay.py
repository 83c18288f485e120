"""A stage of a peer with steps of its own that is lost is repeated by another worker, or by one that has
stood by: every bit of both peers is as it would be, and the other one hears nothing of it.

Real stages, links and gates in one process; what crosses goes through the arenas and the send logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll.messages.to_worker import Replay, StepCommit
from atoll.step_loss import step_loss
from tests.parameters import each_once
from tests.worker.compute.bridge import Bridge
from tests.worker.compute.in_thread import in_thread
from tests.worker.compute.test_replay import assert_same
from tests.worker.links.hub import Hub
from tests.worker.stage.steps.crew import Case, Crew, case
from tests.worker.stage.steps.test_piped_steps import RULES, SPEC, assigned, cuts
from worker.cancel import Cancel
from worker.stage.reports import StepReport

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.exchange import Exchange
    from worker.stage.assignment import Assignment
    from worker.stage.steps.run import StageRun

    State = dict[str, dict[str, Tensor]]

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Pipes:
    """Peers of three and two stages, each stage of a worker of its own, driven as a coordinator does it."""

    made: Case
    exchange: Exchange
    folder: Path
    version: int = 1
    commits: dict[int, list[StepCommit]] = field(default_factory=lambda: {0: [], 1: []})  # by peer
    bridges: dict[str, Bridge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.assignments = assigned(self.made, self.exchange, cuts(self.made, 3))
        self.hub = Hub()
        for a in self.assignments:
            self.join(a, 0)
        self.crew = Crew(self.made, self.assignments, lambda name: self.bridges[name].network)
        self.heard()

    def join(self, a: Assignment, first_step: int, rank: int | None = None) -> None:
        me = a.worker_of(a.program.stage)
        mine = a.rank if rank is None else rank
        others = {place.worker: at for at, place in enumerate(a.plan.places) if at != mine}
        self.bridges[me] = Bridge(
            self.hub, me, others, folder=self.folder / me, version=a.version, first_step=first_step
        )

    def heard(self) -> None:
        for bridge in self.bridges.values():
            bridge.network.connect("job", 1, Cancel())

    def ranks(self, peer: int) -> list[int]:
        return [rank for rank, a in enumerate(self.assignments) if a.replica == peer]

    def step(self, step: int, peers: Sequence[int] = (0, 1)) -> None:
        for peer in peers:
            ranks = self.ranks(peer)
            own = [
                r for r in self.crew.all("run_step", step, Cancel(), only=ranks) if isinstance(r, StepReport)
            ]
            losses = [loss for r in own for loss in r.stage.losses]
            found = step_loss(losses, [w for r in own for w in r.stage.weights])
            norms = [square for r in own for square in r.stage.square_norms]
            scale = SPEC.optimizer.gradient_scale(norms, found.weight)
            self.commits[peer].append(
                StepCommit(
                    "job", self.version, step, scale, store=False, evaluate=False, last=False, own=True
                )
            )
            self.crew.all("apply", step, scale, Cancel(), only=ranks)

    def round(self, last: int) -> None:
        everybody = range(len(self.assignments))
        self.crew.all("run_round", last, Cancel(), only=everybody)
        self.crew.all("apply", last, 1.0, only=everybody)
        for commits in self.commits.values():
            commits.append(
                StepCommit("job", self.version, last, 1.0, store=False, evaluate=False, last=False)
            )

    def period(self, first: int) -> int:
        last = self.exchange.last_step(first, SPEC.steps)
        for step in range(first, last + 1):
            self.step(step)
        self.round(last)
        return last + 1

    def state(self, peer: int) -> State:
        found: State = {}
        for rank in reversed(self.ranks(peer)):
            found.update(self.crew.runs[rank].snapshot())
        return found

    # ---------------------------------------------------------------- losses

    def moved(self, lost: int, at: dict[int, tuple[int, bool]], tensors: State, source: int) -> None:
        """Have another worker take rank ``lost``, which begins with ``tensors`` after ``source`` steps;
        ``at``: the step that each peer is at, and whether that is its round."""
        before = self.assignments[lost]
        gone = before.worker_of(before.program.stage)
        self.bridges.pop(gone).close()
        self.version += 1
        workers = [place.worker for place in before.plan.places]
        workers[lost] = f"{gone}+"
        plan = before.plan.moved(self.version, workers)
        for rank, run in enumerate(self.crew.runs):
            step, joining = at[self.assignments[rank].replica]
            mine = replace(self.assignments[rank], version=self.version, plan=plan, first_step=step)
            self.assignments[rank] = mine
            if rank != lost:
                others = {worker: other for other, worker in enumerate(workers) if other != rank}
                self.bridges[workers[rank]].gate.reconfigure(others, self.version, step + joining)
                run.reconfigure(run.assignment.reconfigured(plan, run.assignment.links, step))
        mine = self.assignments[lost]
        commits = tuple(c for c in self.commits[mine.replica] if c.step >= source)
        mine = replace(mine, replay=Replay(source, (), (), commits=commits), joining=at[mine.replica][1])
        self.assignments[lost] = mine
        self.join(mine, source, lost)
        self.crew.runs[lost] = run = self.crew.run_of(mine, {**self.made.tensors, **tensors})
        self.crew.links[lost] = self.crew.links.pop()
        run.open(source)
        self.heard()
        in_thread(lambda: run.replay(Cancel(), lambda _: None, lambda _: None))
        self.heard()

    def stand_by(self, rank: int) -> StageRun:
        """Have another worker repeat a rank's commits beside the plan, from the state that the job began
        with."""
        before = self.assignments[rank]
        name, workers = f"{before.worker_of(before.program.stage)}*", [p.worker for p in before.plan.places]
        workers[rank] = name
        commits = tuple(self.commits[before.replica])
        plan = before.plan.moved(self.version, workers)
        mine = replace(
            before, plan=plan, standby=True, first_step=commits[-1].step + 1,
            replay=Replay(0, (), (), standby=True, commits=commits),
        )  # fmt: skip
        self.join(mine, 0, rank)
        for at, place in enumerate(before.plan.places):
            if at != rank:
                self.bridges[place.worker].gate.stand_by({name: rank})
        run = self.crew.run_of(mine)
        run.open(0)
        self.beside = self.crew.links.pop()
        self.bridges[name].network.connect("job", 1, Cancel())
        in_thread(lambda: run.replay(Cancel(), lambda _: None, lambda _: None))
        return run

    def promoted(self, lost: int, beside: StageRun, at: dict[int, tuple[int, bool]]) -> None:
        """Have who stood by for a rank take it."""
        before = self.assignments[lost]
        self.bridges.pop(before.worker_of(before.program.stage)).close()
        self.version += 1
        workers = [place.worker for place in beside.assignment.plan.places]
        plan = before.plan.moved(self.version, workers)
        for rank, run in enumerate([beside if r == lost else run for r, run in enumerate(self.crew.runs)]):
            step, joining = at[self.assignments[rank].replica]
            others = {worker: other for other, worker in enumerate(workers) if other != rank}
            gate = self.bridges[workers[rank]].gate
            gate.reconfigure(others, self.version, step + joining, repeating=rank == lost)
            run.reconfigure(run.assignment.reconfigured(plan, run.assignment.links, step))
            self.assignments[rank] = replace(
                self.assignments[rank], version=self.version, plan=plan, first_step=step
            )
        self.crew.runs[lost], self.crew.links[lost] = beside, self.beside
        self.heard()

    def close(self) -> None:
        for bridge in self.bridges.values():
            bridge.close()


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[Callable[[str], Pipes]]:
    made: list[Pipes] = []

    def begin(rule: str) -> Pipes:
        made.append(Pipes(case("gpt2"), RULES[rule], tmp_path / str(len(made))))
        return made[-1]

    yield begin
    for one in made:
        one.close()


@pytest.mark.parametrize(("place", "rule"), each_once([(1, 0), (0, 3), (4, 0)], ["diloco", "sparseloco"]))
def test_who_takes_a_stage_over_repeats_own_steps_and_rounds(
    pipes: Callable[[str], Pipes], rule: str, place: tuple[int, int]
) -> None:
    """Within a period, of peers that are at different steps; the next is done with the same bits."""
    lost, source = place
    calm, hit = pipes(rule), pipes(rule)
    states = {}
    for one in (calm, hit):
        after = one.period(0)
        states[after] = [one.state(0), one.state(1)]
        one.step(3)
        one.step(4, [0])
    peer = hit.assignments[lost].replica
    tensors = states[source][peer] if source else {}
    hit.moved(lost, {0: (5, False), 1: (4, False)}, tensors, source)
    for peer in (0, 1):
        assert_same(hit.state(peer), calm.state(peer))
    for one in (calm, hit):
        one.step(4, [1])
        one.step(5)
        one.round(5)
    for peer in (0, 1):
        assert_same(hit.state(peer), calm.state(peer))


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_a_stage_that_is_lost_within_a_round_is_taken_over_and_the_round_done_again(
    pipes: Callable[[str], Pipes], lost: int
) -> None:
    """Then once more: the log of who took it over serves the next."""
    calm, hit = pipes("diloco"), pipes("diloco")
    for one in (calm, hit):
        one.period(0)
        for step in range(3, 6):
            one.step(step)
    hit.moved(lost, {0: (5, True), 1: (5, True)}, {}, 0)
    for one in (calm, hit):
        one.round(5)
        one.step(6)
    hit.moved(1 - (lost == 1), {0: (6, True), 1: (6, True)}, {}, 0)
    for one in (calm, hit):
        one.round(6)
    for peer in (0, 1):
        assert_same(hit.state(peer), calm.state(peer))


@pytest.mark.parametrize("lost", [1, 4])
def test_who_stands_by_repeats_each_commit_and_takes_the_stage_as_it_is(
    pipes: Callable[[str], Pipes], lost: int
) -> None:
    calm, hit = pipes("diloco"), pipes("diloco")
    for one in (calm, hit):
        one.step(0)
    beside = hit.stand_by(lost)
    for one in (calm, hit):
        for step in (1, 2):
            one.step(step)
        one.round(2)
        one.step(3)
    for commit in hit.commits[hit.assignments[lost].replica][1:]:
        in_thread(lambda commit=commit: beside.repeat(commit, commit.step, Cancel()))
    hit.promoted(lost, beside, {0: (4, False), 1: (4, False)})
    for one in (calm, hit):
        one.step(4)
        one.step(5)
        one.round(5)
    for peer in (0, 1):
        assert_same(hit.state(peer), calm.state(peer))
