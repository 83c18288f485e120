"""Data owners consent, with real workers over TLS: jobs wait, refusals are told, what leaves is logged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.federated_fleet import COORDINATOR, FederatedFleet
from coordinator.client.client import connect
from coordinator.config import CoordinatorConfig
from coordinator.server import serve
from coordinator.services.workers import work
from coordinator.storage.blob_store import BlobStore
from protos import atoll_control_pb2 as pb
from tests.e2e.test_federated import finished, job, samples, submitted
from worker.cli import jobs
from worker.data.consent import ConsentStore
from worker.data.departures import FACTS, MESSAGE, UPDATE, read_departures
from worker.data.policy import UNSTATED

NOT_MESSAGES = {
    "introduction", "heartbeat", "codec_speeds", "ops_probed", "link_probed", "leaving", "peer_joined",
}  # fmt: skip


class Received:
    """What arrives at a coordinator in this process: payload bytes of blobs, and of messages by job."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.blobs = 0
        self.messages: Counter[str] = Counter()
        self.introductions = 0
        write: Callable[..., bool] = BlobStore.write
        read = work.message_from

        def counted_write(*of: Any, **known: bool) -> bool:
            *_, data, _ = of
            self.blobs += len(data)
            return write(*of, **known)

        def counted_read(message: pb.FromWorker) -> Any:
            kind = message.WhichOneof("body")
            if kind not in NOT_MESSAGES:
                self.messages[getattr(message, kind).job] += len(message.SerializeToString())
            return read(message)

        patch.setattr(BlobStore, "write", counted_write)
        patch.setattr(work, "message_from", counted_read)


class AskingFleet(FederatedFleet):
    """Two data owners that set no policy; the coordinator runs here."""

    def __init__(self) -> None:
        super().__init__([samples(120, 1), samples(80, 2)], policy=UNSTATED)
        self._here = ExitStack()

    def serve(self) -> None:
        config = CoordinatorConfig(
            state_dir=self.folder / COORDINATOR,
            host="127.0.0.1",
            entry_port=self.entry_port,
            work_port=self.work_port,
        )
        started = self._here.enter_context(serve(config)).started
        self.client = connect(f"127.0.0.1:{started.entry_port}", started.owner_token)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._here.close()

    def says(self, worker: str, name: str, word: str, reason: str = "") -> None:
        """`atoll-worker jobs accept` or `refuse` of this machine's owner."""
        folder = self.folder / worker
        if word == "accept":
            jobs.accept(name, folder)
        else:
            jobs.refuse(name, reason, folder)

    def wait_for(self, name: str, done: Callable[[Any], bool]) -> Any:
        for update in self.client.watch(name):
            if done(update):
                return update
        raise AssertionError(f"{name} ended {update.state}: {update.reason}")

    def left(self, worker: str, name: str) -> list[dict[str, Any]]:
        return [line for line in read_departures(self.folder / worker) if line["job"] == name]


@pytest.fixture(scope="module")
def received() -> Iterator[Received]:
    with pytest.MonkeyPatch.context() as patch:
        yield Received(patch)


@pytest.fixture(scope="module")
def fleet(received: Received) -> Iterator[AskingFleet]:
    with AskingFleet() as started:
        yield started


@pytest.mark.slow  # in one process: {coordinator,worker}/federated, test_consent
def test_a_first_job_waits_for_consent_and_what_leaves_afterwards_is_logged_to_the_byte(
    fleet: AskingFleet, received: Received
) -> None:
    name = submitted(fleet, job(3, "first", min_clients=2))
    asked = fleet.wait_for(name, lambda u: [c.state for c in u.federated.clients] == ["awaiting consent"] * 2)
    assert asked.state == "awaiting consent"
    assert "0 clients are ready, 2 are needed; waits until " in asked.reason
    assert "`atoll-worker jobs`" in asked.reason
    assert len(fleet.states("pool")) == 2, "they are free for other work, and not lost"
    (request,) = ConsentStore(fleet.folder / "worker0").known()
    shown = dict(request.facts)
    assert shown["data set"] == "digits, 120 samples here"
    assert shown["each round"].startswith("one update, how far training here moved the model: 4 tensors")
    assert shown["evaluation"].startswith("each round the means of loss, accuracy over the 12 samples")
    uploaded = received.blobs
    assert not [
        line
        for worker in ("worker0", "worker1")
        for line in fleet.left(worker, name)
        if line["kind"] == UPDATE
    ]
    fleet.says("worker0", name, "accept")
    waiting = fleet.wait_for(name, lambda u: "1 clients are ready, 2 are needed" in u.reason)
    assert waiting.state in ("awaiting consent", "gathering")
    fleet.says("worker1", name, "accept")
    last = finished(fleet, name)
    assert last.step == 3
    lines = [line for worker in ("worker0", "worker1") for line in fleet.left(worker, name)]
    updates = [line["bytes"] for line in lines if line["kind"] == UPDATE]
    assert len(updates) == 6
    assert sum(updates) == received.blobs - uploaded == last.federated.bytes_up
    told = sum(line["bytes"] for line in lines if line["kind"] == MESSAGE)
    assert told == received.messages[name]
    facts = [line for line in read_departures(fleet.folder / "worker0") if line["kind"] == FACTS]
    assert facts[0]["data"] == ["digits"]


@pytest.mark.slow
def test_the_same_job_under_other_terms_asks_again_and_a_refusal_says_who_and_why(fleet: AskingFleet) -> None:
    name = submitted(fleet, job(4, "second", min_clients=1, local_steps=3))
    fleet.wait_for(name, lambda u: u.state == "awaiting consent" and len(u.federated.clients) == 2)
    fleet.says("worker1", name, "refuse", "no agreement with this group")
    refused = fleet.wait_for(name, lambda u: "refused" in [c.state for c in u.federated.clients])
    (why,) = [c.reason for c in refused.federated.clients if c.state == "refused"]
    assert why == "its data owner refused: no agreement with this group"
    worker = next(c.worker for c in refused.federated.clients if c.state == "refused")
    names = {w.worker: w.name for w in fleet.client.status().workers}
    assert (
        f"refused by {names[worker]}: {why}"
        in fleet.wait_for(name, lambda u: "refused by" in u.reason).reason
    )
    lines = [line for line in fleet.client.logs(name) if line.event == "consent.refused"]
    assert [json.loads(line.fields_json)["reason"] for line in lines] == [why]
    assert not [line for line in fleet.left("worker1", name) if line["kind"] == UPDATE]
    fleet.client.cancel(name)


@pytest.mark.slow
def test_without_an_answer_in_time_the_job_fails_in_words(fleet: AskingFleet) -> None:
    name = submitted(fleet, job(2, "silent", min_clients=1, consent_s=1.0))
    last = list(fleet.client.watch(name))[-1]
    assert last.state == "failed"
    assert "0 clients take part, 2 are needed" in last.reason or "0 clients take part, 1 are" in last.reason
    assert "within 1 s no consent came from the data owners of" in last.reason
