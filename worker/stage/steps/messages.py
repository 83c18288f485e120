"""Messages of a stage's steps: which are taken, the waits for them, and what is sent.

Every wait watches a ``Cancel`` and the links, so that a lost peer or a release stops it within ``POLL_S``;
weight gradients that were deferred are taken while a message is awaited, a few at a time.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.errors import BadFrame
from worker.links.codecs import lossy
from worker.pipe.status import Waiting
from worker.spans import Span
from worker.stage.piece import UnusableValue
from worker.stage.reports import LongWait
from worker.stage.steps.expected import evaluation_arrivals, round_arrivals, step_arrivals
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction, MessageKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from atoll.program import StageProgram
    from worker.cancel import Cancel
    from worker.exchange.slices import Which
    from worker.machine.cpu import CpuMeter
    from worker.spans import Spans
    from worker.stage.assignment import Assignment
    from worker.stage.reports import Progress
    from worker.stage.stage import Stage
    from worker.stage.steps.local_steps import LocalSteps
    from worker.stage.steps.ports import MicroBatches, TensorLinks
    from worker.stage.steps.replay import Repeating

POLL_S = 0.25
LONG_WAIT_S = 60.0
"""A wait of so long, and of twice the last step, is reported, and again when it has doubled."""
MIN_WAIT_SPAN_S = 0.0005


class Messages:
    """What comes to one stage and leaves it, each step under its plan version."""

    def __init__(
        self,
        assignment: Assignment,
        links: TensorLinks,
        spans: Spans,
        progress: Progress,
        cpu: CpuMeter,
        notice: Callable[[LongWait], None],
        stage: Stage,
        fill: Callable[[int, int], None],
    ) -> None:
        """``notice`` hears of waits that last suspiciously long; while ``stage`` owes weight gradients,
        ``fill`` takes some of a step on a piece."""
        self.assignment = assignment
        self._links, self._spans, self._progress, self.cpu = links, spans, progress, cpu
        self.clock: Callable[[], float] = time.perf_counter
        self.notice, self._stage, self._fill = notice, stage, fill
        self.eras = list(assignment.eras)  # first step -> the plan version from there on, ascending
        self.asks: Repeating | None = None  # while steps are repeated
        self._own: dict[MessageKey, Tensor | None] = {}  # from one piece of this stage to another
        self._expected: int | None = None  # last step whose messages are taken, ...
        self._rounds = -1  # ... and the last one whose round's are
        self.waited_s = 0.0
        self.step_s = 0.0  # the last one's

    def check_not_begun(self, step: int) -> None:
        """Raise ValueError where messages of ``step`` are awaited already."""
        if self._expected is not None and step <= self._expected:
            raise ValueError(f"new links from step {step}, but step {self._expected} has begun to come")

    def change(self, step: int, later: Assignment) -> None:
        """Have steps from ``step`` on be of ``later``."""
        self.eras = [*(era for era in self.eras if era[0] < step), (step, later)]

    def reconfigure(self, later: Assignment, local: LocalSteps | None) -> None:
        """Go on with the first step of ``later``, among its neighbours."""
        self.asks, self.assignment = None, later
        self.change(later.first_step, later)
        self._expected = self._rounds = later.first_step - 1
        self.expect_first(later.first_step, local)

    def forget_before(self, step: int) -> None:
        """Drop plan versions of steps before ``step``."""
        over = [first for first, _ in self.eras if first <= step][:-1]
        self.eras = [era for era in self.eras if era[0] not in over]

    def at(self, step: int) -> Assignment:
        """The assignment under the plan version of ``step``."""
        return next(assignment for first, assignment in reversed(self.eras) if first <= step)

    def expect_first(self, step: int, local: LocalSteps | None) -> None:
        """Take messages of the step, or the period, that comes first."""
        if local is not None:
            last = self.assignment.plan.last_step(step, self.assignment.training.steps)
            self.expect_rounds(local, (last,))
        if local is None or not local.alone:
            self.expect_up_to(step)

    def expect_up_to(self, step: int) -> None:
        """Take messages of steps up to ``step``."""
        first = step if self._expected is None else self._expected + 1
        for number in range(first, step + 1):
            assignment = self.at(number)
            self._links.expect(step_arrivals(assignment, number))
            if self.assignment.standby or number < self.assignment.first_step or assignment.plan.local:
                continue  # no evaluation is repeated, and peers evaluate after a round alone
            self._links.expect(evaluation_arrivals(assignment, number))
            if lossy(assignment.pipeline.links):
                self._links.expect(evaluation_arrivals(assignment, number, Direction.EVALUATION_CODED))
        self._expected = max(step, self._expected or 0)

    def expect_rounds(self, local: LocalSteps, ends: Iterable[int]) -> None:
        """Take messages of the rounds of periods that end with these steps."""
        for last in ends:
            if last <= self._rounds:
                continue
            assignment = self.at(last)
            self._links.expect(round_arrivals(assignment, local, last))
            if not self.assignment.standby and last >= self.assignment.first_step:
                self._links.expect(evaluation_arrivals(assignment, last))
            self._rounds = last

    def begin(self) -> None:
        """Forget what pieces have handed on to each other: a step, or an evaluation, begins."""
        self._own.clear()

    def key(self, direction: Direction, step: int, micro: int, edge: int) -> MessageKey:
        """Key of a message under the plan version of its step."""
        return MessageKey(self.assignment.job, self.at(step).version, step, micro, edge, direction)

    def key_to(self, piece: int, direction: Direction, step: int, micro: int, about: int) -> MessageKey:
        """Key of a message to a piece about an op or a tied parameter."""
        return self.key(direction, step, micro, self.assignment.ends[piece].edge(about))

    def key_of(self, step: int, which: Which) -> MessageKey:
        """Key of an exchange's message."""
        direction, micro, edge = which
        return self.key(direction, step, micro, edge)

    def take(
        self, feed: MicroBatches, program: StageProgram, step: int, micro: int, cancel: Cancel
    ) -> dict[str, Tensor]:
        """Wait for a piece's inputs of a micro-batch."""
        if not program.inputs:
            return {}
        begun_s, started_s = self._spans.now_s(), self.clock()
        with self._progress.waiting("", "data", step):
            inputs = feed.take(step, micro, cancel)
        self._note_wait(step, micro, begun_s, self.clock() - started_s, "")
        return {name: inputs[name] for name in program.inputs}

    def receive_from(self, piece: int, key: MessageKey, cancel: Cancel) -> Tensor | None:
        """Wait for what a piece sends; what one of this stage's own hands on is here. BadFrame for actions
        in an order in which it is not."""
        if not self.assignment.here(piece):
            return self.receive(key, self.assignment.worker_of(piece), cancel)
        if key not in self._own:
            raise BadFrame(f"piece {piece} has not made what another of this stage needs: {key}")
        return self._own.pop(key)

    def receive_value_from(self, piece: int, key: MessageKey, cancel: Cancel) -> Tensor:
        """Wait for what is never a zero mark. Raises PeerLost for one that is, too."""
        return _nonzero(self.receive_from(piece, key, cancel), key, self.assignment.worker_of(piece))

    def receive(
        self, key: MessageKey, peer: str, cancel: Cancel, until_s: float | None = None
    ) -> Tensor | None:
        """Wait for a message. Raises PeerLost where it has not come by ``until_s``, if that is given."""
        try:
            return self._await(key, peer, cancel, until_s)
        finally:
            self._progress.waits = None

    def receive_value(
        self, key: MessageKey, peer: str, cancel: Cancel, until_s: float | None = None
    ) -> Tensor:
        """Wait for a message that is never a zero mark. Raises PeerLost for one that is, too."""
        return _nonzero(self.receive(key, peer, cancel, until_s), key, peer)

    def arrived(self, step: int, which: Which, peer: str) -> Tensor | None:
        """Return a message of an exchange, None where it has not come."""
        key = self.key_of(step, which)
        try:
            return _nonzero(self._links.receive(key, 0.0), key, peer)
        except TimeoutError:
            return None

    def awaited(self, step: int, cancel: Cancel, which: Which, peer: str) -> Tensor:
        """Wait for a message of an exchange."""
        return self.receive_value(self.key_of(step, which), peer, cancel)

    def within(
        self, step: int, cancel: Cancel, begun_s: float, which: Which, peer: str, patience: float
    ) -> Tensor:
        """Wait for a message of a round. Raises PeerLost past the deadline, counted from ``begun_s``."""
        exchange, until_s = self.assignment.plan.exchange, None
        if exchange is not None and exchange.deadline_s and self.asks is None:
            until_s = begun_s + exchange.deadline_s * patience
        return self.receive_value(self.key_of(step, which), peer, cancel, until_s)

    def _await(self, key: MessageKey, peer: str, cancel: Cancel, until_s: float | None) -> Tensor | None:
        told_at_s = max(LONG_WAIT_S, 2 * self.step_s)
        begun_s, started_s, computed_s = self._spans.now_s(), self.clock(), self.cpu.computed_s
        while True:
            cancel.check()
            owing = self._stage.owing
            left_s = POLL_S if until_s is None else max(0.0, until_s - self.clock())
            try:
                value = self._links.receive(key, 0.0 if owing is not None else min(POLL_S, left_s))
                break
            except TimeoutError:
                if owing is not None:
                    self._fill(key.step, owing[0])
                    begun_s, started_s, computed_s = self._spans.now_s(), self.clock(), self.cpu.computed_s
                    continue
                waited_s = self.clock() - started_s
                self._progress.waits = Waiting(
                    peer, key.direction.name.lower(), key.step, time.monotonic() - waited_s
                )
                if self.asks is not None:
                    self.asks.waited(peer, key.step, waited_s)
                if until_s is not None and self.clock() >= until_s:
                    why = f"the round's deadline was over before all of it had come; waited {waited_s:.1f} s"
                    raise PeerLost(peer, why) from None
                if waited_s >= told_at_s:
                    told_at_s = 2 * waited_s
                    self.notice(LongWait(key, peer, waited_s))
        self._progress.tick()
        decoding_s = self.cpu.computed_s - computed_s
        waited_s = max(0.0, self.clock() - started_s - decoding_s)
        self._note_wait(key.step, key.micro, begun_s, waited_s, peer)
        return value

    def _note_wait(self, step: int, micro: int, begun_s: float, waited_s: float, peer: str) -> None:
        self.waited_s += waited_s
        if waited_s >= MIN_WAIT_SPAN_S:
            self._spans.add(Span("wait", step, micro, begun_s, begun_s + waited_s, peer))

    @contextmanager
    def blaming_sources(self, program: StageProgram) -> Iterator[None]:
        """Raise PeerLost of who sent a value that no op may index by."""
        try:
            yield
        except UnusableValue as error:
            (source,) = (r.source for r in program.received if r.op == error.op)
            if self.assignment.here(source):
                raise
            raise PeerLost(self.assignment.worker_of(source), str(error)) from None

    def send_all(self, messages: Iterable[tuple[int, MessageKey, Tensor | None]]) -> None:
        """What one action sends, in this order."""
        left = list(messages)
        while left:
            piece, key, value = left.pop(0)
            self.send(piece, key, value, more=any(later == piece for later, *_ in left))

    def send(self, piece: int, key: MessageKey, value: Tensor | None, *, more: bool = False) -> None:
        """Send a message to a piece of this replica; to one of this stage it is handed on."""
        if self.assignment.here(piece):
            self._own[key] = value
            return
        peer = self.assignment.worker_of(piece)
        with self._progress.waiting(peer, "room", key.step):
            self._links.send(peer, key, value, more=more)

    def send_exchanged(self, step: int, peer: str, which: Which, value: Tensor) -> None:
        """Send a part of an exchange."""
        with self._progress.waiting(peer, "room", step):
            self._links.send(peer, self.key_of(step, which), value)


def _nonzero(value: Tensor | None, key: MessageKey, peer: str) -> Tensor:
    if value is None:
        raise PeerLost(peer, f"a {key.direction.name.lower()} came as a zero mark: {key}")
    return value
