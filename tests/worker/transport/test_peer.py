"""What is to be sent and stands still is asked about anew, without a network below."""

from __future__ import annotations

from unittest.mock import Mock

from worker.transport.connection import Connection
from worker.transport.contract import TransportConfig
from worker.transport.frames import Direction, Hello, MessageKey
from worker.transport.peer import Peer
from worker.transport.window import Window

KEY = MessageKey("job", 1, 0, 0, 7, Direction.FORWARD)


def test_what_moves_is_not_stirred() -> None:
    peer = Peer("w-b", 1, TransportConfig(still_s=1.0), lambda *_: None, lambda *_: None)
    lane = Mock(window=Window(), waiting=False)
    with peer.lock:
        peer.lanes.append(lane)
        peer.outbox.add(KEY, b"", memoryview(bytes(1000)))
        peer.sent(1000.0, 1000, last=True)
        # The first look at it comes late: it may have been queued just now.
        assert [peer.stir(now_s) for now_s in (1000.0, 1000.5, 1001.0)] == [None] * 3
        peer.settled(1001.2, 500, 0.1, arrived=True)
        assert [peer.stir(now_s) for now_s in (1001.5, 1002.4)] == [None] * 2
        assert not lane.press.called
        told = [peer.stir(1002.6 + 1.1 * n) is not None for n in range(8)]
        assert told == [True, True, False, True, False, False, False, True]
        assert lane.press.call_count == 8
        peer.lanes.remove(lane)
        assert peer.stir(1050.0) is None  # no connection: another clock judges that
        peer.lanes.append(lane)
        assert peer.stir(1050.5) is None
        peer.confirmed((0,))
        peer.settled(1050.6, 500, 0.1, arrived=True)
        assert [peer.stir(now_s) for now_s in (1051.0, 1060.0)] == [None] * 2
        assert peer.stirred == 0


def test_a_question_that_waits_to_leave_is_not_asked_twice() -> None:
    hello = Hello(1, 1, "w-a", "w-b")
    connection = Connection(hello, dialled=True, checksum=False, on_end=lambda _: None)
    peer = Peer("w-b", 1, TransportConfig(), lambda *_: None, lambda *_: None)
    connection.open(Hello(1, 2, "w-b", "w-a"), peer, lambda wire: wire)
    with peer.lock:
        for _ in range(50):
            connection.press(again=True)
    assert len(connection._control) == 1
