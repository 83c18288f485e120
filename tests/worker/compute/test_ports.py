"""The compute process's ports: what is asked of the daemon, and tensors through two arenas."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import BadFrame, ConnectionFailed, StorageError
from atoll.microbatch import ScheduleName
from atoll.opdag import TensorMeta
from protos import atoll_compute_pb2 as pb
from protos import atoll_control_pb2 as control
from tests.patience import HUNG_S
from tests.worker.compute.bridge import Bridge
from tests.worker.links.hub import Hub
from tests.worker.stage.steps.crew import TRAINING, Crew, assign, case, cut_evenly
from worker.blobs import BlobFile
from worker.cancel import Cancel, Cancelled
from worker.compute import ports
from worker.compute.ports import DaemonBlobs, QueueBounds, Requests, daemon_batches
from worker.stage.batches import Arrived
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction, MessageKey

KEY = MessageKey("job", 1, 5, 0, 0, Direction.FORWARD)


class Daemon:
    """Answers requests in a thread of its own, as ``answers`` says by kind."""

    def __init__(self, **answers: Callable[[Requests, Any], None]) -> None:
        self.heard: list[pb.FromCompute] = []
        self._answers = answers
        self._asked: queue.SimpleQueue[pb.FromCompute | None] = queue.SimpleQueue()
        self.requests = Requests(self._asked.put)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while (m := self._asked.get()) is not None:
            self.heard.append(m)
            kind = m.WhichOneof("body") or ""
            if kind in self._answers:
                self._answers[kind](self.requests, getattr(m, kind))

    def close(self) -> list[pb.FromCompute]:
        """All that was asked."""
        self._asked.put(None)
        self._thread.join(HUNG_S)
        return self.heard


def answer(**fields: Any) -> Callable[[Requests, Any], None]:
    return lambda requests, m: requests.answered(m.request, pb.Answer(request=m.request, **fields))


# ------------------------------------------------------------ requests


def test_blobs_are_fetched_by_the_daemon_and_read_from_its_folder(tmp_path: Path) -> None:
    def came(requests: Requests, m: Any) -> None:
        for total in (10, 25):
            requests.transferred(m.request, total)
        answer(bytes=40)(requests, m)

    daemon, progress = Daemon(fetch=came), list[int]()
    blobs = DaemonBlobs(daemon.requests, tmp_path)
    blobs.fetch({"a": 40, "b": 7}, Cancel(), progress.append)
    assert progress == [10, 15, 15]
    assert blobs.path("a") == tmp_path / "a"
    [asked] = daemon.close()
    assert {(blob.hash, blob.size) for blob in asked.fetch.blobs} == {("a", 40), ("b", 7)}


def test_files_are_stored_by_their_place(tmp_path: Path) -> None:
    daemon = Daemon(store=answer(bytes=40))
    file = BlobFile(tmp_path / "update", "a" * 64, 40)
    assert DaemonBlobs(daemon.requests, tmp_path).store([file], Cancel(), new=True) == 40
    [asked] = daemon.close()
    [stored] = asked.store.files
    assert (stored.path, stored.hash, stored.size) == (str(file.path), file.hash, 40)
    assert asked.store.new


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("StorageError", StorageError),
        ("BadFrame", BadFrame),
        ("ConnectionFailed", ConnectionFailed),
        ("PeerLost", ConnectionFailed),  # no class of atoll.errors
        ("KeyboardInterrupt", ConnectionFailed),
        ("annotations", ConnectionFailed),  # a name there, and no error
    ],
)
def test_the_daemons_error_is_raised_here_as_what_it_is(
    tmp_path: Path, kind: str, expected: type[Exception]
) -> None:
    daemon = Daemon(fetch=answer(kind=kind, error="disk is full"))
    with pytest.raises(expected, match="disk is full"):
        DaemonBlobs(daemon.requests, tmp_path).fetch({"a": 1}, Cancel())
    assert [m.WhichOneof("body") for m in daemon.close()] == ["fetch"]  # nothing is left to cancel


def test_a_peer_that_the_daemon_did_not_reach_is_named() -> None:
    daemon = Daemon(connect=answer(kind="ConnectionFailed", error="it did not connect", peer="w-n"))
    try:
        with pytest.raises(PeerLost, match="it did not connect") as lost:
            daemon.requests.ask(pb.JobLinks(), Cancel())
    finally:
        daemon.close()
    assert lost.value.peer == "w-n"


def test_the_daemon_hears_that_a_request_is_given_up_and_what_comes_later_is_dropped(
    tmp_path: Path,
) -> None:
    cancel = Cancel()
    daemon = Daemon(fetch=lambda requests, m: cancel.set("another plan"))
    with pytest.raises(Cancelled, match="another plan"):
        DaemonBlobs(daemon.requests, tmp_path).fetch({"a": 1}, cancel)
    daemon.requests.transferred(1, 10)
    daemon.requests.answered(1, pb.Answer(request=1))
    asked, given_up = daemon.close()
    assert given_up.cancel == asked.fetch.request == 1


def test_micro_batches_come_in_order_until_the_answer_does() -> None:
    def send(requests: Requests, m: Any) -> None:
        for step in range(m.batches.first_step, m.batches.first_step + m.batches.count):
            batch = control.Batch(step=step, micro=1, input="x", dtype="uint8", shape=[2], data=b"ab")
            requests.answered(m.request, batch)
        answer()(requests, m)

    daemon = Daemon(batches=send)
    found = list(daemon_batches(daemon.requests, "job", range(1, 2))(True, ("x", "y"), 4, 2))
    assert found == [Arrived(step, 1, "x", "uint8", (2,), b"ab") for step in (4, 5)]
    [asked] = daemon.close()
    wanted = asked.batches.batches
    assert (wanted.job, wanted.evaluation, list(wanted.inputs)) == ("job", True, ["x", "y"])
    assert (wanted.first_micro, wanted.micros) == (1, 1)


def test_micro_batches_that_break_off_raise_and_those_nobody_reads_are_given_up() -> None:
    def send(requests: Requests, m: Any) -> None:
        requests.answered(m.request, control.Batch(step=4))
        answer(kind="ConnectionFailed", error="reset")(requests, m)

    daemon = Daemon(batches=send)
    fetch = daemon_batches(daemon.requests, "job", None)
    batches = fetch(False, ("x",), 4, 2)
    assert next(iter(batches)).step == 4
    with pytest.raises(ConnectionFailed, match="reset"):
        next(iter(batches))
    unread: Any = fetch(False, ("x",), 4, 2)
    next(unread)
    unread.close()
    assert [m.WhichOneof("body") for m in daemon.close()] == ["batches", "batches", "cancel"]


# ------------------------------------------------------------ tensors


class Inbox:
    """A receiver that takes everything."""

    def __init__(self) -> None:
        self.found: queue.SimpleQueue[tuple[str, MessageKey, bytes, bytes]] = queue.SimpleQueue()
        self.losses: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def expect(self, peer: str, key: MessageKey, total: int) -> memoryview:
        return memoryview(bytearray(total))

    def deliver(self, peer: str, key: MessageKey, header: bytes, payload: memoryview) -> None:
        self.found.put((peer, key, header, bytes(payload)))

    def lost(self, peer: str, reason: str) -> None:
        self.losses.put((peer, reason))


class Due:
    """An arrival that is announced."""

    meta = TensorMeta((), "float32")

    def __init__(self, peer: str, key: MessageKey) -> None:
        self.peer, self.key = peer, key


Pair = Callable[..., tuple[Bridge, Bridge]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Workers "w-0" and "w-1", connected."""
    made: list[Bridge] = []

    def begin(hub: Hub | None = None, **options: Any) -> tuple[Bridge, Bridge]:
        both = hub or Hub()
        made.extend(Bridge(both, f"w-{at}", {f"w-{1 - at}": 1 - at}, **options) for at in range(2))
        return made[0], made[1]

    yield begin
    for bridge in made:
        bridge.close()


