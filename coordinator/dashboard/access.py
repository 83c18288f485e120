"""Who may look: a key that becomes a cookie, the names that this page goes by, and headers on every reply.

The key stands in the fragment of the address that `atoll dashboard` prints: no log and no Referer holds it.
The page sends it once, by POST, for a cookie of 12 hours.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, Response

from atoll.errors import UsageError
from hostos.net.addresses import join_address, parse_address

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE_S = 12 * 3600.0
WRONG_KEY_DELAY_S = 0.5
WRONG_KEYS_AT_ONCE = 16  # that are answered late; further ones are refused at once
MAX_KEY_BYTES = 4096
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
PAGE_PORT = 7780  # unless --listen names another
OPEN = ("/static/", "/session")  # without a cookie: neither tells anything of the fleet


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the page listens, and by which names browsers reach it.

    ``tls``: certificate and key, by path; ``behind_proxy``: another program ends TLS in front of it;
    ``published``: the loopback address and port of the host that lead here, into a container.
    UsageError for an address that others reach without any of the three.
    """

    host: str = "127.0.0.1"
    port: int = PAGE_PORT
    tls: tuple[str, str] | None = None
    behind_proxy: bool = False
    names: frozenset[str] = frozenset()  # that Host headers may have, beside the loopback's and ``host``
    published: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if self.published is not None and self.published[0] not in LOOPBACK:
            raise UsageError(
                f"--published {self.published[0]}: give the loopback address of the host, such as "
                f"127.0.0.1:{self.port}; for any other address the page needs --tls or --behind-proxy"
            )
        contained = self.tls is not None or self.behind_proxy or self.published is not None
        if self.host not in LOOPBACK and not contained:
            raise UsageError(
                f"{self.host} would send the page over the network in the clear; give --tls CERTIFICATE KEY "
                f"or --behind-proxy, or leave --listen at 127.0.0.1 and look from elsewhere through "
                f"`ssh -L {self.port}:127.0.0.1:{self.port} THIS_MACHINE`"
            )

    @property
    def secure(self) -> bool:
        """Whether browsers reach it by https."""
        return self.tls is not None or self.behind_proxy

    def goes_by(self, host: str) -> bool:
        """Return whether a Host header names this page: a page of somebody else's name was rebound to us."""
        name = (urlsplit(f"//{host}").hostname or "").lower()
        return name in LOOPBACK or name == self.host.lower() or name in self.names

    def address(self, port: int) -> str:
        """Return the page's address as it is shown."""
        if self.published is not None:
            return f"http://{join_address(*self.published)}/"
        name = next(iter(sorted(self.names)), self.host)
        return f"{'https' if self.secure else 'http'}://{join_address(name, port)}/"


def listening(
    listen: str, tls: tuple[str, str] | None, behind_proxy: bool, names: tuple[str, ...], published: str = ""
) -> Listening:
    """Return where to listen by a command's options. UsageError."""
    if published and (tls is not None or behind_proxy):
        raise UsageError("--published is for a page without TLS: leave out --tls and --behind-proxy, or it")
    host, port = parse_address(listen, PAGE_PORT)
    known = frozenset(name.lower() for name in names)
    return Listening(
        host, port, tls, behind_proxy, known, parse_address(published, PAGE_PORT) if published else None
    )


@dataclass
class Keys:
    """The key of one process, and the cookies that it has given for it."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    clock: Callable[[], float] = time.time
    _seal: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def opens(self, given: str) -> bool:
        """Return whether this is the key; takes the same time whatever is given."""
        return hmac.compare_digest(_digest(given.encode()), _digest(self.key.encode()))

    def cookie(self) -> str:
        """Return a new cookie: its end and the seal over it."""
        end = str(int(self.clock() + COOKIE_S))
        return f"{end}.{self._sealed(end)}"

    def holds(self, cookie: str) -> bool:
        """Return whether a cookie is one of ours and has not ended."""
        end, _, seal = cookie.partition(".")
        known = hmac.compare_digest(_digest(seal.encode()), _digest(self._sealed(end).encode()))
        return known and end.isdecimal() and len(end) < 16 and int(end) > self.clock()

    def _sealed(self, end: str) -> str:
        return hmac.new(self._seal, end.encode(), hashlib.sha256).hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Guard:
    """ASGI: lets calls through whose Host is this page's and that have the cookie, and adds ``HEADERS``."""

    def __init__(
        self, app: ASGIApp, listening: Listening, keys: Keys | None, signin: Callable[[], Response]
    ) -> None:
        """``keys`` None: everybody may look. ``signin``: the page for a browser without a cookie."""
        self._app, self._listening, self._keys, self._signin = app, listening, keys, signin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, headed)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._listening.goes_by(headers.get("host", "")):
            return PlainTextResponse("this page does not go by that name; start it with --name\n", 421)
        if scope["path"].startswith(OPEN) or self._keys is None or self._keys.holds(self._cookie(headers)):
            return None
        if "text/html" in headers.get("accept", ""):
            return self._signin()
        return PlainTextResponse("open the address that `atoll dashboard` printed, with its key\n", 401)

    def _cookie(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(cookie_name(self._listening))
        except CookieError:
            return ""
        return found.value if found is not None else ""


def cookie_name(listening: Listening) -> str:
    """Return the cookie's name: browsers send one of 127.0.0.1 to every port there."""
    return f"atoll-{listening.port}"


class Entrance:
    """POST /session: the key for a cookie. Wrong keys are answered late, so that nobody guesses."""

    def __init__(self, listening: Listening, keys: Keys, delay_s: float = WRONG_KEY_DELAY_S) -> None:
        self._listening, self._keys, self._delay_s = listening, keys, delay_s
        self._delayed = 0

    async def __call__(self, request: Request) -> Response:
        """Return the cookie, or 401 for a wrong key and 403 for another site's call."""
        origin = request.headers.get("origin", "")
        if urlsplit(origin).netloc != request.headers.get("host", ""):
            return PlainTextResponse("another site's page must not sign in here\n", 403)
        key = await _body(request)
        if key is None or not self._keys.opens(key):
            await self._slow_down()
            return PlainTextResponse("this is not the key of this dashboard\n", 401)
        answer = JSONResponse({"signed_in": True})
        answer.set_cookie(
            cookie_name(self._listening),
            self._keys.cookie(),
            max_age=int(COOKIE_S),
            path="/",
            secure=self._listening.secure,
            httponly=True,
            samesite="strict",
        )
        return answer

    async def _slow_down(self) -> None:
        if self._delayed >= WRONG_KEYS_AT_ONCE:
            return
        self._delayed += 1
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._delayed -= 1


async def _body(request: Request) -> str | None:
    """Return a call's body as text, None where it is longer than any key."""
    found = b""
    async for chunk in request.stream():
        found += chunk
        if len(found) > MAX_KEY_BYTES:
            return None
    return found.decode(errors="replace").strip()
