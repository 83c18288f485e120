"""Parts of an app run between the coordinator and this machine's disk; never a whole one in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from atoll.errors import AtollError, BadFrame, ConnectionFailed
from protos import atoll_apps_pb2 as pb
from protos import atoll_apps_pb2_grpc as rpc
from protos.blob_transfer import Chunk, fetch
from protos.grpc_errors import to_atoll_error
from worker.blobs import CHUNK_BYTES, BlobCache, attempts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.cancel import Cancel


class Parts:
    """Fetches into a bounded cache and sends from files, for one run at a time."""

    def __init__(
        self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]], address: str, cache: BlobCache
    ) -> None:
        self._channel = channel
        self._stub: Any = rpc.AppWorkStub(channel)
        self._metadata, self._address = metadata, address
        self.cache = cache
        self._lock = threading.Lock()
        self._call: Any = None

    def abort(self) -> None:
        """End the transfer under way; it raises ConnectionFailed, or Cancelled where that was set."""
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def move(self, channel: grpc.Channel, address: str) -> None:
        """The coordinator listens elsewhere now."""
        with self._lock:
            old, self._channel = self._channel, channel
            self._stub, self._address = rpc.AppWorkStub(channel), address
        old.close()

    @property
    def address(self) -> str:
        """HOST:PORT at which the coordinator takes parts."""
        return self._address

    def close(self) -> None:
        """No transfer follows."""
        self._channel.close()

    def take(self, parts: Sequence[pb.Part]) -> int:
        """Put what came with a message into the cache; returns its bytes. BadFrame when damaged."""
        for part in parts:
            if part.data or not part.size:
                name, size = part.hash, len(part.data)
                if self.cache.held(name) is not None:
                    self.cache.path(name).with_suffix(".part").unlink(missing_ok=True)
                    self.cache.write(Chunk(name, size, 0, part.data))
        return sum(len(part.data) for part in parts)

    def fetch(self, run: int, wanted: Mapping[str, int], cancel: Cancel) -> int:
        """Bring parts (hash -> bytes) into the cache; returns the bytes that travelled.

        Goes on after a lost connection; ConnectionFailed after so many attempts without a new byte.
        """
        self.cache.trim(wanted)
        travelled = 0
        for chunk in fetch(partial(self._get, run), partial(self.cache.lacking, wanted), attempts(cancel)):
            cancel.check()
            if chunk.size != wanted.get(chunk.hash, -1):
                raise BadFrame(
                    f"part {chunk.hash[:12]} has {chunk.size} bytes, announced were {wanted.get(chunk.hash)}"
                )
            self.cache.write(chunk)
            travelled += len(chunk.data)
        return travelled

    def send(self, run: int, files: Mapping[str, Path], cancel: Cancel) -> int:
        """Send whole files under their hashes; returns the bytes. Errors as ``fetch``."""
        for attempt in attempts(cancel) if files else ():
            with attempt:
                future = self._stub.PutNodeParts.future(_chunks(run, files, cancel), metadata=self._metadata)
                with self._lock:
                    self._call = future
                self._result(future)
        return sum(path.stat().st_size for path in files.values())

    def _get(self, run: int, lacking: list[tuple[str, int]]) -> Iterator[Chunk]:
        request = pb.PartList(run=run, parts=[pb.Part(hash=name, offset=held) for name, held in lacking])
        call = self._stub.GetNodeParts(request, metadata=self._metadata)
        with self._lock:
            self._call = call
        try:
            for chunk in call:
                yield Chunk(chunk.hash, chunk.size, chunk.offset, chunk.data)
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            with self._lock:
                self._call = None
            call.cancel()

    def _result(self, future: Any) -> None:
        try:
            future.result()
        except grpc.FutureCancelledError:
            raise ConnectionFailed("the transfer was stopped") from None
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            with self._lock:
                self._call = None

    def _error(self, error: grpc.RpcError) -> AtollError:
        if getattr(error, "code", lambda: None)() is grpc.StatusCode.CANCELLED:
            return ConnectionFailed("the transfer was stopped")
        return to_atoll_error(error, self._address)


def _chunks(run: int, files: Mapping[str, Path], cancel: Cancel) -> Iterator[pb.PartChunk]:
    for name, path in files.items():
        size, offset = path.stat().st_size, 0
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                if cancel.is_set:
                    return
                yield pb.PartChunk(run=run, hash=name, size=size, offset=offset, data=piece)
                offset += len(piece)
