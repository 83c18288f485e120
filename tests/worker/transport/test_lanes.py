"""How many connections a link gets."""

from worker.transport.lanes import LANE_BYTES, Lanes, most_lanes

HOST = ("127.0.0.1", 1)
RTT_S = 0.08


def test_the_longer_the_way_the_more_there_may_be() -> None:
    assert [most_lanes(rtt_s) for rtt_s in (0.0002, 0.010, 0.080)] == [1, 2, 8]


def test_a_slow_line_keeps_what_it_began_with() -> None:
    lanes = Lanes(HOST, most_lanes(RTT_S))
    assert list(lanes.take(2)) == [1]
    for tick in range(100):
        assert not lanes.lacking(tick / 10, LANE_BYTES, 100_000 * tick, RTT_S)  # 8 Mbit/s come in


def test_what_is_sent_or_arrives_opens_more_up_to_the_most() -> None:
    lanes = Lanes(HOST, 8)
    lanes.take(2)
    assert list(lanes.lacking(1.0, 3 * LANE_BYTES + 1, 0, RTT_S)) == [2, 3]
    assert not lanes.lacking(1.1, 4 * LANE_BYTES, 0, RTT_S)
    # 100 Mbit/s come in: a megabyte is under way towards us, nearly two with the window's gain.
    assert not lanes.lacking(2.0, 0, 0, RTT_S)
    assert list(lanes.lacking(3.0, 0, 12_500_000, RTT_S)) == [4, 5, 6, 7]
    assert not lanes.lacking(4.0, 100 * LANE_BYTES, 0, RTT_S)


def test_while_some_are_opened_no_others_are() -> None:
    lanes = Lanes(HOST, 8)
    lanes.growing = True
    assert not lanes.lacking(1.0, 5 * LANE_BYTES, 0, RTT_S)
    lanes.growing = False
    assert len(lanes.lacking(1.1, 5 * LANE_BYTES, 0, RTT_S)) == 4
