"""The tunnel through a relay: both ends dial it with tickets of the coordinator, and it joins them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from atoll.errors import BadFrame, ConnectionFailed, UsageError
from hostos.net.addresses import join_address
from hostos.net.proxies import MAX_HEAD_BYTES, Proxy, connected, proxy_for
from hostos.net.splice import received, tuned
from protos.relay_tickets import (
    CONFIRMED,
    GREETING_BYTES,
    JOINED,
    MAX_REASON_BYTES,
    REFUSED,
    answer,
    nonce_of,
)
from protos.text_limits import clean
from worker.transport import TUNED
from worker.transport.contract import RelayOffer

Address = tuple[str, int]


class RelayTunnel:
    """Streams to one peer through the relays of one offer."""

    def __init__(
        self,
        offer: RelayOffer,
        coordinator: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        use_proxy: bool = False,
    ) -> None:
        """``coordinator``: the host of a relay whose address has none."""
        self._use_proxy = use_proxy
        self.dials, self.after_s = offer.dials, offer.after_s
        self._offer, self._clock = offer, clock
        self._relays = [(host or coordinator, port) for host, port in offer.addresses]
        self._over_s = clock() + offer.lasts_s
        self._used = self._relays[0] if self._relays else ("", 0)

    @property
    def name(self) -> str:
        """HOST:PORT of the relay last used."""
        return join_address(*self._used)

    @property
    def over(self) -> bool:
        """The ticket has ended."""
        return self._clock() >= self._over_s

    async def open(self) -> socket.socket:
        """Dial each relay in turn, or wait at all of them. Raises ConnectionFailed with every reason."""
        if self.over:
            raise ConnectionFailed("the relay's ticket has ended, and no other has come")
        if not self.dials:
            return await self._wait()
        reasons = []
        for relay in self._relays:
            try:
                return await self._join(relay)
            except ConnectionFailed as error:
                reasons.append(str(error))
        raise ConnectionFailed("; ".join(reasons) or "no relay known")

    async def _wait(self) -> socket.socket:
        tasks = [asyncio.create_task(self._join(relay)) for relay in self._relays]
        pending, reasons, found = set(tasks), [], None
        try:
            while pending and found is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is None and found is None:
                        found = task.result()
                    elif error is None:
                        task.result().close()
                    elif isinstance(error, ConnectionFailed):
                        reasons.append(str(error))
                    else:
                        raise error
        finally:
            for task in pending:
                task.cancel()
            for result in await asyncio.gather(*pending, return_exceptions=True):
                if isinstance(result, socket.socket):
                    result.close()
        if found is None:
            raise ConnectionFailed("; ".join(reasons) or "no relay known")
        return found

    async def _join(self, relay: Address) -> socket.socket:
        """A stream through this relay, once the peer is there."""
        loop, offer = asyncio.get_running_loop(), self._offer
        try:
            async with asyncio.timeout(TUNED.greet_within_s):
                proxy = proxy_for(relay[0]) if self._use_proxy else None
                stream = await (_dialled(relay) if proxy is None else _through(proxy, relay))
        except (OSError, TimeoutError, UsageError) as error:
            raise ConnectionFailed(f"relay {join_address(*relay)}: {_why(error)}") from None
        try:
            async with asyncio.timeout(TUNED.greet_within_s):
                nonce = nonce_of(await received(stream, GREETING_BYTES))
            await loop.sock_sendall(stream, answer(offer.ticket, offer.key, nonce))
            word = await received(stream, 1)
            if word != JOINED:
                raise ConnectionFailed(f"relay {join_address(*relay)}: {await _refusal(stream, word)}")
            if not self.dials:
                await loop.sock_sendall(stream, CONFIRMED)
        except BaseException as error:
            stream.close()
            if isinstance(error, OSError | TimeoutError | BadFrame):
                raise ConnectionFailed(f"relay {join_address(*relay)}: {_why(error)}") from None
            raise
        self._used = relay
        return stream


async def _dialled(relay: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    error: OSError = OSError("no such host")
    for family, kind, protocol, _, address in await loop.getaddrinfo(*relay, type=socket.SOCK_STREAM):
        stream = socket.socket(family, kind, protocol)
        try:
            tuned(stream)
            await loop.sock_connect(stream, address)
        except OSError as failed:
            stream.close()
            error = failed
        except BaseException:
            stream.close()
            raise
        else:
            return stream
    raise error


async def _through(proxy: Proxy, relay: Address) -> socket.socket:
    """A stream by way of a proxy that allows CONNECT."""
    stream = await _dialled((proxy.host, proxy.port))
    try:
        await asyncio.get_running_loop().sock_sendall(stream, proxy.request(*relay))
        head = b""
        # Byte by byte: what follows the head is the relay's.
        while not head.endswith(b"\r\n\r\n") and len(head) < MAX_HEAD_BYTES:
            more = await received(stream, 1)
            if not more:
                break
            head += more
        if not connected(head):
            said = clean(head.split(b"\r\n", 1)[0].decode(errors="replace"), 80)
            raise OSError(f"the proxy {proxy.host}:{proxy.port} does not connect: {said or 'closed'}")
    except BaseException:
        stream.close()
        raise
    return stream


async def _refusal(stream: socket.socket, word: bytes) -> str:
    if word != REFUSED:
        return "closed the connection"
    length = await received(stream, 1)
    reason = await received(stream, min(length[0], MAX_REASON_BYTES) if length else 0)
    return clean(reason.decode(errors="replace"), MAX_REASON_BYTES)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TUNED.greet_within_s:g} s"
    return str(getattr(error, "strerror", None) or error)
