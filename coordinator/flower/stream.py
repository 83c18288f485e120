"""The owner's end of an app run: one stream to the coordinator, and parts beside it.

The stream survives a coordinator that is restarted: it is opened again, and ``reopened`` says that
everything unanswered has to be sent once more, for nothing that was there need be there still.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import TYPE_CHECKING

from atoll.errors import AtollError, BadFrame, ConnectionFailed, JobFailed
from coordinator.client.calls import PAUSE_MOST_S, RETRY_FOR_S, calling
from coordinator.client.endpoint import Endpoint
from hostos.retries import progressed, retrying, stop_after_pauses
from protos import atoll_apps_pb2 as pb
from protos import atoll_apps_pb2_grpc as rpc

if TYPE_CHECKING:
    from tenacity import AttemptManager

CHUNK_BYTES = 1 << 20
END_WITHIN_S = 1.0


class AppLink:
    """One run's connection. ``received`` is called in the stream's thread, ``lost`` once at the end."""

    def __init__(
        self,
        endpoint: Endpoint,
        opening: pb.AppOpen,
        received: Callable[[pb.ToApp], None],
        reopened: Callable[[], None],
        lost: Callable[[AtollError], None],
    ) -> None:
        self._endpoint, self._opening = endpoint, opening
        self._received, self._reopened, self._lost = received, reopened, lost
        self._channel = endpoint.channel()
        self._bulk = endpoint.channel()
        self._metadata = endpoint.metadata()
        self._queue: queue.SimpleQueue[pb.FromApp | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._opened = False
        self._thread = threading.Thread(target=self._run, name="atoll-app-link", daemon=True)

    def start(self) -> None:
        """Open the run."""
        self._thread.start()

    def say(self, message: pb.FromApp) -> None:
        """Queue a message for the coordinator."""
        self._queue.put(message)

    def close(self, reason: str) -> None:
        """End the run: its workers are released."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.say(pb.FromApp(close=pb.AppClose(run=self._opening.run, reason=reason)))
        self._queue.put(None)
        self._thread.join(END_WITHIN_S)
        self._channel.close()
        self._bulk.close()

    # ------------------------------------------------------------ the stream

    def _run(self) -> None:
        patience = stop_after_pauses(RETRY_FOR_S)
        attempts = retrying(lambda state: not self._opened or patience(state), self._pause, PAUSE_MOST_S)
        try:
            for attempt in attempts:
                if self._opened:
                    # What was queued for the broken stream is said anew where it still matters.
                    self._queue = queue.SimpleQueue()
                    self._reopened()
                with attempt, calling(self._endpoint.address, self._endpoint.token):
                    self._converse(attempt)
        except AtollError as error:
            if not self._stopping.is_set():
                self._lost(error)

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise ConnectionFailed("closed while the coordinator was away")

    def _converse(self, attempt: AttemptManager) -> None:
        messages = self._queue
        request = pb.AppOpen(resume=self._opened)
        request.MergeFrom(self._opening)
        stub = rpc.AppsStub(self._channel)
        try:
            for message in stub.Run(self._outgoing(request, messages), metadata=self._metadata):
                self._opened = True
                progressed(attempt)
                if message.HasField("ended"):
                    raise JobFailed(f"the coordinator ended this run: {message.ended.reason}")
                self._received(message)
            raise JobFailed("the coordinator ended this run's stream; see its log")
        finally:
            messages.put(None)  # its sender waits no longer

    @staticmethod
    def _outgoing(first: pb.AppOpen, messages: queue.SimpleQueue[pb.FromApp | None]) -> Iterator[pb.FromApp]:
        yield pb.FromApp(open=first)
        while (message := messages.get()) is not None:
            yield message

    # ------------------------------------------------------------ parts

    def put(self, parts: Mapping[str, bytes]) -> int:
        """Send parts from memory, a piece at a time; returns the bytes. Raises as any call."""
        if parts:
            with calling(self._endpoint.address, self._endpoint.token):
                rpc.AppsStub(self._bulk).PutParts(self._chunks(parts), metadata=self._metadata)
        return sum(len(data) for data in parts.values())

    def _chunks(self, parts: Mapping[str, bytes]) -> Iterator[pb.PartChunk]:
        for name, data in parts.items():
            view = memoryview(data)
            for at in range(0, len(data), CHUNK_BYTES):
                piece = bytes(view[at : at + CHUNK_BYTES])
                yield pb.PartChunk(run=self._opening.run, hash=name, size=len(data), offset=at, data=piece)

    def get(self, wanted: Mapping[str, int]) -> dict[str, bytes]:
        """The bytes of parts (hash -> size), checked. BadFrame when they are not what was asked for."""
        request = pb.PartList(run=self._opening.run, parts=[pb.Part(hash=name) for name in wanted])
        found: dict[str, bytes] = {}
        if not wanted:
            return found
        buffer, digest = BytesIO(), hashlib.sha256()
        with calling(self._endpoint.address, self._endpoint.token):
            for chunk in rpc.AppsStub(self._bulk).GetParts(request, metadata=self._metadata):
                size = wanted.get(chunk.hash)
                if size != chunk.size or chunk.offset != buffer.tell():
                    raise BadFrame(
                        f"part {chunk.hash[:12]}: byte {chunk.offset} of {chunk.size} was not expected"
                    )
                buffer.write(chunk.data)
                digest.update(chunk.data)
                if buffer.tell() == size:
                    if digest.hexdigest() != chunk.hash:
                        raise BadFrame(f"part {chunk.hash[:12]} arrived damaged: its sha256 differs")
                    found[chunk.hash] = buffer.getvalue()
                    buffer, digest = BytesIO(), hashlib.sha256()
        if len(found) != len(wanted):
            raise BadFrame(f"{len(found)} of {len(wanted)} parts arrived")
        return found
