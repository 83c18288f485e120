"""A session's stream to the coordinator, opened again whenever it breaks, at the address that holds now."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from atoll.errors import AccessDenied, AtollError, ProtocolMismatch
from worker.control.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos import atoll_control_pb2 as pb
    from worker.config import WorkerConfig
    from worker.control.enroll import Membership

FATAL = (AccessDenied, ProtocolMismatch)


@dataclass(slots=True)
class SessionStream:
    """One stream at a time; what an older one still reports counts no more.

    ``find`` looks for the coordinator again and raises why it is out of reach. ``lost`` and ``refused`` hear
    of an end: after ``lost`` the session asks for ``reopen``, after ``refused`` it is over.
    """

    config: WorkerConfig
    membership: Callable[[], Membership]
    introduce: Callable[[], pb.FromWorker]
    receive: Callable[[pb.ToWorker], None]
    find: Callable[[], None]
    lost: Callable[[str], None]
    refused: Callable[[AtollError], None]
    stopping: threading.Event
    gone: threading.Event
    _stream: Stream | None = None
    _opened: int = field(default=0)

    def open(self) -> None:
        """Open a stream; it begins with an introduction made now."""
        member, config = self.membership(), self.config
        self._opened += 1
        self._stream = Stream(
            partial(member.async_channel, config),
            member.metadata,
            member.work_address,
            self.introduce(),
            config.outgoing_messages,
            self.receive,
            partial(self._ended, self._opened),
        )

    def move(self) -> None:
        """Go on from another address, without a look for the coordinator's: soon it gives us up."""
        before = self._stream
        self.open()
        if before is not None:
            before.close(wait=False)

    def reopen(self, after_s: float) -> None:
        """Find the coordinator again after a pause, and open a stream; returns at once."""
        threading.Thread(target=self._reopen, args=(after_s,), name="atoll-reconnect", daemon=True).start()

    def send(self, message: pb.FromWorker) -> bool:
        """Queue a message; False when too many wait. Without a stream it is dropped."""
        return self._stream is None or self._stream.send(message)

    def close(self, *, wait: bool = True) -> None:
        """Close the stream that is open."""
        if self._stream is not None:
            self._stream.close(wait=wait)

    def _reopen(self, after_s: float) -> None:
        opened = self._opened
        if self.stopping.wait(after_s) or self.gone.is_set():
            return
        try:
            self.find()
        except AtollError as error:
            if isinstance(error, FATAL):
                self.refused(error)
            elif self._opened == opened:  # else there is one from another address
                self.lost(str(error))
        else:
            if self._opened == opened:
                self.open()

    def _ended(self, number: int, error: AtollError | None) -> None:
        if self.stopping.is_set() or self.gone.is_set() or number != self._opened:
            return
        if isinstance(error, FATAL):
            self.refused(error)
        else:
            self.lost(str(error or "the coordinator closed the session"))
