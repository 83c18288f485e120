"""How quickly one coordinator answers while many workers hold a session, and what a session costs it.

    python -m benchmarks.sessions --workers 1000 --processes 4 --seconds 30 --json

One real `atoll serve` on loopback with TLS. A job holds four fake workers for the whole time; then
``--workers`` others enroll, open a session each on a connection of their own, beat as their Welcome asks and
answer probes. Measured with the fleet connected: `status` of an owner, the job's commits (as
``benchmarks.commit``), the join of every worker, and the coordinator's memory and CPU time. The fleet joins
``--at-once`` at a time: without the owner's token `atoll serve` takes at most 64 calls of one address.
With ``--probing`` the job is then cancelled, and `status` timed while links of the idle fleet are probed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from atoll.errors import UsageError
from benchmarks.commit import SHARE_BYTES, Stopwatch, serving, submitted
from benchmarks.fake_worker import FakeWorker
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.light_workers import Joined, Left, Orders
from benchmarks.waits import HUNG_S, LOOK_EVERY_S
from coordinator.client.endpoint import find_endpoint
from hostos.descriptors import raise_limit
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc

HOLDERS = 4  # of the job
STEP_S = 0.05
STATUS_EVERY_S = 0.1
MAX_AT_ONCE = 60  # of 64 calls an address
LIVE = ("pool", "assigned")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the coordinator has used: ``memory_bytes`` is resident (a proportional share would fall as client
    processes map the same libraries)."""

    memory_bytes: int
    cpu_s: float
    at_s: float


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least ``share`` (0 to 1] of ``values`` do not exceed; NaN without values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


