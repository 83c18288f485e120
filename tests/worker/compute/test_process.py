"""The real compute process on a real pipe: it says what it computes on, answers, refuses, ends."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from tests.patience import HUNG_S
from worker.compute import process
from worker.compute.ports import Arenas
from worker.hosting.contained.child import Child, make_scratch
from worker.hosting.contained.launch import Ending
from worker.hosting.contained.sandbox import View, probe

MEMORY = 1 << 30


class Real:
    """A compute process, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: queue.SimpleQueue[pb.FromCompute] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[Ending] = queue.SimpleQueue()
        scratch = make_scratch(folder, "1")
        view = View((), (scratch,), "cpu")
        heard, ends = self.heard.put, self.ends.put
        self.child = Child(view, probe(), 1, scratch, lambda _, m: heard(m), lambda _, e: ends(e))

    def set_up(self, device: str = "cpu") -> None:
        setup = pb.ComputeSetup(
            worker="w-a",
            state_dir=str(self.folder),
            blob_dir=str(self.folder / "blobs"),
            scratch_dir=str(self.child.scratch),
            device=device,
            threads=1,
            memory_bytes=MEMORY,
            feed_ahead_steps=2,
            feed_bytes=1 << 20,
            kept_bytes=1 << 30,
            min_batch=1,
            min_samples=1,
            min_steps=1,
            min_clients=1,
            max_queued_bytes=1 << 20,
            max_queued_messages=16,
        )
        self.child.send(pb.ToCompute(setup=setup))

    def says(self, kind: str) -> pb.FromCompute:
        """The next message of a kind; log lines come in between."""
        while (m := self.heard.get(timeout=HUNG_S)).WhichOneof("body") != kind:
            assert m.WhichOneof("body") == "log", m
        return m


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Real]:
    made = Real(tmp_path)
    yield made
    made.child.kill("the test is over")
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_it_says_what_it_computes_on_answers_refuses_and_ends(real: Real) -> None:
    real.set_up()
    ready = real.says("ready").ready
    assert not ready.error
    assert (ready.device.kind, ready.device.threads) == ("cpu", 1)
    assert ready.device.memory_limit_bytes == MEMORY
    assert ready.device.torch_version
    real.child.send(pb.ToCompute(ping=41))
    assert real.says("pong").pong == 41
    # What breaks a bound is the job's failure; torch's own words come through the log.
    real.child.send(pb.ToCompute(load=control.Assign(job="j", plan_version=3), assignment=7))
    assert real.says("loading").loading == 7
    broke = real.says("said").said.failed
    assert (broke.job, broke.plan_version) == ("j", 3)
    assert broke.reason
    real.child.send(pb.ToCompute(run_step=control.StepStart(job="j", plan_version=3, step=5)))
    while (said := real.heard.get(timeout=HUNG_S)).WhichOneof("body") != "said":
        assert (said.log.event, said.log.level) == ("stage.broke", "error")
        assert "no stage is loaded" in json.loads(said.log.fields_json)["exception"]
    assert "no stage is loaded" in said.said.failed.reason
    assert real.child.status.memory_bytes > 0
    real.child.send(pb.ToCompute(stop=True))
    assert real.ends.get(timeout=HUNG_S).code == 0


def test_a_device_that_is_not_there_is_said_and_is_no_crash(real: Real) -> None:
    real.set_up("cuda:97")
    assert "cuda:97" in real.says("ready").ready.error
    assert real.ends.get(timeout=HUNG_S).code == 0


def test_it_ends_when_the_daemon_is_gone(real: Real) -> None:
    real.set_up()
    real.says("ready")
    real.child._pipe.close()
    assert real.ends.get(timeout=HUNG_S) is not None


def test_a_thread_that_dies_of_what_nothing_foresees_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die() -> None:
        raise MemoryError("not foreseen")

    def run() -> None:
        thread = threading.Thread(target=die)
        thread.start()
        thread.join()

    codes: list[int] = []
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # as it is afterwards
    monkeypatch.setattr(process, "ComputeProcess", lambda *_: SimpleNamespace(run=run))
    monkeypatch.setattr(process, "log_to", lambda send: None)
    monkeypatch.setattr(os, "_exit", codes.append)
    pipe: Any = SimpleNamespace(receive=lambda message: message, send=None)
    process.serve(pipe, Arenas(*[None] * 2), 0.0)  # type: ignore[arg-type]
    assert codes == [1]
    assert "not foreseen" in capsys.readouterr().err
