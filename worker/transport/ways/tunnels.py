"""Ways to a peer that cannot be dialled: streams through something that both ends reach, and gRPC over them.

``Tunnel`` is all that the transport knows of such a way. gRPC dials and accepts sockets of its own alone. So
each stream is spliced to a Unix socket of this process: mutual TLS runs through both, from worker to worker.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from atoll.errors import ConnectionFailed
from hostos.net.splice import accept, splice
from worker.transport import TUNED


class Tunnel(Protocol):
    """Streams to one peer. Of both ends one dials, and the other waits in ``open`` to be dialled."""

    dials: bool
    after_s: float  # other ways have so long before

    @property
    def name(self) -> str:
        """What the streams pass, such as a relay's HOST:PORT."""

    @property
    def over(self) -> bool:
        """It opens no more streams; what is open stays."""

    async def open(self) -> socket.socket:
        """Return a stream to the peer, which does not block. Raises ConnectionFailed."""


MAX_FOLDER_BYTES = 80
"""An address of a Unix socket has 107 on Linux, 103 on macOS; names in the folder take 20."""
SHORT_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - a folder of this user alone is made in them


class LocalEnds:
    """Unix sockets between gRPC and the streams of tunnels, in a folder of this user alone."""

    def __init__(self) -> None:
        """Raise OSError where there is no place for the folder."""
        self._folder = _folder()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = self._folder / "accept"

    @property
    def accepting(self) -> str:
        """The gRPC address to listen on for ``accepted`` streams."""
        return f"unix:{self._accepting}"

    def dialled(self, stream: socket.socket) -> str:
        """Return the gRPC address at which one connection is spliced to ``stream``."""
        path = self._folder / str(next(self._numbers))
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        try:
            listener.bind(str(path))
            listener.listen(1)
        except OSError as error:
            listener.close()
            stream.close()
            raise ConnectionFailed(f"no local socket in {self._folder}: {error.strerror}") from None
        self._spawn(self._splice_first(listener, path, stream), listener, stream)
        return f"unix:{path}"

    def accepted(self, stream: socket.socket) -> None:
        """Have our server accept a stream that the peer dialled."""
        self._spawn(self._splice_to_server(stream), stream)

    async def _splice_first(self, listener: socket.socket, path: Path, stream: socket.socket) -> None:
        try:
            async with asyncio.timeout(TUNED.accept_within_s):
                ours, _ = await accept(listener)
        except BaseException:
            stream.close()
            raise
        finally:
            listener.close()
            path.unlink(missing_ok=True)
        await splice(ours, stream)

    async def _splice_to_server(self, stream: socket.socket) -> None:
        ours = socket.socket(socket.AF_UNIX)
        ours.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(ours, str(self._accepting))
        except BaseException:
            ours.close()
            stream.close()
            raise
        await splice(ours, stream)

    def _spawn(self, work: Coroutine[Any, Any, None], *sockets: socket.socket) -> None:
        async def guarded() -> None:
            with suppress(OSError, TimeoutError):  # a pipe's end says why
                await work

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for one in sockets:  # a task that is cancelled before its first step closes nothing itself
            task.add_done_callback(partial(_close, one))

    async def close(self) -> None:
        """Break every stream off."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _close(one: socket.socket, _: object) -> None:
    one.close()


def _folder() -> Path:
    """A new folder where temporary files are, or where paths are short: TMPDIR of a batch job is often longer
    than a socket's address may be, and a container may have no other place to write to than memory."""
    refused = OSError("no folder for sockets")
    for place in (None, *SHORT_PLACES):
        try:
            made = Path(tempfile.mkdtemp(prefix="atoll-ends-", dir=place))
        except OSError as error:
            refused = error
            continue
        if len(os.fsencode(made)) <= MAX_FOLDER_BYTES:
            return made
        made.rmdir()
    raise refused