def announced(bridge: Bridge, peer: str, *keys: MessageKey, most: int = 1 << 20) -> Inbox:
    """A receiver at ``bridge`` whose messages the gate knows."""
    inbox = Inbox()
    bridge.network.register("job", inbox)
    bridge.network.announce([(Due(peer, key), most) for key in keys])
    bridge.network.connect("job", 1, Cancel())  # answered behind what was announced
    return inbox


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100_003])
def test_bytes_arrive_as_they_were_sent_with_a_span_at_either_end(pair: Pair, size: int) -> None:
    one, other = pair()
    inbox = announced(other, "w-0", KEY)
    data = bytes(at * 7 % 256 for at in range(size))
    one.network.send("w-1", KEY, b"head", data)
    assert inbox.found.get(timeout=HUNG_S) == ("w-0", KEY, b"head", data)
    other.network.connect("job", 1, Cancel())
    [sent], [got] = one.spans.take(), other.spans.take()
    assert (sent.kind, sent.step, sent.micro, sent.peer, sent.bytes) == ("send", 5, 0, "w-1", size)
    assert (got.kind, got.step, got.micro, got.peer, got.bytes) == ("recv", 5, 0, "w-0", size)
    assert got.start_s <= got.end_s


def test_many_more_bytes_pass_than_an_arena_holds(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "READ_BYTES", 16 << 10)  # of this arena as 8 MiB are of the real one
    one, other = pair(room=64 << 10, bounds=QueueBounds(32 << 10, 4))
    keys = [KEY._replace(micro=micro) for micro in range(100)]
    inbox = announced(other, "w-0", *keys, most=10_000)
    for at, key in enumerate(keys):
        one.network.send("w-1", key, b"", bytes([at]) * 10_000, HUNG_S)
    found = {inbox.found.get(timeout=HUNG_S)[1:] for _ in keys}
    assert found == {(key, b"", bytes([at]) * 10_000) for at, key in enumerate(keys)}


