"""A scrape of a running coordinator holds every metric that the docs promise."""

from __future__ import annotations

import shutil
import subprocess
import threading
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.errors import UsageError
from benchmarks.fake_worker import FakeWorker
from coordinator.cli.fleet.admin import _metrics
from coordinator.config import CoordinatorConfig
from coordinator.membership import member
from protos import atoll_control_pb2 as pb
from protos import telemetry
from tests.coordinator.serving import Owner, fleet, start
from tests.patience import HUNG_S

HELD_STEP = 3
EVERYWHERE = "0.0.0.0"  # noqa: S104 - where the ports of the coordinator listen, not its metrics
Sample = tuple[dict[str, str], float]


def _page(port: int) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=HUNG_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def _scraped(port: int) -> dict[str, list[Sample]]:
    text = _page(port)
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_scrape_holds_every_metric_with_its_labels(tmp_path: Path) -> None:
    looked = threading.Event()

    def report(worker: FakeWorker, step: int) -> pb.StepReady:
        if step == HELD_STEP:
            looked.wait(HUNG_S)
        said = worker.report(step)
        assert worker.assigned is not None
        said.energy_j = 1e9
        for peer in worker.assigned.peers:
            said.links.add(peer=peer.peer.worker, bytes=250, dense_bytes=1000)
        return said

    with ExitStack() as stack:
        running = start(stack, tmp_path, metrics_port=0)
        owner = Owner(running)
        fleet(stack, running, 2, ready=report)
        stack.callback(looked.set)
        job = owner.submit(steps=HELD_STEP + 1)
        owner.watch(job, lambda update: update.step == HELD_STEP)
        assert running.server is not None
        assert running.server.exporter is not None
        running.call(lambda server: server.shell.scheduler.effects.dropped.update(StepReady=2))
        found = _scraped(running.server.exporter.port)
        page = _page(running.server.exporter.port)
        if (promtool := shutil.which("promtool")) is not None:
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=page, capture_output=True, text=True
            )
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, ""), (
                "as Prometheus names things"
            )
    federated = {m for m in telemetry.METRICS if m.name.startswith("atoll_federated_")}
    assert not {m.name for m in federated} & found.keys()  # no such job is here: test_prometheus_federated.py
    assert all(f"# HELP {metric.name} " in page for metric in federated)
    for metric in set(telemetry.METRICS) - federated:
        assert metric.name in found, metric.name
        assert all(labels.keys() == set(metric.labels) for labels, _ in found[metric.name]), metric.name
    assert found[telemetry.STEPS.name] == [({"job": job}, HELD_STEP)]
    assert ({"state": "assigned"}, 2.0) in found[telemetry.WORKERS.name]
    seconds = {labels["kind"]: s for labels, s in found[telemetry.CREDIT_ENERGY.name]}
    assert 0.0 < seconds["pending"] < 1e9, "bounded by what a machine can take"
    assert ({"kind": "StepReady"}, 2.0) in found[telemetry.DROPPED.name]
    first, second = "fake-0", "fake-1"
    ratios = [(labels["source"], labels["target"], r) for labels, r in found[telemetry.LINK_RATIO.name]]
    assert sorted(ratios) == [(first, second, 4.0), (second, first, 4.0)]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9100", "127.0.0.1", 9100),
        ("0", "127.0.0.1", 0),
        ("10.9.8.7:9100", "10.9.8.7", 9100),
        ("[::]:1", "::", 1),
    ],
)
def test_metrics_stay_on_this_machine_unless_a_host_is_named(text: str, host: str, port: int) -> None:
    config = CoordinatorConfig(Path("state"), host=EVERYWHERE, **_metrics(text))
    assert (config.metrics_host, config.metrics_port) == (host, port)


@pytest.mark.parametrize("text", ["host", "70000", "a:b:c", "host:70000", "-1"])
def test_what_is_no_place_for_metrics_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        _metrics(text)


def test_a_coordinator_that_listens_everywhere_shows_its_metrics_to_its_own_machine(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = start(stack, tmp_path, host=EVERYWHERE, metrics_port=0)
        assert running.server is not None
        exporter = running.server.exporter
        assert exporter is not None
        assert exporter.host == "127.0.0.1"
        found = _scraped(exporter.port)  # of a coordinator that nobody has joined
    assert found[telemetry.WORKERS.name] == [({"state": phase.value}, 0.0) for phase in member.Phase]
    assert {value for _, value in found[telemetry.JOBS.name]} == {0.0}
