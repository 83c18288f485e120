"""The compute thread: codecs and ops are measured while no stage is held; orders that break a bound fail."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.errors import ConnectionFailed
from protos import atoll_control_pb2 as pb
from protos.atoll_compute_pb2 import ComputeJoin
from tests.patience import HUNG_S
from worker.cancel import Cancel
from worker.compute import loading, workbench
from worker.compute.snapshots import Snapshot
from worker.compute.tasks import Thread
from worker.compute.workbench import PROBE_S, Workbench
from worker.machine import op_timing
from worker.machine.cpu import CpuMeter
from worker.manners.duty import DutyCycle
from worker.pipe.arena import HEAD_BYTES
from worker.pipe.status import ComputeStatus, Mark
from worker.session import events, instructions
from worker.stage import tensor_blobs
from worker.transport.contract import PeerLost

PROBES = pb.ProbeOps(request=7)


class Gauge:
    """A gauge that says what it was asked, and whether something else waited."""

    def __init__(self) -> None:
        self.rates: dict[str, tuple[float, float]] = {}
        self.waited: list[bool] = []
        self.left: tuple[str, ...] = ()
        self.entered: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.go_on: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, check: Callable[[], None], wanted_elsewhere: Callable[[], bool]) -> bool:
        self.entered.put(None)
        self.go_on.get(timeout=HUNG_S)
        check()
        self.waited.append(wanted_elsewhere())
        self.rates[f"codec{len(self.waited)}"] = (1e9, 2e9)
        return not self.waited[-1]


def bench_with(
    gauge: Gauge, cpu: CpuMeter | None = None
) -> tuple[Workbench, queue.SimpleQueue[Any], queue.SimpleQueue[pb.FromWorker]]:
    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said: queue.SimpleQueue[pb.FromWorker] = queue.SimpleQueue()
    device = SimpleNamespace(kind="cpu", model="a CPU", memory_limit_bytes=1 << 30)
    status = ComputeStatus(memoryview(bytearray(HEAD_BYTES)))
    meter = cpu or CpuMeter()
    context: Any = SimpleNamespace(
        device=device, cpu=meter, status=status, duty=DutyCycle(), blobs=None, scratch=None
    )
    bench = Workbench(context, posted.put, said.put, lambda assignment: None, gauge)  # type: ignore[arg-type]
    bench.start()
    return bench, posted, said


def test_codec_speeds_are_said_when_they_are_known_and_others_that_wait_come_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op_timing, "time_ops", lambda *_, **__: {})
    gauge = Gauge()
    bench, posted, said = bench_with(gauge)
    bench.report_codecs()
    gauge.entered.get(timeout=HUNG_S)
    bench.time_ops(PROBES)
    gauge.go_on.put(None)
    assert [s.codec for s in said.get(timeout=HUNG_S).codec_speeds.speeds] == ["codec1"]
    gauge.entered.get(timeout=HUNG_S)
    assert posted.get_nowait().request == 7  # done before the second part began
    gauge.go_on.put(None)
    assert [s.codec for s in said.get(timeout=HUNG_S).codec_speeds.speeds] == ["codec1", "codec2"]
    assert gauge.waited == [True, False]
    assert bench.stop(20.0)


def test_codecs_asked_for_twice_are_measured_and_do_not_make_way_for_each_other() -> None:
    gauge = Gauge()
    bench, _, said = bench_with(gauge)
    bench.report_codecs()
    gauge.entered.get(timeout=HUNG_S)
    for _ in range(3):
        bench.report_codecs()
    gauge.go_on.put(None)
    gauge.entered.get(timeout=HUNG_S)
    gauge.go_on.put(None)
    assert [s.codec for s in said.get(timeout=HUNG_S).codec_speeds.speeds] == ["codec1"]
    assert [s.codec for s in said.get(timeout=HUNG_S).codec_speeds.speeds] == ["codec1", "codec2"]
    assert bench.stop(20.0)
    assert gauge.waited == [True, False]
    assert said.empty()


def test_a_worker_that_leaves_does_not_wait_for_the_codecs_that_are_left() -> None:
    gauge = Gauge()
    bench, _, said = bench_with(gauge)
    bench.report_codecs()
    gauge.entered.get(timeout=HUNG_S)
    bench.interrupt("leaving")
    gauge.go_on.put(None)
    assert bench.stop(20.0)
    assert gauge.waited == []
    assert not said.get_nowait().codec_speeds.speeds


def test_ops_are_timed_by_the_clock_that_training_counts_its_stage_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks: list[Callable[[], float]] = []

    def time_ops(*_: object, clock: Callable[[], float], watch: object) -> dict[str, Any]:
        clocks.append(clock)
        return {}

    monkeypatch.setattr(op_timing, "time_ops", time_ops)
    bench, posted, _ = bench_with(Gauge(), CpuMeter(0.25, 1, thread_clock=lambda: 2.0))
    bench.time_ops(PROBES)
    posted.get(timeout=HUNG_S)
    assert [clock() for clock in clocks] == [8.0]  # 2 s of a quarter of a core
    assert bench.stop(20.0)


def test_what_an_op_says_of_a_clients_data_stays_in_the_clients_log() -> None:
    bench = SimpleNamespace(_context=SimpleNamespace(device=None))
    error = IndexError("index 4711 is out of bounds for dimension 0 with size 10")
    told = Workbench._explained(bench, error, private=True)  # type: ignore[arg-type]
    assert told.startswith("IndexError on the client's own data")
    assert "4711" not in told
    assert "4711" in Workbench._explained(bench, error)  # type: ignore[arg-type]


def test_an_op_that_is_timed_is_shown_on_the_status_page_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, posted, _ = bench_with(Gauge())
    status = bench._context.status
    seen: list[Mark | None] = []

    def time_ops(*_: object, clock: object, watch: Callable[[str], object]) -> dict[str, Any]:
        watch("op 'aten.mm.default' (product)")
        seen.append(status.running().mark)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(op_timing, "time_ops", time_ops)
    bench.time_ops(PROBES)
    assert "no such kernel" in posted.get(timeout=HUNG_S).error
    assert seen == [Mark("op 'aten.mm.default' (product), as a probe", PROBE_S)]
    assert status.running().mark is None
    assert bench.stop(20.0)


def _loads(bench: Workbench) -> None:
    bench.load(pb.Assign(job="j\u202e", plan_version=3), 1)


def _joins(bench: Workbench) -> None:
    bench.join(ComputeJoin(invitation=pb.Participate(job="j")))


@pytest.mark.parametrize(("ask", "why"), [(_loads, "control characters"), (_joins, "Optimizer")])
def test_an_order_that_breaks_a_bound_is_a_failure_of_its_job_and_the_bench_goes_on(
    ask: Callable[[Workbench], None], why: str
) -> None:
    gauge = Gauge()
    bench, posted, said = bench_with(gauge)
    ask(bench)
    failure = posted.get(timeout=HUNG_S)
    assert failure.job[:1] == "j"
    assert why in failure.reason
    bench.report_codecs()
    gauge.entered.get(timeout=HUNG_S)
    gauge.go_on.put(None)
    assert said.get(timeout=HUNG_S).codec_speeds.speeds
    assert bench.stop(20.0)


def test_a_snapshot_on_its_way_to_the_store_outlives_what_stops_the_step() -> None:
    bench, _, _ = bench_with(Gauge())
    cancels: queue.SimpleQueue[Cancel] = queue.SimpleQueue()
    go_on = threading.Event()

    def lasting(cancel: Cancel) -> None:
        cancels.put(cancel)
        assert go_on.wait(HUNG_S)

    bench._tasks.submit(lasting, Thread.STORE)
    bench._tasks.submit(lasting)
    stored, step = sorted(
        (cancels.get(timeout=HUNG_S) for _ in range(2)),
        key=lambda c: bench._tasks._pending[c] is not Thread.STORE,
    )
    bench.do(instructions.Interrupt("lost a neighbour"))
    bench.do(events.StepDiscard("j", 1, 3, "lost a neighbour"))
    assert (step.is_set, stored.is_set) == (True, False)
    bench.do(events.Release("j", 1, "released"))
    assert stored.is_set
    go_on.set()
    assert bench.stop(20.0)


def test_a_snapshot_that_finds_no_memory_is_reported_and_the_next_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that stores is one: if it died, every later snapshot would stay in memory."""
    bench, posted, _ = bench_with(Gauge())
    failures = [MemoryError()]

    def stored(*_: object, keep: bool) -> dict[str, str]:
        if failures:
            raise failures.pop()
        return {"w": "ab" * 32}

    monkeypatch.setattr(tensor_blobs, "write_tensors", lambda *_: {})
    monkeypatch.setattr(tensor_blobs, "store_files", stored)
    monkeypatch.setattr(workbench, "used_memory_bytes", lambda device: 1 << 30)
    assignment: Any = SimpleNamespace(job="j", version=1)
    for step in (4, 5):
        write = partial(bench._snapshots.write, Snapshot(assignment, step, keep=False), {})
        bench._tasks.submit(write, Thread.WRITE)
    failed, done = (posted.get(timeout=HUNG_S) for _ in range(2))
    assert (failed.step, done.step) == (4, 5)
    assert "out of memory on a CPU: 1.0 GiB held" in failed.error
    assert not failed.tensors
    assert list(done.tensors) == ["w"]
    assert bench.stop(20.0)