@pytest.mark.parametrize("bounds", [QueueBounds(1 << 20, 2), QueueBounds(250, 100), QueueBounds(1, 100)])
def test_who_sends_waits_while_as_much_as_may_be_is_on_its_way(pair: Pair, bounds: QueueBounds) -> None:
    one, _ = pair(bounds=bounds)
    one.slow = True
    before = 1 if bounds.bytes == 1 else 2  # one message is always under way, however large
    for micro in range(before):
        one.network.send("w-1", KEY._replace(micro=micro), b"", bytes(100), HUNG_S)
    with pytest.raises(TimeoutError, match="bytes for w-1 are still in flight"):
        one.network.send("w-1", KEY._replace(micro=9), b"", bytes(100), 0.02)
    one.network.connect("job", 1, Cancel())  # everything is with the transport now
    one.held.pop()
    one.network.send("w-1", KEY._replace(micro=9), b"", bytes(100), HUNG_S)


def test_a_full_arena_lets_wait_as_well(pair: Pair) -> None:
    one, _ = pair(room=4096)
    one.slow = True
    one.network.send("w-1", KEY, b"", bytes(4096), HUNG_S)
    with pytest.raises(TimeoutError):
        one.network.send("w-1", KEY._replace(micro=1), b"", b"x", 0.02)
    one.network.connect("job", 1, Cancel())
    one.held.clear()
    one.network.send("w-1", KEY._replace(micro=1), b"", b"x", HUNG_S)


