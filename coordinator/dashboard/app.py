"""The page's routes, and the process that serves them: `atoll dashboard`."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from atoll.errors import AtollError, UsageError
from coordinator.client.chrome_trace import chrome_trace
from coordinator.client.client import Client
from coordinator.dashboard.access import Entrance, Guard, Keys, Listening
from coordinator.dashboard.reader import (
    EVENTS,
    FLEET,
    GIVEN,
    JOB,
    PUBLIC,
    PUBLIC_RUN,
    TIMELINE,
    Pace,
    Reader,
)
from coordinator.dashboard.stream import MAX_TOPICS_A_PAGE, EventStream, Patience, Viewers
from hostos.net.networks import open_listener

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from coordinator.client.endpoint import Endpoint

FOLDER = Path(__file__).parent
BACKLOG = 128
LEAVE_S = 1  # for streams that are open when the process is asked to end


@dataclass(frozen=True)
class Settings:
    """What one dashboard serves, and how patiently."""

    listening: Listening = field(default_factory=Listening)
    pace: Pace = field(default_factory=Pace)
    patience: Patience = field(default_factory=Patience)
    wrong_key_delay_s: float = 0.5
    public: bool = False  # the page for everybody, and no other


@dataclass(frozen=True)
class Page:
    """A page of the menu: its script in ``static/pages``, and the topics that it shows."""

    path: str
    title: str
    script: str
    topics: tuple[str, ...]
    subject: str = ""  # parameter of the path that names what it is about
    in_menu: bool = False


PAGES = (
    Page("/", "Fleet", "fleet", (FLEET,), in_menu=True),
    Page("/events", "Events", "events", (EVENTS, FLEET), in_menu=True),
    Page("/links", "Links", "links", (FLEET,), in_menu=True),
    Page("/jobs/{job}", "Job", "job", (JOB, TIMELINE, EVENTS), subject="job"),
    Page("/contributions", "Contributions", "contributions", (GIVEN,), in_menu=True),
    Page("/workers/{worker:path}", "Worker", "worker", (FLEET, EVENTS, GIVEN), subject="worker"),
)

PUBLIC_PAGES = (
    Page("/", "Run", "public", (PUBLIC,)),
    Page("/runs/{job}", "Run", "public", (PUBLIC, PUBLIC_RUN), subject="job"),
)


class Site:
    """The routes over one reader."""

    def __init__(self, endpoint: Endpoint, settings: Settings) -> None:
        self.reader = Reader(endpoint, settings.pace)
        self.viewers = Viewers(self.reader, settings.patience)
        self._endpoint, self._public = endpoint, settings.public
        self._tracing = asyncio.Semaphore(1)
        self._shells = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"), autoescape=True, auto_reload=False
        )

    def shell(self, page: Page) -> Callable[[Request], Response]:
        """The function of a page's route: the frame that its script fills."""

        def show(request: Request) -> Response:
            subject = request.path_params.get(page.subject, "")
            topics = [name + subject if name.endswith(":") else name for name in page.topics]
            return self._html("page.html", page=page, subject=subject, topics=topics)

        return show

    def signin(self) -> Response:
        """The page for a browser that has no cookie: it makes one of the address's fragment."""
        return self._html("signin.html", status=401)

    def _html(self, template: str, status: int = 200, **values: object) -> Response:
        menu = [page for page in PAGES if page.in_menu and not self._public]
        return HTMLResponse(self._shells.get_template(template).render(menu=menu, **values), status)

    def stream(self, request: Request) -> EventStream | Response:
        """Events of the topics that a page shows."""
        topics = request.query_params.getlist("topic")
        if self._public and not all(name == PUBLIC or name.startswith(PUBLIC_RUN) for name in topics):
            return PlainTextResponse("this page shows what is public\n", 404)
        if not 0 < len(topics) <= MAX_TOPICS_A_PAGE:
            return PlainTextResponse(f"name 1 to {MAX_TOPICS_A_PAGE} topics\n", 400)
        return EventStream(self.viewers, topics, gzip="gzip" in request.headers.get("accept-encoding", ""))

    async def trace(self, request: Request) -> Response:
        """A job's timeline as a file for Perfetto; one is made at a time."""
        job = request.path_params["job"]
        async with self._tracing:
            try:
                text = await asyncio.to_thread(_trace, self._endpoint, job)
            except AtollError as error:
                return PlainTextResponse(f"{error}\n", 404 if isinstance(error, UsageError) else 502)
        headers = {"content-disposition": f'attachment; filename="{_file_name(job)}-trace.json"'}
        return Response(text, media_type="application/json", headers=headers)


