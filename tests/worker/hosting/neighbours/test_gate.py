"""A job's way in and out: what was declared passes, at its size and from its peer, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from tests.patience import eventually
from tests.worker.links.hub import Hub
from worker.hosting import TUNED
from worker.hosting.neighbours import gate
from worker.hosting.neighbours.gate import Gate
from worker.hosting.neighbours.replays import MAX_ASKED
from worker.hosting.neighbours.send_log import SendLog
from worker.pipe import arena as arenas
from worker.pipe.arena import HEAD_BYTES, Allocator, Arena
from worker.pipe.keys import from_key, to_key
from worker.transport.contract import PeerLost
from worker.transport.frames import NOT_HERE, Direction, MessageKey

ROOM = 4 * arenas.PAGE
KEY = MessageKey("j", 1, 5, 0, 0, Direction.FORWARD)
NEXT = MessageKey("j", 1, 5, 1, 0, Direction.FORWARD)


class Setup:
    """A gate of worker "me" for job "j" with one neighbour, and what the compute process hears."""

    def __init__(self, folder: Path) -> None:
        self.hub, self.heard = Hub(), list[pb.ToCompute]()
        self.port = self.hub.port("me")
        arena = Arena.make(ROOM)
        arena.close_descriptor()
        self.incoming = Allocator(arena)
        network: Any = self.port
        self.ended: list[str] = []
        log = SendLog(folder, "j", 1 << 20, 0)
        stages = {"peer": 3}
        self.gate = Gate("j", 1, stages, network, self.incoming, self.heard.append, log, self.ended.append)
        self.port.register("j", self.gate)

    def want(self, *keys: MessageKey, peer: str = "peer", most: int = ROOM) -> None:
        self.gate.want(pb.Wanted(peer=peer, key=to_key(key), max_bytes=most) for key in keys)

    def send(self, key: MessageKey, data: bytes, peer: str = "peer") -> bool:
        """Deliver a message as a transport does; False when it is not wanted."""
        place = self.gate.expect(peer, key, len(data))
        if place is None:
            return False
        place[:] = data
        self.gate.deliver(peer, key, b"head", place)
        return True

    def arrived(self) -> list[tuple[MessageKey, bytes]]:
        """Messages that were handed over, and what the compute process reads at their places."""
        found = [m.arrived for m in self.heard if m.WhichOneof("body") == "arrived"]
        arena = self.incoming.arena
        return [(from_key(m.key), arena.block(m.offset, m.size).tobytes() if m.size else b"") for m in found]

    def places(self) -> list[int]:
        return [m.arrived.offset for m in self.heard if m.WhichOneof("body") == "arrived"]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path / "log")
    yield made
    made.gate.close()


def test_what_is_wanted_lies_in_the_arena_as_it_was_sent(setup: Setup) -> None:
    setup.want(KEY, NEXT)
    assert setup.send(NEXT, b"two")
    assert setup.send(KEY, b"one")
    assert setup.arrived() == [(NEXT, b"two"), (KEY, b"one")]
    arrived = setup.heard[0].arrived
    assert (arrived.peer, arrived.header) == ("peer", b"head")
    assert arrived.lasted_s >= 0


def test_neither_an_unknown_key_nor_another_peer_nor_a_larger_message_is_taken(setup: Setup) -> None:
    assert not setup.send(KEY, b"x")
    setup.want(KEY, most=3)
    assert not setup.send(KEY, b"x", peer="other")
    assert not setup.send(KEY, b"four")
    assert not setup.send(KEY._replace(plan_version=2), b"x")
    assert setup.send(KEY, b"yes")
    assert len(setup.arrived()) == 1


def test_a_message_without_bytes_takes_no_room(setup: Setup) -> None:
    setup.want(KEY)
    full = setup.incoming.allocate(ROOM)
    assert full is not None
    assert setup.send(KEY, b"")
    assert setup.arrived() == [(KEY, b"")]


def test_a_key_has_so_many_blocks_at_a_time_and_another_once_one_is_gone(setup: Setup) -> None:
    setup.want(KEY)
    filling = [setup.gate.expect("peer", KEY, 10) for _ in range(TUNED.blocks_a_key)]
    assert None not in filling
    assert setup.gate.expect("peer", KEY, 10) is None
    filling.pop()  # a connection was lost
    assert setup.gate.expect("peer", KEY, 10) is not None


def test_a_block_counts_until_the_compute_process_has_read_it(setup: Setup) -> None:
    setup.want(KEY)
    for _ in range(TUNED.blocks_a_key):
        assert setup.send(KEY, b"abc")
    assert not setup.send(KEY, b"abc")
    setup.gate.freed(setup.places()[:1])
    assert setup.send(KEY, b"abc")


def test_what_comes_while_the_arena_is_full_is_handed_over_as_soon_as_there_is_room(setup: Setup) -> None:
    setup.want(KEY, NEXT, third := NEXT._replace(micro=2))
    assert setup.send(KEY, bytes(range(256)) * (ROOM // 256))
    assert setup.send(NEXT, b"b" * 100)
    assert setup.send(third, b"c" * 100)
    assert [key for key, _ in setup.arrived()] == [KEY]
    setup.gate.freed(setup.places())
    assert setup.arrived()[1:] == [(NEXT, b"b" * 100), (third, b"c" * 100)]
    setup.gate.freed(setup.places()[1:])
    assert setup.incoming.allocate(ROOM) == HEAD_BYTES


def test_a_process_that_never_reads_is_ended_before_this_one_holds_too_much(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_BESIDE_BYTES", 250)
    keys = [KEY._replace(micro=micro) for micro in range(4)]
    setup.want(*keys)
    assert setup.send(keys[0], bytes(ROOM))
    for key in keys[1:3]:
        assert setup.send(key, b"b" * 100)
    assert not setup.ended
    assert setup.send(keys[3], b"c" * 100)
    assert setup.ended == ["it does not read what its peers send"]


def test_a_place_that_was_not_handed_over_is_freed_without_harm(setup: Setup) -> None:
    setup.want(KEY)
    assert setup.send(KEY, b"abc")
    (place,) = setup.places()
    setup.gate.freed([place + 64, 0, 1 << 60])
    assert setup.incoming.allocate(3) == place + 64
    setup.gate.freed([place, place])
    assert setup.incoming.allocate(3) == place


def test_steps_that_are_over_are_not_wanted_any_more(setup: Setup) -> None:
    later = KEY._replace(step=6)
    setup.want(KEY, later)
    setup.gate.step_over(6)
    assert not setup.send(KEY, b"x")
    assert setup.send(later, b"x")


@pytest.mark.parametrize(
    ("key", "peer"), [(KEY._replace(job="k"), "peer"), (KEY, "other"), (KEY, ""), (KEY, "me")]
)
def test_neither_another_job_nor_a_worker_that_is_no_neighbour_is_named(
    setup: Setup, key: MessageKey, peer: str
) -> None:
    with pytest.raises(BadFrame, match="none of which is here"):
        setup.want(key, peer=peer)
    outgoing = pb.Outgoing(peer=peer, key=to_key(key))
    with pytest.raises(BadFrame, match="none of which is here"):
        setup.gate.send(outgoing, np.zeros(3, np.uint8))
    assert setup.hub.sent == []


def test_a_direction_of_no_kind_is_refused(setup: Setup) -> None:
    wrong = pb.Key(job="j", direction=200)
    with pytest.raises(BadFrame, match="direction"):
        setup.gate.want([pb.Wanted(peer="peer", key=wrong)])
    with pytest.raises(BadFrame, match="direction"):
        setup.gate.send(pb.Outgoing(peer="peer", key=wrong), np.zeros(3, np.uint8))


def test_more_messages_than_any_plan_has_are_not_wanted(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.hosting.neighbours.gate.MAX_WANTED", 2)
    setup.want(KEY, NEXT)
    setup.want(KEY, NEXT)  # the same
    with pytest.raises(BadFrame, match="more than 2 messages"):
        setup.want(KEY._replace(micro=2))


def test_what_is_sent_reaches_the_peers_receiver(setup: Setup) -> None:
    setup.hub.port("peer")
    setup.gate.send(pb.Outgoing(peer="peer", key=to_key(KEY), header=b"h"), np.frombuffer(b"abc", np.uint8))
    assert setup.hub.sent == [("me", "peer", KEY)]
    assert setup.hub.packets[KEY] == [b"habc"]


def test_who_queues_more_than_may_be_breaks_a_rule(setup: Setup) -> None:
    setup.port.full = True
    with pytest.raises(BadFrame, match="more is queued for peer than may be"):
        setup.gate.send(pb.Outgoing(peer="peer", key=to_key(KEY)), np.zeros(3, np.uint8))


def test_a_lost_peer_is_reported_whoever_notices(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise PeerLost("peer", "reset")

    setup.gate.lost("peer", "silent")
    monkeypatch.setattr(setup.port, "send", lost)
    setup.gate.send(pb.Outgoing(peer="peer", key=to_key(KEY)), np.zeros(3, np.uint8))
    assert [(m.lost.peer, m.lost.reason) for m in setup.heard] == [("peer", "silent"), ("peer", "reset")]


def test_a_message_that_a_lost_peer_began_and_sends_again_is_timed_anew(setup: Setup) -> None:
    setup.want(KEY)
    place = setup.gate.expect("peer", KEY, 3)
    assert place is not None
    setup.gate.lost("peer", "reset")
    assert setup.gate._begun_s == {}
    assert setup.send(KEY, b"abc")
    assert [m.arrived.lasted_s < 1e3 for m in setup.heard if m.WhichOneof("body") == "arrived"] == [True]


def test_nothing_passes_a_closed_gate_and_the_arena_is_empty(setup: Setup) -> None:
    setup.want(KEY, NEXT)
    assert setup.send(KEY, bytes(ROOM))
    assert setup.send(NEXT, b"waits")
    setup.gate.close()
    assert not setup.send(NEXT, b"x")
    assert setup.port.receivers == {}
    assert setup.port.forgotten == [("j", None)]
    assert setup.incoming.allocate(ROOM) == HEAD_BYTES
    assert len(setup.arrived()) == 1


# ------------------------------------------------------------ other neighbours, and what they ask for


def ask(step: int, version: int = 1) -> MessageKey:
    return MessageKey("j", version, step, 0, 2, Direction.REPLAY)


def sent(setup: Setup, key: MessageKey, data: bytes, peer: str = "peer", *, log_only: bool = False) -> None:
    message = pb.Outgoing(peer=peer, key=to_key(key), header=b"h", log_only=log_only)
    setup.gate.send(message, np.frombuffer(data, np.uint8))


def test_who_takes_over_is_sent_a_step_again_under_its_old_keys_as_often_as_it_asks(setup: Setup) -> None:
    setup.hub.port("peer")
    evaluation = KEY._replace(direction=Direction.EVALUATION)
    for key in (KEY, evaluation, NEXT, KEY._replace(step=6)):
        sent(setup, key, b"abc")
    setup.hub.sent.clear()
    for times in (1, 2):
        assert setup.send(ask(5), b"")
        eventually(lambda most=2 * times: len(setup.hub.sent) >= most)
    assert [key for _, _, key in setup.hub.sent] == [KEY, NEXT] * 2
    assert setup.hub.packets[KEY] == [b"habc"] * 3
    assert setup.arrived() == []


def test_a_step_that_is_not_there_is_answered_with_the_reason(setup: Setup) -> None:
    setup.hub.port("peer")
    setup.gate.trim_log(6)
    assert setup.send(ask(5), b"")
    eventually(lambda: setup.hub.sent)
    [(_, peer, key)] = setup.hub.sent
    assert (peer, key) == ("peer", ask(5)._replace(micro=NOT_HERE))
    assert setup.hub.packets[key] == [b"step 5 is not in the send log, which begins at 6"]
    setup.want(key)  # and who asked takes the answer
    assert setup.send(key, b"")
    assert setup.arrived() == [(key, b"")]


def test_what_is_asked_for_while_its_step_lasts_follows_as_it_is_sent(setup: Setup) -> None:
    setup.hub.port("peer")
    assert setup.send(ask(5), b"")
    for key in (KEY, NEXT):
        sent(setup, key, b"abc", log_only=True)
        eventually(lambda key=key: key in [k for *_, k in setup.hub.sent])
    assert [key for *_, key in setup.hub.sent] == [KEY, NEXT]


@pytest.mark.parametrize(
    ("peer", "key", "data"),
    [("other", ask(5), b""), ("peer", ask(5, version=2), b""), ("peer", ask(5), b"x")],
    ids=["a stranger", "of another plan", "with bytes"],
)
def test_nobody_else_is_sent_a_step_again(setup: Setup, peer: str, key: MessageKey, data: bytes) -> None:
    setup.hub.port("peer")
    sent(setup, KEY, b"abc")
    assert not setup.send(key, data, peer)
    if peer != "peer":
        setup.gate.deliver(peer, key, b"", memoryview(data))
    assert setup.gate._replays._asked == {}


def test_a_peer_may_have_asked_for_so_many_steps_at_a_time(setup: Setup) -> None:
    setup.port.full = True
    for step in range(5, 5 + 3 * MAX_ASKED):
        assert setup.send(ask(step), b"")
    assert len(setup.gate._replays._asked) <= MAX_ASKED


def test_who_begins_again_with_low_steps_has_them_though_it_had_asked_for_higher_ones(setup: Setup) -> None:
    """As where a standby was given up and begins again: what it had asked for made way last."""
    setup.hub.port("peer")
    sent(setup, KEY, b"abc")
    setup.hub.sent.clear()
    for step in range(20, 20 + MAX_ASKED):
        assert setup.send(ask(step), b"")
    assert setup.send(ask(5), b"")
    eventually(lambda: setup.hub.sent)
    assert [key for *_, key in setup.hub.sent] == [KEY]


def test_after_a_reconfiguration_neither_old_messages_nor_lost_peers_pass(setup: Setup) -> None:
    for name in ("peer", "new"):
        setup.hub.port(name)
    setup.want(KEY)
    sent(setup, KEY._replace(step=4), b"kept")
    sent(setup, KEY, b"abc")
    setup.gate.reconfigure({"new": 3}, 2, 5)
    assert setup.port.forgotten == [("j", 1)]
    setup.hub.sent.clear()
    # The compute process has not heard of it: what it says of the old plan is dropped, not punished.
    sent(setup, NEXT, b"abc")
    setup.want(NEXT)
    assert not setup.send(KEY, b"x")
    assert not setup.send(NEXT, b"x")
    assert setup.hub.sent == []
    again = KEY._replace(plan_version=2)
    sent(setup, again, b"abc", "new")
    setup.want(again, peer="new")
    assert setup.send(again, b"x", "new")
    assert not setup.send(ask(4), b"", "peer")
    assert setup.send(ask(4, 2), b"", "new")
    assert setup.send(ask(5, 2), b"", "new")
    eventually(lambda: len(setup.hub.sent) == 3)
    assert [key for *_, key in setup.hub.sent] == [again, KEY._replace(step=4), again]
    with pytest.raises(BadFrame, match="none of which is here"):
        sent(setup, again, b"abc", "peer")


def test_who_stood_by_for_one_rank_and_takes_another_is_sent_what_went_to_that_one(setup: Setup) -> None:
    """It asks in the same words: its neighbour is the first of either rank's."""
    for name in ("peer", "other", "new"):
        setup.hub.port(name)
    setup.gate.reconfigure({"peer": 3, "other": 4}, 2, 5)
    first, second = KEY._replace(plan_version=2), NEXT._replace(plan_version=2)
    sent(setup, first, b"abc", "peer")
    sent(setup, second, b"abc", "other")
    setup.gate.stand_by({"new": 3})
    for taken in (first, second):
        setup.hub.sent.clear()
        assert setup.send(ask(5, 2), b"", "new")
        eventually(lambda: setup.hub.sent)
        assert setup.hub.sent == [("me", "new", taken)]
        setup.gate.reconfigure({"peer": 3, "new": 4}, 3, 6)


def test_who_repeats_steps_while_neighbours_change_twice_does_so_among_those_of_before(setup: Setup) -> None:
    """It hears of the second loss while it loads for the first: its messages of then are no breach."""
    for version, ranks in ((2, {"second": 3}), (3, {"third": 3})):
        setup.gate.reconfigure(ranks, version, 5, repeating=True)
    for peer, version in (("peer", 1), ("second", 2), ("third", 3)):
        setup.want(KEY._replace(plan_version=version), peer=peer)
    with pytest.raises(BadFrame, match="none of which is here"):
        setup.want(KEY, peer="stranger")
    setup.gate.reconfigure({"third": 3}, 4, 5)
    with pytest.raises(BadFrame, match="none of which is here"):
        setup.want(KEY._replace(plan_version=4), peer="second")