def test_nothing_is_sent_to_a_lost_peer_until_it_is_connected_again(pair: Pair) -> None:
    one, other = pair(bounds=QueueBounds(1 << 20, 1))
    lost = announced(one, "w-1")
    one.slow = True
    one.network.send("w-1", KEY, b"", b"x", HUNG_S)
    failed: queue.SimpleQueue[PeerLost] = queue.SimpleQueue()

    def wait() -> None:
        try:
            one.network.send("w-1", KEY._replace(micro=1), b"", b"x", HUNG_S)
        except PeerLost as error:
            failed.put(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.gate.lost("w-1", "silent")
    assert lost.losses.get(timeout=HUNG_S) == ("w-1", "silent")
    error = failed.get(timeout=HUNG_S)  # who waits for room hears of it
    assert (error.peer, error.reason) == ("w-1", "silent")
    waiting.join(HUNG_S)
    with pytest.raises(PeerLost):
        one.network.send("w-1", KEY, b"", b"x", HUNG_S)
    one.network.connect("job", 1, Cancel())
    one.held.clear()
    inbox = announced(other, "w-0", KEY)
    one.network.send("w-1", KEY, b"", b"y", HUNG_S)
    assert inbox.found.get(timeout=HUNG_S)[3] == b"y"


def test_a_message_that_nobody_takes_any_more_is_freed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "READ_BYTES", 1 << 20)
    one, other = pair()
    inbox = announced(other, "w-0", KEY, NEXT := KEY._replace(micro=1))
    other.network.unregister("job", inbox)
    one.network.send("w-1", KEY, b"", bytes(1 << 20), HUNG_S)
    other.network.register("job", inbox)
    one.network.send("w-1", NEXT, b"", bytes(1 << 20), HUNG_S)
    found = [inbox.found.get(timeout=HUNG_S)[1]]
    assert NEXT in found or inbox.found.get(timeout=HUNG_S)[1] == NEXT


def test_what_was_read_of_an_earlier_plan_frees_nothing_of_the_next_one(pair: Pair) -> None:
    """Word of what was read travels with the next message; by then another may lie at the same place."""
    one, other = pair()
    inbox = announced(other, "w-0", KEY)
    one.network.send("w-1", KEY, b"", b"old", HUNG_S)
    inbox.found.get(timeout=HUNG_S)
    other.gate.close()
    other.open_gate()
    go_on, reading = threading.Event(), threading.Event()

    class Slow(Inbox):
        def expect(self, peer: str, key: MessageKey, total: int) -> memoryview:
            reading.set()
            assert go_on.wait(HUNG_S)
            return super().expect(peer, key, total)

    keys = [KEY._replace(plan_version=2, micro=micro) for micro in range(2)]
    slow = Slow()
    other.network.register("job", slow)
    other.network.announce([(Due("w-0", key), 9) for key in keys])
    other.network.connect("job", 2, Cancel())
    one.network.send("w-1", keys[0], b"", b"new", HUNG_S)
    assert reading.wait(HUNG_S)
    taken = announced(one, "w-1", keys[0])
    other.network.send("w-0", keys[0], b"", b"x", HUNG_S)
    taken.found.get(timeout=HUNG_S)  # and what travelled along
    one.network.send("w-1", keys[1], b"", b"two", HUNG_S)
    one.network.connect("job", 2, Cancel())
    go_on.set()
    assert [slow.found.get(timeout=HUNG_S)[3] for _ in keys] == [b"new", b"two"]


def test_stages_train_over_arenas_to_the_bits_of_one_memory(pair: Pair) -> None:
    made = case("mlp")
    assignments = assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.GPIPE)
    bridges = dict(zip(("w-0", "w-1"), pair(), strict=True))
    apart = Crew(made, assignments, lambda name: bridges[name].network)
    together = Crew(made, assignments)
    for crew in (apart, together):
        for step in range(TRAINING.steps):
            crew.all("run_step", step, Cancel())
            crew.all("apply", step, 1.0)
    ours, theirs = apart.snapshot(), together.snapshot()
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        assert all(bool((ours[name][key] == value).all()) for key, value in tensors.items()), name
    spans = [bridges[name].spans.take() for name in ("w-0", "w-1")]
    for here, there in ((0, 1), (1, 0)):
        sent = [(s.step, s.micro, s.bytes) for s in spans[here] if s.kind == "send"]
        got = [(s.step, s.micro, s.bytes) for s in spans[there] if s.kind == "recv"]
        assert sent
        assert sorted(sent) == sorted(got)
