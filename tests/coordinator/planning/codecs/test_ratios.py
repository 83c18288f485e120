import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.compression import Compression
from atoll.errors import UsageError
from atoll.job import TrainingSpec
from atoll.microbatch import Depth
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Mask
from compressors.catalogue import CODECS, takes
from coordinator.planning.codecs.ratios import (
    TOLERANCE,
    Link,
    adatopk,
    assumed_ratio,
    check_compression,
    choose,
    label,
    link_codecs,
    uniform,
    within,
)
from coordinator.planning.costs.codec_costs import ends_s, load_bytes, tensor_bytes
from coordinator.planning.costs.traffic import Crossing, LinkLoad
from coordinator.planning.problem import Candidate, Problem
from tests.coordinator.planning.dags import chain_dag, gpt_like
from tests.coordinator.planning.fleets import random_fleet, two_islands

DEVICE = random_fleet(1, 1).devices[0]
GB = 1e9


def values(*shapes: tuple[int, ...], dtype: str = "float32", direct: bool = True) -> tuple[Crossing, ...]:
    return tuple(Crossing(TensorMeta(shape, dtype), direct) for shape in shapes)


ROWS = values((64, 512))


def link(source: int, target: int, dense_s: float, tensors=ROWS, **speeds) -> Link:
    device = replace(DEVICE, codec_speeds=speeds)
    return Link(LinkLoad(source, target, tensors), dense_s, f"{source}>{target}", 1, device, device)


def chain(*seconds: float, **kwargs) -> list[Link]:
    """Links 0>1, 1>0, 1>2, 2>1 ... with the same dense time both ways."""
    found = []
    for s, dense_s in enumerate(seconds):
        found += [link(s, s + 1, dense_s, **kwargs), link(s + 1, s, dense_s, **kwargs)]
    return found


def random_links(seed: int) -> tuple[Link, ...]:
    """The links of a random cut of a random model over a random fleet with shared uplinks."""
    draw = random.Random(seed)
    n = draw.randrange(2, 6)
    dag = chain_dag(seed, 40, skips=0.3)
    problem = Problem(dag, TrainingSpec(10, 4), random_fleet(seed, n))
    starts = (0, *sorted(draw.sample(range(1, 40), n - 1)))
    return problem.links_between(Candidate(tuple(draw.sample(range(n), n)), starts))


def by_pair(specs):
    return {(spec.source, spec.target): spec for spec in specs}


# ---------------------------------------------------------------- AdaTopK


def test_every_compressed_link_takes_the_slowest_link_s_time_over_the_ratio():
    links = chain(1.0, 0.4, 0.11)
    specs = by_pair(adatopk(links, 20.0, names=("topk",)))
    for one in links:
        spec = specs[one.pair]
        assert (spec.codec, spec.ratio) == ("topk", pytest.approx(20 * one.dense_s, rel=1e-3))
        if not one.load.backward:  # k a row is whole: one of 512 elements is about 3 %
            assert one.coded_s(spec) == pytest.approx(0.05, rel=0.08)
        assert one.coded_s(spec) <= 0.05 * (1 + TOLERANCE)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), ratio=st.floats(1.5, 60))
def test_links_of_random_plans_are_equalised_or_at_the_limit_or_fast_enough(seed, ratio):
    links = random_links(seed)
    tau = max(one.dense_s for one in links) / ratio
    specs = by_pair(adatopk(links, ratio))
    for one in links:
        spec = specs[one.pair]
        quick = one.coded_s(spec) <= tau * (1 + TOLERANCE)
        fixed = sum(t.meta.nbytes for t in one.load.tensors if not takes(CODECS["topk"], t.meta))
        assert quick or spec.ratio == pytest.approx(ratio) or fixed == one.dense_bytes
        if spec.codec == "none" and fixed < one.dense_bytes:
            assert one.dense_s <= tau * (1 + TOLERANCE)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(
        ["adatopk:1", "adatopk:1.7", "adatopk:40", "topk:1.2", "topk:3000", "lossless", "fp16", "int8_block"]
    ),
)
def test_no_link_ever_carries_more_than_dense(seed, mode):
    links = random_links(seed)
    specs = by_pair(choose(links, Compression.parse(mode)))
    for one in links:
        spec = specs[one.pair]
        assert spec.ratio >= 1.0
        assert load_bytes(one.load, spec) <= one.dense_bytes
        assert one.coded_s(spec) <= one.dense_s * (1 + 1e-9)
        assert spec.codec == "none" or load_bytes(one.load, spec) < one.dense_bytes


def test_a_link_that_is_fast_enough_stays_dense_and_says_so():
    specs = by_pair(adatopk(chain(1.0, 0.09), 10.0, names=("topk",)))
    assert [specs[pair].codec for pair in ((0, 1), (1, 0), (1, 2), (2, 1))] == [
        "topk",
        "topk",
        "none",
        "none",
    ]
    assert "is within 100 ms, the slowest link's 1 s / 10" in specs[1, 2].reason
    assert "topk:10: 1 s ->" in specs[0, 1].reason


