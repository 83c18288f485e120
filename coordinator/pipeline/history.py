"""A running plan's history: which version a message is of, which steps can be repeated, whose logs have them.

A stage is a function of its state and its messages. The newest checkpoint has the state; the neighbours' send
logs have the messages since; the journal has the scale of each step and the codecs of each version. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.messages.from_worker import MAX_REPEATED
from coordinator.messages import instructions as do
from coordinator.messages.events import Loaded, StageMessage
from coordinator.messages.facts import Checkpoint, Era
from coordinator.messages.jobs import RUNNING, STEPPING, FromRank, JobState, Phase

if TYPE_CHECKING:
    from coordinator.membership.roster import Roster
    from coordinator.messages.facts import JobRecord


def begun(state: JobState) -> bool:
    """Whether all ranks of the plan have held their stages, so that those who are left go on with them."""
    return state.run.moving or state.phase in STEPPING or state.phase is Phase.STORING


def staleness(state: JobState, event: FromRank[StageMessage]) -> str | None:
    """Return why a stage's message is not of the plan as it is now, None when it is."""
    message = event.message
    version = (
        (state.run.assigned or state.version)
        if isinstance(message, Loaded)
        else _version_at(state, message.step)
    )
    if message.version != version:
        return f"{type(message).__name__} of plan {message.version}, now {version}"
    if not 0 <= event.rank < state.n_ranks:
        return f"{type(message).__name__} of rank {event.rank} of {state.n_ranks}"
    return None


def _version_at(state: JobState, step: int) -> int:
    # A given-up plan's late words are of no version that counts.
    alive = state.phase in RUNNING
    return version_at(state.run.lineage, step, state.version) if alive else state.version


def version_at(lineage: Sequence[tuple[int, int]], step: int, version: int) -> int:
    """The version that messages of ``step`` carry; ``version`` where nothing is known."""
    for known, first_step in reversed(lineage):
        if first_step <= step:
            return known
    return lineage[0][0] if lineage else version


def current(state: JobState, version: int) -> bool:
    """Whether ``version`` is a version that the adopted plan has had."""
    return version == state.version or any(version == known for known, _ in state.run.lineage)


def sources(state: JobState, rank: int | None = None) -> list[Checkpoint]:
    """Return the checkpoints that those who have taken over load, or one rank of them: newer ones may be
    stored."""
    found = [state.run.source]
    if state.run.moving:
        found += [source for of, source in state.run.promoted.items() if rank in (None, of)]
    return [source for source in found if source is not None]


Heard = Mapping[int, tuple[do.StepCommit, ...]]


def heard(state: JobState, before: Heard, peers: Iterable[int], commit: do.StepCommit) -> Heard:
    """Return what peers have heard since the newest checkpoint, with one commit more; the oldest goes where
    there are too many."""
    if not state.repeats_own:
        return before
    return {**before, **{peer: (*before.get(peer, ()), commit)[-MAX_REPEATED:] for peer in peers}}


def since(state: JobState, checkpoint: Checkpoint) -> Heard:
    """Return what is still needed of what peers have heard, after a checkpoint is stored: somebody may be
    loading an older one."""
    loading = [s.source for s in state.standbys.values() if s.source is not None and not s.loaded]
    first = min(source.step for source in (checkpoint, *sources(state), *loading))
    return {
        peer: tuple(commit for commit in commits if commit.step >= first)
        for peer, commits in state.run.heard.items()
    }


def _own_replay(
    state: JobState, rank: int, source: Checkpoint, stores: Collection[int], *, standby: bool = False
) -> do.Replay:
    """Return what a stage of a peer repeats whose own steps are committed."""
    commits = state.run.heard.get(state.adopted.places[rank].replica, ())
    said = tuple(
        replace(
            commit,
            store=not commit.own and commit.step + 1 in stores,
            evaluate=False,
            evaluate_coded=False,
            last=False,
            keep=False,
            replay_from=0,
        )
        for commit in commits
        if commit.step >= source.step
    )
    return do.Replay(source.step, (), (), standby=standby, commits=said)


