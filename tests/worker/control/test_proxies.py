"""Connections are direct whatever the environment says, and take its proxy with one flag."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from atoll.errors import ConnectionFailed, UsageError
from coordinator.client.client import connect
from hostos.net.proxies import Proxy as Address
from hostos.net.proxies import proxy_for
from tests.coordinator.serving import start
from tests.interrupts import ROOT
from tests.patience import HUNG_S
from tests.worker.transport.test_network import PATIENT, Make, authority, host, key
from tests.worker.transport.ways.test_tunnels import Relays, exchange, leave, relayed, relays
from worker.config import WorkerConfig, make_config, remember
from worker.control.enroll import join
from worker.transport.contract import Paths, TransportConfig

__all__ = ["authority", "host", "relays"]


class Proxy:
    """Answers CONNECT as a company's proxy does, and keeps whom it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += near.recv(4096)
            found = re.match(rb"CONNECT ([\d.]+):(\d+) ", head)
            assert found is not None, head
            where = found[1].decode(), int(found[2])
            self.asked.append(f"{where[0]}:{where[1]}")
            with socket.create_connection(where) as far:
                near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                threading.Thread(target=self._pump, args=(far, near), daemon=True).start()
                self._pump(near, far)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in ("grpc_proxy", "http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    found = Proxy()
    monkeypatch.setenv("https_proxy", found.url)
    yield found
    found.close()


@pytest.mark.parametrize("use_proxy", [False, True])
def test_an_owner_and_a_worker_take_the_proxy_when_told_to(
    stack: ExitStack, tmp_path: Path, proxy: Proxy, use_proxy: bool
) -> None:
    running = start(stack, tmp_path / "c")
    entry = f"127.0.0.1:{running.started.entry_port}"
    with connect(entry, running.started.owner_token, use_proxy=use_proxy) as client:
        assert client.status().workers == []
    assert proxy.asked == [entry] * use_proxy
    config = WorkerConfig(
        "127.0.0.1",
        running.started.entry_port,
        running.started.join_token or "",
        state_dir=tmp_path / "w",
        use_proxy=use_proxy,
    )
    member = join(config, lambda seconds: False)
    assert set(proxy.asked) == ({entry} if use_proxy else set())
    with member.channel(config) as channel:
        channel.subscribe(lambda state: None, try_to_connect=True)
        ready = threading.Event()
        channel.subscribe(lambda state: ready.set() if state.name == "READY" else None)
        assert ready.wait(HUNG_S)
    assert (member.work_address in proxy.asked) == use_proxy


@pytest.mark.parametrize("use_proxy", [False, True])
def test_a_peer_is_dialled_through_the_proxy_when_told_to(host: Make, proxy: Proxy, use_proxy: bool) -> None:
    patience = {"silence_s": PATIENT.silence_s, "reconnect_s": PATIENT.reconnect_s, "streams": 1}
    a = host("w-a", TransportConfig(**patience, use_proxy=use_proxy), listen=False)
    b = host("w-b")
    b.network.admit("w-a")
    a.network.meet("w-b", Paths((b.address,), dial=True), HUNG_S)
    a.network.send("w-b", key(), b"", b"there")
    assert b.delivered.get(timeout=HUNG_S)[3] == b"there"
    assert set(proxy.asked) == ({f"127.0.0.1:{b.address[1]}"} if use_proxy else set())


@pytest.mark.parametrize("use_proxy", [False, True])
def test_a_relay_is_dialled_through_the_proxy_when_told_to(
    host: Make, relays: Relays, proxy: Proxy, use_proxy: bool
) -> None:
    config = TransportConfig(silence_s=PATIENT.silence_s, streams=1, use_proxy=use_proxy)
    a, b = relayed(host, relays.port, config=config)
    exchange(a, b, range(2))
    asked = {f"127.0.0.1:{relays.port}"}
    assert set(proxy.asked) == (asked if use_proxy else set())


def test_a_proxy_that_does_not_connect_is_named(
    host: Make, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as refusing:
        port = refusing.getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")

        def refuse() -> None:
            with suppress(OSError):
                while True:
                    near, _ = refusing.accept()
                    with near:
                        near.recv(4096)
                        near.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

        threading.Thread(target=refuse, daemon=True).start()
        a = host("w-a", TransportConfig(use_proxy=True), listen=False)
        with pytest.raises(ConnectionFailed, match=f"proxy 127.0.0.1:{port} does not connect: HTTP/1.1 403"):
            a.network.meet("w-b", Paths(relay=leave(relays.port, dials=True)), 1.0)
        refusing.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"https_proxy": "http://p.example:3128"}, Address("p.example", 3128)),
        ({"https_proxy": "p.example:3128", "no_proxy": "other"}, Address("p.example", 3128)),
        ({"http_proxy": "http://u%40:pa@[::1]:8"}, Address("::1", 8, "u@:pa")),
        ({"https_proxy": "http://p.example", "no_proxy": "relay.example.org"}, None),
        ({"grpc_proxy": "http://g", "https_proxy": "http://p"}, Address("g", 80)),
    ],
)
def test_the_proxy_of_the_environment(environment: dict[str, str], found: Address | None) -> None:
    assert proxy_for("relay.example.org", environment) == found


