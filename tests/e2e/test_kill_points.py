"""Every process killed at each named point of the protocols: no step, and no bit, is lost or done twice.

Several points share a fleet and a job: each begins when all are well again. What is killed is the process
that comes to the point where it is of the victim's kind, else the coordinator, or a worker that holds a
stage, or what computes for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import Case, built_in
from benchmarks.real_workers import ROOT
from coordinator.messages.facts import Fact
from protos import atoll_control_pb2 as pb
from tests.e2e.kill_points import (
    DAEMON,
    POINTS,
    REPLAY,
    SOON,
    STEP,
    SUBMIT,
    VICTIMS,
    fleet,
)
from tests.e2e.points import PACE
from worker.session import events, instructions
from worker.transport.frames import Direction

PACE_S = 0.1  # between two steps, so that they suffice
STEPS, FEW_STEPS, BRIEF_STEPS = 600, 150, 60  # killed at many points, at one, and submitted beside it

pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(steps: int) -> Case:
    training = TrainingSpec(
        steps=steps, n_micro=2, seed=3, optimizer=Optimizer(lr=3e-3, clip_norm=0.5), checkpoint_every=10
    )
    return built_in("branches", training, 0.1)


def cut_in(case: Case, stages: int) -> tuple[int, ...]:
    positions = case.dag.cuttable()
    return (0, *(positions[len(positions) * at // stages] for at in range(1, stages)))


@pytest.mark.slow
def test_a_commit_survives_the_process_that_is_killed_in_it(tmp_path: Path) -> None:
    """The step's border: heard and not applied."""
    case, brief = case_of(FEW_STEPS), case_of(BRIEF_STEPS)
    with fleet(case, brief, cut_in(case, 2), 3, tmp_path / "points", PACE_S) as started:
        started.submit(case).join()
        started.wait(lambda: started.trains(started.jobs[-1]))
        started.kill_at("worker.hear.StepCommit.after", SOON, DAEMON)
        (started.folder / PACE).unlink()
        started.finished(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("protocol", POINTS)
def test_no_kill_at_a_named_point_costs_a_step_or_a_bit(protocol: str, victim: str, tmp_path: Path) -> None:
    case, brief, folder = case_of(STEPS), case_of(BRIEF_STEPS), tmp_path / "points"
    # Two of three stages are lost at once here; with a third that changes hands none would hold its state.
    with fleet(case, brief, cut_in(case, 3), 6, folder, PACE_S, steady=protocol == REPLAY) as started:
        started.submit(case).join()
        for point, how in POINTS[protocol]:
            if how != SUBMIT:
                started.wait(lambda: started.trains(started.jobs[-1]))
            started.kill_at(point, how, victim)
        (started.folder / PACE).unlink(missing_ok=True)
        started.finished(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [STEP, REPLAY])
def test_a_worker_of_several_pieces_is_killed_and_no_bit_is_lost(protocol: str, tmp_path: Path) -> None:
    case, brief, folder = case_of(STEPS), case_of(BRIEF_STEPS), tmp_path / "points"
    cut, ring, steady = cut_in(case, 4), (0, 1, 2, 0), protocol == REPLAY
    with fleet(case, brief, cut, 6, folder, PACE_S, steady=steady, owners=ring) as started:
        started.submit(case).join()
        for point, how in POINTS[protocol]:
            started.wait(lambda: started.trains(started.jobs[-1]))
            started.kill_at(point, how, DAEMON)
        (started.folder / PACE).unlink(missing_ok=True)
        started.finished(tmp_path)


def test_every_point_wraps_something_that_there_is(tmp_path: Path) -> None:
    """In a process of its own, which it leaves wrapped."""
    kinds = {"compute": "", "worker": ", f", "coordinator": ", steady=False"}
    wraps = "; ".join(f"p.{kind}(p.Points(f, '{kind}'){more})" for kind, more in kinds.items())
    code = (
        f"from pathlib import Path; from tests.e2e import points as p; f = Path({str(tmp_path)!r}); {wraps}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_there_are_points_enough() -> None:
    """Of each of the protocols, at each of the three processes, 25 and more in all."""
    names = [point for points in POINTS.values() for point, _ in points]
    assert len(set(names)) == len(names) >= 25
    for points in POINTS.values():
        assert {point.partition(".")[0] for point, _ in points} >= {"coordinator", "worker"}


KNOWN = {
    "coordinator.journal": {kind.__name__ for kind in get_args(Fact)},
    "coordinator.say": {field.message_type.name for field in pb.ToWorker.DESCRIPTOR.fields},
    "worker.send": {field.name for field in pb.FromWorker.DESCRIPTOR.fields},
    "worker.hear": {kind.__name__ for kind in get_args(events.Event)},
    "worker.order": {kind.__name__ for kind in get_args(instructions.Instruction)},
    "compute.post": {kind.__name__ for kind in get_args(events.Event)},
    "compute.pass": set(Direction.__members__),
}


def test_a_point_that_is_named_after_a_message_names_one_that_there_is() -> None:
    """Else nobody would ever come there."""
    for point in (point for points in POINTS.values() for point, _ in points):
        process, port, what, *_ = point.split(".")
        if what not in ("before", "after") and what != "worker":  # "worker.enrolled" is no job's
            assert what in KNOWN[f"{process}.{port}"], point
