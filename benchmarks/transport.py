"""Peer links against raw TCP: loopback rate, lab links, CPU per GB; TLS on, every message checked.

    python -m benchmarks.transport --json                    everything
    python -m benchmarks.transport --scenario lossy          one lab link only (name or path)

Loopback: 64 MiB messages between two processes, ours, raw TCP (sendall and recv_into), the same
over Python's own TLS with certificates of either side, and gloo, in turn, median of 9 after one that
does not count. Lab (root): the share of the link's rate that arrives as payload, over eight seconds'
worth of 4 MiB messages, with raw TCP on one flow beside it; then both ways at once, beside two raw flows;
then how long a gradient of 1 kB takes that is sent while such messages wait, median of 20.
Every message is another one. When the clock has stopped, their number and sizes are compared with what
was sent, and of each the values at 257 places, its first and last among them; of the last one all.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import conclude, execute, need_lab, parser
from lab.reader import read_scenario
from lab.tun import unavailable
from lab.world import Lab
from protos.credentials import Authority, Identity, identity_from, new_key, signing_request
from worker.machine.malloc import keep_chunk_memory
from worker.transport.contract import Paths, TransportConfig
from worker.transport.frames import Direction, MessageKey
from worker.transport.network import PeerNetwork

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lab.scenario import Scenario

    Bytes = NDArray[np.uint8]

ROOT = Path(__file__).resolve().parent.parent
LINKS = Path(__file__).resolve().parent / "links"
DEFAULT_LINKS = ("region", "metro", "lossy", "slow", "uplink")
LOOPBACK_BYTES = 64 << 20
LOOPBACK_REPEATS = 10
LAB_SECONDS = 8.0
LAB_MESSAGE_BYTES = 4 << 20
BULK = "bulk"  # job
URGENT, URGENT_BYTES, URGENT_COUNT = "urgent", 1000, 20  # job, size and number of gradients
SHIFT, SHIFTS = 4096, 64  # message n starts at byte SHIFT * (n mod SHIFTS) of the data
SAMPLES = 257  # values of a message that are kept as it arrives: a copy of all would slow the receiver
MAX_FAULTS = 5  # named in one message
PLAIN = ("raw", "tls")
BACK = "back"  # raw TCP from w-b to w-a, on a connection that w-a opens
RAW_HEADER = struct.Struct(">QQ")  # number of the first message, how many
PATIENT = TransportConfig(silence_s=30.0, reconnect_s=10.0)


# ---------------------------------------------------------------- what is sent, and what arrived


class Messages:
    """Messages of ``nbytes`` random bytes, the same at both ends, and the record of those that arrived.

    Neighbours differ at almost every place, so neither an untouched buffer nor the message before
    can pass for a received one.
    """

    def __init__(self, nbytes: int, seed: int) -> None:
        self.nbytes = nbytes
        length = nbytes + SHIFT * (SHIFTS - 1)
        self._data: Bytes = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
        self._places = np.linspace(0, nbytes - 1, SAMPLES).astype(np.int64)
        self._arrived: queue.SimpleQueue[tuple[int, Bytes, Bytes]] = queue.SimpleQueue()

    def message(self, number: int) -> Bytes:
        """What message ``number`` consists of; not to be written to."""
        start = SHIFT * (number % SHIFTS)
        return self._data[start : start + self.nbytes]

    def arrived(self, number: int, payload: Bytes) -> None:
        """Note a message, from any thread; its buffer may be filled again at once."""
        self._arrived.put((number, payload, self._sample(payload)))

    def _sample(self, payload: Bytes) -> Bytes:
        return payload[self._places[self._places < len(payload)]]

    def wrong(self, first: int, count: int) -> str:
        """Why what arrived since the last call is not messages ``first`` to ``first + count - 1``, each
        once; "" when it is. Overwrites the buffers."""
        awaited, faults = set(range(first, first + count)), []
        held: dict[int, tuple[int, Bytes]] = {}  # address of a buffer -> what came into it last
        while not self._arrived.empty():
            number, payload, sample = self._arrived.get()
            held[payload.ctypes.data] = number, payload
            if number not in awaited:
                faults.append(f"message {number} came unasked, or twice")
            elif len(payload) != self.nbytes:
                faults.append(f"message {number} has {len(payload)} bytes of {self.nbytes}")
            elif not np.array_equal(sample, self._sample(self.message(number))):
                faults.append(f"message {number} has other values")
            awaited.discard(number)
        if awaited:
            faults.append(f"{len(awaited)} of {count} messages are missing")
        for number, payload in held.values():
            if not faults and not np.array_equal(payload, self.message(number)):
                faults.append(f"message {number} has other values")
            payload[:] = 0
        return "; ".join(faults[:MAX_FAULTS])


# ---------------------------------------------------------------- one end, a process of its own


class End:
    """Commands come as JSON lines on stdin, results leave as JSON lines on stdout."""

    def __init__(self, folder: Path, name: str, nbytes: int, seed: int) -> None:
        identity = Identity.load(folder / name)
        assert identity is not None
        self.name, self.nbytes = name, nbytes
        self.messages = Messages(nbytes, seed)
        self.buffer: Bytes = np.zeros(nbytes, dtype=np.uint8)  # of raw TCP, TLS and gloo
        self.free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()  # ours: several messages come at a time
        listen = ("0.0.0.0", 0) if name == "w-b" else None  # noqa: S104 - inside the lab or loopback
        keep_chunk_memory()  # as in a worker
        self.network = PeerNetwork(identity, listen, config=PATIENT)
        for job in (BULK, URGENT):
            self.network.register(job, self)
        self.other = "w-a" if name == "w-b" else "w-b"
        self.network.admit(self.other)
        self.tls = tls_context(folder / name, server=name == "w-b")
        self.sockets: dict[str, socket.socket] = {}
        self.receiving: list[threading.Thread] = []
        self.urgent_at: dict[int, float] = {}  # when it came; both ends have the machine's clock

    # Receiver

    def listen(self, ways: Sequence[str] = PLAIN) -> dict[str, Any]:
        """Open the ports of these plain ``ways``; ours is open already."""
        ports = {"port": self.network.port}
        for way in ways:
            server = socket.create_server(("0.0.0.0", 0))  # noqa: S104
            ports[way] = server.getsockname()[1]
            self._start(self._accept_plain, server, way)
        return ports

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self.receiving.append(thread)
        thread.start()

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview:
        if key.job == URGENT:  # another's buffer is compared with what last came into it
            return memoryview(bytearray(total))
        try:
            buffer = self.free.get_nowait()
        except queue.Empty:
            buffer = np.zeros(self.nbytes, dtype=np.uint8)
        return memoryview(buffer)[:total]  # type: ignore[arg-type]

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        values = np.frombuffer(payload, dtype=np.uint8)
        if key.job == URGENT:
            if np.array_equal(values, self.messages.message(key.step)[:URGENT_BYTES]):
                self.urgent_at[key.step] = time.monotonic()
            return
        self.messages.arrived(key.step, values)
        self.free.put(payload.obj)  # type: ignore[arg-type]

    def lost(self, peer: str, reason: str) -> None:
        """What waits for the peer fails by itself."""

    def _accept_plain(self, server: socket.socket, way: str) -> None:
        with server:
            connection, _ = server.accept()
        if way == BACK:
            self.sockets[BACK] = connection
            return
        self._receive_plain(
            self.tls.wrap_socket(connection, server_side=True) if way == "tls" else connection
        )

    def _receive_plain(self, connection: socket.socket) -> None:
        view = memoryview(self.buffer)  # type: ignore[arg-type]
        header = memoryview(bytearray(RAW_HEADER.size))
        with connection:
            while filled(connection, header):
                first, count = RAW_HEADER.unpack(header)
                for number in range(first, first + count):
                    if not filled(connection, view):
                        return
                    self.messages.arrived(number, self.buffer)
                connection.sendall(b"k")

    def check(self, first: int, count: int) -> str:
        """What is wrong with the messages since the last check; see ``Messages.wrong``."""
        return self.messages.wrong(first, count)

    # Sender

    def connect(self, host: str, port: int, raw: int, tls: int = 0, back: int = 0) -> dict[str, Any]:
        """``tls``, ``back`` 0: not measured."""
        self.network.meet("w-b", Paths(((host, port),), dial=True), 30)
        self.sockets["raw"] = socket.create_connection((host, raw))
        if back:
            self._start(self._receive_plain, socket.create_connection((host, back)))
        if tls:
            self.sockets["tls"] = self.tls.wrap_socket(socket.create_connection((host, tls)))
        return {"rtt_s": self.network.rtt("w-b")}

    def connections(self) -> int:
        return self.network.connections("w-b")

    def ours(self, first: int, count: int) -> float:
        started_s = time.perf_counter()
        for number in range(first, first + count):
            key = MessageKey(BULK, 1, number, 0, 0, Direction.FORWARD)
            self.network.send(self.other, key, b"", self._view(number))
        assert self.network.flush(self.other, 300)
        return time.perf_counter() - started_s

    def urgent(self, first: int, count: int) -> list[float]:
        """Send messages and, while they wait, gradients; returns when each of these was sent."""
        for number in range(first, first + count):
            key = MessageKey(BULK, 1, number, 0, 0, Direction.FORWARD)
            self.network.send(self.other, key, b"", self._view(number))
        sent = []
        for number in range(URGENT_COUNT):
            time.sleep(LAB_SECONDS / 2 / URGENT_COUNT)
            sent.append(time.monotonic())
            key = MessageKey(URGENT, 1, number, 0, 0, Direction.BACKWARD)
            self.network.send(self.other, key, b"", self._view(number)[:URGENT_BYTES])
        assert self.network.flush(self.other, 300)
        return sent

    def urgent_arrived(self) -> list[float]:
        """Times at which they came, each as it was sent."""
        return [self.urgent_at[number] for number in range(URGENT_COUNT)]

    def plain(self, way: str, first: int, count: int) -> float:
        connection = self.sockets[way]
        started_s = time.perf_counter()
        connection.sendall(RAW_HEADER.pack(first, count))
        for number in range(first, first + count):
            connection.sendall(self._view(number))
        assert connection.recv(1) == b"k"
        return time.perf_counter() - started_s

    def _view(self, number: int) -> memoryview:
        return memoryview(self.messages.message(number))  # type: ignore[arg-type]

    def measured(self, seconds: float, max_bytes: int) -> float:
        """What the link probe says, bit/s."""
        return self.network.bandwidth("w-b", seconds, max_bytes)

    # Both

    def join_gloo(self, rank: int, port: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, 2, is_master=rank == 0
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        self.signal = torch.zeros(1)

    def gloo(self, rank: int, number: int) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(self.messages.message(number) if rank else self.buffer)
        started_s = time.perf_counter()
        (dist.send if rank else dist.recv)(tensor, 1 - rank)
        (dist.recv if rank else dist.send)(self.signal, 1 - rank)
        took_s = time.perf_counter() - started_s
        if not rank:
            self.messages.arrived(number, self.buffer)
        return took_s

    def cpu(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self.network.close()
        for connection in self.sockets.values():
            connection.close()
        for thread in self.receiving:
            thread.join(1.0)  # it ends with the sender's connection


def filled(connection: socket.socket, view: memoryview) -> bool:
    """Fill ``view`` from the connection; False at its end."""
    while len(view):
        received = connection.recv_into(view)
        if not received:
            return False
        view = view[received:]
    return True


def tls_context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """Mutual TLS with the identity in ``folder``, as our own connections have it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    context.load_verify_locations(folder / "ca.pem")
    context.check_hostname = False  # the certificates name workers, not hosts
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def serve(kind: type[End], arguments: Sequence[str]) -> None:
    """Be the end that ``arguments_of`` asked for: obey commands until stdin ends."""
    folder, name, nbytes, seed = arguments
    obey(kind(Path(folder), name, int(nbytes), int(seed)))


