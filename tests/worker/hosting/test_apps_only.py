"""A machine that takes Flower apps alone: it has facts and ways, and says of every computation why not."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UsageError
from protos import atoll_control_pb2 as control
from tests.worker.hosting.scripted import Blobs, Network, batches, taken
from worker.config import WorkerConfig
from worker.federated.owner.consent import Consent
from worker.hosting.apps_only import REASON, AppsOnly
from worker.hosting.contained import child
from worker.hosting.requests import HostPorts
from worker.machine.torch_device import find_device
from worker.session import events, instructions


@pytest.fixture
def posted() -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


@pytest.fixture
def host(tmp_path: Path, posted: queue.SimpleQueue[Any], monkeypatch: pytest.MonkeyPatch) -> AppsOnly:
    def refused(*_: object) -> None:
        raise AssertionError("a compute process was started")

    monkeypatch.setattr(child.Child, "__init__", refused)
    config = WorkerConfig("lab", state_dir=tmp_path, threads=3, allow_apps=True, apps_only=True)
    made = AppsOnly(config, Consent(tmp_path))
    made.prepare()
    network: Any = Network()
    blobs: Any = Blobs()
    facts = made.start("w-a", HostPorts(network, blobs, batches, posted.put, lambda message: None))
    assert facts.kind == "cpu"
    assert facts.threads == 3
    assert 0 < facts.memory_limit_bytes <= facts.memory_bytes
    assert facts.torch_version.startswith("2.")
    return made


def test_a_probe_is_answered_with_the_reason(host: AppsOnly, posted: queue.SimpleQueue[Any]) -> None:
    host.do(events.ProbeOps(9, control.ProbeOps(request=9, ops=[control.ProbeOp()])))
    answer = taken(posted)
    assert (answer.request, list(answer.timings), answer.error) == (9, [], REASON)
    host.do(events.ProbeOps(10, control.ProbeOps(request=10)))  # of the way alone
    assert taken(posted).error == ""


def test_a_job_is_told_why_not_and_is_not_held(host: AppsOnly, posted: queue.SimpleQueue[Any]) -> None:
    host.do(events.Assign("j", 4, (), 0, control.Assign(job="j", plan_version=4)))
    assert taken(posted) == events.StageFailed("j", 4, 0, REASON)
    host.do(events.Participate("f", 2, control.Participate(job="f", version=2)))
    assert taken(posted) == events.ClientFailed("f", 0, REASON, "load")
    for instruction in (
        events.Release("j", 4, "over"),
        instructions.Suspend("paused"),
        instructions.Wake(),
        instructions.Interrupt("over"),
    ):
        host.do(instruction)
    host.make_room()
    host.report_codecs()
    assert posted.empty()
    assert host.codec_speeds == []
    assert (host.progress, host.waiting, host.memory_bytes) == (0, None, 0)
    host.stop(0.0)


def test_without_threads_given_its_facts_are_those_of_any_cpu(tmp_path: Path) -> None:
    """No threads at all would have it quarantined."""
    config = WorkerConfig("lab", state_dir=tmp_path, device="cpu", allow_apps=True, apps_only=True)
    host = AppsOnly(config, Consent(tmp_path))
    host.prepare()
    assert host.device.threads == find_device(config).threads >= 1


def test_apps_only_wants_apps_and_one_device(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--allow-apps"):
        WorkerConfig("lab", state_dir=tmp_path, apps_only=True)
    with pytest.raises(UsageError, match="--devices"):
        WorkerConfig("lab", state_dir=tmp_path, apps_only=True, allow_apps=True, devices="cpu*2")
