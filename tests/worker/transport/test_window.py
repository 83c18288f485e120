"""How much may be under way on a connection, from what its acknowledgements tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.transport.contract import TransportConfig
from worker.transport.frames import Flag
from worker.transport.peer import Peer
from worker.transport.window import Window


def drive(window: Window, rate: float, rtt_s: float, seconds: float) -> tuple[float, int]:
    """A link of ``rate`` bytes/s and ``rtt_s``: returns its used share and the largest queue."""
    now_s, free_s, delivered, worst = 0.0, 0.0, 0, 0
    acks: list[tuple[float, int]] = []
    while now_s < seconds:
        while window.open:
            size = window.chunk
            window.sent(now_s, size, last=False)
            free_s = max(now_s, free_s) + size / rate
            acks.append((free_s + rtt_s, window.sent_bytes))
        worst = max(worst, int((free_s - now_s) * rate))
        now_s, delivered = acks.pop(0)
        window.acked(now_s, delivered)
    return delivered / (rate * now_s), worst


@pytest.mark.parametrize(("mbit", "rtt_s"), [(8, 0.08), (100, 0.08), (1000, 0.01), (100, 0.001), (20, 0.2)])
def test_the_window_fills_a_link_and_keeps_its_queue_short(mbit: int, rtt_s: float) -> None:
    share, worst = drive(Window(), mbit * 125_000, rtt_s, 20.0)
    assert share > 0.97
    # What a gradient waits at most behind what is already under way.
    assert worst / (mbit * 125_000) < max(0.3, rtt_s)


def test_a_chunk_lasts_a_few_hundredths_of_a_second_on_the_link_whatever_its_rate() -> None:
    for mbit, least, most in (
        (8, 56 << 10, 64 << 10),
        (100, 64 << 10, 512 << 10),
        (10_000, 1 << 20, 1 << 20),
    ):
        window = Window()
        drive(window, mbit * 125_000, 0.02, 5.0)
        assert least <= window.chunk <= most


def test_connections_to_one_peer_cut_chunks_for_the_line_that_they_share() -> None:
    for mbit, least, most in (
        (1, 16 << 10, 16 << 10),
        (8, 56 << 10, 64 << 10),
        (20, 60 << 10, 64 << 10),
        (100, 36 << 10, 52 << 10),
    ):
        line, eighth = Window(), Window()
        drive(line, mbit * 125_000, 0.08, 5.0)
        drive(eighth, mbit * 125_000 / 8, 0.08, 5.0)
        eighth.fit(line, 8)
        assert least <= eighth.chunk <= most
        assert eighth.size >= 4 * eighth.chunk


def test_one_of_many_connections_does_not_take_the_whole_line() -> None:
    line, first = Window(), Window()
    for window in (line, first):  # nothing has gone over another one yet
        drive(window, 100 * 125_000, 0.08, 5.0)
    for connections, share in ((2, 1.0), (4, 0.5), (8, 0.25)):
        first.fit(line, connections)
        assert first.size == pytest.approx(share * line.size, rel=0.01)
    first.fit(Window(), 8)
    assert first.size == 256 << 10
    first.fit(line, 1)
    assert first.size == line.size


def test_a_window_that_is_full_of_what_nobody_will_answer_asks_for_an_answer() -> None:
    """Four connections, each with a chunk too small for its own window to ask, and all together exactly the
    least window of a slow line: nothing would ever move again."""
    peer = Peer("w-b", 1, TransportConfig(), lambda *_: None, lambda *_: None)
    drive(peer._window, 200_000, 0.08, 5.0)
    assert peer._window.size_at(0.08) == 64 << 10
    pressed: list[int] = []
    peer._in_flight = 64 << 10
    lanes: list[Any] = [
        SimpleNamespace(window=SimpleNamespace(unasked_bytes=16 << 10), press=lambda: pressed.append(1))
        for _ in range(4)
    ]
    peer.lanes = lanes
    peer.relieve()
    assert len(pressed) == 4
    lanes[0].window.unasked_bytes = 0  # its answer will come
    peer.relieve()
    assert len(pressed) == 4


def test_the_connection_that_is_left_of_many_has_the_whole_line() -> None:
    peer = Peer("w-b", 1, TransportConfig(), lambda *_: None, lambda *_: None)
    lane: Any = SimpleNamespace(window=Window())
    drive(lane.window, 100 * 125_000, 0.08, 5.0)
    alone = lane.window.size
    peer.lanes = [lane] * 8
    peer.fit(lane)
    assert lane.window.size < alone
    peer.lanes = [lane]
    peer.fit(lane)
    assert lane.window.size == alone


def burst(window: Window, at_s: float, took_s: float, nbytes: int = 128 << 10) -> list[int]:
    """A message and its acknowledgements; the chunks that it was cut into."""
    chunks: list[int] = []
    while sum(chunks) < nbytes:
        chunks.append(min(window.chunk, nbytes - sum(chunks)))
        window.sent(at_s, chunks[-1], last=sum(chunks) == nbytes)
    for size in chunks:
        window.acked(at_s + took_s, window.acked_bytes + size)
    return chunks


def test_an_end_that_reads_late_for_a_while_makes_no_smaller_chunks() -> None:
    window = Window()
    burst(window, 0.0, 0.008)
    for at in range(1, 16):  # out of processor time: 0.4 s each, one a second
        assert len(burst(window, float(at), 0.4)) <= 2
    for at in range(16, 40):
        chunks = burst(window, float(at), 0.4)
    assert len(chunks) > 4, "a line that was never quicker is slow"


@pytest.mark.parametrize(
    ("rate", "chunk"), [(250_000, 16 << 10), (1_250_000, 36 << 10), (4_000_000, 124 << 10)]
)
def test_a_slow_line_over_a_short_way_gets_chunks_of_32_ms_and_a_window_of_two(rate: int, chunk: int) -> None:
    window = Window()
    drive(window, rate, 0.003, 5.0)
    window.note_rtt(5.0, 0.003)  # of an echo
    assert window.chunk == chunk
    assert window.size == pytest.approx(max(64 << 10, 0.064 * rate), rel=0.1)


def test_a_stall_after_messages_of_one_chunk_leaves_a_rate() -> None:
    window = Window()
    for at in range(20):
        window.sent(float(at), 4096, last=True)
        window.acked(at + 0.06, window.sent_bytes)
    assert window.rate == pytest.approx(4096 / 0.06)
    window.sent(20.0, 4096, last=True)
    window.acked(22.0, window.sent_bytes)
    assert window.rate == pytest.approx(4096 / 2.0)


def test_bursts_are_told_by_all_their_time_and_only_what_arrived() -> None:
    window = Window()
    burst(window, 0.0, 0.1)
    window.sent(1.0, 64 << 10, last=False)
    window.sent(1.0, 64 << 10, last=True)
    window.acked(1.1, window.acked_bytes + (64 << 10))
    window.acked(1.1, window.sent_bytes)  # in a heap
    assert max(window._bursts) == pytest.approx((128 << 10) / 0.1)
    window.sent(9.0, 1 << 20, last=True)
    window.broke()
    window.acked(9.01, window.sent_bytes)  # given up, not carried
    assert max(window._bursts) == pytest.approx((128 << 10) / 0.1)


def test_a_line_that_never_rests_is_what_it_was_in_the_last_second() -> None:
    window = Window()
    drive(window, 50 * 125_000, 0.02, 5.0)
    fast = window.rate
    assert fast is not None
    for at in range(40):  # now 5 Mbit/s, always with something under way
        window.sent(5.0 + 0.1 * at, 62_500, last=False)
        window.acked(5.1 + 0.1 * at, window.sent_bytes - 20_000)
    assert window.rate is not None
    assert window.rate < fast / 5


def test_a_forged_or_old_acknowledgement_moves_nothing_back() -> None:
    window = Window()
    window.sent(0.0, 1000, last=True)
    assert window.acked(0.1, 1000) == 1000
    assert window.acked(0.2, 500) == 0
    assert window.in_flight == 0


def test_the_last_chunk_always_asks_for_an_acknowledgement() -> None:
    window = Window()
    assert window.sent(0.0, 10, last=True) == Flag.ACK_SOON
    assert not window.unasked
    assert not window.sent(0.0, 10, last=False)
    assert window.unasked


def test_the_sender_asks_at_once_when_its_window_is_half_full_or_an_eighth_is_unacknowledged() -> None:
    window = Window()
    eighth = window.size // 8
    assert window.sent(0.0, eighth - 1, last=False) == 0
    assert window.sent(0.0, 1, last=False) == Flag.ACK_NOW
    assert not window.unpressed
    assert window.sent(0.0, 3 * eighth - 1, last=True) == Flag.ACK_SOON
    assert window.unpressed
    assert window.sent(0.0, 1, last=True) == Flag.ACK_NOW
    assert not window.unpressed


def test_a_rest_between_two_messages_does_not_read_as_a_slow_line() -> None:
    window, now_s = Window(), 0.0
    for _ in range(50):  # a message each half second over 10 MB/s, acknowledged just before the next
        for last in (False, False, True):
            window.sent(now_s, 50_000, last=last)
        window.acked(now_s + 0.015, window.sent_bytes)
        now_s += 0.5
    rate = window.rate
    window.sent(now_s, 50_000, last=True)
    for _ in range(8):  # the acknowledgement still waits when the next message leaves
        now_s += 0.5
        window.sent(now_s, 50_000, last=False)
        window.acked(now_s - 0.495, window.sent_bytes - 50_000)
        window.sent(now_s, 50_000, last=True)
        window.acked(now_s + 0.005, window.sent_bytes - 50_000)
    assert rate is not None
    assert window.rate is not None
    assert window.rate > 0.9 * rate
