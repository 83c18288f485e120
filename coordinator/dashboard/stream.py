"""The stream of server-sent events to one viewer: the newest alone, and ended when nobody takes it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from starlette.responses import PlainTextResponse

from atoll.errors import UsageError
from coordinator.dashboard.topic import GZIP_HEAD, Topic, deflated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from coordinator.dashboard.reader import Reader

log = structlog.get_logger()
SIGN_OF_LIFE = b": here\n\n"
MAX_TOPICS_A_PAGE = 4


@dataclass(frozen=True, slots=True)
class Patience:
    """How long viewers are waited for."""

    slow_viewer_s: float = 30.0  # for one that takes nothing
    sign_of_life_s: float = 15.0  # between two messages at most, for proxies that end what is silent
    viewers: int = 200


class Viewers:
    """All who look now."""

    def __init__(self, reader: Reader, patience: Patience) -> None:
        self.reader, self.patience = reader, patience
        self.count = 0


class EventStream:
    """ASGI response: the events of some topics for as long as the viewer takes them."""

    def __init__(self, viewers: Viewers, topics: Sequence[str], *, gzip: bool) -> None:
        self._viewers, self._topics, self._gzip = viewers, topics, gzip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        viewers = self._viewers
        if viewers.count >= viewers.patience.viewers:
            refusal = PlainTextResponse(f"{viewers.patience.viewers} look already; close some pages\n", 503)
            await refusal(scope, receive, send)
            return
        viewers.count += 1
        try:
            async with viewers.reader.looking(self._topics) as topics:
                sending = asyncio.create_task(self._send(topics, send))
                left = asyncio.create_task(_left(receive))
                try:
                    await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
                    if sending.done():
                        sending.result()
                finally:
                    sending.cancel()
                    left.cancel()
        except UsageError as error:
            await PlainTextResponse(f"{error}\n", 404)(scope, receive, send)
        except TimeoutError:
            log.info(
                "dashboard.viewer_closed", topics=list(self._topics), waited_s=viewers.patience.slow_viewer_s
            )
        finally:
            viewers.count -= 1

    async def _send(self, topics: Sequence[Topic], send: Send) -> None:
        """Send what is new for ever. TimeoutError when the viewer takes nothing."""
        patience, pulse = self._viewers.patience, self._viewers.reader.pulse
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        if self._gzip:
            headers.append((b"content-encoding", b"gzip"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._gzip:
            await self._put(send, GZIP_HEAD)
        known = dict.fromkeys((topic.name for topic in topics), 0)
        while True:
            following = pulse.next
            for topic in topics:
                version, frame = topic.version, topic.since(known[topic.name])
                if frame is not None:
                    await self._put(send, frame.deflated if self._gzip else frame.plain)
                    known[topic.name] = version
            if any(topic.version != known[topic.name] for topic in topics):
                continue
            try:
                await asyncio.wait_for(following.wait(), patience.sign_of_life_s)
            except TimeoutError:
                await self._put(send, deflated(SIGN_OF_LIFE) if self._gzip else SIGN_OF_LIFE)

    async def _put(self, send: Send, data: bytes) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": True}
        await asyncio.wait_for(send(message), self._viewers.patience.slow_viewer_s)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
