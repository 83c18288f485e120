"""What a worker needs to know of its place in a plan, and of those whom it talks to. Pure."""

from __future__ import annotations

from atoll.plan import Plan
from coordinator.membership.roster import Roster
from coordinator.messages import instructions as do
from coordinator.messages.jobs import JobState


def assignment(state: JobState, rank: int, roster: Roster) -> do.Assign:
    """Return the message that gives a rank of the adopted plan its stage."""
    assert state.plan is not None  # noqa: S101 - a plan was adopted
    places, neighbours = state.plan.places, _neighbours(state.plan, rank)
    peers = tuple(
        _peer(roster, places[rank].worker, other, place.worker, rank)
        for other, place in enumerate(places)
        if other in neighbours
    )
    return do.Assign(
        state.job, state.spec, state.plan, rank, state.step, dict(state.checkpoint.tensors), peers
    )


def _neighbours(plan: Plan, rank: int) -> set[int]:
    """Ranks that this one exchanges tensors with: its replica's, in stages that a link joins to its own.

    Two that accept no connections may be in one plan as long as nothing goes between them. A plan that
    names no links may use any.
    """
    places = plan.places
    mine = places[rank]
    replica = plan.replicas[mine.replica]
    ends = [{link.source, link.target} for link in replica.links] or [set(range(len(replica.stages)))]
    stages = set().union(*(pair for pair in ends if mine.stage in pair)) - {mine.stage}
    return {at for at, place in enumerate(places) if place.replica == mine.replica and place.stage in stages}


def _peer(roster: Roster, me: str, rank: int, peer: str, my_rank: int) -> do.RankPeer:
    """The lower rank dials where both can be reached, else whoever can reach the other."""
    mine, theirs = roster.addresses(me, peer), roster.addresses(peer, me)
    dial = bool(theirs) and (my_rank < rank or not mine)
    return do.RankPeer(rank, peer, theirs, dial, roster.relay_use(me, peer))
