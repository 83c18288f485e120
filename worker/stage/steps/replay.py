"""Steps that a stage repeats by itself: its neighbours send again what they sent, it sends nothing.

A stage is a deterministic function of its state and its messages (decision 033), so what comes of it are the
bits of the worker that was lost.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from worker.stage.steps.expected import EMPTY, Arrival, round_arrivals, step_arrivals
from worker.transport.frames import NOT_HERE, Direction, MessageKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from atoll.messages.to_worker import StepCommit
    from worker.stage.assignment import Assignment
    from worker.stage.steps.local_steps import LocalSteps
    from worker.stage.steps.ports import TensorLinks

AHEAD_STEPS = 4
AHEAD_BYTES = 256 << 20
"""Messages of so many bytes may come while a step is computed."""
MOST_ASKED = 64
"""Steps back that times are remembered of."""
AGAIN_S = 2.0
"""A neighbour that does not know of the plan yet does not answer: it is asked again, then ever later."""


class Repeating(Protocol):
    """What messages of repeated steps are asked for with."""

    def waited(self, peer: str, step: int, waited_s: float) -> None:
        """Ask again where nothing has come for long. Raises PeerLost."""
        ...


class Asks:
    """What the neighbours of a stage are asked for, of steps ``first`` to ``end`` - 1."""

    def __init__(
        self,
        assignment: Assignment,
        links: TensorLinks,
        first: int,
        end: int,
        version_at: Callable[[int], int] | None = None,
    ) -> None:
        """``version_at(step)``: under which a step is asked for; None: under the assignment's."""
        self.job, self._links = assignment.job, links
        self._version_at = version_at or (lambda _: assignment.version)
        self._next, self._end = first, end
        arrivals = list(step_arrivals(assignment, first))
        self._peers = sorted({arrival.peer for arrival in arrivals})
        step_bytes = sum(arrival.meta.nbytes for arrival in arrivals)
        self.ahead = min(AHEAD_STEPS, AHEAD_BYTES // max(1, step_bytes))
        self._again_s: dict[tuple[str, int], float] = {}

    def up_to(self, step: int) -> None:
        """Ask for the steps until ``step``, as far as they are to be repeated. Raises PeerLost."""
        for old in [asked for asked in self._again_s if asked[1] < self._next - MOST_ASKED]:
            del self._again_s[old]
        while self._next <= min(step, self._end - 1):
            self._links.expect(
                Arrival(self._key(peer, self._next, NOT_HERE), peer, EMPTY) for peer in self._peers
            )
            for peer in self._peers:
                self._ask(peer, self._next)
            self._next += 1

    def waited(self, peer: str, step: int, waited_s: float) -> None:
        """Ask again where nothing has come for long. Raises PeerLost."""
        if step < self._next and waited_s >= self._again_s[peer, step]:
            self._again_s[peer, step] *= 2
            self._ask(peer, step)

    def _ask(self, peer: str, step: int) -> None:
        self._again_s.setdefault((peer, step), AGAIN_S)
        with suppress(TimeoutError):  # later, then
            self._links.ask(peer, self._key(peer, step, 0))

    def _key(self, peer: str, step: int, micro: int) -> MessageKey:
        # Keys tell messages apart, whoever sends them.
        version = self._version_at(step)
        return MessageKey(self.job, version, step, micro, self._peers.index(peer), Direction.REPLAY)


class CommitAsks:
    """What the neighbours of a stage of a peer are asked for whose own steps are committed.

    Of a step the others of its pipeline are asked, of a round those that hold a part of the same. A log keeps
    a period's round with its last step, so who was asked for that step sends the round as well.
    """

    def __init__(self, assignment: Assignment, links: TensorLinks, local: LocalSteps) -> None:
        self._assignment, self._links, self._local = assignment, links, local
        self._numbers = {place.worker: at for at, place in enumerate(assignment.plan.places)}
        own = list(step_arrivals(assignment, assignment.first_step))
        step_bytes = sum(arrival.meta.nbytes for arrival in own)
        self._ahead = min(AHEAD_STEPS, AHEAD_BYTES // max(1, step_bytes))
        self._asked = 0  # of the commits that are being repeated
        self._again_s: dict[tuple[str, int], tuple[float, int]] = {}  # and under which version

    def begin(self) -> None:
        """Other commits are repeated from now on."""
        self._asked = 0

    def up_to(self, commits: Sequence[StepCommit], at: int) -> None:
        """Ask for what these take, up to number ``at`` and some more. Raises PeerLost."""
        for commit in commits[self._asked : at + 1 + self._ahead]:
            self._ask_for(commit)
            self._asked += 1

    def waited(self, peer: str, step: int, waited_s: float) -> None:
        """Ask again where nothing has come for long. Raises PeerLost."""
        known = self._again_s.get((peer, step))
        if known is not None and waited_s >= known[0]:
            self._again_s[peer, step] = 2 * known[0], known[1]
            self._ask(peer, known[1], step)

    def _ask_for(self, commit: StepCommit) -> None:
        version, step, plan = commit.version, commit.step, self._assignment.plan
        for old in [asked for asked in self._again_s if asked[1] < step - MOST_ASKED]:
            del self._again_s[old]
        last = plan.last_step(step, self._assignment.training.steps)
        seen = self._assignment.relinked(version, ())
        arrivals = list(step_arrivals(seen, step)) if commit.own else []
        if step == last or not commit.own:  # before any of them comes
            of_round = list(round_arrivals(seen, self._local, last))
            self._links.expect(of_round)
            arrivals += [] if commit.own else of_round
        self._expect(arrivals, version, step)

    def _expect(self, arrivals: Iterable[Arrival], version: int, step: int) -> None:
        wanted = list(arrivals)
        peers = sorted({arrival.peer for arrival in wanted})
        refusals = [Arrival(self._key(peer, version, step, NOT_HERE), peer, EMPTY) for peer in peers]
        self._links.expect([*wanted, *refusals])
        for peer in peers:
            if self._again_s.get((peer, step), (0.0, -1))[1] != version:
                self._again_s[peer, step] = AGAIN_S, version
                self._ask(peer, version, step)

    def _ask(self, peer: str, version: int, step: int) -> None:
        with suppress(TimeoutError):  # later, then
            self._links.ask(peer, self._key(peer, version, step, 0))

    def _key(self, peer: str, version: int, step: int, micro: int) -> MessageKey:
        job = self._assignment.job
        return MessageKey(job, version, step, micro, self._numbers[peer], Direction.REPLAY)