def replay(state: JobState, record: JobRecord, rank: int, source: Checkpoint) -> do.Replay | None:
    """Return what a newcomer repeats after ``source``; None where that is as new as the step in flight."""
    if state.adopted.in_pipe(rank):
        due = {d for d, parts in state.storing.parts.items() if rank in state.store_ranks - parts.keys()}
        found = _own_replay(state, rank, source, due)
        return found if found.commits else None
    steps = state.step - source.step
    if steps <= 0:
        return None
    eras = [era for era in record.eras if era.first_step < state.step]
    over = [era for era in eras if era.first_step <= source.step][:-1]
    stores = tuple(
        sorted(
            done
            for done, parts in state.storing.parts.items()
            if source.step < done and rank in state.store_ranks - parts.keys()
        )
    )
    kept = tuple(era for era in eras if era not in over)
    return do.Replay(source.step, kept, tuple(record.scales[-steps:]), stores)


def standing_by(state: JobState, record: JobRecord, rank: int, source: Checkpoint) -> do.Replay:
    """Return what who stands by for a rank repeats after ``source``: every step, under whatever version."""
    if state.adopted.in_pipe(rank):
        return _own_replay(state, rank, source, (), standby=True)
    scales = tuple(record.scales[-(state.step - source.step) :]) if state.step > source.step else ()
    over = [era for era in record.eras if era.first_step <= source.step][:-1]
    eras = tuple(era for era in record.eras if era not in over)
    if state.run.relink is not None:
        eras += (Era(state.run.relink.version, state.run.relink.first_step, state.run.relink.links),)
    return do.Replay(source.step, eras, scales, standby=True)


def not_repeatable(state: JobState, record: JobRecord) -> str:
    """Return why not enough is known for a replay, "" when it is."""
    if state.local:
        return _own_not_repeatable(state)
    steps = state.step - state.checkpoint.step
    if steps > len(record.scales):
        return f"{steps} steps since the checkpoint are more than the {len(record.scales)} known"
    if steps and not ran_alike(record, state.checkpoint.step):
        return f"codecs or shares of step {state.checkpoint.step} are no longer known"
    return ""


def _own_not_repeatable(state: JobState) -> str:
    """Return why peers' own steps since the checkpoint cannot be repeated, "" where they can."""
    first = state.checkpoint.step
    if not state.repeats_own:
        return "peers take their steps without a commit, or exchange while they take them"
    if state.run.alike_from > first:
        return f"other peers than now exchanged after step {first}"
    for rank in filter(state.adopted.in_pipe, state.present):
        commits = state.run.heard.get(state.adopted.places[rank].replica, ())
        if state.steps_of(rank) > first and not (commits and commits[0].step <= first):
            return f"not all commits since step {first} are known"
    return ""


def ran_alike(record: JobRecord, step: int) -> bool:
    """Whether steps from ``step`` on ran under plans that are known, in which every rank had its share."""
    return any(era.first_step <= step for era in record.eras)


def stores_anew(state: JobState, record: JobRecord, rank: int) -> bool:
    """Whether a rank that keeps its stage is to store it as it is. After replicas were lost nobody can repeat
    the steps before, and who was to store may be among them; or another plan is to begin with it."""
    parts = state.storing.parts.get(state.step)
    due = parts is not None and rank in state.store_ranks - parts.keys()
    return due and state.run.moving and (state.run.unfit or not ran_alike(record, state.step - 1))


def logged_from(state: JobState, roster: Roster, rank: int, worker: str | None = None) -> int:
    """Return the step from which on a rank's send log is whole, 0 before it has reported that; ``worker``:
    who has the rank, None: whom the plan says."""
    beat = roster.beat_of(worker or state.workers[rank], state.job)
    return beat.logged_from if beat is not None else 0


def logs_short(state: JobState, roster: Roster) -> bool:
    """Whether a send log does not reach back to the newest checkpoint, and no newer one is coming.

    A worker that logs nothing is no reason: its log reaches back to no checkpoint, however many are stored.
    """
    if state.plan is not None and len(state.plan.replicas) > 1:
        return False  # logs of gradients may never reach so far: then it goes back
    if state.phase not in STEPPING or state.storing.parts or state.storing.owed:
        return False
    logged = [logged_from(state, roster, rank) for rank in range(state.n_ranks)]
    return any(state.checkpoint.step < first <= state.step for first in logged)
