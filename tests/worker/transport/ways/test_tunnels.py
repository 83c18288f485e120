"""Peers of which neither can be dialled, over a tunnel: a fake one, and relays over loopback."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from atoll.errors import ConnectionFailed
from coordinator.relay.server import Relay
from protos import relay_tickets as tickets
from protos.credentials import Authority
from protos.relay_tickets import Ticket
from tests.patience import HUNG_S, eventually
from tests.worker.transport.hosts import Host, enroll, joined, joined_by, key, whole_and_once
from worker.transport.contract import Paths, RelayOffer, TransportConfig, Way
from worker.transport.loop import SHARED
from worker.transport.ways.tunnels import Tunnel

KEY = tickets.new_key()
CONFIG = TransportConfig(silence_s=60.0, reconnect_s=0.4, upgrade_s=0.1)
Make = Callable[..., Host]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def host(authority: Authority) -> Iterator[Make]:
    made: list[Host] = []

    def make(name: str, config: TransportConfig = CONFIG, *, listen: bool = False, **more: object) -> Host:
        made.append(Host(enroll(authority, name), config, listen=listen, **more))
        return made[-1]

    yield make
    for one in made:
        one.network.close()


def exchange(a: Host, b: Host, numbers: range, n_bytes: int = 300_000) -> None:
    """Send from a to b and back, and compare every byte."""
    rng = Random(numbers.start)
    for sender, receiver in ((a, b), (b, a)):
        sent = {}
        for number in numbers:
            sent[number] = rng.randbytes(n_bytes)
            sender.network.send(receiver.network.name, key(number), b"", sent[number])
        got = [receiver.delivered.get(timeout=HUNG_S) for _ in numbers]
        assert {k.micro: payload for _, k, _, payload in got} == sent


# ---------------------------------------------------------------- any tunnel


class Switchboard:
    """Streams between two ends of one process."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.opened: list[socket.socket] = []
        self.broken = False

    def end(self, offer: RelayOffer) -> Tunnel:
        return FakeTunnel(self, offer.dials, offer.after_s)


@dataclass(eq=False)
class FakeTunnel:
    board: Switchboard
    dials: bool
    after_s: float
    name: str = "fake"
    over: bool = False

    async def open(self) -> socket.socket:
        if self.board.broken:
            raise ConnectionFailed("the fake is broken")
        if not self.dials:
            return await self.board.waiting.get()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self.board.opened.append(ours)
        self.board.waiting.put_nowait(theirs)
        return ours

    def __hash__(self) -> int:
        return id(self)


def offer(*, dials: bool, after_s: float = 0.0) -> RelayOffer:
    return RelayOffer((), b"", b"", dials, after_s, 3600.0)


def met(host: Make, board: Switchboard, *, doors: tuple[bool, bool] = (False, False)) -> tuple[Host, Host]:
    a, b = (
        host(name, listen=door, tunnel=board.end) for name, door in zip(("w-a", "w-b"), doors, strict=True)
    )
    b.network.expect("w-a", Paths(relay=offer(dials=False)), HUNG_S)
    a.network.meet("w-b", Paths(relay=offer(dials=True)), HUNG_S)
    joined(b.network, "w-a")
    return a, b


def test_two_that_accept_nobody_exchange_tensors_through_a_tunnel(host: Make) -> None:
    a, b = met(host, Switchboard())
    assert a.network.port == b.network.port == 0
    assert joined_by(a.network) == {"w-b": Way.RELAYED}
    assert joined_by(b.network) == {"w-a": Way.RELAYED}
    assert a.ways.get(timeout=HUNG_S) == ("w-b", Way.RELAYED, "fake")
    exchange(a, b, range(4))


@pytest.mark.parametrize("place", ["x" * 100, "missing/folder"])
def test_a_tunnel_needs_no_short_and_no_temporary_folder(
    host: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if "/" not in place:  # as batch systems set TMPDIR: longer than a socket's address may be
        (tmp_path / place).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / place))
    a, b = met(host, Switchboard())
    exchange(a, b, range(3))
    assert list(tmp_path.rglob("atoll-ends-*")) == []


def test_a_way_that_works_before_the_tunnels_time_leaves_the_tunnel_unused(host: Make) -> None:
    board = Switchboard()
    a, b = host("w-a", tunnel=board.end), host("w-b", listen=True, tunnel=board.end)
    b.network.expect("w-a", Paths(relay=offer(dials=False, after_s=HUNG_S)), HUNG_S)
    a.network.meet("w-b", Paths((b.address,), True, offer(dials=True, after_s=HUNG_S)), HUNG_S)
    assert joined_by(a.network) == {"w-b": Way.DIRECT}
    assert board.opened == []


