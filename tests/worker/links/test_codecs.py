"""Codecs on the links of real stages: both ends agree, nothing depends on when or how often."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.errors import BadFrame, UsageError
from atoll.held_out import Figures
from atoll.microbatch import ScheduleName
from atoll.opdag import TensorMeta
from atoll.plan import LinkSpec, Mask
from compressors import catalogue
from compressors.base import Packet
from compressors.catalogue import Use
from tests.inprocess.pipeline import LocalPipeline
from tests.parameters import sampled
from tests.worker.links import plain_codec
from tests.worker.stage.steps.crew import TRAINING, Case, Crew, assign, case, cut_evenly, scale_of
from worker.cancel import Cancel
from worker.links.codecs import StageCodecs, packet_seed
from worker.links.links import Links
from worker.stage.reports import StepReport
from worker.stage.steps.expected import Arrival, evaluation_arrivals, step_arrivals
from worker.stage.steps.run import codecs_of
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction, MessageKey

STAGES = 3


@pytest.fixture(autouse=True)
def codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_codec.offer(monkeypatch)
    monkeypatch.setattr(catalogue, "MIN_BYTES", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def gpt2() -> Case:
    return case("gpt2")


@pytest.fixture(scope="module")
def branches() -> Case:
    return case("branches")


def linked(codec: str, ratio: float = 1.0, mask: Mask = Mask.SAME) -> tuple[LinkSpec, ...]:
    """That codec on every pair of stages, both ways."""
    pairs = [(s, t) for s in range(STAGES) for t in range(STAGES) if s != t]
    return tuple(LinkSpec(s, t, codec, ratio, mask if s > t else Mask.NONE) for s, t in pairs)


def crew_of(made: Case, links: Sequence[LinkSpec], schedule: ScheduleName = ScheduleName.ONE_F_ONE_B) -> Crew:
    return Crew(made, assign(made, cut_evenly(made.dag, STAGES), TRAINING, schedule, links))


def local_of(made: Case, links: Sequence[LinkSpec]) -> LocalPipeline:
    programs, evaluations = made.programs(cut_evenly(made.dag, STAGES))
    pipeline = LocalPipeline(programs, TRAINING, made.tensors, eval_programs=evaluations, states=made.states)
    pipeline.relink(links)
    return pipeline


def step_of(crew: Crew, step: int) -> float:
    """Compute and commit; returns the loss."""
    reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
    assert len(reports) == STAGES
    crew.all("apply", step, scale_of(reports))
    (loss,) = [r.stage.step_loss.mean for r in reports if r.stage.losses]
    return loss


def local_step(pipeline: LocalPipeline, made: Case, step: int) -> float:
    return pipeline.step(step, [made.batches.of(step, micro) for micro in range(TRAINING.n_micro)]).loss


# ---------------------------------------------------------------- stages over links


@pytest.mark.parametrize("schedule", list(ScheduleName))
@pytest.mark.parametrize("mask", [Mask.SAME, Mask.INDEPENDENT])
@pytest.mark.parametrize("name", sampled(1, ["branches", "gpt2"]))
def test_stages_over_coded_links_end_in_the_bits_of_the_same_in_one_process(
    name: str, mask: Mask, schedule: ScheduleName, request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(name)
    links = linked("largest", 3.0, mask)
    crew, pipeline = crew_of(made, links, schedule), local_of(made, links)
    for step in range(2):
        assert step_of(crew, step) == local_step(pipeline, made, step)
    found, expected = crew.snapshot(), pipeline.snapshot()
    for tensor, values in expected.items():
        assert torch.equal(found[tensor]["value"], values["value"]), tensor


def test_a_step_that_is_run_again_sends_the_same_bits(gpt2: Case) -> None:
    crew = crew_of(gpt2, linked("largest", 3.0))
    for _ in range(2):
        crew.all("run_step", 0, Cancel())
        for run in crew.runs:
            run.discard()
    assert crew.hub.packets
    for packets in crew.hub.packets.values():
        assert len(packets) == 2
        assert packets[0] == packets[1]


def test_a_coded_evaluation_is_that_of_one_process_and_the_exact_one_stays_exact(gpt2: Case) -> None:
    links = linked("largest", 3.0)
    crew, pipeline = crew_of(gpt2, links), local_of(gpt2, links)
    step_of(crew, 0)
    local_step(pipeline, gpt2, 0)
    held_out = gpt2.batches.held_out()
    exact, coded = pipeline.evaluate(held_out), pipeline.evaluate(held_out, coded=True)
    assert coded != exact
    for expected, options in ((exact, {}), (coded, {"coded": True})):
        found = crew.all("evaluate", 0, Cancel(), **options)
        assert [one.loss for one in found if isinstance(one, Figures)] == [expected]


@pytest.mark.parametrize("links", [(), linked("lossless")])
def test_there_is_no_coded_evaluation_where_no_link_loses_anything(
    gpt2: Case, links: Sequence[LinkSpec]
) -> None:
    crew = crew_of(gpt2, links)
    step_of(crew, 0)
    sent = len(crew.hub.sent)
    assert [run.evaluate(0, Cancel(), coded=True) for run in crew.runs] == [None] * STAGES
    assert len(crew.hub.sent) == sent


def test_new_links_take_effect_at_their_step_without_a_pause(gpt2: Case) -> None:
    before, after = linked("largest", 2.0), linked("largest", 6.0, Mask.INDEPENDENT)
    crew, pipeline = crew_of(gpt2, before), local_of(gpt2, before)
    for step in range(5):
        if step == 3:
            pipeline.relink(after)
        assert step_of(crew, step) == local_step(pipeline, gpt2, step)
        if step == 1:  # with its commit: two steps ahead
            crew.all("relink", 2, 3, after)
    for *_, key in crew.hub.sent:
        assert key.plan_version == (2 if key.step >= 3 else 1)
    assert not crew.hub.dropped
    for links in crew.links:
        assert links.plan_version == 2


def test_new_links_that_come_too_late_are_refused(gpt2: Case) -> None:
    crew = crew_of(gpt2, ())
    step_of(crew, 0)
    with pytest.raises(ValueError, match="step 1"):
        crew.runs[0].relink(2, 1, linked("largest"))


def test_new_links_may_name_only_stages_of_the_plan(gpt2: Case) -> None:
    crew = crew_of(gpt2, ())
    with pytest.raises(BadFrame, match="piece 7 of 3"):
        crew.runs[0].relink(2, 5, [LinkSpec(0, 7, "lossless")])


def test_what_the_codecs_did_is_told_once_and_per_peer(gpt2: Case) -> None:
    crew = crew_of(gpt2, linked("largest", 4.0))
    step_of(crew, 0)
    use = crew.links[1].codec_use()
    assert sorted(use) == ["w-0", "w-2"]
    for each in use.values():
        assert each.dense_bytes > each.wire_bytes > 0
        assert each.encode_s > 0
        assert each.decode_s > 0
    assert crew.links[1].codec_use() == {}


# ---------------------------------------------------------------- both ends agree


@dataclass(frozen=True)
class Sent:
    """A message as its sender sees it."""

    sender: str
    receiver: str
    key: MessageKey


SPECS = st.builds(
    LinkSpec,
    st.integers(0, STAGES - 1),
    st.integers(0, STAGES - 1),
    st.sampled_from(["none", "largest", "lossless", "counting"]),
    st.sampled_from([1.0, 2.0, 16.0]),
    st.sampled_from(Mask),
)


@settings(
    derandomize=True, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck), database=None
)
@given(seed=st.integers(0, 2**32), links=st.lists(SPECS, max_size=8))
@pytest.mark.parametrize("name", ["gpt2", "branches"])
def test_both_ends_of_every_message_name_the_same_codec(
    name: str, seed: int, links: list[LinkSpec], request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(name)
    cuts = sorted(random.Random(seed).sample(made.dag.cuttable(), STAGES - 1))
    assignments = assign(made, (0, *cuts), TRAINING, ScheduleName.GPIPE, links)
    tables = {f"w-{at}": codecs_of(a) for at, a in enumerate(assignments)}
    for at, assignment in enumerate(assignments):
        coded = evaluation_arrivals(assignment, 0, Direction.EVALUATION_CODED)
        for arrival in (*step_arrivals(assignment, 0), *evaluation_arrivals(assignment, 0), *coded):
            here = tables[f"w-{at}"].coding(arrival.peer, arrival.key, sending=False)
            there = tables[arrival.peer].coding(f"w-{at}", arrival.key, sending=True)
            assert (here.codec.name, here.on_support, here.keeps_support) == (
                there.codec.name,
                there.on_support,
                there.keeps_support,
            )
            assert getattr(here.codec, "ratio", 1.0) == getattr(there.codec, "ratio", 1.0)
            if arrival.key.direction in (
                Direction.EVALUATION,
                Direction.TIED_PARTIAL,
                Direction.TIED_TOTAL,
            ):
                assert here.exact
            if arrival.meta.dtype not in catalogue.FLOATS or arrival.meta.nbytes < catalogue.MIN_BYTES:
                assert here.codec.name in ("none", "lossless", "counting")


def test_a_gradient_keeps_to_its_values_positions_only_where_it_has_one_consumer(branches: Case) -> None:
    positions = branches.dag.cuttable()
    seen = set()
    for assignment in (
        assignment
        for cut in range(1, len(positions) - 4, 2)
        for assignment in assign(
            branches, (0, *positions[cut : cut + 5 : 4]), TRAINING, ScheduleName.GPIPE, linked("largest", 4.0)
        )
    ):
        table = codecs_of(assignment)
        for r in assignment.program.received:
            if not r.requires_grad or r.meta.nbytes < catalogue.MIN_BYTES:
                continue
            alone = r.grad_from is None and r.grad_to == r.source
            key = MessageKey("job", 1, 0, 0, r.op, Direction.BACKWARD)
            coding = table.coding(assignment.worker_of(r.grad_to), key, sending=True)
            assert coding.on_support is alone
            seen.add(alone)
    assert seen == {True, False}


def test_the_same_mask_needs_a_sparse_codec_on_the_way_forward(gpt2: Case) -> None:
    links = [LinkSpec(0, 1, "lossless"), LinkSpec(1, 0, "largest", 4.0, Mask.SAME)]
    crew = crew_of(gpt2, links)
    step_of(crew, 0)


# ---------------------------------------------------------------- seeds, states, refusals


def chain(gpt2: Case, codec: str) -> tuple[StageCodecs, int, TensorMeta]:
    """Codecs of the first stage, the op it sends to the second, and its shape."""
    assignment = assign(gpt2, cut_evenly(gpt2.dag, STAGES), TRAINING, ScheduleName.GPIPE, linked(codec, 4.0))[
        0
    ]
    nodes = dict(assignment.program.ops)
    op = next(p.op for p in assignment.program.produced if p.requires_grad and p.targets[0] == 1)
    return codecs_of(assignment), op, nodes[op].outputs[0]


def said(codecs: StageCodecs, meta: TensorMeta, step: int, micro: int, op: int) -> tuple[int, int]:
    """Seed and state that ``counting`` saw."""
    key = MessageKey("job", 1, step, micro, op, Direction.FORWARD)
    packet = codecs.encode("w-1", key, torch.ones(meta.shape))
    seed, seen = packet.params.decode().split(":")
    return int(seed), int(seen)


def test_a_codecs_state_goes_from_micro_batch_to_micro_batch_and_begins_anew_with_the_step(
    gpt2: Case,
) -> None:
    codecs, op, meta = chain(gpt2, "counting")
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 0), (1, 1)]
    assert [said(codecs, meta, *at, op)[1] for at in order] == [0, 1, 2, 0, 1, 0, 1]


def test_every_message_has_a_seed_of_its_own_and_keeps_it_under_another_version(gpt2: Case) -> None:
    codecs, op, meta = chain(gpt2, "counting")
    first = said(codecs, meta, 3, 1, op)[0]
    assert said(codecs, meta, 3, 1, op)[0] == first
    keys = [
        MessageKey("job", version, step, micro, edge, direction)
        for version in (1, 2)
        for step in range(3)
        for micro in range(3)
        for edge in range(3)
        for direction in Direction
    ]
    assert len({packet_seed(7, key) for key in keys}) == len(keys) // 2


def test_a_value_for_two_stages_is_encoded_once(gpt2: Case) -> None:
    codecs, op, meta = chain(gpt2, "largest")
    key = MessageKey("job", 1, 0, 0, op, Direction.FORWARD)
    value = torch.randn(meta.shape)
    assert codecs.encode("w-1", key, value) is codecs.encode("w-1", key, value)
    assert codecs.encode("w-1", key, value.clone()) is not codecs.encode("w-1", key, value)


@pytest.mark.parametrize(
    ("codec", "words"), [("weights", "not valid for"), ("shared", "both ends share"), ("zip", "not known")]
)
def test_a_codec_that_no_link_can_carry_is_refused_by_name(gpt2: Case, codec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        codecs_of(assign(gpt2, cut_evenly(gpt2.dag, 3), TRAINING, ScheduleName.GPIPE, linked(codec))[0])


class Nowhere:
    """A network that nothing leaves."""

    def register(self, *_: object) -> None: ...

    def unregister(self, *_: object) -> None: ...

    def forget(self, *_: object) -> None: ...

    def send(self, *_: object) -> None: ...


def receiving(
    gpt2: Case, announced: list[tuple[Arrival, int]] | None = None
) -> tuple[Links, Arrival, Arrival]:
    """Links of the first stage, a gradient at its value's positions and one micro-batch more."""
    assignment = assign(
        gpt2, cut_evenly(gpt2.dag, STAGES), TRAINING, ScheduleName.GPIPE, linked("largest", 4.0)
    )[0]
    table = codecs_of(assignment)
    links = Links(
        Nowhere(), "job", 1, table, announce=lambda new: None if announced is None else announced.extend(new)
    )
    arrivals = [a for a in step_arrivals(assignment, 0) if a.key.direction is Direction.BACKWARD]
    found = [a for a in arrivals if table.coding(a.peer, a.key, sending=False).on_support]
    links.expect(found)
    for arrival in found:
        value = torch.arange(arrival.meta.elements, dtype=torch.float32).reshape(arrival.meta.shape)
        links.send(arrival.peer, arrival.key._replace(direction=Direction.FORWARD), value)
    first, *others = found
    return links, first, next(other for other in others if other.key.edge == first.key.edge)


@pytest.mark.parametrize("codec", ["none", "lossless", "zip"])
def test_a_packet_of_another_codec_is_refused(gpt2: Case, codec: str) -> None:
    links, arrival, _ = receiving(gpt2)
    buffer = links.expect_buffer(arrival.peer, arrival.key, 4)
    assert buffer is not None
    links.deliver(arrival.peer, arrival.key, Packet(codec, arrival.meta).header, buffer)
    with pytest.raises(PeerLost, match=f"codec '{codec}'") as lost:
        links.receive(arrival.key, 1.0)
    assert lost.value.peer == arrival.peer


def test_no_payload_longer_than_the_positions_allow_is_announced(gpt2: Case) -> None:
    announced: list[tuple[Arrival, int]] = []
    _, arrival, _ = receiving(gpt2, announced)
    assert dict(announced)[arrival] == arrival.meta.elements // 4 * 4


def test_a_payload_that_does_not_fit_the_positions_is_refused_and_the_next_one_taken(gpt2: Case) -> None:
    links, short, good = receiving(gpt2)
    for arrival, nbytes in ((short, 8), (good, short.meta.elements // 4 * 4)):
        buffer = links.expect_buffer(arrival.peer, arrival.key, nbytes)
        assert buffer is not None
        buffer[:] = bytes(nbytes)
        links.deliver(arrival.peer, arrival.key, Packet("largest", arrival.meta).header, buffer)
    with pytest.raises(PeerLost, match="8 bytes") as lost:
        links.receive(short.key, 1.0)
    assert lost.value.peer == short.peer
    got = links.receive(good.key, 1.0)
    assert got is not None
    assert TensorMeta(tuple(got.shape), "float32") == good.meta


ABLE = [
    (name, use)
    for name, facts in sorted(catalogue.CODECS.items())
    for use in (Use.ACTIVATION, Use.GRADIENT)
    if use in facts.valid_for and not facts.shared_state and name != "none"
]


@pytest.mark.parametrize(("codec", "use"), sampled(12, ABLE))
def test_every_codec_that_a_link_may_carry_gives_the_same_bits_over_links_and_in_one_process(
    gpt2: Case, codec: str, use: Use
) -> None:
    forward = use is Use.ACTIVATION
    links = [link for link in linked(codec, 4.0) if (link.source < link.target) is forward]
    crew, pipeline = crew_of(gpt2, links), local_of(gpt2, links)
    for step in range(2):
        loss = step_of(crew, step)
        assert loss == local_step(pipeline, gpt2, step)
        assert 0.0 < loss < 10.0
    assert not crew.hub.dropped
