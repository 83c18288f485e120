"""Exchange of one stage's gradients with the other replicas of its plan, while a step computes.

A part leaves as soon as the gradients of its bucket are whole, on a CPU while the backward still computes
others; what arrives is added between two actions, and the rest is waited for at the step's end. Parts are
waited for first, then totals that others wait for here: nobody needs more to send a part than the parts of
the site before, nor a total than the total of the site behind. So no order of waits can be a circle. Phases
of a rule (``RuleBucket``) are waited for one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.collective import TOTAL
from atoll.exchange import ExchangeRound
from strategies.exchanges import make_rule
from worker.exchange.bucket import BucketRun
from worker.exchange.rule_bucket import FaultyReplica, RuleBucket
from worker.stage.steps.expected import bucket_arrivals, bucket_key
from worker.transport.contract import PeerLost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from atoll.gradient_exchange import Arriving, Bucket
    from worker.exchange.bucket import Outgoing
    from worker.exchange.slices import Send, Take, Which
    from worker.stage.assignment import Assignment
    from worker.stage.stage import Stage

Wait = Callable[["Which", str], "Tensor"]


class GradientExchange:
    """All buckets of one stage in one step."""

    def __init__(self, assignment: Assignment, stage: Stage, send: Send, step: int) -> None:
        self._assignment, self._stage, self._send = assignment, stage, send
        self._runs = _runs(assignment, stage, step)
        self._due = {(at, label) for at, run in enumerate(self._runs) for label in run.bucket.labels}
        passed_on = [run.bucket.passed_on for run in self._runs]
        of = [bucket_arrivals(assignment, run.bucket) for run in self._runs]
        awaited = [(at, arriving) for at, arrivals in enumerate(of) for arriving in arrivals]
        self._awaited = dict.fromkeys(
            sorted(
                awaited, key=lambda e: (e[1].phase, e[1].label == TOTAL, e[1].segment not in passed_on[e[0]])
            )
        )
        self._bucket_of = {name: at for at, run in enumerate(self._runs) for name in run.bucket.names}
        self._missing: dict[tuple[int, int], set[str]] = {}  # gradients whose part is not whole
        tied = {tied.name for program, _ in assignment.pieces for tied in program.tied}
        self._tied = {at for at, run in enumerate(self._runs) if tied & set(run.bucket.names)}

    def part_whole(self, name: str, label: int) -> None:
        """Send a bucket's part once those of all its gradients are whole, while others are computed."""
        at = self._bucket_of[name]
        missing = self._missing.setdefault((at, label), set(self._runs[at].bucket.names))
        missing.discard(name)
        if not missing and (at, label) in self._due and at not in self._tied:
            self._contribute({(at, label)})

    def advance(self, take: Take) -> None:
        """Send what is whole, add what has arrived."""
        self._contribute(self._whole())
        self._take(take)

    def finish(self, take: Take, wait: Wait) -> None:
        """Send and wait for the rest, and give the stage its totals. Call it when tied parameters' uses in
        later stages are folded."""
        self._contribute(set(self._due))
        while self._awaited:
            self._take(take)
            entry = next(iter(self._awaited), None)
            if entry is not None and not self._runs[entry[0]].awaits(entry[1]):
                del self._awaited[entry]
            elif entry is not None:
                self._arrived(entry, wait(*self._which(entry)))
        for run in self._runs:
            for name, total in run.totals().items():
                shape = self._assignment.states[name].meta.shape
                self._stage.set_total(name, None if total is None else total.view(shape))

    def _whole(self) -> set[tuple[int, int]]:
        """Parts that are due and whole. Of tied parameters the later stages' uses come last."""
        whole = self._stage.whole_blocks
        labels = {0} if 0 in whole and len(whole) == len(self._stage.blocks) else set(whole) - {0}
        return {(at, label) for at, label in self._due if label in labels and at not in self._tied}

    def _contribute(self, which: set[tuple[int, int]]) -> None:
        self._due -= which
        for at, label in sorted(which, key=lambda part: (part[1], part[0])):
            run = self._runs[at]
            parts = {name: self._stage.parts(name).get(label) for name in run.bucket.names}
            with self._blaming(run.bucket):
                messages = run.contribute(label, parts)
            self._sent(run.bucket, messages)

    def _take(self, take: Take) -> None:
        for entry in list(self._awaited):
            value = take(*self._which(entry))
            if value is not None:
                self._arrived(entry, value)

    def _arrived(self, entry: tuple[int, Arriving], value: Tensor) -> None:
        at, arriving = entry
        del self._awaited[entry]
        run = self._runs[at]
        with self._blaming(run.bucket):
            messages = run.take(arriving, value.reshape(-1).to("cpu"))
        self._sent(run.bucket, messages)

    @contextmanager
    def _blaming(self, bucket: Bucket) -> Iterator[None]:
        """Raise PeerLost of who sent what is no message of a round."""
        try:
            yield
        except FaultyReplica as fault:
            raise PeerLost(self._assignment.holder(bucket, fault.replica), str(fault)) from None

    def _sent(self, bucket: Bucket, messages: Iterable[Outgoing]) -> None:
        for message in messages:
            peer = self._assignment.holder(bucket, message.to)
            self._send(peer, bucket_key(bucket, message), message.value)

    def _which(self, entry: tuple[int, Arriving]) -> tuple[Which, str]:
        at, arriving = entry
        bucket = self._runs[at].bucket
        return bucket_key(bucket, arriving), self._assignment.holder(bucket, arriving.source)


def _runs(assignment: Assignment, stage: Stage, step: int) -> Sequence[BucketRun | RuleBucket]:
    """Runs of a step's buckets: exact sums, or a rule's rounds."""
    exchange = assignment.plan.exchange
    if exchange is None or not exchange.keeps:
        return [BucketRun(bucket) for bucket in assignment.buckets]
    micros = [stop - start for start, stop in (replica.micros for replica in assignment.plan.replicas)]
    at = ExchangeRound(step, tuple(range(len(micros))), assignment.training.seed, tuple(map(float, micros)))
    rule, states = make_rule(exchange), assignment.states
    return [
        RuleBucket(bucket, rule, at, [states[name].meta.shape for name in bucket.names], stage.kept)
        for bucket in assignment.buckets
    ]


def stored(assignment: Assignment, stage: Stage) -> dict[str, dict[str, Tensor]]:
    """Return what a stage stores in a checkpoint: the first replica its state, each what its rule of exchange
    keeps."""
    if not assignment.plan.keeps:
        return stage.state()
    beside = stage.kept.stored(_shapes(assignment), assignment.replica)
    return beside if assignment.replica else {**stage.state(), **beside}


def restore(assignment: Assignment, stage: Stage, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Have a stage go on with what its rule of exchange kept, as stored. Raises BadFrame."""
    if assignment.plan.keeps:
        stage.kept.restore(tensors, _shapes(assignment), assignment.replica)


def _shapes(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters whose gradients a stage exchanges."""
    names = (name for bucket in assignment.buckets for name in bucket.names)
    return {name: assignment.states[name].meta.shape for name in names}
