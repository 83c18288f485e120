"""What a worker is told when it is given a stage. Pure."""

from __future__ import annotations

from atoll.plan import Plan
from coordinator.membership.roster import Roster
from coordinator.messages import instructions as do
from coordinator.messages.jobs import JobState


def stage_of(state: JobState, worker: str) -> int | None:
    """The stage that ``worker`` holds, None when it holds none."""
    for at, spec in enumerate(state.plan.stages if state.plan else ()):
        if spec.worker == worker:
            return at
    return None


def assignment(state: JobState, stage: int, roster: Roster) -> do.AssignStage:
    """A stage of the adopted plan, with where its tensors are and whom it talks to."""
    assert state.plan is not None  # noqa: S101 - a plan was adopted
    neighbours = _neighbours(state.plan, stage)
    peers = tuple(
        _peer(roster, state.plan.stages[stage].worker, at, spec.worker, stage)
        for at, spec in enumerate(state.plan.stages)
        if at in neighbours
    )
    return do.AssignStage(
        state.job, state.spec, state.plan, stage, state.step, dict(state.checkpoint.tensors), peers
    )


def _neighbours(plan: Plan, stage: int) -> set[int]:
    """Stages that this one exchanges tensors with; two that accept no connections may be in one
    plan as long as nothing goes between them. A plan that names no links may use any."""
    ends = [{link.source, link.target} for link in plan.links] or [set(range(len(plan.stages)))]
    return set().union(*(pair for pair in ends if stage in pair)) - {stage}


def _peer(roster: Roster, me: str, at: int, peer: str, stage: int) -> do.StagePeer:
    """The lower stage dials where both can be reached, else whoever can reach the other."""
    mine, theirs = roster.addresses(me, peer), roster.addresses(peer, me)
    dial = bool(theirs) and (stage < at or not mine)
    return do.StagePeer(at, peer, theirs, dial)
