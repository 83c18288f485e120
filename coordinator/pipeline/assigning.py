"""What a worker needs to know of its place in a plan, and of those whom it talks to. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from atoll.plan import Plan, StageSpec
from coordinator.membership.roster import Roster
from coordinator.messages import instructions as do
from coordinator.messages import peer_tensors
from coordinator.messages.events import StepReady
from coordinator.messages.facts import Checkpoint
from coordinator.messages.jobs import JobState

Word = do.StepStart | do.StepCommit | do.StepDiscard


class Repeated(Protocol):
    """Steps of a rank that are repeated: from ``source`` up to ``end`` - 1."""

    @property
    def rank(self) -> int: ...

    @property
    def source(self) -> Checkpoint: ...

    @property
    def end(self) -> int: ...

    @property
    def replay(self) -> do.Replay: ...


def assignment(
    state: JobState,
    rank: int,
    roster: Roster,
    source: Checkpoint,
    replay: do.Replay | None = None,
    holders: tuple[do.ExpectPeer, ...] = (),
) -> do.Assign:
    """Return the message that gives a rank of the adopted plan its stage."""
    peers, tensors = _peers(state.adopted, rank, roster), tensors_of(state.adopted, rank, source)
    step, joining = state.due_of(rank) if state.adopted.in_pipe(rank) else (state.step, False)
    return do.Assign(
        state.job, state.spec, state.adopted, rank, step, tensors, peers, replay, holders, joining
    )


def tensors_of(plan: Plan, rank: int, source: Checkpoint) -> dict[str, str]:
    """Return a checkpoint's tensors as a rank begins with them."""
    peer = plan.places[rank].replica
    if plan.local:
        return peer_tensors.own(source.tensors, peer)
    model = peer_tensors.model(source.tensors)
    return model | peer_tensors.kept(source.tensors, model, peer) if plan.keeps else model


def reconfiguration(
    state: JobState, rank: int, roster: Roster, base: int, *, store: bool = False
) -> do.Reconfigure:
    """Return the message that says to a rank which keeps its stage who its neighbours are now; ``store``: and
    that it stores the stage as it is."""
    peers = _peers(state.adopted, rank, roster)
    step, joining = state.due_of(rank) if state.adopted.in_pipe(rank) else (state.step, False)
    return do.Reconfigure(state.job, state.adopted, base, step, peers, store=store, joining=joining)


def said_to(state: JobState, rank: int, word: Word) -> Word:
    """Return what a rank hears of a word to all of them: who need not store is not asked to, and a peer of
    several stages begins with the step that it is at."""
    if isinstance(word, do.StepCommit) and rank not in state.store_ranks:
        return replace(word, store=False)
    if isinstance(word, do.StepStart):
        return replace(word, step=state.due_of(rank)[0])
    return word


def beside(plan: Plan, rank: int, worker: str, version: int) -> Plan:
    """Return the plan as if a worker had that rank."""
    workers = [place.worker for place in plan.places]
    workers[rank] = worker
    return plan.moved(version, workers)


def repetition(
    state: JobState, case: Repeated, worker: str, version: int, roster: Roster
) -> tuple[do.Assign, dict[str, do.StandbysHere]]:
    """Return the message that has a worker repeat a rank's steps beside the plan, as a plan of that version,
    and what the rank's neighbours are to know of it, by worker."""
    plan, rank, job = state.adopted, case.rank, state.job
    places, theirs = plan.places, beside(plan, rank, worker, version)
    peers, tensors = _peers(theirs, rank, roster), tensors_of(theirs, rank, case.source)
    assign = do.Assign(job, state.spec, theirs, rank, case.end, tensors, peers, case.replay)
    said = {
        places[other].worker: do.StandbysHere(
            job, plan.version, (rank_peer(roster, places[other].worker, rank, worker, other),), checks=True
        )
        for other in neighbours(plan, rank)
    }
    return assign, said


def _peers(plan: Plan, rank: int, roster: Roster) -> tuple[do.RankPeer, ...]:
    places, others = plan.places, neighbours(plan, rank)
    return tuple(
        rank_peer(roster, places[rank].worker, other, place.worker, rank)
        for other, place in enumerate(places)
        if other in others
    )


def neighbours(plan: Plan, rank: int) -> set[int]:
    """Ranks that this one exchanges tensors with: its replica's, in stages that a link joins to its own, and
    those of other replicas that hold a part of the same ops, so perhaps of its gradients.

    Two that accept no connections may be in one plan as long as nothing goes between them. A replica that
    names no links may use any.
    """
    places = plan.places
    mine = places[rank]
    replica = plan.replicas[mine.replica]
    owner = [one.stage for one in replica.pieces]
    ends = [{owner[link.source], owner[link.target]} for link in replica.links]
    ends = ends or [set(range(len(replica.stages)))]
    stages = set().union(*(pair for pair in ends if mine.stage in pair)) - {mine.stage}
    own = replica.stages[mine.stage]
    found = set()
    for at in plan.present:
        place = places[at]
        theirs = plan.replicas[place.replica].stages[place.stage]
        if _overlap(own, theirs) if place.replica != mine.replica else place.stage in stages:
            found.add(at)
    return found


def _overlap(one: StageSpec, other: StageSpec) -> bool:
    """Whether two stages hold a part of the same ops."""
    return any(max(a.start, b.start) < min(a.stop, b.stop) for a in one.pieces for b in other.pieces)


def of_neighbours(plan: Plan, rank: int, report: StepReady) -> StepReady:
    """Return a rank's report without figures of links to others than its neighbours, and one for each: what
    is kept of a report is bounded by the plan, whatever names are in it."""
    if not report.links:
        return report
    near = {plan.places[other].worker for other in neighbours(plan, rank)}
    links = {link.peer: link for link in report.links if link.peer in near}
    return replace(report, links=tuple(links.values()))


def rank_peer(roster: Roster, me: str, rank: int, peer: str, my_rank: int) -> do.RankPeer:
    """Return the way to ``peer``, who has ``rank`` or stands by for it. The lower rank dials where both can
    be reached, else whoever can reach the other."""
    way = roster.way(me, peer)
    dial = way.dial and (my_rank < rank or not roster.addresses(me, peer))
    return do.RankPeer(rank, replace(way, dial=dial))