def latency_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median and p99 in milliseconds, and the number of samples."""
    return {
        "median": round(1e3 * statistics.median(seconds), 2) if seconds else math.nan,
        "p99": round(1e3 * percentile(seconds, 0.99), 2),
        "samples": len(seconds),
    }


def shared_out(workers: int, processes: int) -> list[tuple[int, int]]:
    """First number and count of each process's workers; counts differ by one at most, none is empty."""
    edges = [workers * at // processes for at in range(processes + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(edges) if b > a]


def bytes_a_session(before: Usage, after: Usage, sessions: int) -> int:
    """Memory that each of ``sessions`` sessions added."""
    return round((after.memory_bytes - before.memory_bytes) / sessions) if sessions else 0


def cpu_share(before: Usage, after: Usage) -> float:
    """CPU seconds a second between two readings: 1.0 is one core."""
    return (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s)


def usage(process: psutil.Process) -> Usage:
    """Reading of a live process."""
    times = process.cpu_times()
    return Usage(process.memory_info().rss, times.user + times.system, time.monotonic())


class Fleet:
    """Client processes with their sessions."""

    def __init__(self, entry: str, token: str, options: argparse.Namespace) -> None:
        parts = shared_out(options.workers, options.processes)
        at_once = max(1, min(options.at_once, MAX_AT_ONCE) // max(1, len(parts)))
        self._clients = [self._client(Orders(entry, token, a, n, at_once)) for a, n in parts]

    def _client(self, orders: Orders) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from benchmarks.light_workers import main; main()"]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert client.stdin is not None
        client.stdin.write(json.dumps(asdict(orders)) + "\n")
        client.stdin.flush()
        return client

    def _lines(self) -> Iterator[dict[str, Any]]:
        for client in self._clients:
            assert client.stdout is not None
            line = client.stdout.readline()
            if not line:
                raise RuntimeError(f"a client process ended with {client.wait()}")
            yield json.loads(line)

    def joined(self) -> Joined:
        """Wait until every session is open or has failed."""
        parts = [Joined(**line) for line in self._lines()]
        return Joined([s for p in parts for s in p.welcome_s], [why for p in parts for why in p.failed])

    def leave(self) -> Left:
        """Close every session."""
        for client in self._clients:
            assert client.stdin is not None
            client.stdin.close()
        parts = [Left(**line) for line in self._lines()]
        for client in self._clients:
            client.wait()
        return Left(
            sum(p.heartbeats for p in parts),
            sum(p.answers for p in parts),
            [why for p in parts for why in p.ended],
        )

    def kill(self) -> None:
        """End processes that are still there."""
        for client in self._clients:
            client.kill()
            client.wait()


class Owner:
    """The owner's own connection."""

    def __init__(self, state_dir: Path) -> None:
        self.endpoint = find_endpoint(state_dir=state_dir)
        self.channel = self.endpoint.channel()
        self.metadata = self.endpoint.metadata()
        self._stub = rpc.OwnerStub(self.channel)

    def status(self) -> pb.StatusReply:
        request = pb.StatusRequest()
        reply: pb.StatusReply = self._stub.Status(request, metadata=self.metadata, timeout=HUNG_S)
        return reply

    def cancel(self, job: str) -> None:
        self._stub.Cancel(pb.JobRequest(job=job), metadata=self.metadata, timeout=HUNG_S)

    def timed(self, seconds: float) -> tuple[list[float], int]:
        """Seconds that each `status` took, one every STATUS_EVERY_S, and the fewest live workers in any."""
        took_s, live = [], sys.maxsize
        until_s = time.monotonic() + seconds
        while (begun_s := time.monotonic()) < until_s:
            reply = self.status()
            took_s.append(time.monotonic() - begun_s)
            live = min(live, sum(worker.state in LIVE for worker in reply.workers))
            time.sleep(max(0.0, STATUS_EVERY_S - took_s[-1]))
        return took_s, live


def run(options: argparse.Namespace, state_dir: Path) -> dict[str, Any]:
    """Figures of one run."""
    with contextlib.ExitStack() as stack:
        profile = ["-m", "cProfile", "-o", options.profile] if options.profile else []
        serve = ("--max-workers", str(max(4096, 2 * options.workers)))
        process, token = stack.enter_context(serving(state_dir, *serve, python=profile))
        coordinator, owner = psutil.Process(process.pid), Owner(state_dir)
        watch = Stopwatch(HOLDERS)
        job = _training(owner, token, watch, stack)
        alone_s, _ = owner.timed(options.seconds / 6)
        commits_alone, before = len(watch.took_s), usage(coordinator)

        begun_s = time.monotonic()
        fleet = Fleet(owner.endpoint.address, token, options)
        stack.callback(fleet.kill)
        joined = fleet.joined()
        joining_s = time.monotonic() - begun_s
        _say(f"{len(joined.welcome_s)} sessions open after {joining_s:.0f} s")

        commits_joined, start = len(watch.took_s), usage(coordinator)
        status_s, live = owner.timed(options.seconds)
        end, commits_end = usage(coordinator), len(watch.took_s)
        owner.cancel(job)
        idle_start = usage(coordinator)
        probing_s, live_idle = owner.timed(options.probing) if options.probing else ([], live)
        idle_end = usage(coordinator)
        left = fleet.leave()
    sessions = len(joined.welcome_s)
    return {
        "workers": options.workers,
        "sessions": sessions,
        "live": min(live, live_idle),
        "failed": joined.failed[:5],
        "ended": left.ended[:5],
        "status_ms": latency_ms(status_s),
        "commit_ms": latency_ms(watch.took_s[commits_joined:commits_end]),
        "welcome_ms": latency_ms(joined.welcome_s),
        "joins_per_s": round(sessions / joining_s, 1),
        "probing_status_ms": latency_ms(probing_s) if probing_s else None,
        "alone_status_ms": latency_ms(alone_s),
        "alone_commit_ms": latency_ms(watch.took_s[:commits_alone]),
        "memory_mb": round(before.memory_bytes / 1e6, 1),
        "memory_with_sessions_mb": round(end.memory_bytes / 1e6, 1),
        "kib_a_session": round(bytes_a_session(before, end, sessions) / 1024, 1),
        "cpu_share": round(cpu_share(start, end), 3),
        "probing_cpu_share": round(cpu_share(idle_start, idle_end), 3) if probing_s else None,
        "heartbeats": left.heartbeats,
        "answers": left.answers,
        "machine": machine(),
    }


def _training(owner: Owner, token: str, watch: Stopwatch, stack: contextlib.ExitStack) -> str:
    """A job that goes on until it is cancelled, under way on its HOLDERS workers."""
    for at in range(HOLDERS):
        holder = FakeWorker(
            owner.endpoint.address, token, f"fake-{at}", memory_bytes=SHARE_BYTES, compute_s=STEP_S,
            ready=watch.said, on_commit=watch.heard,
        )  # fmt: skip
        stack.callback(holder.start().stop)
    job = submitted(owner.channel, owner.metadata, HOLDERS, 10**6)
    while not watch.took_s:
        time.sleep(LOOK_EVERY_S)
    return job


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Command line."""
    made = parser(__doc__)
    made.add_argument("--workers", type=int, default=1000)
    made.add_argument("--processes", type=int, default=4)
    made.add_argument("--seconds", type=float, default=30.0)
    made.add_argument("--at-once", type=int, default=16, help=f"joins under way; at most {MAX_AT_ONCE}")
    made.add_argument("--probing", type=float, default=0.0, help="seconds of the idle fleet's probing")
    made.add_argument("--profile", default="", help="file for cProfile's figures of the coordinator")
    options = made.parse_args()
    if options.workers < 1 or options.processes < 1 or not options.seconds > 0:
        raise UsageError("give at least one worker, one process and a positive number of seconds")
    wanted = 2 * options.workers + 256
    if (allowed := raise_limit(wanted)) < wanted:
        _say(f"this machine allows {allowed} open files a process; {wanted} are wanted: raise `ulimit -Hn`")
    with tempfile.TemporaryDirectory() as folder:
        figures = run(options, Path(folder))
    for what, key in (("status", "status_ms"), ("commit", "commit_ms"), ("join to Welcome", "welcome_ms")):
        _say(f"{what}: {figures[key]['median']} ms median, {figures[key]['p99']} ms p99")
    _say(
        f"coordinator: {figures['memory_mb']} MB, with {figures['sessions']} sessions "
        f"{figures['memory_with_sessions_mb']} MB ({figures['kib_a_session']} KiB each), "
        f"{figures['cpu_share']:.0%} of a core"
    )
    missing = figures["workers"] - figures["sessions"]
    wrong = f"{missing} workers did not join, {len(figures['ended'])} or more sessions ended early"
    return conclude(figures, options.json, wrong if missing or figures["ended"] else "")


if __name__ == "__main__":
    execute(main)
