"""What a boundary tensor there and back takes of its ends: CPU milliseconds on slow lines.

    python -m benchmarks.messages --json
    python -m benchmarks.messages --scenario region --json      any two hosts: name or path

Two hosts of the lab exchange tensors as neighbouring stages do: one sends, the other answers each.
`resting`: the next one follows the answer; `busy`: four are unanswered, so the line is full both ways. Ours,
with TLS, beside two raw TCP flows, in turns; quotas hold. Every tensor is another one; their number, their
sizes and the values at 257 places of each are compared with what was sent. `cpu_ms` is of one end and one
tensor each way; `share`: of what a direction of the line can carry.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import conclude, execute, machine, need_lab, parser
from benchmarks.transport import (
    BULK,
    End,
    arguments_of,
    checked,
    filled,
    identities,
    lab_end,
    line_scenario,
    serve,
)
from benchmarks.waits import HUNG_S
from lab.world import Lab
from worker.transport.contract import Paths
from worker.transport.frames import Direction, MessageKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.transport import Remote

DEFAULT_LINKS = ("region_part", "home_part")
TENSOR_BYTES = 256 << 10  # 4 sequences of 64 tokens, 256 wide, in fp32
WAYS = ("ours", "raw_tcp")
DEPTHS = {"resting": 1, "busy": 4}  # unanswered tensors


class Neighbour(End):
    """One end: w-a sends and counts the answers, w-b answers."""

    def __init__(self, folder: Path, name: str, nbytes: int, seed: int) -> None:
        self.came: queue.SimpleQueue[int] = queue.SimpleQueue()
        super().__init__(folder, name, nbytes, seed)

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        super().deliver(peer, key, header, payload)
        self.came.put(key.step)

    def open_ports(self) -> list[int]:
        """Of ours, and of raw TCP's two flows."""
        servers = [socket.create_server(("0.0.0.0", 0)) for _ in range(2)]  # noqa: S104 - inside the lab
        self._start(self._accept_both, servers)
        return [self.network.port, *(server.getsockname()[1] for server in servers)]

    def _accept_both(self, servers: Sequence[socket.socket]) -> None:
        for way, server in zip(("in", "out"), servers, strict=True):
            with server:
                self.sockets[way] = server.accept()[0]
        self._read(self.sockets["in"])

    def join(self, host: str, port: int, there: int, back: int) -> float:
        """Connect both ways of exchanging; returns the round trip, seconds."""
        self.network.meet(self.other, Paths(((host, port),), dial=True), 30)
        self.sockets["out"] = socket.create_connection((host, there))
        self.sockets["in"] = socket.create_connection((host, back))
        self._start(self._read, self.sockets["in"])
        return self.network.rtt(self.other)

    def _read(self, connection: socket.socket) -> None:
        view = memoryview(self.buffer)  # type: ignore[arg-type]
        number = memoryview(bytearray(8))
        while filled(connection, number) and filled(connection, view):
            at = int.from_bytes(number, "big")
            self.messages.arrived(at, self.buffer)
            self.came.put(at)

    def _send(self, way: str, number: int, direction: Direction) -> None:
        if way == "ours":
            self.network.send(
                self.other, MessageKey(BULK, 1, number, 0, 0, direction), b"", self._view(number)
            )
        else:
            self.sockets["out"].sendall(number.to_bytes(8, "big"))
            self.sockets["out"].sendall(self._view(number))

    def exchange(self, way: str, first: int, count: int, depth: int) -> list[float]:
        """Seconds, and CPU seconds of this end."""
        begun_s, used_s = time.perf_counter(), time.process_time()
        for number in range(first, first + count):
            if number - first >= depth:
                self.came.get(timeout=HUNG_S)
            self._send(way, number, Direction.FORWARD)
        for _ in range(min(depth, count)):
            self.came.get(timeout=HUNG_S)
        return [time.perf_counter() - begun_s, time.process_time() - used_s]

    def answer(self, way: str, count: int) -> float:
        """CPU seconds of this end."""
        used_s = time.process_time()
        for _ in range(count):
            self._send(way, self.came.get(timeout=HUNG_S), Direction.BACKWARD)
        if way == "ours":
            assert self.network.flush(self.other, 60)
        return time.process_time() - used_s