def obey(end: Any) -> None:
    """Have an end do what stdin says, until that ends: its methods' names and arguments, a line each."""
    try:
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            print(json.dumps(getattr(end, command)(*arguments)), flush=True)
    finally:
        end.close()


class Remote:
    """The parent's handle on an end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.hear()

    def tell(self, command: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an end of the link died with code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


# ---------------------------------------------------------------- measurements


def identities(folder: Path) -> None:
    """A CA and both ends' certificates."""
    authority = Authority.open(folder / "ca")
    for name in ("w-a", "w-b"):
        key = new_key()
        certificate = authority.sign(signing_request(key, name), name)
        identity_from(key, certificate, authority.certificate_pem).save(folder / name)


def arguments_of(
    folder: Path, name: str, nbytes: int, seed: int, module: str = "benchmarks.transport"
) -> list[str]:
    """Python's arguments that start one end."""
    return ["-m", module, "--end", str(folder), name, str(nbytes), str(seed)]


def lab_end(lab: Lab, host: str, arguments: Sequence[str]) -> Remote:
    """One end, started on a host of the lab."""
    pipe = subprocess.PIPE
    return Remote(lab.python(host, *arguments, stdin=pipe, stdout=pipe, text=True, cwd=ROOT))


def checked(receiver: Remote, way: str, first: int, count: int) -> None:
    """Raise RuntimeError unless the messages arrived, each once and as it was sent."""
    if wrong := receiver.ask("check", first, count):
        raise RuntimeError(f"{way}: {wrong}")


