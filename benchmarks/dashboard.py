"""What the page costs: a fleet of 1,000 made-up workers of whom all change each second, and 20 viewers.

    python -m benchmarks.dashboard --workers 1000 --viewers 20 --seconds 60 --json

The page is `atoll dashboard` as a process of its own; its share of a core and its memory are the system's.
Its delay is from the coordinator's answer to `Status` until the last viewer has it. Then a real coordinator
runs one job with nobody looking and with as many viewers, in turns, and the steps' median times are compared:
runs of one kind differ by what the machine alone makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.commit import SHARE_BYTES, serving, submitted
from benchmarks.fake_worker import FakeWorker
from benchmarks.harness import execute
from benchmarks.waits import HUNG_S, LOOK_EVERY_S
from coordinator.client.endpoint import find_endpoint, remember
from protos import PROTOCOL_VERSION
from protos import atoll_control_pb2 as pb
from protos import atoll_control_pb2_grpc as rpc

STEP_S = 0.05
REPEATS = 5


class MadeUpFleet(rpc.OwnerServicer, rpc.EntryServicer):
    """A coordinator of ``workers`` workers; ``version`` holds the time of each answer."""

    def __init__(self, workers: int) -> None:
        self._turn, self._draw = 0, random.Random(workers)
        self._status = pb.StatusReply()
        for number in range(workers):
            device = pb.DeviceFacts(kind="cuda", model="NVIDIA RTX 3060", threads=8, memory_bytes=12 << 30)
            self._status.workers.add(
                worker=f"w-{number:016x}", name=f"host{number}", state="assigned", device=device, job="gpt-1",
                gflops=9800.0, site=f"site{number % 20}", address=f"10.0.0.{number % 250}:41000",
            )  # fmt: skip

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:  # noqa: N802
        """Greet."""
        return pb.HelloReply(protocol=PROTOCOL_VERSION, version="1", time_s=time.time())

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        """Answer with figures that are others than before for every worker."""
        self._turn += 1
        for number, worker in enumerate(self._status.workers):
            worker.waits_s = 2.0 + (self._turn + number) % 40
            worker.waits_what = "activations"
            worker.waits_step = self._turn
            worker.gflops = self._draw.uniform(300.0, 40_000.0)
        self._status.version = repr(time.monotonic())
        return self._status


@contextlib.contextmanager
def made_up(workers: int, state_dir: Path) -> Iterator[None]:
    """Serve such a fleet, remembered in ``state_dir``."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    fleet = MadeUpFleet(workers)
    rpc.add_OwnerServicer_to_server(fleet, server)
    rpc.add_EntryServicer_to_server(fleet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    remember(state_dir, "127.0.0.1", port, insecure=True)
    try:
        yield
    finally:
        server.stop(0).wait()


@dataclass
class Page:
    """`atoll dashboard` and its address."""

    process: psutil.Process
    host: str
    key: str

    def cookie(self) -> str:
        """Return a viewer's cookie."""
        with contextlib.closing(http.client.HTTPConnection(self.host, timeout=HUNG_S)) as connection:
            connection.request("POST", "/session", self.key, {"origin": f"http://{self.host}"})
            return connection.getresponse().headers["set-cookie"].partition(";")[0]

    def cpu_s(self) -> float:
        """Return the processor seconds that it has taken."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def page(state_dir: Path) -> Iterator[Page]:
    """Run the command on a free port."""
    command = [sys.executable, "-m", "coordinator.cli", "dashboard", "--state-dir", str(state_dir)]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            root, _, key = url.partition("/#key=")
            yield Page(psutil.Process(process.pid), root.removeprefix("http://"), key)
        finally:
            process.terminate()
            process.wait()


class Viewers:
    """``count`` viewers on one loop in a thread of its own; ``seen``: by answer, when each had it."""

    def __init__(self, found: Page, count: int, topics: str) -> None:
        self._page, self._count, self._topics = found, count, topics
        self.seen: dict[str, list[float]] = {}
        self.bytes = 0
        self._over = threading.Event()

    def __enter__(self) -> Viewers:
        cookie = self._page.cookie()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all(cookie)))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _all(self, cookie: str) -> None:
        tasks = [asyncio.create_task(self._view(cookie)) for _ in range(self._count)]
        while not self._over.is_set():
            await asyncio.sleep(LOOK_EVERY_S)
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(error, asyncio.CancelledError):
                print(f"a viewer ended: {error!r}", file=sys.stderr)

    async def _view(self, cookie: str) -> None:
        host, _, port = self._page.host.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(
                f"GET /stream?{self._topics} HTTP/1.1\r\nHost: {self._page.host}\r\nCookie: {cookie}\r\n"
                "Accept-Encoding: gzip\r\n\r\n".encode()
            )
            await reader.readuntil(b"\r\n\r\n")
            press, text = zlib.decompressobj(wbits=31), b""
            while True:
                size = int(await reader.readline(), 16)
                data = await reader.readexactly(size + 2)
                self.bytes += size
                text += press.decompress(data[:-2])
                *events, text = text.split(b"\n\n")
                for event in events:
                    stamp = event.partition(b'"version":"')[2].partition(b'"')[0].decode()
                    if stamp:
                        self.seen.setdefault(stamp, []).append(time.monotonic())
        finally:
            writer.close()


def load(workers: int, viewers: int, seconds: float) -> dict[str, Any]:
    """Return what the page takes while all look at the fleet."""
    with tempfile.TemporaryDirectory() as folder, made_up(workers, Path(folder)), page(Path(folder)) as found:
        with Viewers(found, viewers, "topic=fleet") as watching:
            while sum(len(seen) == viewers for seen in watching.seen.values()) < 3:
                time.sleep(0.1)  # all have the whole
            before, known, sent = found.cpu_s(), set(watching.seen), watching.bytes
            began_s = time.monotonic()
            time.sleep(seconds)
            took_s = time.monotonic() - began_s
            cpu_s, memory = found.cpu_s() - before, found.process.memory_info().rss
            sent = watching.bytes - sent
            seen = {stamp: at for stamp, at in watching.seen.items() if stamp not in known}
        delays = sorted(1e3 * (max(at) - float(stamp)) for stamp, at in seen.items() if len(at) == viewers)
    return {
        "workers": workers,
        "viewers": viewers,
        "seconds": round(took_s, 1),
        "updates": len(delays),
        "core_share": round(cpu_s / took_s, 4),
        "page_mb": round(memory / 1e6, 1),
        "last_viewer_ms_median": round(statistics.median(delays), 1),
        "last_viewer_ms_max": round(delays[-1], 1),
        "kb_a_viewer_a_second": round(sent / 1e3 / viewers / took_s, 1),
    }


def step_ms(steps: int, viewers: int | None) -> float:
    """Return the median time of a job's step in ms, with a page and so many viewers, or with neither."""
    at: list[float] = []

    def committed(worker: FakeWorker, commit: pb.StepCommit) -> None:
        if worker.name == "fake-0":
            at.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        state = Path(folder)
        _, token = stack.enter_context(serving(state))
        endpoint = find_endpoint(state_dir=state)
        remember(state, endpoint.host, endpoint.port, insecure=False)
        fakes = [
            FakeWorker(
                endpoint.address, token, f"fake-{i}", memory_bytes=SHARE_BYTES, compute_s=STEP_S,
                on_commit=committed,
            ).start()
            for i in range(2)
        ]  # fmt: skip
        for fake in fakes:
            stack.callback(fake.stop)
        channel = endpoint.channel()
        stack.callback(channel.close)
        job = submitted(channel, endpoint.metadata(), 2, steps)
        if viewers is not None:
            found = stack.enter_context(page(state))
            stack.enter_context(Viewers(found, viewers, f"topic=job:{job}&topic=events&topic=fleet"))
        owner = rpc.OwnerStub(channel)
        for update in owner.Watch(pb.JobRequest(job=job), metadata=endpoint.metadata(), timeout=HUNG_S):
            last = update
        if last.state != "finished":
            raise SystemExit(f"{last.state}: {last.reason}")
    pauses = [after - before for before, after in pairwise(at)]
    return 1e3 * statistics.median(pauses[len(pauses) // 3 :])


def disturbance(steps: int, viewers: int) -> dict[str, Any]:
    """Return a job's step time without and with the page, in turns."""
    without, looked_at = [], []
    for _ in range(REPEATS):
        without.append(step_ms(steps, None))
        looked_at.append(step_ms(steps, viewers))
    return {
        "step_ms_without": round(statistics.median(without), 2),
        "step_ms_with": round(statistics.median(looked_at), 2),
        "step_ms_scatter_without": round(max(without) - min(without), 2),
        "step_ms_all_without": [round(ms, 2) for ms in without],
        "step_ms_all_with": [round(ms, 2) for ms in looked_at],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=200, help="of the job whose step time is compared")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = load(given.workers, given.viewers, given.seconds) | disturbance(given.steps, given.viewers)
    print(
        f"{figures['workers']} workers, {figures['viewers']} viewers, {figures['seconds']:.0f} s: "
        f"{figures['core_share']:.1%} of a core, {figures['page_mb']:.0f} MB, the last viewer after "
        f"{figures['last_viewer_ms_median']:.0f} ms ({figures['last_viewer_ms_max']:.0f} at most), "
        f"{figures['kb_a_viewer_a_second']} kB a second each"
    )
    print(
        f"step of a job: {figures['step_ms_without']} ms alone, {figures['step_ms_with']} ms looked at; "
        f"runs alone differ by {figures['step_ms_scatter_without']} ms"
    )
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    execute(main)
