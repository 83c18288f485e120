"""Peer links against raw TCP: loopback rate, lab links, CPU per GB; TLS on, values checked.

    python -m benchmarks.transport --json                    everything
    python -m benchmarks.transport --scenario lossy          one lab link only (name or path)

Loopback: 64 MiB messages between two processes, ours, raw TCP (sendall and recv_into) and gloo
in turn, median of 9 after one that does not count. Lab (root): the share of the link's rate that
arrives as payload, over eight seconds' worth of 4 MiB messages, with raw TCP on one flow beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.reader import read_scenario
from lab.tun import unavailable
from lab.world import Lab
from protos.credentials import Authority, Identity, identity_from, new_key, signing_request
from worker.frames import Direction, MessageKey
from worker.transport import PeerNetwork, TransportConfig

ROOT = Path(__file__).resolve().parent.parent
LINKS = Path(__file__).resolve().parent / "links"
DEFAULT_LINKS = ("region", "metro", "lossy")
LOOPBACK_BYTES = 64 << 20
LOOPBACK_REPEATS = 10
LAB_SECONDS = 8.0
LAB_MESSAGE_BYTES = 4 << 20
PATIENT = TransportConfig(silence_s=30.0, reconnect_s=10.0)


# ---------------------------------------------------------------- one end, a process of its own


class End:
    """Commands come as JSON lines on stdin, results leave as JSON lines on stdout."""

    def __init__(self, folder: Path, name: str, nbytes: int, seed: int) -> None:
        identity = Identity.load(folder / name)
        assert identity is not None
        self.name, self.nbytes = name, nbytes
        # Every byte differs between seeds, so an untouched buffer cannot pass for a received one.
        self.data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        self.arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        listen = ("0.0.0.0", 0) if name == "w-b" else None  # noqa: S104 - inside the lab or loopback
        self.network = PeerNetwork(
            identity,
            listen,
            lambda peer, key, header, payload: self.arrived.put(len(payload)),
            config=PATIENT,
            expect=lambda peer, key, total: memoryview(self.buffer)[:total],  # type: ignore[arg-type]
        )
        self.network.admit("w-a")
        self.socket: socket.socket | None = None
        self.steps = 0

    # Receiver

    def listen(self) -> dict[str, Any]:
        """Open the raw port; ours is open already."""
        server = socket.create_server(("0.0.0.0", 0))  # noqa: S104
        threading.Thread(target=self._receive_raw, args=(server,), daemon=True).start()
        return {"port": self.network.port, "raw": server.getsockname()[1]}

    def _receive_raw(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        view = memoryview(self.buffer)  # type: ignore[arg-type]
        while header := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(header, "big")
            while left:
                at = 0
                size = min(left, self.nbytes)
                while at < size:
                    count = connection.recv_into(view[at:size])
                    if not count:
                        return
                    at += count
                left -= size
            connection.sendall(b"k")

    def check(self) -> bool:
        """Whether the buffer holds the sender's bytes; then spoils it for the next repetition."""
        equal = bool(np.array_equal(self.buffer, self.data))
        self.buffer[:] = 0
        return equal

    # Sender

    def connect(self, host: str, port: int, raw: int) -> dict[str, Any]:
        self.network.dial("w-b", [(host, port)], 30)
        self.socket = socket.create_connection((host, raw))
        return {"rtt_s": self.network.rtt("w-b")}

    def connections(self) -> int:
        return self.network.connections("w-b")

    def ours(self, total: int) -> float:
        started_s = time.perf_counter()
        view = memoryview(self.data)  # type: ignore[arg-type]
        for _ in range(max(1, total // self.nbytes)):
            self.steps += 1
            self.network.send("w-b", MessageKey("bench", 1, self.steps, 0, 0, Direction.FORWARD), b"", view)
        assert self.network.flush("w-b", 300)
        return time.perf_counter() - started_s

    def raw(self, total: int) -> float:
        assert self.socket is not None
        started_s = time.perf_counter()
        count = max(1, total // self.nbytes)
        self.socket.sendall((count * self.nbytes).to_bytes(8, "big"))
        for _ in range(count):
            self.socket.sendall(memoryview(self.data))  # type: ignore[arg-type]
        assert self.socket.recv(1) == b"k"
        return time.perf_counter() - started_s

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
        self.tensor = torch.from_numpy(self.data if rank else self.buffer)
        self.signal = torch.zeros(1)

    def gloo(self, rank: int) -> float:
        import torch.distributed as dist

        started_s = time.perf_counter()
        (dist.send if rank else dist.recv)(self.tensor, 1 - rank)
        (dist.recv if rank else dist.send)(self.signal, 1 - rank)
        return time.perf_counter() - started_s

    def cpu(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self.network.close()


def run_end(folder: str, name: str, nbytes: int, seed: int) -> None:
    """Serve commands until stdin ends."""
    end = End(Path(folder), name, nbytes, seed)
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


def arguments_of(folder: Path, name: str, nbytes: int, seed: int) -> list[str]:
    """Python's arguments that start one end."""
    return ["-m", "benchmarks.transport", "--end", str(folder), name, str(nbytes), str(seed)]


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
        facts = sender.ask("connect", "127.0.0.1", ports["port"], ports["raw"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store_port = free.getsockname()[1]
        receiver.tell("join_gloo", 0, store_port)
        sender.ask("join_gloo", 1, store_port)
        receiver.hear()

        def gloo(_: int) -> float:
            receiver.tell("gloo", 0)
            took_s = float(sender.ask("gloo", 1))
            receiver.hear()
            return took_s

        ways: dict[str, Callable[[int], float]] = {
            "ours": lambda total: float(sender.ask("ours", total)),
            "raw_tcp": lambda total: float(sender.ask("raw", total)),
            "gloo": gloo,
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        cpu_s = dict.fromkeys(ways, 0.0)
        for repeat in range(LOOPBACK_REPEATS):
            for way, run in ways.items():
                before_s = sum(end.ask("cpu") for end in ends)
                seconds = run(LOOPBACK_BYTES)
                used_s = sum(end.ask("cpu") for end in ends) - before_s
                assert receiver.ask("check"), f"{way}: wrong values"
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
        "rtt_s": facts["rtt_s"],
    }


def lab_link(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Payload rate over a lab link as a share of its rate, ours and one raw TCP flow."""
    path = LINKS / f"{name}.toml"
    scenario = read_scenario(path if path.exists() else name)
    source, target = scenario.host_names[:2]
    link = scenario.link(source, target)
    total = int(link.mbit * 125_000 * LAB_SECONDS)
    nbytes = min(LAB_MESSAGE_BYTES, total // 8)
    with Lab(scenario, quotas=False) as lab:
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
            "cwd": ROOT,
        }
        sender = Remote(lab.python(source, *arguments_of(folder, "w-a", nbytes, seed), **options))
        receiver = Remote(lab.python(target, *arguments_of(folder, "w-b", nbytes, seed), **options))
        try:
            ports = receiver.ask("listen")
            facts = sender.ask("connect", lab.address(target), ports["port"], ports["raw"])
            shares: dict[str, float] = {}
            for way in ("ours", "raw"):
                sender.ask(way, nbytes)  # TCP's start is not what is measured
                assert receiver.ask("check"), f"{way}: wrong values"
                count = max(1, total // nbytes)
                took_s = sender.ask(way, count * nbytes)
                assert receiver.ask("check"), f"{way}: wrong values"
                shares[way] = count * nbytes / took_s / (link.mbit * 125_000)
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
        "share": shares["ours"],
        "share_one_raw_flow": shares["raw"],
        "connections": connections,
        "rtt_s": facts["rtt_s"],
        "probe_share": probe_bps / (link.mbit * 1e6),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; the last line is JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="figures as one JSON object on the last line")
    parser.add_argument("--scenario", action="append", help="a lab link only; name or path, may repeat")
    parser.add_argument("--loopback", action="store_true", help="loopback only")
    parser.add_argument("--end", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.end:
        folder, name, nbytes, seed = options.end
        run_end(folder, name, int(nbytes), int(seed))
        return 0
    figures: dict[str, Any] = {"seed": options.seed, "load1": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="atoll-transport-") as temporary:
        folder = Path(temporary)
        identities(folder)
        if not options.scenario:
            figures["loopback"] = found = loopback(folder, options.seed)
            print(f"{'loopback':10} {'GB/s':>8} {'CPU s/GB':>9}")
            for way, rate in found["gb_per_s"].items():
                print(f"{way:10} {rate:8.2f} {found['cpu_s_per_gb'][way]:9.2f}")
            print(f"ours / raw TCP = {found['share_of_raw']:.2f} (goal 0.45)\n")
        names = options.scenario or (() if options.loopback else DEFAULT_LINKS)
        if names and (reason := unavailable()):
            print(f"lab links skipped: {reason}")
            names = ()
        figures["links"] = {}
        for name in names:
            figures["links"][name] = link = lab_link(folder, name, options.seed)
            print(
                f"{name:10} {link['mbit']:g} Mbit/s, {link['one_way_ms']:g} ms, loss {link['loss']:g}, "
                f"{link['congestion']}: ours {link['share']:.1%} on {link['connections']} connections, "
                f"one raw flow {link['share_one_raw_flow']:.1%}, probe {link['probe_share']:.1%}"
            )
    if options.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
