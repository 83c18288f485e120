"""moto's S3 over HTTP, in an environment of its own, and a proxy before it that watches and fails.

moto pins much that Atoll's environment has in other versions, so it is installed on demand into a folder of
its own below the user's cache.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.patience import HUNG_S

VERSION = "5.2.5"


def environment() -> Path:
    """Return the folder of an environment that has moto; skips where it cannot be installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "atoll-tests" / f"moto-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"
    installed = folder / "installed"
    if not installed.exists():
        wanted = f"moto[server]=={VERSION}"
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", wanted]
            subprocess.run(pip, check=True, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{wanted} cannot be installed into {folder}: {error}")
        installed.touch()
    return folder


@contextmanager
def moto_server() -> Iterator[int]:
    """Run moto; yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [str(environment() / "bin" / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _answers(port):
                assert server.poll() is None, "moto ended"
                time.sleep(0.05)
            yield port
        finally:
            server.kill()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@dataclass
class Proxy:
    """Hands requests on to moto; ``failing``: so many are answered with ``status`` first."""

    moto_port: int
    failing: int = 0
    status: int = 503
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, path, headers
    port: int = 0

    @contextmanager
    def serve(self) -> Iterator[Proxy]:
        """Listen for as long as it lasts."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def asked(self, method: str, *, query: str = "") -> list[dict[str, str]]:
        """Return the headers of the requests of a method whose query holds a word."""
        return [headers for was, path, headers in self.seen if was == method and query in path]


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            proxy.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
            if proxy.failing > 0:
                proxy.failing -= 1
                self.send_response(proxy.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            moto = http.client.HTTPConnection("127.0.0.1", proxy.moto_port, timeout=HUNG_S)
            moto.request(self.command, self.path, body, dict(self.headers.items()))
            answer = moto.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                    self.send_header(key, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(data)
            moto.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler
