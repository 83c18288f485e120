"""What messages take of their ends."""

from dataclasses import replace

import pytest

from coordinator.planning.costs.fleet import Device
from coordinator.planning.costs.message_costs import (
    ACTION_CPU_S,
    ACTION_S,
    BYTE_CPU_S,
    LEAST_SHARE,
    MESSAGE_CPU_S,
    PACKETS_BPS,
    TENSOR_CPU_S,
    bytes_cpu_s,
    handled,
    message_cpu_s,
)
from coordinator.planning.costs.quota import held_up_s
from coordinator.planning.costs.traffic import Hop
from coordinator.planning.costs.workload import Route, StageLoad, Wire, Workload

KIB = 1024


def device(cores: float, scale: float = 1.0) -> Device:
    return Device("w", 1 << 30, cores=cores, handling_scale=scale)


def test_a_byte_takes_more_on_a_slow_line_and_a_message_something_without_any() -> None:
    slow, faster, fast = (bytes_cpu_s(128 * KIB, rate) for rate in (8e6, 20e6, 1e9))
    assert slow == pytest.approx(128 * KIB * BYTE_CPU_S)
    assert faster == pytest.approx(slow * PACKETS_BPS / 20e6)
    assert fast == pytest.approx(slow * LEAST_SHARE)
    assert message_cpu_s() == MESSAGE_CPU_S
    assert message_cpu_s(5) == pytest.approx(MESSAGE_CPU_S + 4 * TENSOR_CPU_S)


def test_on_a_part_of_a_core_handling_takes_as_much_longer() -> None:
    found = [held_up_s(0.003, device(cores)) for cores in (0.0, 2.0, 64.0, 1.5, 1.0, 0.5, 0.125)]
    assert found[:3] == [0.0] * 3
    assert found[2:] == sorted(found[2:])
    assert found[-1] == pytest.approx(0.024)


def test_each_stage_handles_what_it_sends_and_what_it_gets() -> None:
    stage = StageLoad(0, 0.1, 0.2, 0.0, 0.0, ())
    route = Route((("line", 8e6),), 0.04)
    work = Workload(
        (stage, stage, replace(stage, device=1)),
        4,
        (Hop(0, 1, 128 * KIB, 1), Hop(1, 2, KIB, 3)),
        (Hop(1, 0, 128 * KIB, 1), Hop(2, 1, KIB, 1)),
        (),
        dict.fromkeys(((0, 1), (1, 0), (1, 2), (2, 1)), route),
        Wire(),
    )
    stages = handled(work, [device(1.0)] * 3).stages
    one, three, rest = message_cpu_s(1), message_cpu_s(3), ACTION_S + ACTION_CPU_S
    expected = [rest + one, rest + one + (one + three) / 2, rest + (one + three) / 2]
    assert [s.action_s for s in stages] == pytest.approx(expected)
    large, small = (bytes_cpu_s(n, 8e6) for n in (128 * KIB, KIB))
    assert [s.bytes_s for s in stages] == pytest.approx([large, large + small, small])
    halves = handled(work, [device(0.5, 2.0)] * 3).stages
    assert [s.action_s for s in halves] == pytest.approx(
        [2 * (ACTION_S + 2 * (s - ACTION_S)) for s in expected]
    )
    assert [s.bytes_s for s in halves] == pytest.approx([4 * s.bytes_s for s in stages])
