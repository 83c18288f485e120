"""An address has so many connections to a port, the first ones, and others are not disturbed."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog.testing

from coordinator.config import CoordinatorConfig
from coordinator.server import serve
from coordinator.services.connections import ConnectionBound
from tests.patience import HUNG_S, eventually

if TYPE_CHECKING:
    import pytest

HERE, NEIGHBOUR = "127.0.0.1", "127.0.0.2"


class Port:
    """A listening port and the connections that it has accepted."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listening = stack.enter_context(socket.create_server((HERE, 0)))
        self.number: int = self._listening.getsockname()[1]

    def connected(self, source: str = HERE) -> socket.socket:
        """A client's end."""
        made = socket.create_connection((HERE, self.number), HUNG_S, source_address=(source, 0))
        self._stack.enter_context(made)
        self._stack.enter_context(self._listening.accept()[0])
        return made


def ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_locks_on_files_survive_a_look(stack: ExitStack, tmp_path: Path) -> None:
    """Such as SQLite's: a reader that finds none makes the journal's shared memory anew, under a coordinator
    that has it mapped."""
    file = stack.enter_context((tmp_path / "locked").open("w"))
    fcntl.lockf(file, fcntl.LOCK_EX)
    ConnectionBound({Port(stack).number: 3}, lambda: 0.0, nearby_too=True).look()
    other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    tried = subprocess.run([sys.executable, "-c", other, file.name], capture_output=True, text=True)
    assert "BlockingIOError" in tried.stderr


def test_the_newest_of_an_address_go_and_other_addresses_stay(stack: ExitStack) -> None:
    port = Port(stack)
    bound = ConnectionBound({port.number: 3}, lambda: 0.0, nearby_too=True)
    first = [port.connected() for _ in range(2)]
    assert bound.look() == 0
    more = [port.connected() for _ in range(5)]
    other = [port.connected(NEIGHBOUR) for _ in range(3)]
    with structlog.testing.capture_logs() as logs:
        assert bound.look() == 4
    eventually(lambda: sum(map(ended, more)) == 4)
    assert not any(map(ended, first + other))
    (line,) = logs
    assert (line["event"], line["peer"], line["found"], line["most"]) == ("connections.ended", HERE, 7, 3)


def test_another_port_of_this_process_is_left_alone(stack: ExitStack) -> None:
    port, other = Port(stack), Port(stack)
    bound = ConnectionBound({port.number: 1}, lambda: 0.0, nearby_too=True)
    beside = [other.connected() for _ in range(4)]
    assert bound.look() == 0
    assert not any(map(ended, beside))


def test_this_machine_is_not_bounded_and_a_64_of_ipv6_counts_as_one(stack: ExitStack) -> None:
    port = Port(stack)
    bound = ConnectionBound({port.number: 1}, lambda: 0.0)
    for _ in range(4):
        port.connected()
    assert bound.look() == 0
    places = [bound._place(host) for host in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")]
    assert places == ["2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64"]
    assert [
        bound._place(host) for host in ("::ffff:198.51.100.7", "198.51.100.7", "::1", "fe80::1%eth0")
    ] == [
        "198.51.100.7",
        "198.51.100.7",
        "",
        "fe80::/64",
    ]


def test_connections_that_say_nothing_to_a_coordinator_are_few(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConnectionBound, "_place", lambda self, host: host)
    config = CoordinatorConfig(state_dir=tmp_path, entry_port=0, connections_per_address=8)
    running = stack.enter_context(serve(config))
    silent = [
        stack.enter_context(
            socket.create_connection(
                (HERE, running.started.entry_port), HUNG_S, source_address=(NEIGHBOUR, 0)
            )
        )
        for _ in range(40)
    ]
    eventually(lambda: sum(map(ended, silent)) >= 32)
    assert sum(map(ended, silent)) == 32
    from coordinator.client.client import connect

    with connect(f"{HERE}:{running.started.entry_port}", running.started.owner_token) as client:
        assert client.status().version, "an owner from elsewhere is not disturbed"
