"""An address has so many connections to a port, the first ones, and others are not disturbed."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog.testing

from coordinator.config import CoordinatorConfig
from coordinator.server import serve
from protos.connections import ConnectionBound, Known, PortBound, ends_in
from tests.interrupts import ROOT
from tests.patience import HUNG_S, eventually

HERE, NEIGHBOUR = "127.0.0.1", "127.0.0.2"
UNKNOWN_S = 10.0


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


def bounded(of_an_address: int, unknown: int = 100, known: Known | None = None) -> PortBound:
    return PortBound(of_an_address, unknown, UNKNOWN_S, known or Known())


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
    ConnectionBound({Port(stack).number: bounded(3)}, lambda: 0.0, nearby_too=True).look()
    other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    tried = subprocess.run([sys.executable, "-c", other, file.name], capture_output=True, text=True)
    assert "BlockingIOError" in tried.stderr


def test_the_newest_of_an_address_go_and_other_addresses_stay(stack: ExitStack) -> None:
    port = Port(stack)
    bound = ConnectionBound({port.number: bounded(3)}, lambda: 0.0, nearby_too=True)
    first = [port.connected() for _ in range(2)]
    assert bound.look() == 0
    more = [port.connected() for _ in range(5)]
    other = [port.connected(NEIGHBOUR) for _ in range(3)]
    with structlog.testing.capture_logs() as logs:
        assert bound.look() == 4
    eventually(lambda: sum(map(ended, more)) == 4)
    assert not any(map(ended, first + other))
    (line,) = logs
    assert (line["event"], line["peer"], line["ended"]) == ("connections.ended", HERE, 4)


def test_another_port_of_this_process_is_left_alone(stack: ExitStack) -> None:
    port, other = Port(stack), Port(stack)
    bound = ConnectionBound({port.number: bounded(1)}, lambda: 0.0, nearby_too=True)
    beside = [other.connected() for _ in range(4)]
    assert bound.look() == 0
    assert not any(map(ended, beside))


def test_this_machine_is_not_bounded_and_a_64_of_ipv6_counts_as_one(stack: ExitStack) -> None:
    port = Port(stack)
    bound = ConnectionBound({port.number: bounded(1)}, lambda: 0.0)
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


def test_of_strangers_that_are_too_many_the_oldest_of_the_address_with_the_most_go(stack: ExitStack) -> None:
    port, known = Port(stack), Known()
    bound = ConnectionBound({port.number: bounded(100, 4, known)}, lambda: 0.0)
    members = [port.connected(NEIGHBOUR) for _ in range(3)]
    for member in members:
        known.add("ipv4:{}:{}".format(*member.getsockname()))
    crowd = [port.connected("127.0.0.3") for _ in range(4)]
    assert bound.look() == 0, "who is known does not count"
    crowd += [port.connected("127.0.0.3") for _ in range(2)]
    alone = port.connected("127.0.0.4")
    assert bound.look() == 3
    eventually(lambda: sum(map(ended, crowd)) == 3)
    assert [ended(one) for one in crowd] == [True] * 3 + [False] * 3
    assert not any(map(ended, [*members, alone]))
    assert bound.look() == 0, "those that were shut down count no more"


def test_a_stranger_has_so_long_and_who_has_called_as_long_as_he_likes(stack: ExitStack) -> None:
    port, known, now_s = Port(stack), Known(), 0.0
    bound = ConnectionBound({port.number: bounded(100, 4, known)}, lambda: now_s)
    silent, calls = port.connected(), port.connected()
    assert bound.look() == 0
    known.add("ipv4:{}:{}".format(*calls.getsockname()))
    now_s = UNKNOWN_S + 1
    assert bound.look() == 1
    eventually(lambda: ended(silent))
    assert not ended(calls)


def test_what_is_known_of_connections_that_have_gone_is_forgotten(stack: ExitStack) -> None:
    port, known = Port(stack), Known()
    bound = ConnectionBound({port.number: bounded(100, 4, known)}, lambda: 0.0)
    here = port.connected()
    known.add("ipv4:{}:{}".format(*here.getsockname()))
    for number in range(100):
        known.add(f"ipv4:198.51.100.7:{number}")
    bound.look()
    assert known.noted() == {here.getsockname()}


def test_a_look_needs_no_descriptor_to_find_whom_to_end(stack: ExitStack) -> None:
    """What a flood has left of them is none: the look that ended it then failed, and with it the process."""
    ran = subprocess.run([sys.executable, "-c", NONE_LEFT], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.split() == ["found", "3"], ran.stderr


NONE_LEFT = """
import os, resource, socket
from protos.connections import ConnectionBound, PortBound
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
listening = socket.create_server(("127.0.0.1", 0))
ends = [(socket.create_connection(listening.getsockname()), listening.accept()[0]) for _ in range(3)]
bound = ConnectionBound({listening.getsockname()[1]: PortBound(9, 9, 1.0)}, lambda: 0.0)
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
print("found", len(list(bound._connections())))
"""


@pytest.mark.parametrize(
    ("peer", "ends"),
    [
        ("ipv4:198.51.100.7:4711", ("198.51.100.7", 4711)),
        ("ipv6:%5B2001:db8::1%5D:4711", ("2001:db8::1", 4711)),
        ("ipv6:%5B::ffff:198.51.100.7%5D:4711", ("198.51.100.7", 4711)),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", ("fe80::1%eth0", 4711)),
        ("unix:/run/here", None),
        ("", None),
    ],
)
def test_a_caller_is_found_under_the_name_that_grpc_gives_it(peer: str, ends: tuple[str, int] | None) -> None:
    assert ends_in(peer) == ends


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