def test_what_cannot_be_shrunk_stays_dense():
    small = values((8, 100))  # 3,200 bytes
    labels = values((8, 4096), dtype="int64")
    for tensors in (small, labels):
        specs = adatopk(chain(1.0, tensors=tensors), 10.0)
        assert {spec.codec for spec in specs} == {"none"}
        assert all("no codec pays" in spec.reason for spec in specs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seconds=st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6), faster=st.floats(1.0, 50.0))
def test_more_bandwidth_never_means_a_higher_ratio(seconds, faster):
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    changed = (slowest + 1) % len(seconds)  # the pace that the slowest sets stays
    before = by_pair(adatopk(chain(*seconds), 30.0))
    quicker = [s / faster if i == changed else s for i, s in enumerate(seconds)]
    after = by_pair(adatopk(chain(*quicker), 30.0))
    for pair in ((changed, changed + 1), (changed + 1, changed)):
        assert after[pair].ratio <= before[pair].ratio


def test_flows_that_share_a_gateway_count_as_one_line():
    dag, fleet = gpt_like(4), two_islands()
    problem = Problem(dag, TrainingSpec(10, 16), fleet)
    starts = (0, 15, 27, 41)
    alternating = problem.links_between(Candidate((0, 1, 2, 3), starts))
    grouped = problem.links_between(Candidate((0, 2, 1, 3), starts))
    slow = [one for one in alternating if one.flows == 3]
    assert len(slow) == 6
    assert all(one.line in ("slow up", "slow down", "fast up", "fast down") for one in slow)
    total = sum(one.rate_bps for one in slow if one.line == slow[0].line)
    assert total == pytest.approx(8e6 * fleet.payload_share)
    across = next(one for one in grouped if one.pair == (1, 2))
    assert across.rate_bps == pytest.approx(8e6 * fleet.payload_share)


def test_the_gradient_goes_back_at_its_value_s_positions_and_takes_no_index_bytes():
    specs = by_pair(adatopk(chain(1.0), 20.0))
    assert (specs[0, 1].mask, specs[1, 0].mask) == (Mask.NONE, Mask.SAME)
    ahead, back = chain(1.0)
    assert load_bytes(back.load, specs[1, 0]) < load_bytes(ahead.load, specs[0, 1])
    folded = values((64, 512), direct=False)[0]
    assert tensor_bytes(folded, specs[1, 0], True) == CODECS["topk"].payload_bytes(folded.meta, 20.0)


def test_independent_gradients_have_a_ratio_of_their_own():
    links = [link(0, 1, 1.0), link(1, 0, 0.2)]
    both = by_pair(adatopk(links, 20.0))
    assert both[0, 1].ratio == both[1, 0].ratio == 20.0
    apart = by_pair(choose(links, Compression.parse("adatopk:20:independent")))
    assert apart[1, 0].mask is Mask.INDEPENDENT
    assert apart[1, 0].ratio == pytest.approx(4.0)


def test_a_gradient_that_folds_over_another_pair_chooses_for_itself():
    specs = by_pair(adatopk([link(0, 1, 1.0), link(1, 0, 1.0), link(3, 2, 1.0)], 10.0, names=("topk",)))
    assert specs[3, 2].mask is Mask.INDEPENDENT


# ---------------------------------------------------------------- uniform, lossless, the ladder


def test_uniform_is_the_same_on_every_link():
    specs = uniform(chain(1.0, 0.001), "topk", 25.0)
    assert {(spec.codec, spec.ratio) for spec in specs} == {("topk", 25.0)}
    assert {label(spec) for spec in uniform(chain(1.0), "int8_block", 9.0)} == {"int8_block"}


def test_lossless_is_used_where_it_beats_sending_dense():
    speeds = {"lossless": (1e8, 1e8)}
    tensors = values((1024, 1024))
    slow, fast = link(0, 1, 3.0, tensors, **speeds), link(1, 2, 0.2, tensors, **speeds)
    specs = by_pair(choose([slow, fast], Compression("lossless")))
    assert (specs[0, 1].codec, specs[1, 2].codec) == ("lossless", "none")
    assert "lossless pays: encode" in specs[0, 1].reason
    assert "dense: lossless would take encode" in specs[1, 2].reason
    for one in (slow, fast):
        spec = LinkSpec(*one.pair, codec="lossless")
        takes_s = sum(ends_s(one.load, spec, one.sender, one.receiver)) + one.coded_s(spec)
        assert one.pays(spec) == (takes_s < one.dense_s)


def test_the_ladder_takes_the_mildest_codec_that_suffices():
    found = {}
    for tau in (1.0, 0.9, 0.51, 0.3, 0.05):
        specs = by_pair(within(chain(1.0, tensors=values((1024, 512))), tau, 32.0))
        found[tau] = (specs[0, 1].codec, specs[1, 0].codec)
    assert found == {
        1.0: ("none", "none"),
        0.9: ("lossless", "lossless"),
        0.51: ("fp16", "bf16"),
        0.3: ("int8_block", "int8_block"),
        0.05: ("topk", "topk"),
    }