def _trace(endpoint: Endpoint, job: str) -> str:
    with Client(endpoint) as client:
        names = {worker.worker: worker.name or worker.worker for worker in client.status().workers}
        spans = client.trace(job)
    if not spans:
        raise UsageError(f"{job} has no recorded spans yet; try again once it trains")
    return json.dumps(chrome_trace(job, spans, names))


def _file_name(job: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in job)[:80]


class _Raw:
    """A route's endpoint that answers by an ASGI application of its own."""

    def __init__(self, answer: Callable[[Request], EventStream | Response]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Request(scope))(scope, receive, send)


def make_app(endpoint: Endpoint, settings: Settings, keys: Keys) -> Starlette:
    """Return the page as an ASGI application; ``app.state.site`` has its reader and viewers."""
    site = Site(endpoint, settings)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await site.reader.close()

    entrance = Entrance(settings.listening, keys, settings.wrong_key_delay_s)
    private = [
        Route("/session", entrance.__call__, methods=["POST"]),
        Route("/jobs/{job}/trace", site.trace),
    ]
    pages = PUBLIC_PAGES if settings.public else PAGES
    asked = None if settings.public else keys
    app = Starlette(
        routes=[
            *(Route(page.path, site.shell(page), name=page.path) for page in pages),
            *([] if settings.public else private),
            Route("/stream", _Raw(site.stream)),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ],
        middleware=[Middleware(Guard, listening=settings.listening, keys=asked, signin=site.signin)],
        lifespan=life,
    )
    app.state.site = site
    return app


@dataclass(frozen=True)
class OpenPage:
    """The page on its address, before it is served."""

    address: str  # with the key
    site: Site
    server: uvicorn.Server
    listener: socket.socket

    def run(self) -> None:
        """Serve until the process is asked to end, or ``server.should_exit`` is set."""
        self.server.run(sockets=[self.listener])


@contextmanager
def open_page(endpoint: Endpoint, settings: Settings, keys: Keys) -> Iterator[OpenPage]:
    """Listen for viewers. UsageError when the address cannot be had, or TLS's files cannot be read."""
    listening = settings.listening
    try:
        listener = open_listener(listening.host, listening.port, BACKLOG)
    except OSError as error:
        where = f"{listening.host}:{listening.port}"
        raise UsageError(f"cannot listen on {where}: {error.strerror}; give another --listen") from None
    with listener:
        _end_what_hangs(listener, settings.patience.slow_viewer_s)
        listening = replace(listening, port=listener.getsockname()[1])
        app = make_app(endpoint, replace(settings, listening=listening), keys)
        certificate, key = listening.tls or (None, None)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            timeout_graceful_shutdown=LEAVE_S,
        )
        try:
            config.load()
        except OSError as error:
            why = f"cannot read {certificate} or {key}: {error}; give --tls CERTIFICATE KEY"
            raise UsageError(why) from None
        address = listening.address(listening.port) + ("" if settings.public else f"#key={keys.key}")
        yield OpenPage(address, app.state.site, uvicorn.Server(config), listener)


def serve_page(endpoint: Endpoint, settings: Settings, keys: Keys, announce: Callable[[str], None]) -> None:
    """Serve the page until the process is asked to end; ``announce`` gets its address, with the key.

    UsageError as ``open_page``.
    """
    with open_page(endpoint, settings, keys) as opened:
        announce(opened.address)
        opened.run()


def _end_what_hangs(listener: socket.socket, within_s: float) -> None:
    """Have the system end connections that take nothing, or are gone, for so long."""
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(within_s * 1000))
