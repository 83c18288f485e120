"""In which order the shell carries out what a batch of events caused: facts, consequences, words for people.

All facts of a batch are made durable first, with one write. Where that fails, nothing is sent that a worker
would act upon as if they were; who is released keeps what it holds until they are, as a kill of ours would
bring back the plan before. What people read comes last: no worker waits for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.messages import instructions as do
from coordinator.messages.facts import Fact

FOR_PEOPLE = (do.Measured, do.Notify, do.Log, do.SweepBlobs)
CONSEQUENCES = (
    do.StepCommit,
    do.StepStart,
    do.Assign,
    do.Reconfigure,
    do.Participate,
    do.TrainRound,
    do.EvaluateRound,
    do.RoundTaken,
    do.SecureOrder,
)

Caused = Sequence[do.Instruction]
"""Instructions caused by one event, in the scheduler's order."""


def facts(batch: Iterable[Caused]) -> list[Fact]:
    """Return what has to be durable before anything of the batch is carried out."""
    return [i.fact for caused in batch for i in caused if isinstance(i, do.Journal)]


def consequences(caused: Caused, *, durable: bool) -> list[do.Instruction]:
    """Return what is to be carried out at once; without the batch's facts, what does not rest on them."""
    rest = () if durable else (*CONSEQUENCES, do.Release)
    return [i for i in caused if not isinstance(i, (*FOR_PEOPLE, do.Journal)) and not _sends(i, rest)]


def deferred(caused: Caused) -> list[do.Instruction]:
    """Return what is carried out once the facts of a batch are durable after all: its releases."""
    return [i for i in caused if _sends(i, (do.Release,))]


def words(batch: Iterable[Caused]) -> list[do.Instruction]:
    """Return what is for people alone, and may wait until the rest is under way."""
    return [i for caused in batch for i in caused if isinstance(i, FOR_PEOPLE)]


def _sends(instruction: do.Instruction, kinds: tuple[type, ...]) -> bool:
    return isinstance(instruction, do.SendTo) and isinstance(instruction.message, kinds)