def test_other_neighbours_for_a_stage_that_is_not_there_are_a_failure_of_its_job() -> None:
    bench, posted, _ = bench_with(Gauge())
    bench.reconfigure(pb.Reconfigure(job="j", plan_version=2, step=3))
    failure = posted.get(timeout=HUNG_S)
    assert (failure.job, failure.version, failure.step) == ("j", 2, 3)
    assert "no stage is loaded" in failure.reason
    assert bench.stop(20.0)


def test_ops_that_break_a_bound_are_answered_with_the_reason() -> None:
    bench, posted, _ = bench_with(Gauge())
    bench.time_ops(pb.ProbeOps(request=7, precision="fp3"))
    answer = posted.get(timeout=HUNG_S)
    assert (answer.request, list(answer.timings)) == (7, [])
    assert "precision" in answer.error
    assert bench.stop(20.0)


def test_who_loads_a_stage_accuses_nobody_of_those_who_were_there_before() -> None:
    class Unreached:
        def connect(self, job: str, plan_version: int, cancel: Cancel) -> None:
            raise PeerLost("w-a", "w-a did not connect within 30 s")

    context: Any = SimpleNamespace(network=Unreached())
    assignment: Any = SimpleNamespace(job="job", version=2)
    with pytest.raises(ConnectionFailed, match=r"^w-a did not connect") as failed:
        loading._connect(assignment, context, Cancel())
    assert not isinstance(failed.value, PeerLost)