def loopback(folder: Path, seed: int) -> dict[str, Any]:
    """Rates in GB/s and CPU seconds per GB of both ends together."""
    ends = []
    for name in ("w-a", "w-b"):
        command = [sys.executable, *arguments_of(folder, name, LOOPBACK_BYTES, seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ends.append(
            Remote(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env=environment,
                )
            )
        )
    sender, receiver = ends
    try:
        ports = receiver.ask("listen")
        facts = sender.ask("connect", "127.0.0.1", *(ports[way] for way in ("port", *PLAIN)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store_port = free.getsockname()[1]
        receiver.tell("join_gloo", 0, store_port)
        sender.ask("join_gloo", 1, store_port)
        receiver.hear()

        def gloo(number: int) -> float:
            receiver.tell("gloo", 0, number)
            took_s = float(sender.ask("gloo", 1, number))
            receiver.hear()
            return took_s

        ways: dict[str, Callable[[int], float]] = {
            "ours": lambda number: float(sender.ask("ours", number, 1)),
            "raw_tcp": lambda number: float(sender.ask("plain", "raw", number, 1)),
            "tls": lambda number: float(sender.ask("plain", "tls", number, 1)),
            "gloo": gloo,
        }
        numbers = itertools.count()
        took: dict[str, list[float]] = {way: [] for way in ways}
        cpu_s = dict.fromkeys(ways, 0.0)
        for repeat in range(LOOPBACK_REPEATS):
            for way, run in ways.items():
                before_s = sum(end.ask("cpu") for end in ends)
                number = next(numbers)
                seconds = run(number)
                used_s = sum(end.ask("cpu") for end in ends) - before_s
                checked(receiver, way, number, 1)
                if repeat:
                    took[way].append(seconds)
                    cpu_s[way] += used_s
    finally:
        for end in ends:
            end.close()
    rates = {way: LOOPBACK_BYTES / statistics.median(seconds) / 1e9 for way, seconds in took.items()}
    moved_gb = (LOOPBACK_REPEATS - 1) * LOOPBACK_BYTES / 1e9
    return {
        "gb_per_s": rates,
        "cpu_s_per_gb": {way: seconds / moved_gb for way, seconds in cpu_s.items()},
        "share_of_raw": rates["ours"] / rates["raw_tcp"],
        "share_of_tls": rates["ours"] / rates["tls"],
        "rtt_s": facts["rtt_s"],
    }


def line_path(name: str) -> str:
    """One of the benchmarks' own lines as a path; any other scenario as it is, name or path."""
    path = LINKS / f"{name}.toml"
    return str(path) if path.exists() else name


def line_scenario(name: str) -> Scenario:
    """One of the benchmarks' own lines, or any other scenario: name or path."""
    return read_scenario(line_path(name))


def lab_link(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Payload rate over a lab link as a share of its rate, ours and one raw TCP flow."""
    scenario = line_scenario(name)
    source, target = scenario.host_names[:2]
    link = scenario.link(source, target)
    total = int(link.mbit * 125_000 * LAB_SECONDS)
    nbytes = min(LAB_MESSAGE_BYTES, total // 8)
    with Lab(scenario, quotas=False) as lab:
        sender = lab_end(lab, source, arguments_of(folder, "w-a", nbytes, seed))
        receiver = lab_end(lab, target, arguments_of(folder, "w-b", nbytes, seed))
        try:
            ports = receiver.ask("listen", ["raw", BACK])
            facts = sender.ask("connect", lab.address(target), ports["port"], ports["raw"], 0, ports[BACK])
            number = 0

            def shares(*ways: tuple[Remote, Remote, tuple[str, ...]]) -> list[float]:
                """Of the link's rate, of each (sender, receiver, way), all at once."""
                nonlocal number
                for count in (1, max(1, total // nbytes)):  # TCP's start is not what is measured
                    for sending, _, way in ways:
                        sending.tell(*way, number, count)
                    took = [sending.hear() for sending, _, _ in ways]
                    for _, receiving, way in ways:
                        checked(receiving, way[-1], number, count)
                    number += count
                return [count * nbytes / took_s / (link.mbit * 125_000) for took_s in took]

            ours, raw, back = ("ours",), ("plain", "raw"), ("plain", BACK)
            one_way = shares((sender, receiver, ours)) + shares((sender, receiver, raw))
            ours_both = shares((sender, receiver, ours), (receiver, sender, ours))
            raw_both = shares((sender, receiver, raw), (receiver, sender, back))
            count = max(1, total // nbytes)
            sent = sender.ask("urgent", number, count)
            checked(receiver, "urgent", number, count)
            urgent_s = [
                at_s - sent_s for at_s, sent_s in zip(receiver.ask("urgent_arrived"), sent, strict=True)
            ]
            connections = sender.ask("connections")
            probe_bps = sender.ask("measured", 2.0, total)
        finally:
            sender.close()
            receiver.close()
    return {
        "mbit": link.mbit,
        "one_way_ms": link.ms,
        "loss": link.loss,
        "congestion": scenario.congestion,
        "mtu": scenario.mtu,
        "share": one_way[0],
        "share_one_raw_flow": one_way[1],
        "shares_both_ways": ours_both,
        "shares_two_raw_flows": raw_both,
        "urgent_s": statistics.median(urgent_s),
        "urgent_latest_s": max(urgent_s),
        "urgent_over_rtt_s": statistics.median(urgent_s) - facts["rtt_s"],
        "connections": connections,
        "rtt_s": facts["rtt_s"],
        "probe_share": probe_bps / (link.mbit * 1e6),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; the last line is JSON with --json."""
    made = parser(__doc__, scenario=f"loopback, then {', '.join(DEFAULT_LINKS)}")
    made.add_argument("--loopback", action="store_true", help="loopback only")
    made.add_argument("--end", nargs=4, help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    if options.end:
        serve(End, options.end)
        return 0
    if options.scenario:
        need_lab(options.json)
    figures: dict[str, Any] = {"seed": options.seed, "load1": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="atoll-transport-") as temporary:
        folder = Path(temporary)
        identities(folder)
        if not options.scenario:
            figures["loopback"] = found = loopback(folder, options.seed)
            print(f"{'loopback':10} {'GB/s':>8} {'CPU s/GB':>9}")
            for way, rate in found["gb_per_s"].items():
                print(f"{way:10} {rate:8.2f} {found['cpu_s_per_gb'][way]:9.2f}")
            print(
                f"ours / raw TCP = {found['share_of_raw']:.2f}, "
                f"ours / Python's TLS = {found['share_of_tls']:.2f}\n"
            )
        names = options.scenario or (() if options.loopback else DEFAULT_LINKS)
        if names and (reason := unavailable()):
            print(f"lab links skipped: no lab here: {reason}")
            figures["links_skipped"], names = reason, ()
        figures["links"] = {}
        for name in names:
            figures["links"][name] = link = lab_link(folder, name, options.seed)
            print(
                f"{name:10} {link['mbit']:g} Mbit/s, {link['one_way_ms']:g} ms, loss {link['loss']:g}, "
                f"{link['congestion']}: ours {link['share']:.1%} on {link['connections']} connections, "
                f"one raw flow {link['share_one_raw_flow']:.1%}, probe {link['probe_share']:.1%}"
            )
            ours, raw = (
                " and ".join(f"{share:.1%}" for share in link[key])
                for key in ("shares_both_ways", "shares_two_raw_flows")
            )
            print(f"{'':10} both ways at once: ours {ours}, two raw flows {raw}")
            print(
                f"{'':10} a gradient behind messages: {1e3 * link['urgent_s']:.0f} ms in the median, "
                f"{1e3 * link['urgent_latest_s']:.0f} at most, round trip {1e3 * link['rtt_s']:.0f}"
            )
    return conclude(figures, options.json)


if __name__ == "__main__":
    execute(main)
