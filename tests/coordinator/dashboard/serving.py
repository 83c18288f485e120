"""The page served for a test: by its own process's server in a thread, on a free port of the loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.client.endpoint import Endpoint
from coordinator.dashboard.access import Keys
from coordinator.dashboard.app import Settings, open_page
from coordinator.dashboard.stream import Viewers

if TYPE_CHECKING:
    import uvicorn

KEY = "a-key-of-tests"


@dataclass
class ServedPage:
    """A page that is served, its address with the key, and those who look."""

    address: str
    viewers: Viewers
    server: uvicorn.Server

    @property
    def root(self) -> str:
        return self.address.partition("#")[0].rstrip("/")


@contextmanager
def served_page(endpoint: Endpoint, settings: Settings) -> Iterator[ServedPage]:
    with open_page(endpoint, settings, Keys(KEY)) as opened:
        thread = threading.Thread(target=opened.run)
        thread.start()
        try:
            yield ServedPage(opened.address, opened.site.viewers, opened.server)
        finally:
            opened.server.should_exit = True
            thread.join()