@pytest.mark.parametrize(
    ("no_proxy", "excepted"),
    [
        ("*", True),
        (".example.org", True),
        ("ample.org", False),
        (" , ,relay.example.org", True),
        ("10.0.0.0/8", False),
    ],
)
def test_hosts_are_excepted_by_name_and_domain(no_proxy: str, excepted: bool) -> None:
    environment = {"https_proxy": "http://p", "no_proxy": no_proxy}
    assert (proxy_for("relay.example.org", environment) is None) == excepted


def test_hosts_are_excepted_by_network() -> None:
    environment = {"https_proxy": "http://p", "no_proxy": "10.0.0.0/8, fd00::/8"}
    found = [proxy_for(host, environment) is None for host in ("10.1.2.3", "fd00::1", "11.0.0.1")]
    assert found == [True, True, False]


def test_a_proxy_asks_for_the_relay_with_its_login() -> None:
    request = Address("p", 1, "user:word").request("::1", 7702)
    assert request.startswith(b"CONNECT [::1]:7702 HTTP/1.1\r\nHost: [::1]:7702\r\n")
    assert request.endswith(b"Proxy-Authorization: Basic dXNlcjp3b3Jk\r\n\r\n")
    with pytest.raises(UsageError, match="not http://HOST:PORT"):
        proxy_for("relay", {"https_proxy": "socks5://p:1"})


@pytest.mark.parametrize("said", ["--use-proxy", "ATOLL_USE_PROXY"])
def test_the_command_has_one_flag_for_every_call(
    stack: ExitStack, tmp_path: Path, proxy: Proxy, said: str
) -> None:
    running = start(stack, tmp_path)
    entry = f"127.0.0.1:{running.started.entry_port}"
    options = ["status", "--coordinator", entry, "--token", running.started.owner_token or "", "--json"]
    command = [sys.executable, "-m", "coordinator.cli"]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True)
    assert proxy.asked == [], "connections are direct without it"
    flag = [said] if said.startswith("--") else []
    environment = os.environ | ({} if flag else {said: "1"})
    subprocess.run([*command, *flag, *options], cwd=ROOT, check=True, capture_output=True, env=environment)
    assert proxy.asked == [entry]


def test_a_later_join_remembers_the_flag_until_it_is_taken_back(tmp_path: Path) -> None:
    remember(make_config({"host": "h", "state_dir": tmp_path, "use_proxy": True}, {}))
    assert make_config({"state_dir": tmp_path}, {}).use_proxy
    remember(make_config({"state_dir": tmp_path, "use_proxy": False}, {}))
    assert not make_config({"state_dir": tmp_path}, {}).use_proxy
