"""Steps that a stage repeats by itself: its neighbours send again what they sent, it sends nothing.

A stage is a deterministic function of its state and its messages (decision 033), so what comes of it are the
bits of the worker that was lost.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from worker.stage.expected import EMPTY, Arrival, step_arrivals
from worker.transport.frames import NOT_HERE, Direction, MessageKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.stage.assignment import Assignment
    from worker.stage.ports import TensorLinks

AHEAD_STEPS = 4
AHEAD_BYTES = 256 << 20
"""Messages of so many bytes may come while a step is computed."""
MOST_ASKED = 64
"""Steps back that times are remembered of."""
AGAIN_S = 2.0
"""A neighbour that does not know of the plan yet does not answer: it is asked again, then ever later."""


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
        self._job, self._links = assignment.job, links
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
        return MessageKey(self._job, version, step, micro, self._peers.index(peer), Direction.REPLAY)
