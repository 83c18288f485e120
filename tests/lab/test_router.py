"""The router's arithmetic: rates, delays, buffers, doors, without a packet on a wire."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import cpu
from lab.doors import Door
from lab.queues import Fabric, Flow, Server
from lab.router import wire_bytes
from lab.tun import HEADER_BYTES


def carry(fabric: Fabric, until_s: float) -> list[tuple[float, bytes]]:
    left = []
    while (next_s := fabric.next_s()) is not None and next_s <= until_s:
        left += [(next_s, packet) for _, packet in fabric.due(next_s)]
    return left


def test_an_idle_path_counts_serialisation_once_at_its_slowest_server() -> None:
    servers = [Server("up", 8, 500), Server("pair", 1000, 500), Server("down", 16, 500)]
    fabric, flow = Fabric(1), Flow(servers, 2, 0.040, 0.0, 7)
    fabric.enter(flow, b"x", 1000, 5.0)
    [(at_s, _)] = carry(fabric, 9.0)
    assert at_s == pytest.approx(5.0 + 0.001 + 0.040)


def test_a_waiting_packet_does_not_reserve_a_later_server_ahead_of_others() -> None:
    down = Server("down", 100, 500)
    slow = Flow([Server("slow", 0.8, 500), down], 1, 0.0, 0.0, 1)
    quick = Flow([Server("quick", 100, 500), down], 1, 0.0, 0.0, 1)
    fabric = Fabric(1)
    fabric.enter(slow, b"s1", 1000, 0.0)
    fabric.enter(slow, b"s2", 1000, 0.0)  # starts on its own line after 10 ms
    fabric.enter(quick, b"q", 1000, 0.001)
    assert [packet for _, packet in carry(fabric, 1.0)] == [b"q", b"s1", b"s2"]


def test_two_flows_share_an_uplink_and_a_third_path_is_not_touched() -> None:
    up = Server("up", 8, 10_000)
    one, two = (Flow([up, Server(name, 1000, 500)], 2, 0.0, 0.0, 1) for name in "ab")
    alone = Flow([Server("c", 8, 10_000)], 1, 0.0, 0.0, 1)
    fabric = Fabric(1)
    for _ in range(100):
        for flow in (one, two, alone):
            fabric.enter(flow, b"", 1000, 0.0)
    carry(fabric, 0.1000001)
    assert alone.packets == 100
    assert (one.packets, two.packets) == (50, 50)


def test_a_full_buffer_drops_and_counts() -> None:
    server = Server("pair", 8, 10.5)  # 1,000 bytes take 1 ms: 10 may wait behind the one on its way
    fabric, flow = Fabric(1), Flow([server], 1, 0.0, 0.0, 1)
    for _ in range(50):
        fabric.enter(flow, b"", 1000, 0.0)
    assert len(carry(fabric, 1.0)) == 11
    assert (flow.packets, flow.drops, server.drops) == (11, 39, 39)


def test_a_cut_loses_what_is_on_its_way_too() -> None:
    fabric, flow = Fabric(1), Flow([Server("pair", 8, 100)], 1, 0.05, 0.0, 1)
    fabric.enter(flow, b"1", 1000, 0.0)
    flow.cut = True
    fabric.enter(flow, b"2", 1000, 0.01)
    assert carry(fabric, 1.0) == []
    flow.cut = False
    fabric.enter(flow, b"3", 1000, 1.0)
    assert [packet for _, packet in carry(fabric, 2.0)] == [b"3"]


def test_loss_by_chance_is_seeded_and_near_its_share() -> None:
    def lost(seed: int) -> int:
        fabric, flow = Fabric(seed), Flow([Server("pair", 1e5, 1e4)], 1, 0.0, 0.01, 1)
        for number in range(20_000):
            fabric.enter(flow, b"", 100, number * 1e-3)
        return flow.drops

    assert lost(3) == lost(3)
    assert 140 < lost(3) < 260


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9000), st.floats(0, 0.01)), min_size=1, max_size=60),
    st.lists(st.floats(1, 100), min_size=3, max_size=3),
)
def test_packets_of_a_flow_stay_in_order_and_no_server_beats_its_rate(
    arrivals: list[tuple[int, int, float]], rates: list[float]
) -> None:
    up, down = Server("up", rates[0], 1e4), Server("down", rates[1], 1e4)
    flows = [Flow([up, Server(f"p{n}", rates[2], 1e4), down], 2, 0.01 * n, 0.0, n) for n in range(4)]
    fabric, now_s, sent = Fabric(1), 0.0, 0
    left: list[tuple[float, bytes]] = []
    for number, (which, size, gap_s) in enumerate(arrivals):
        now_s += gap_s
        left += carry(fabric, now_s)
        fabric.enter(flows[which], bytes([which, number]), size, now_s)
        sent += size
    left += carry(fabric, 1e9)
    assert len(left) == len(arrivals)
    for which in range(4):
        numbers = [packet[1] for _, packet in left if packet[0] == which]
        assert numbers == sorted(numbers)
    assert left[-1][0] >= sent * 8e-6 / min(rates[:2]) * (1 - 1e-12)
    assert down.bytes == up.bytes == sent


def packet(source: str, target: str, protocol: int, ports: tuple[int, int], flags: int = 0) -> bytes:
    addresses = bytes(map(int, source.split("."))) + bytes(map(int, target.split(".")))
    ip = bytes([0x45]) + bytes(8) + bytes([protocol]) + bytes(2) + addresses
    head = ports[0].to_bytes(2, "big") + ports[1].to_bytes(2, "big")
    return ip + head + bytes(9) + bytes([flags]) + bytes(6)


def test_a_closed_door_admits_answers_but_no_stranger() -> None:
    door, home, far = Door(), "10.80.0.1", "10.80.0.2"
    syn, syn_ack, ack = 0x02, 0x12, 0x10
    assert not door.admits(packet(far, home, 6, (4000, 80), syn), 0)
    assert not door.admits(packet(far, home, 17, (4000, 80)), 0)
    assert not door.admits(packet(far, home, 1, (0, 0)), 0)
    assert door.admits(packet(far, home, 6, (80, 4000), syn_ack), 0)
    assert door.admits(packet(far, home, 6, (80, 4000), ack), 0)
    door.leaving(packet(home, far, 17, (80, 4000)), 0)
    door.leaving(packet(home, far, 6, (5000, 6000), syn), 0)
    assert door.admits(packet(far, home, 17, (4000, 80)), 0)
    assert not door.admits(packet(far, home, 17, (4001, 80)), 0)
    assert door.admits(packet(far, home, 6, (6000, 5000), syn), 0), "hole punching"


def test_a_door_that_stands_open_admits_strangers_until_it_is_closed() -> None:
    door, home, far = Door(), "10.80.0.1", "10.80.0.2"
    first = [packet(far, home, 6, (4000, 80), 0x02), packet(far, home, 17, (4000, 80))]
    door.stands_open = True
    assert [door.admits(p, 0) for p in first] == [True, True]
    door.stands_open = False
    assert [door.admits(p, 0) for p in first] == [False, False]


def test_a_burst_counts_a_header_for_every_segment() -> None:
    header = bytes([0, 1]) + (52).to_bytes(2, sys.byteorder) + (8948).to_bytes(2, sys.byteorder) + bytes(4)
    assert len(header) == HEADER_BYTES
    assert wire_bytes(header + bytes(52 + 3 * 8948 + 5)) == 4 * 52 + 3 * 8948 + 5
    assert wire_bytes(bytes(HEADER_BYTES) + bytes(100)) == 100


def test_quotas_use_four_milliseconds_and_longer_only_where_the_kernel_demands_it() -> None:
    assert cpu.quota_us(0.5) == (2000, 4000)
    assert cpu.quota_us(0.25) == (1000, 4000)
    assert cpu.quota_us(0.1) == (1000, 10_000)
    assert cpu.quota_us(2) == (8000, 4000)
