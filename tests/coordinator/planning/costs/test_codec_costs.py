from dataclasses import replace

import pytest

from atoll.errors import BadFrame
from atoll.messages.from_worker import MAX_CODECS
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Mask
from compressors.catalogue import CODECS
from coordinator.config import Liveness, Probing
from coordinator.membership.roster import Roster, refusal
from coordinator.messages.events import CodecSpeeds
from coordinator.planning.codecs.ratios import BACKWARD_RUNGS, FINE, FORWARD_RUNGS, SPARSE, link_codecs
from coordinator.planning.costs.codec_costs import (
    CALL_CPU_S,
    DEFAULT_SPEEDS,
    UNKNOWN_SPEED,
    ends_s,
    judge_speeds,
    speed_of,
)
from coordinator.planning.costs.fleet import Device
from coordinator.planning.costs.traffic import Crossing, LinkLoad
from coordinator.services.workers.wire import introduction_from, message_from
from protos import atoll_control_pb2 as pb

SLOW, FAST = Device("slow", 1, codec_speeds={"topk": (1e8, 2e8)}), Device("fast", 1)
BIG = Crossing(TensorMeta((100, 2500), "float32"), True)  # 1 MB
SMALL = Crossing(TensorMeta((100,), "float32"), True)


def introduction(**speeds: tuple[float, float]) -> pb.Introduction:
    return pb.Introduction(
        name="w",
        incarnation=1,
        device=pb.DeviceFacts(kind="cpu", threads=2, memory_bytes=2**30, memory_limit_bytes=2**30),
        codec_speeds=[
            pb.CodecSpeed(codec=name, encode_bytes_per_s=encode, decode_bytes_per_s=decode)
            for name, (encode, decode) in speeds.items()
        ],
    )


def test_speeds_that_a_worker_measured_reach_the_planner() -> None:
    told = introduction_from(introduction(topk=(3e8, 9e9)))
    assert refusal(told) is None
    roster = Roster(Liveness(), Probing())
    roster.open("w", 1, told, 0.0)
    (device,) = roster.fleet(["w"], "fp32").devices
    assert speed_of(device, "topk") == (3e8, 9e9)
    assert speed_of(device, "fp16") == DEFAULT_SPEEDS["fp16"]
    assert speed_of(device, "nobody_knows") == UNKNOWN_SPEED


def test_speeds_that_are_known_later_count_for_plans_to_come() -> None:
    roster = Roster(Liveness(), Probing())
    roster.open("w", 1, introduction_from(introduction(topk=(3e8, 9e9))), 0.0)
    later = introduction(fp16=(2e9, 1e9), topk=(1e8, 2e8)).codec_speeds
    told = message_from(pb.FromWorker(codec_speeds=pb.CodecSpeeds(speeds=later)))
    assert isinstance(told, CodecSpeeds)
    assert roster.codecs_timed("w", told.speeds) is None
    assert "possible are" in (roster.codecs_timed("w", {"topk": (1e20, 1.0)}) or "")
    (device,) = roster.fleet(["w"], "fp32").devices
    assert (speed_of(device, "topk"), speed_of(device, "fp16")) == ((1e8, 2e8), (2e9, 1e9))


@pytest.mark.parametrize("speed", [(float("nan"), 1e9), (1e9, 0.0), (1e20, 1e9), (-1.0, 1e9)])
def test_impossible_speeds_are_refused_in_words(speed: tuple[float, float]) -> None:
    wrong = refusal(introduction_from(introduction(topk=speed))) or ""
    assert "codec topk that" in wrong
    assert "possible are" in wrong
    assert judge_speeds({"topk": (1e9, 2e9)}) is None


def test_an_endless_list_of_speeds_is_a_bad_frame() -> None:
    many = {f"codec{i}": (1e9, 1e9) for i in range(MAX_CODECS + 1)}
    with pytest.raises(BadFrame, match=r"codec_speeds: 101"):
        introduction_from(introduction(**many))


def test_each_end_works_at_its_own_speed_on_what_the_codec_takes() -> None:
    load = LinkLoad(0, 1, (BIG, BIG, SMALL))
    spec = LinkSpec(0, 1, "topk", 10.0)
    encode, _ = ends_s(load, spec, SLOW, FAST)
    _, decode = ends_s(load, spec, FAST, SLOW)
    assert encode == pytest.approx(2 * (1e6 / 1e8 + CALL_CPU_S))
    assert decode == pytest.approx(2 * (1e6 / 2e8 + CALL_CPU_S))
    assert ends_s(load, LinkSpec(0, 1), SLOW, FAST) == (0.0, 0.0)


def test_a_gradient_at_known_positions_needs_no_selection() -> None:
    load = LinkLoad(1, 0, (BIG,))
    same, _ = ends_s(load, LinkSpec(1, 0, "topk", 10.0, Mask.SAME), SLOW, FAST)
    alone, _ = ends_s(load, LinkSpec(1, 0, "topk", 10.0, Mask.INDEPENDENT), SLOW, FAST)
    assert (same, alone) == (pytest.approx(1e6 / 2e8 + CALL_CPU_S), pytest.approx(1e6 / 1e8 + CALL_CPU_S))


def test_a_call_takes_longer_on_a_part_of_a_core_as_its_speeds_do() -> None:
    load = LinkLoad(0, 1, (BIG, BIG))
    spec = LinkSpec(0, 1, "topk", 10.0)
    whole = ends_s(load, spec, SLOW, replace(FAST, cores=4.0))
    eighth = ends_s(load, spec, replace(SLOW, cores=0.125), FAST)
    assert eighth[0] - whole[0] == pytest.approx(2 * 7 * CALL_CPU_S)
    assert eighth[1] == whole[1]


def test_every_codec_that_is_chosen_unasked_has_a_default_speed() -> None:
    assert {FINE, SPARSE, *FORWARD_RUNGS, *BACKWARD_RUNGS} <= set(DEFAULT_SPEEDS) & set(link_codecs())
    assert set(DEFAULT_SPEEDS) <= set(CODECS)


def test_what_training_taught_of_a_workers_codecs_slows_every_one_of_them() -> None:
    load, spec = LinkLoad(0, 1, (BIG,)), LinkSpec(0, 1, "topk", 10.0)
    once, _ = ends_s(load, spec, SLOW, FAST)
    assert ends_s(load, spec, replace(SLOW, codec_scale=8.0), FAST)[0] == pytest.approx(8 * once)