def test_no_rung_goes_beyond_the_limit():
    links = chain(1.0, tensors=values((1024, 512)))
    specs = by_pair(within(links, 0.01, 2.0))
    assert all(load_bytes(one.load, specs[one.pair]) >= one.dense_bytes / 2.5 for one in links)
    assert "int8_block" not in {spec.codec for spec in specs.values()}


def test_a_codec_too_slow_to_pay_is_passed_over():
    crawl = (2e5, 2e5)
    speeds = dict.fromkeys(("lossless", "fp16", "bf16", "int8_block", "topk"), crawl)
    specs = within(chain(0.05, **speeds), 0.001, 32.0)
    assert {spec.codec for spec in specs} == {"none"}


# ---------------------------------------------------------------- what may be asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "codec nothing is not known; give off, lossless"),
        ("powersgd:8", "codec powersgd is not valid for activations; .* topk"),
        ("fp16:2", "fp16 takes no ratio; write --compress fp16"),
    ],
)
def test_what_links_cannot_do_is_refused_with_what_they_can(text, message):
    with pytest.raises(UsageError, match=message):
        check_compression(Compression.parse(text))


@pytest.mark.parametrize("text", ["off", "lossless", "auto", "auto:8", "adatopk:100", "topk:32:independent"])
def test_what_links_can_do_is_accepted(text):
    wanted = Compression.parse(text)
    check_compression(wanted)
    assert str(wanted) == text


@pytest.mark.parametrize("text", ["off:independent", "lossless:2", "topk:0.5", "topk:x", "topk:3:own"])
def test_a_malformed_wish_is_refused(text):
    with pytest.raises(UsageError):
        Compression.parse(text)


def test_codecs_that_keep_a_state_at_both_ends_are_not_for_links():
    assert "acp_sgd" not in link_codecs()
    assert {"none", "lossless", "fp16", "bf16", "int8_block", "topk"} <= set(link_codecs())


def test_the_ratio_assumed_before_a_cut_is_known():
    assert assumed_ratio(Compression("off")) == 1.0
    assert assumed_ratio(Compression("adatopk", 50.0)) == 50.0
    assert assumed_ratio(Compression("fp16")) == pytest.approx(2.0, rel=1e-3)


# ---------------------------------------------------------------- what it does to the plan's work


def test_codecs_count_as_work_of_both_ends_and_shrink_the_hops():
    dag = gpt_like(4)
    fleet = two_islands()
    devices = tuple(replace(d, codec_speeds={"topk": (0.1 * GB, 1 * GB)}) for d in fleet.devices)
    problem = Problem(dag, TrainingSpec(10, 4), replace(fleet, devices=devices))
    candidate = Candidate((0, 1), (0, 27))
    specs = choose(problem.links_between(candidate), Compression("topk", 10.0))
    dense = problem.workload(candidate, (Depth(4),) * 2)
    work = problem.workload(candidate, (Depth(4),) * 2, specs)
    n_bytes = dense.forward[0].n_bytes
    assert work.forward[0].n_bytes <= n_bytes / 10
    assert work.backward[0].n_bytes <= n_bytes / 10
    tensors = dense.forward[0].messages
    added = work.stages[0].forward_s - dense.stages[0].forward_s
    assert added == pytest.approx(n_bytes / (0.1 * GB) + tensors * 2e-4)
    added = work.stages[1].forward_s - dense.stages[1].forward_s
    assert added == pytest.approx(n_bytes / GB + tensors * 2e-4)
    for coded_stage, stage in zip(work.stages, dense.stages, strict=True):
        more = coded_stage.forward_s + coded_stage.backward_s - stage.forward_s - stage.backward_s
        assert coded_stage.codec_s == pytest.approx(more)
    assert np.isclose(sum(s.codec_s for s in dense.stages), 0.0)


def test_what_a_few_bits_an_element_can_do_is_not_left_to_the_largest_ones():
    specs = by_pair(adatopk(chain(1.0, 0.4, 0.25, 0.11), 40.0))
    assert [specs[i, i + 1].codec for i in range(4)] == ["topk", "topk", "eden", "eden"]
    assert specs[0, 1].ratio == pytest.approx(40.0, rel=0.01)
    assert specs[1, 2].ratio == pytest.approx(16.0, rel=0.05), "beyond 11 times few bits cost the model more"
    assert specs[2, 3].ratio == pytest.approx(10.0, rel=0.01)
    assert specs[3, 4].ratio == pytest.approx(4.4, rel=0.01)  # its four bits are an eighth all the same


def test_a_link_that_the_slowest_stage_hides_stays_dense_and_the_slow_one_does_not():
    specs = by_pair(adatopk(chain(1.0, 0.1), 100.0, unnoticed_s=0.15))
    assert [specs[i, i + 1].codec for i in range(2)] == ["topk", "none"]
    assert "go unnoticed" in specs[1, 2].reason
