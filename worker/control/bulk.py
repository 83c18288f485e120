"""Blobs and micro-batches on a channel of their own, which is opened anew when the identity is renewed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from protos.blob_calls import BlobsOverGrpc
from worker.control.remote_store import batches

if TYPE_CHECKING:
    import grpc

    from protos import atoll_control_pb2 as pb
    from protos.blob_transfer import Change, Chunk, Patch
    from worker.control.enroll import Membership


SILENT_CALLS_S = 0.5


class Bulk:
    """``BlobPort`` and the data provider's micro-batches; from any thread. An upload must not hold up a
    commit, hence a channel beside the session's."""

    def __init__(self, opened: Callable[[Membership], grpc.Channel], member: Membership) -> None:
        self._opened, self._lock = opened, threading.Lock()
        self._before: grpc.Channel | None = None
        self._use(member)

    def renewed(self, member: Membership) -> None:
        """Calls from now on go as ``member``; those under way end on the channel that they have."""
        with self._lock:
            if self._before is not None:  # a third of a certificate's time ago, at the least
                self._before.close()
            self._before = self._channel
            self._use(member)

    def reopen(self) -> None:
        """Go on over another connection, and soon end the calls under way: they have fallen silent."""
        with self._lock:
            silent = [self._channel] + ([self._before] if self._before is not None else [])
            self._before = None
            self._use(self._member)
        for channel in silent:
            # Not at once: a call may be about to begin on it.
            ending = threading.Timer(SILENT_CALLS_S, channel.close)
            ending.daemon = True
            ending.start()

    def _use(self, member: Membership) -> None:
        self._channel, self._member = self._opened(member), member
        self._blobs = BlobsOverGrpc(self._channel, member.metadata, member.work_address)

    def get(self, wanted: list[tuple[str, int]]) -> Iterable[Chunk]:
        return self._blobs.get(wanted)

    def missing(self, hashes: list[str]) -> dict[str, int]:
        return self._blobs.missing(hashes)

    def put(self, chunks: Iterator[Chunk]) -> Collection[str]:
        return self._blobs.put(chunks)

    def patch(self, patches: list[Patch]) -> Collection[str]:
        return self._blobs.patch(patches)

    def changes(self, hashes: list[str]) -> list[Change]:
        return self._blobs.changes(hashes)

    def batches(self, request: pb.BatchRequest) -> Iterator[pb.Batch]:
        """Yield what was asked for. ConnectionFailed may be tried again."""
        member = self._member
        return batches(self._channel, member.metadata, member.work_address, request)

    def close(self) -> None:
        """End every call."""
        with self._lock:
            for channel in (self._channel, self._before):
                if channel is not None:
                    channel.close()