def test_ways_that_work_at_the_same_moment_all_serve(host: Make) -> None:
    board = Switchboard()
    a, b = (host(name, listen=True, tunnel=board.end) for name in ("w-a", "w-b"))
    b.network.expect("w-a", Paths((a.address,), True, offer(dials=False)), HUNG_S)
    a.network.meet("w-b", Paths((b.address,), True, offer(dials=True)), HUNG_S)
    joined(b.network, "w-a")
    for first in range(0, 12, 4):
        exchange(a, b, range(first, first + 4))
    assert a.network.flush("w-b", HUNG_S)
    assert b.network.flush("w-a", HUNG_S)
    a.network.close()
    assert b.losses.get(timeout=HUNG_S) == ("w-a", "left: worker is leaving")


def test_a_broken_stream_is_replaced_and_nothing_is_lost_or_doubled(host: Make) -> None:
    board = Switchboard()
    a, b = met(host, board)
    for first in range(0, 12, 4):
        exchange(a, b, range(first, first + 4))
        broken = board.opened[-1]
        a.network._loop.call_soon_threadsafe(broken.shutdown, socket.SHUT_RDWR)
    exchange(a, b, range(12, 16))
    assert len(board.opened) > 1
    assert a.delivered.empty()
    assert b.delivered.empty()
    assert a.losses.empty()
    assert b.losses.empty()


def test_a_tunnel_that_cannot_be_had_is_a_clear_error(host: Make) -> None:
    board = Switchboard()
    board.broken = True
    a = host("w-a", tunnel=board.end)
    with pytest.raises(ConnectionFailed, match="fake: the fake is broken"):
        a.network.meet("w-b", Paths(relay=offer(dials=True)), 0.3)


def test_a_pair_is_joined_directly_once_a_door_opens_and_no_message_is_lost(host: Make) -> None:
    board = Switchboard()
    a, b = host("w-a", tunnel=board.end), host("w-b", listen=True, tunnel=board.end)
    door = Door(b.network.port)
    b.network.expect("w-a", Paths(relay=offer(dials=False)), HUNG_S)
    a.network.meet("w-b", Paths((door.address,), True, offer(dials=True)), HUNG_S)
    assert joined_by(a.network) == {"w-b": Way.RELAYED}
    stop, sent = threading.Event(), queue.SimpleQueue[int]()

    def send() -> None:
        number = 0
        while not stop.is_set():
            a.network.send("w-b", key(number), b"", number.to_bytes(4) * 10_000)
            number += 1
            time.sleep(0.002)
        sent.put(number)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        door.open()
        ways = [b.ways.get(timeout=HUNG_S)[1] for _ in range(2)]
        assert ways == [Way.RELAYED, Way.REVERSED]
        eventually(lambda: all(c.way is not Way.RELAYED for c in a.network._peers.known("w-b").connections))
    finally:
        stop.set()
        sending.join()
        door.close()
    numbers = range(sent.get())
    got = [b.delivered.get(timeout=HUNG_S) for _ in numbers]
    assert sorted(k.micro for _, k, _, _ in got) == list(numbers)
    assert all(payload == k.micro.to_bytes(4) * 10_000 for _, k, _, payload in got)
    assert b.delivered.empty()
    assert a.losses.empty()


