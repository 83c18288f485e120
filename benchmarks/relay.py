"""What a relay costs: rate through `atoll relay` on loopback, one way and both at once, and its CPU time.

  python -m benchmarks.relay --rounds 3 --json

The relay is a process of its own; both ends are sockets of this one, with tickets and without TLS, which
would be theirs. What arrives is compared with what was sent. A GB moved counts once, whichever way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import conclude, execute, machine, parser
from protos import relay_tickets as tickets
from protos.relay_tickets import Ticket
from worker.transport.contract import RelayOffer
from worker.transport.ways.relaying import RelayTunnel

BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def relay() -> Iterator[tuple[psutil.Process, tuple[str, int], bytes]]:
    """A relay's process, its address and its key."""
    with tempfile.TemporaryDirectory(prefix="atoll-relay-") as folder:
        key = tickets.made_key_file(Path(folder) / "key")
        command = [sys.executable, "-m", "coordinator.cli", "relay", "--listen", "127.0.0.1:0", "--json"]
        process = subprocess.Popen(
            [*command, "--key", str(Path(folder) / "key")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert process.stdout is not None
            host, _, port = json.loads(process.stdout.readline())["address"].rpartition(":")
            yield psutil.Process(process.pid), (host, int(port)), key
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def tunnel(key: bytes, address: tuple[str, int], number: int, *, dials: bool) -> RelayTunnel:
    """One end of a pair."""
    serial = bytes([dials]) + number.to_bytes(7)
    sealed = tickets.seal(
        key, Ticket(number.to_bytes(16), serial, dials, int(time.time()) + 600, 1 << 50, 32)
    )
    return RelayTunnel(RelayOffer((address,), sealed, tickets.ticket_key(key, sealed), dials, 0.0, 600.0))


async def moved(
    key: bytes, address: tuple[str, int], number: int, block: bytes, count: int, ways: int
) -> bool:
    """Move ``count`` blocks each way; False when something else arrived."""
    loop = asyncio.get_running_loop()
    ends = await asyncio.gather(
        *(tunnel(key, address, number, dials=dials).open() for dials in (True, False))
    )

    async def send(source: Any) -> None:
        for _ in range(count):
            await loop.sock_sendall(source, block)

    async def check(target: Any) -> bool:
        same, buffer, at = True, memoryview(bytearray(BLOCK_BYTES)), 0
        for _ in range(count):
            at = 0
            while at < BLOCK_BYTES:
                at += await loop.sock_recv_into(target, buffer[at:])
            same = same and buffer == block
        return same

    pairs = [(ends[0], ends[1]), (ends[1], ends[0])][:ways]
    try:
        found = await asyncio.gather(
            *(check(target) for _, target in pairs), *(send(source) for source, _ in pairs)
        )
    finally:
        for end in ends:
            end.close()
    return all(found[:ways])


def measure(rounds: int, mib: int, block: bytes) -> tuple[list[dict[str, Any]], str]:
    """Rows of the medians, and what arrived wrong."""
    rows, wrong, number = [], "", 0
    with relay() as (process, address, key):
        for ways in (1, 2):
            rates, costs = [], []
            for _ in range(rounds):
                number += 1
                before_s, begun_s = sum(process.cpu_times()[:2]), time.perf_counter()
                if not asyncio.run(moved(key, address, number, block, mib, ways)):
                    wrong = f"other bytes arrived, {ways} ways"
                took_s, used_s = time.perf_counter() - begun_s, sum(process.cpu_times()[:2]) - before_s
                gigabytes = ways * mib * BLOCK_BYTES / 1e9
                rates.append(8 * gigabytes / took_s)
                costs.append(used_s / gigabytes)
            row = {
                "ways": ways,
                "gbit_per_s": round(statistics.median(rates), 3),
                "relay_cpu_s_per_gb": round(statistics.median(costs), 3),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows, wrong


def main() -> int:
    """Print a row for one way and for both, and with --json all of them."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--mib", type=int, default=512, help="moved each way")
    args = options.parse_args()
    block = random.Random(args.seed).randbytes(BLOCK_BYTES)
    rows, wrong = measure(args.rounds, args.mib, block)
    return conclude({"machine": machine(), "rows": rows}, args.json, wrong)


if __name__ == "__main__":
    execute(main)