class Line:
    """Both ends in the lab, ready to exchange."""

    def __init__(self, folder: Path, name: str, nbytes: int, seed: int) -> None:
        self.scenario = line_scenario(name)
        self.nbytes = nbytes
        self._lab = Lab(self.scenario)
        self._numbers = itertools.count()
        self.ends: list[Remote] = []
        lab = self._lab.__enter__()
        hosts = self.scenario.host_names[:2]
        self.link = self.scenario.link(*hosts)
        try:
            for host in hosts:
                lab.set_cpu(host, None)  # importing is not measured
            for host, end in zip(hosts, ("w-a", "w-b"), strict=True):
                arguments = arguments_of(folder, end, nbytes, seed, "benchmarks.messages")
                self.ends.append(lab_end(lab, host, arguments))
            near, far = self.ends
            self.rtt_s = near.ask("join", lab.address(hosts[1]), *far.ask("open_ports"))
            for host in hosts:
                lab.set_cpu(host, self.scenario.host(host).cpu)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._lab.__exit__(None, None, None)

    def run(self, way: str, count: int, depth: int) -> dict[str, float]:
        """One exchange of ``count`` tensors, its values checked."""
        near, far = self.ends
        first = next(self._numbers) * count
        far.tell("answer", way, count)
        took_s, near_s = near.ask("exchange", way, first, count, depth)
        far_s = far.hear()
        for end in self.ends:
            checked(end, way, first, count)
        return {
            "cpu_ms": 1e3 * (near_s + far_s) / 2 / count,
            "share": count * self.nbytes * 8 / took_s / (self.link.mbit * 1e6),
        }


def measure(folder: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, after one that does not count."""
    line = Line(folder, name, args.bytes, args.seed)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {load: {way: [] for way in WAYS} for load in DEPTHS}
    try:
        for at in range(args.rounds + 1):
            for load, way in itertools.product(DEPTHS, WAYS):
                figures = line.run(way, args.count, DEPTHS[load])
                if at:
                    runs[load][way].append(figures)
    finally:
        line.close()
    medians = {load: {way: _medians(found) for way, found in ways.items()} for load, ways in runs.items()}
    part = line.scenario.host(line.scenario.host_names[0]).cpu
    return {"mbit": line.link.mbit, "one_way_ms": line.link.ms, "cpu": part, "rtt_s": line.rtt_s, **medians}


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each line and print."""
    made = parser(__doc__ or "", scenario=", ".join(DEFAULT_LINKS))
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--count", type=int, default=24, help="tensors a round")
    made.add_argument("--bytes", type=int, default=TENSOR_BYTES, help="of a tensor")
    made.add_argument("--end", nargs=4, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.end:
        serve(Neighbour, args.end)
        return 0
    need_lab(args.json)
    figures: dict[str, Any] = {"seed": args.seed, "machine": machine(), "lines": {}}
    with tempfile.TemporaryDirectory(prefix="atoll-messages-") as temporary:
        identities(Path(temporary))
        for name in args.scenario or DEFAULT_LINKS:
            figures["lines"][name] = line = measure(Path(temporary), name, args)
            print(
                f"{name}: {line['mbit']:g} Mbit/s, {line['one_way_ms']:g} ms, {line['cpu'] or 1:g} of a core"
            )
            for load in DEPTHS:
                ours, raw = (line[load][way] for way in WAYS)
                print(
                    f"  {load:8} ours {ours['cpu_ms']:.2f} CPU ms, {ours['share']:.1%} of the line; "
                    f"raw TCP {raw['cpu_ms']:.2f} CPU ms, {raw['share']:.1%}",
                    flush=True,
                )
    return conclude(figures, args.json)


if __name__ == "__main__":
    execute(main)
