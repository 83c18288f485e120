"""The compute thread: what it does while no stage is held."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protos import atoll_control_pb2 as pb
from tests.patience import HUNG_S
from worker import workbench
from worker.machine import op_timing
from worker.machine.cpu import CpuMeter
from worker.session import instructions
from worker.session.wire import OpsRequest
from worker.workbench import Workbench


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
    device = SimpleNamespace(kind="cpu", memory_limit_bytes=1 << 30)
    context: Any = SimpleNamespace(device=device, cpu=cpu or CpuMeter())
    bench = Workbench(context, posted.put, said.put, gauge)  # type: ignore[arg-type]
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
    bench.do(instructions.TimeOps(7, OpsRequest(("op",), None)))  # type: ignore[arg-type]
    gauge.go_on.put(None)
    assert [s.codec for s in said.get(timeout=HUNG_S).codec_speeds.speeds] == ["codec1"]
    gauge.entered.get(timeout=HUNG_S)
    assert posted.get_nowait().message.ops_probed.request == 7  # done before the second part began
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


def test_the_way_to_the_coordinator_is_timed_without_waiting_for_what_computes() -> None:
    gauge = Gauge()
    bench, posted, _ = bench_with(gauge)
    bench.report_codecs()
    gauge.entered.get(timeout=HUNG_S)
    bench.do(instructions.TimeOps(7, OpsRequest((), None)))  # type: ignore[arg-type]
    assert posted.get_nowait().message.ops_probed.request == 7
    gauge.go_on.put(None)
    assert bench.stop(20.0)


def test_ops_are_timed_by_the_clock_that_training_counts_its_stage_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks: list[Callable[[], float]] = []

    def time_ops(*_: object, clock: Callable[[], float]) -> dict[str, Any]:
        clocks.append(clock)
        return {}

    monkeypatch.setattr(op_timing, "time_ops", time_ops)
    bench, posted, _ = bench_with(Gauge(), CpuMeter(0.25, 1, thread_clock=lambda: 2.0))
    bench.do(instructions.TimeOps(7, OpsRequest(("op",), None)))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("kind", ["stage", "round"])
def test_an_op_that_does_not_end_is_a_failure_with_its_name_and_no_more_work_is_taken(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(workbench, "WATCH_S", 0.01)
    bench, posted, _ = bench_with(Gauge())
    late = iter(["op 'aten.special_zeta.default' (loss) has run for 61 s"])

    def overdue(_: float) -> Any:
        found = next(late, None)
        return None if found is None else ((7, found) if kind == "stage" else (7, "train", found))

    job = SimpleNamespace(job="j", version=3)
    held: Any = SimpleNamespace(overdue=overdue, assignment=job, joining=job, at=lambda step: job)
    setattr(bench, "_run" if kind == "stage" else "_part", held)
    failure = posted.get(timeout=HUNG_S)
    assert (failure.job, getattr(failure, "step", getattr(failure, "round", None))) == ("j", 7)
    assert "'aten.special_zeta.default' (loss)" in failure.reason
    for instruction in (
        instructions.LoadStage("k", 1, None),  # type: ignore[arg-type]
        instructions.JoinFederation("k", 1, None),  # type: ignore[arg-type]
    ):
        bench.do(instruction)
        refused = posted.get(timeout=HUNG_S)
        assert refused.job == "k"
        assert "still computes for an earlier job: op 'aten.special_zeta.default'" in refused.reason
    bench.do(instructions.TimeOps(9, OpsRequest(("op",), None)))  # type: ignore[arg-type]
    assert "restart it" in posted.get(timeout=HUNG_S).message.ops_probed.error
    bench._run = bench._part = None
    assert bench.stop(20.0)
