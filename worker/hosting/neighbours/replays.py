"""Sends again what a neighbour's stage was sent in steps that are over: to who takes it over or stands by.

One thread reads the send log and sends within the transport's bounds. What is asked for while its step is
under way, or is being repeated here as well, follows as it is logged. What hot standbys are sent makes way
for everything else.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll.errors import StorageError
from worker.hosting import TUNED
from worker.transport.contract import PeerLost
from worker.transport.frames import NOT_HERE, MessageKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worker.hosting.neighbours.send_log import SendLog
    from worker.transport.network import PeerNetwork

log = structlog.get_logger()

MAX_ASKED = 8
"""Steps that a peer may have asked for. What it asked for first makes way, not the lowest step: an assignment
before may have come to higher ones."""


@dataclass(eq=False)
class _Asked:
    peer: str
    rank: int
    key: MessageKey
    at: int = 0  # position in the step
    again: bool = False  # was asked once more
    done: bool = False


class Replays:
    """What peers have asked for; ``ask`` never waits."""

    def __init__(
        self, sent: SendLog, network: PeerNetwork, stands_by: Callable[[str], bool] = lambda _: False
    ) -> None:
        """``stands_by(peer)``: whether nobody waits for what this peer asks for."""
        self._log, self._network, self._stands_by = sent, network, stands_by
        self._changed = threading.Condition()
        self._asked: dict[tuple[str, int], _Asked] = {}
        self._due = self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, peer: str, rank: int, key: MessageKey) -> None:
        """Send ``peer``, who has ``rank``, the messages of ``key``'s step."""
        with self._changed:
            if self._closed:
                return
            known = self._asked.pop((peer, key.step), None)
            if known is not None and known.key == key:
                known.again, known.done = True, False
            else:
                known = _Asked(peer, rank, key)
            self._asked[peer, key.step] = known
            for first in [asked for asked in self._asked if asked[0] == peer][:-MAX_ASKED]:
                del self._asked[first]
            self._due = True
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="atoll-replay", daemon=True)
                self._thread.start()

    def logged(self) -> None:
        """More may be in the log of what was asked for."""
        with self._changed:
            if any(not asked.done for asked in self._asked.values()):
                self._due = True
                self._changed.notify()

    def forget_but(self, ranks: Mapping[str, int]) -> None:
        """Forget what was asked for so far by others than these peers, or as another rank than each has now:
        who stood by for one and takes another asks for the same steps in the same words."""
        with self._changed:
            self._asked = {at: what for at, what in self._asked.items() if ranks.get(what.peer) == what.rank}

    def close(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._closed = True
            self._asked.clear()
            self._changed.notify()

    def _serve(self) -> None:
        """Thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if self._closed:
                    return
                self._due = False
                open_ = [asked for asked in self._asked.values() if not asked.done]
            for asked in sorted(open_, key=lambda asked: asked.key.step):
                self._send(asked)

    def _send(self, asked: _Asked) -> None:
        """Send as much as there is, and room for."""
        try:
            if asked.again:
                asked.again = False
                if self._network.flush(asked.peer, 0.0):  # else it is still on its way
                    asked.at = 0
            over = self._log.newest > asked.key.step  # looked at first: what follows is then all
            for record in self._log.records(asked.key.step, asked.rank, asked.at):
                if self._asked.get((asked.peer, asked.key.step)) is not asked:
                    return
                self._network.send(
                    asked.peer,
                    record.key,
                    record.header,
                    record.payload,
                    TUNED.replay_room_s,
                    background=self._stands_by(asked.peer),
                )
                asked.at = record.next
            asked.done = over
        except TimeoutError:
            with self._changed:
                self._due = True
        except PeerLost:
            self._forget(asked)
        except StorageError as error:
            log.warning("replay.refused", peer=asked.peer, step=asked.key.step, reason=str(error))
            self._forget(asked)
            self._refuse(asked, str(error))

    def _refuse(self, asked: _Asked, reason: str) -> None:
        try:
            key = asked.key._replace(micro=NOT_HERE)
            self._network.send(asked.peer, key, reason.encode()[:500], b"", TUNED.replay_room_s)
        except (PeerLost, TimeoutError):
            return  # it asks again, or somebody else does

    def _forget(self, asked: _Asked) -> None:
        with self._changed:
            if self._asked.get((asked.peer, asked.key.step)) is asked:
                del self._asked[asked.peer, asked.key.step]