class Door:
    """A port in front of another one; closed, it refuses whoever comes. ``forget`` lets the streams that pass
    it fall silent, as where an address has changed."""

    def __init__(self, port: int, *, opened: bool = False) -> None:
        self._target, self._opened, self._closed = port, opened, False
        self._streams: list[tuple[asyncio.Task[None], asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._entering: set[asyncio.Task[None] | None] = set()
        self._loop = SHARED.acquire()
        self._server = self._run(asyncio.start_server(self._enter, "127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.sockets[0].getsockname()

    def _run(self, work: object) -> asyncio.Server:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HUNG_S)  # type: ignore[arg-type]

    def open(self) -> None:
        self._opened = True

    def shut(self) -> None:
        """Forget the streams, and let nobody in any more."""
        self._opened = False
        self.forget()

    def forget(self) -> None:
        """Nothing passes any more on the streams there are, and nobody hears of it."""

        async def stop() -> None:
            for task, *_ in self._streams:
                task.cancel()

        self._run(stop())

    def close(self) -> None:
        async def close() -> None:
            self._closed = True
            self._server.close()
            for task, *writers in self._streams:
                task.cancel()
                for writer in writers:
                    writer.transport.abort()
            await asyncio.sleep(0)
            await asyncio.gather(*filter(None, self._entering))

        self._run(close())
        SHARED.release()

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._entering.add(task := asyncio.current_task())
        await self._pass(reader, writer)
        self._entering.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._opened:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        if self._closed:
            writer.transport.abort()
            far_writer.transport.abort()
            return

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while piece := await source.read(1 << 16):
                target.write(piece)
                await target.drain()
            target.transport.abort()

        async def both() -> None:
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)

        self._streams.append((asyncio.ensure_future(both()), writer, far_writer))


# ---------------------------------------------------------------- through a relay


class Relays:
    """A relay on the peers' own loop, that may be killed and started anew on its port."""

    def __init__(self) -> None:
        self._loop = SHARED.acquire()
        self.port = 0
        self.relay = Relay(KEY)
        self.start()

    def start(self) -> None:
        async def start() -> int:
            self.relay = Relay(KEY)
            return await self.relay.start("127.0.0.1", self.port)

        self.port = asyncio.run_coroutine_threadsafe(start(), self._loop).result(HUNG_S)

    def kill(self) -> None:
        asyncio.run_coroutine_threadsafe(self.relay.stop(), self._loop).result(HUNG_S)

    def close(self) -> None:
        self.kill()
        SHARED.release()


@pytest.fixture
def relays() -> Iterator[Relays]:
    made = Relays()
    yield made
    made.close()


def leave(
    port: int, *, dials: bool, lasts_s: float = 3600.0, max_bytes: int = 1 << 40, serial: int = 0
) -> RelayOffer:
    """The coordinator's offer to one end of the pair w-a, w-b."""
    name = (b"dials" if dials else b"waits") + serial.to_bytes(3)
    pair = tickets.pair_id(KEY, "w-a", "w-b")
    sealed = tickets.seal(KEY, Ticket(pair, name, dials, int(time.time() + lasts_s), max_bytes, 32))
    relay = ("127.0.0.1", port)
    return RelayOffer((relay,), sealed, tickets.ticket_key(KEY, sealed), dials, 0.0, lasts_s)


def relayed(
    host: Make, port_a: int, port_b: int | None = None, config: TransportConfig = CONFIG
) -> tuple[Host, Host]:
    a, b = host("w-a", config), host("w-b", config)
    b.network.expect("w-a", Paths(relay=leave(port_b or port_a, dials=False)), HUNG_S)
    a.network.meet("w-b", Paths(relay=leave(port_a, dials=True)), HUNG_S)
    joined(b.network, "w-a")
    return a, b


def test_two_that_accept_nobody_exchange_tensors_through_the_relay(host: Make, relays: Relays) -> None:
    a, b = relayed(host, relays.port, config=replace(CONFIG, streams=4))
    exchange(a, b, range(8))
    assert a.network.connections("w-b") == 4
    assert a.ways.get(timeout=HUNG_S) == ("w-b", Way.RELAYED, f"127.0.0.1:{relays.port}")
    assert relays.relay.book.joined_bytes > 2 * 8 * 300_000
    assert relays.relay.book.refused.total() == 0


def test_a_relay_killed_and_started_anew_loses_and_doubles_nothing(host: Make, relays: Relays) -> None:
    a, b = relayed(host, relays.port)
    for number in whole_and_once(a, b, 1 << 20):
        if number in (2, 7):
            relays.kill()
            time.sleep(1.0)  # longer than what a peer that is dialled may be away
            relays.start()
    assert b.delivered.empty()
    assert a.losses.empty()
    assert b.losses.empty()


def test_an_address_that_changes_in_mid_stream_loses_and_doubles_nothing(host: Make, relays: Relays) -> None:
    router = Door(relays.port, opened=True)
    config = replace(CONFIG, silence_s=0.6, ping_s=0.1)
    a, b = relayed(host, relays.port, router.address[1], config)
    try:
        for first in range(0, 8, 4):
            exchange(a, b, range(first, first + 4))
            router.forget()
        exchange(a, b, range(8, 12))
    finally:
        router.close()
    assert a.losses.empty()
    assert b.losses.empty()


def test_who_was_dialled_dials_back_when_its_address_has_changed(host: Make) -> None:
    config = TransportConfig(silence_s=0.6, ping_s=0.1, reconnect_s=HUNG_S)
    a, b = host("w-a", config, listen=True), host("w-b", config, listen=True)
    old = Door(b.network.port, opened=True)
    try:
        b.network.expect("w-a", Paths((a.address,)), HUNG_S)
        a.network.meet("w-b", Paths((old.address,), dial=True), HUNG_S)
        exchange(a, b, range(4))
        assert joined_by(a.network) == {"w-b": Way.DIRECT}
        old.shut()
        exchange(a, b, range(4, 8))
        assert joined_by(a.network) == {"w-b": Way.REVERSED}
    finally:
        old.close()
    assert a.losses.empty()
    assert b.losses.empty()


def test_a_ticket_that_is_used_up_is_followed_by_the_next(host: Make, relays: Relays) -> None:
    a, b = host("w-a"), host("w-b")
    small = 2 << 20
    b.network.expect("w-a", Paths(relay=leave(relays.port, dials=False, max_bytes=small)), HUNG_S)
    a.network.meet("w-b", Paths(relay=leave(relays.port, dials=True, max_bytes=small)), HUNG_S)
    sending = threading.Thread(target=exchange, args=(a, b, range(8)))
    sending.start()
    eventually(lambda: relays.relay.book.refused["bytes"])
    assert relays.relay.book.joined_bytes <= small
    b.network.expect("w-a", Paths(relay=leave(relays.port, dials=False, serial=1)), HUNG_S)
    a.network.expect("w-b", Paths(relay=leave(relays.port, dials=True, serial=1)), HUNG_S)
    sending.join(HUNG_S)
    assert not sending.is_alive()
    assert a.losses.empty()


def test_a_relay_that_is_away_or_refuses_is_a_clear_error(host: Make, relays: Relays) -> None:
    a = host("w-a")
    ended = replace(leave(relays.port, dials=True, lasts_s=-5.0), lasts_s=3600.0)
    with pytest.raises(ConnectionFailed, match=r"relay 127.0.0.1:\d+: this ticket ended"):
        a.network.meet("w-b", Paths(relay=ended), 0.5)
    with pytest.raises(ConnectionFailed, match=r"relay 127.0.0.1:1: Connect"):
        a.network.meet("w-b", Paths(relay=leave(1, dials=True)), 0.5)


RELAY = """
import asyncio, sys
from coordinator.relay.server import Relay
async def main():
    relay = Relay(bytes.fromhex(sys.argv[1]))
    print(await relay.start("127.0.0.1", 0), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await relay.stop()
asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="reads another process's memory by /proc")
def test_the_relays_memory_holds_no_plain_byte_of_a_tensor(host: Make) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RELAY, KEY.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[4],
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        try:
            a, b = relayed(host, int(process.stdout.readline()))
            plain = Random(4711).randbytes(32)
            for number in range(8):
                a.network.send("w-b", key(number), b"header " + plain, plain * 10_000)
                assert b.delivered.get(timeout=HUNG_S)[3] == plain * 10_000
            found = memory_of(process.pid)
            assert tickets.MAGIC in found, "the search finds what the relay does hold"
            assert plain not in found
        finally:
            process.kill()


def memory_of(pid: int) -> bytes:
    """What a process alone can write to: its heap, stacks and buffers. Not what it shares (the arena): to
    read that takes every page of it, and stops the process meanwhile."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights.startswith("rw") and rights.endswith("p"):
                start, end = (int(at, 16) for at in span.split("-"))
                memory.seek(start)
                found.append(memory.read(end - start) or b"")
    return b"".join(found)


def test_what_passes_the_relay_is_sealed(host: Make, relays: Relays) -> None:
    tap = Door(relays.port, opened=True)
    heard: list[bytes] = []
    real = asyncio.StreamWriter.write
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                asyncio.StreamWriter,
                "write",
                lambda self, data: (heard.append(bytes(data)), real(self, data))[1],
            )
            a, b = relayed(host, tap.address[1], relays.port)
            plain = Random(4711).randbytes(32)
            a.network.send("w-b", key(), b"header", plain * 1000)
            assert b.delivered.get(timeout=HUNG_S)[3] == plain * 1000
    finally:
        tap.close()
    passed = b"".join(heard)
    assert len(passed) > 32_000
    assert plain not in passed
    assert b"atoll.v1.Peer" not in passed
