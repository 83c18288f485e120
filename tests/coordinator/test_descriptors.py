"""Strangers cannot use up what a coordinator may hold open: it lives, its workers stay, others still come."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from atoll.errors import UsageError
from benchmarks.fake_worker import FakeWorker
from coordinator.client.client import connect
from coordinator.client.endpoint import find_endpoint
from coordinator.config import CoordinatorConfig
from coordinator.server import serve
from hostos.descriptors import FEWEST_CONNECTIONS, FEWEST_FILES, START, shares
from tests.coordinator.serving import MEMORY
from tests.interrupts import own_session
from tests.patience import eventually

pytest.importorskip("resource")

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 1024), limit))
from coordinator.cli.__main__ import main
main()
"""


@dataclass
class Limited:
    """`atoll serve` in a process that may hold few descriptors."""

    process: subprocess.Popen[str]
    entry_port: int
    work_port: int
    token: str
    owner_token: str
    log: Path

    def worker(self, name: str) -> FakeWorker:
        return FakeWorker(f"127.0.0.1:{self.entry_port}", self.token, name=name, memory_bytes=MEMORY)

    def members(self) -> set[str]:
        with connect(f"127.0.0.1:{self.entry_port}", self.owner_token) as client:
            return {worker.name for worker in client.status().workers if worker.state == "pool"}

    def lives(self) -> None:
        assert self.process.poll() is None, self.log.read_text()[-2000:]


@contextmanager
def limited(folder: Path, limit: int) -> Iterator[Limited]:
    command = [sys.executable, "-c", LIMITED, str(limit), "serve", "--listen", "127.0.0.1:0"]
    log = folder / "log"
    with (
        log.open("w") as errors,
        own_session(
            [*command, "--state-dir", str(folder / "state")], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        line = next((line for line in process.stdout if "atoll-worker join" in line), "")
        assert line, log.read_text()
        endpoint = find_endpoint(state_dir=folder / "state")
        assert endpoint.token is not None
        events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        started = next(event for event in events if event["event"] == "server.started")
        yield Limited(
            process,
            endpoint.port,
            started["work_port"],
            (folder / "state" / "join-token").read_text().strip(),
            endpoint.token.encode(),
            log,
        )


class Flood:
    """Silent connections from several addresses, opened anew whenever the other side has ended one."""

    def __init__(self, port: int, most: int) -> None:
        self._port, self._most = port, most
        self._over = threading.Event()
        self._open: list[socket.socket] = []
        self.made = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in self._open:
            one.close()

    def _run(self) -> None:
        while not self._over.is_set():
            self._open = [one for one in self._open if not _ended(one)]
            while len(self._open) < self._most and not self._over.is_set():
                one = socket.socket()
                try:
                    one.bind((ADDRESSES[self.made % len(ADDRESSES)], 0))
                    one.settimeout(0.5)
                    one.connect(("127.0.0.1", self._port))
                except OSError:
                    one.close()
                    break
                one.setblocking(False)
                self._open.append(one)
                self.made += 1
            self._over.wait(0.02)


def _ended(one: socket.socket) -> bool:
    with suppress(BlockingIOError):
        try:
            if one.recv(1):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        one.close()
        return True
    return False


def joins(served: Limited, stack: ExitStack, name: str) -> None:
    """Return when a worker of this ``name`` is a member; at a full port it tries again, as ours do."""
    worker = served.worker(name)
    stack.callback(worker.stop)
    worker.ended.set()

    def joined() -> bool:
        if worker.ended.is_set():
            with suppress(grpc.RpcError):
                worker.start()
        return name in served.members()

    eventually(joined)


def flooded(folder: Path, limit: int, most: int, least: int) -> None:
    """Hold ``most`` connections to each port, opening ``least``; who was there stays, others come."""
    with ExitStack() as stack:
        served = stack.enter_context(limited(folder, limit))
        first = served.worker("first").start()
        stack.callback(first.stop)
        eventually(lambda: "first" in served.members())
        with Flood(served.entry_port, most) as one, Flood(served.work_port, most) as other:
            eventually(lambda: min(one.made, other.made) >= least or served.process.poll() is not None)
            served.lives()
        joins(served, stack, "second")  # the ports may still be full for a while
        assert served.members() == {"first", "second"}
        served.lives()
        assert not first.ended.is_set(), first.error


def test_a_flood_from_three_addresses_does_not_end_a_coordinator_of_64_descriptors(tmp_path: Path) -> None:
    flooded(tmp_path, 64, 100, 500)


@pytest.mark.slow
def test_nor_one_of_4096_though_each_address_keeps_to_its_bound(tmp_path: Path) -> None:
    flooded(tmp_path, 4096, 5000, 10_000)


@pytest.mark.slow
def test_a_worker_joins_while_strangers_hold_all_that_they_may(tmp_path: Path) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(limited(tmp_path, 512))
        flood = stack.enter_context(Flood(served.work_port, 1000))
        eventually(lambda: flood.made >= 1500 or served.process.poll() is not None)
        served.lives()
        joins(served, stack, "during")


def test_too_few_descriptors_are_refused_with_the_number_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.server.limit_now", lambda: 40)
    with pytest.raises(
        UsageError, match=r"may hold 40 files .* at once, and needs at least \d+: .*LimitNOFILE="
    ):
        serve(CoordinatorConfig(state_dir=tmp_path, entry_port=0))


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, 1 << 20])
def test_what_ports_may_hold_leaves_the_coordinator_its_own(limit: int, relay: bool) -> None:
    found = shares(limit, 17, relay=relay)
    assert min(found.entry, found.work, found.relay or 1) >= 1
    ours = limit - found.entry - found.work - found.relay
    assert ours >= 17 + START + FEWEST_FILES
    assert found.entry + found.work + found.relay >= FEWEST_CONNECTIONS
    assert found.relay == (found.entry if relay else 0)
