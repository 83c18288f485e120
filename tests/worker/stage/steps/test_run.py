"""A stage's step over links: several stages in threads end in the bits of one stage alone."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from atoll.held_out import Figures
from atoll.indices import IndexRanges, Range
from atoll.job import ParamGroup, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.rows import dag_at_rows
from tests.inprocess.pipeline import LocalPipeline
from tests.parameters import sampled
from tests.patience import HUNG_S
from tests.worker.stage.steps.crew import TRAINING, Batches, Case, Crew, assign, case, cut_evenly, scale_of
from worker.cancel import Cancel, Cancelled
from worker.compute import reports as told_of
from worker.machine.cpu import CpuMeter
from worker.stage.reports import LongWait, StepReport
from worker.stage.steps.expected import Arrival, evaluation_arrivals, step_arrivals
from worker.stage.steps.run import StageRun
from worker.transport.contract import PeerLost
from worker.transport.frames import Direction

pytestmark = pytest.mark.usefixtures("one_thread")


def local(made: Case, training: TrainingSpec) -> tuple[LocalPipeline, list[float], list[float]]:
    """One stage in this process: losses of every step, and of the evaluations after each."""
    programs, evaluations = made.programs((0,))
    pipeline = LocalPipeline(programs, training, made.tensors, eval_programs=evaluations, states=made.states)
    losses, held_out = [], []
    for step in range(training.steps):
        batches = [made.batches.of(step, micro) for micro in range(training.n_micro)]
        losses.append(pipeline.step(step, batches).loss)
        held_out.append(pipeline.evaluate(made.batches.held_out()))
    return pipeline, losses, held_out


def assert_same(a: Mapping[str, Mapping[str, Tensor]], b: Mapping[str, Mapping[str, Tensor]]) -> None:
    assert {n: sorted(t) for n, t in a.items()} == {n: sorted(t) for n, t in b.items()}
    for name, tensors in a.items():
        for key, value in tensors.items():
            assert torch.equal(value, b[name][key]), (name, key)


@pytest.mark.parametrize("schedule", list(ScheduleName))
@pytest.mark.parametrize("name", ["branches", "gpt2"])
def test_three_stages_over_links_end_in_the_bits_of_one(name: str, schedule: ScheduleName) -> None:
    made = case(name)
    reference, losses, held_out = local(made, TRAINING)
    crew = Crew(made, assign(made, cut_evenly(made.dag, 3), TRAINING, schedule))
    for step in range(TRAINING.steps):
        reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
        assert len(reports) == 3
        assert [r.stage.step_loss.mean for r in reports if r.stage.losses] == [losses[step]]
        crew.all("apply", step, scale_of(reports))
        found = [one.loss for one in crew.all("evaluate", step, Cancel()) if isinstance(one, Figures)]
        assert found == [held_out[step]]
    assert_same(crew.snapshot(), reference.snapshot())


@pytest.mark.parametrize("schedule", list(ScheduleName))
def test_a_tied_parameters_blocks_fold_over_links_to_the_bits_of_one_machine(schedule: ScheduleName) -> None:
    made = case("gpt2")
    training = replace(TRAINING, blocks=3)
    reference, losses, _ = local(made, training)
    one_block = local(made, TRAINING)[0].snapshot()
    assert any(not torch.equal(reference.snapshot()[n]["value"], t["value"]) for n, t in one_block.items())
    crew = Crew(made, assign(made, cut_evenly(made.dag, 3), training, schedule))
    for step in range(training.steps):
        reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
        assert [r.stage.step_loss.mean for r in reports if r.stage.losses] == [losses[step]]
        crew.all("apply", step, scale_of(reports))
    assert_same(crew.snapshot(), reference.snapshot())


SEVERAL_PIECES = [
    ("gpt2", 4, (0, 1, 2, 0)),  # the ring: both uses of a tied table are on one device
    ("gpt2", 5, (0, 1, 0, 1, 0)),
    ("gpt2", 6, (0, 1, 2, 2, 1, 0)),  # the V
    ("branches", 4, (0, 1, 1, 0)),
    ("branches", 5, (0, 1, 2, 0, 1)),
    ("mlp", 3, (0, 1, 0)),
    ("mlp", 3, (0, 0, 0)),
]


@pytest.mark.parametrize(
    ("schedule", "blocks"),
    sampled(
        2,
        [
            (ScheduleName.ONE_F_ONE_B, 1),
            (ScheduleName.ONE_F_ONE_B, 3),
            (ScheduleName.ZERO_BUBBLE, 3),
            (ScheduleName.ZERO_BUBBLE, 1),
        ],
    ),
)
@pytest.mark.parametrize(("name", "pieces", "owners"), SEVERAL_PIECES)
def test_stages_of_several_pieces_end_in_the_bits_of_one(
    name: str, pieces: int, owners: tuple[int, ...], schedule: ScheduleName, blocks: int
) -> None:
    made = case(name)
    ends_in_the_bits_of_one(made, cut_evenly(made.dag, pieces), owners, schedule, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "resnet", "branches"])
@pytest.mark.parametrize("seed", range(40))
def test_random_plans_of_several_pieces_end_in_the_bits_of_one(name: str, seed: int) -> None:
    a_random_plan_ends_in_the_bits_of_one(name, seed)


def test_values_of_an_evaluation_wait_for_nobody_who_waits_for_them() -> None:
    """Here a piece was to be a step's micro-batches ahead of one that its own worker's next piece feeds."""
    a_random_plan_ends_in_the_bits_of_one("resnet", 6)


def a_random_plan_ends_in_the_bits_of_one(name: str, seed: int) -> None:
    made, draw = case(name), random.Random(seed)
    pieces = draw.randrange(3, 9)
    starts = (0, *sorted(draw.sample(made.dag.cuttable(), pieces - 1)))
    drawn = [draw.randrange(4) for _ in range(pieces)]
    owners = tuple(list(dict.fromkeys(drawn)).index(owner) for owner in drawn)
    schedule = draw.choice([ScheduleName.ONE_F_ONE_B, ScheduleName.ZERO_BUBBLE, ScheduleName.GPIPE])
    ends_in_the_bits_of_one(made, starts, owners, schedule, draw.randrange(1, TRAINING.n_micro + 1))


def ends_in_the_bits_of_one(
    made: Case, starts: Sequence[int], owners: Sequence[int], schedule: ScheduleName, blocks: int
) -> None:
    training = replace(TRAINING, blocks=blocks)
    reference, losses, held_out = local(made, training)
    assignments = assign(made, starts, training, schedule, owners=owners)
    crew = Crew(made, assignments)
    for step in range(training.steps):
        reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
        assert len(reports) == max(owners) + 1
        assert [r.stage.step_loss.mean for r in reports if r.stage.losses] == [losses[step]]
        crew.all("apply", step, scale_of(reports))
        found = [one.loss for one in crew.all("evaluate", step, Cancel()) if isinstance(one, Figures)]
        assert found == [held_out[step]]
    assert_same(crew.snapshot(), reference.snapshot())
    declared = {
        (arrival.peer, a.worker_of(a.program.stage), arrival.key)
        for a in assignments
        for step in range(training.steps)
        for arrival in (*step_arrivals(a, step), *evaluation_arrivals(a, step))
    }
    assert set(crew.hub.sent) == declared, "nothing goes from a device to itself, or undeclared"
    assert len(crew.hub.sent) == len(declared)


def test_a_tied_table_of_both_ends_is_not_sent_where_one_device_has_them() -> None:
    made = case("gpt2")
    ring = assign(made, cut_evenly(made.dag, 4), TRAINING, ScheduleName.ONE_F_ONE_B, owners=(0, 1, 2, 0))
    chain = assign(made, cut_evenly(made.dag, 4), TRAINING, ScheduleName.ONE_F_ONE_B)
    tied = {Direction.TIED_PARTIAL, Direction.TIED_TOTAL}
    sent = [{a.key.direction for each in those for a in step_arrivals(each, 0)} for those in (ring, chain)]
    assert not sent[0] & tied
    assert tied <= sent[1]


@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (0, 1, 2, 0)])
def test_a_tied_table_that_is_frozen_stays_as_it_is_and_is_stored_once(owners: tuple[int, ...]) -> None:
    """As of a model with a tied head whose adapters alone are trained."""
    made = case("gpt2")
    programs, _ = made.programs(cut_evenly(made.dag, 4))
    (table,) = {tied.name for program in programs for tied in program.tied}
    frozen = ParamGroup((table,), frozen=True)
    training = replace(TRAINING, optimizer=replace(TRAINING.optimizer, groups=(frozen,)))
    reference, losses, _ = local(made, training)
    crew = Crew(
        made, assign(made, cut_evenly(made.dag, 4), training, ScheduleName.ONE_F_ONE_B, owners=owners)
    )
    for step in range(training.steps):
        reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
        assert [r.stage.step_loss.mean for r in reports if r.stage.losses] == [losses[step]]
        crew.all("apply", step, scale_of(reports))
    assert_same(crew.snapshot(), reference.snapshot())
    assert torch.equal(crew.snapshot()[table]["value"], made.tensors[table]["value"])


@pytest.mark.parametrize("schedule", [ScheduleName.ONE_F_ONE_B, ScheduleName.ZERO_BUBBLE])
def test_a_discarded_step_leaves_no_trace(schedule: ScheduleName) -> None:
    made = case("branches")
    reference, _, _ = local(made, TRAINING)
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, schedule))
    crew.all("run_step", 0, Cancel())
    for run in crew.runs:
        run.discard()
    for step in range(TRAINING.steps):
        crew.all("run_step", step, Cancel())
        crew.all("apply", step, 1.0)
    assert_same(crew.snapshot(), reference.snapshot())


def test_on_a_part_of_a_core_what_other_threads_do_counts_as_handling() -> None:
    made = case("branches")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    for run in crew.runs:
        used = iter([100.0, 101.0, 200.0, 201.0])  # CPU seconds of the whole process
        run._cpu = run.messages.cpu = CpuMeter(0.125, cpu_clock=used.__next__)
    handled: list[list[float]] = []
    for step in range(4):
        reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
        crew.all("apply", step, 1.0)
        if step == 1:
            crew.all("evaluate", step, Cancel())  # takes CPU, too, which is no step's
        handled.append([r.handling_s + r.forward_s + r.backward_s + r.optimizer_s for r in reports])
    assert max(handled[0] + handled[2]) < 5.0
    for at in (1, 3):
        assert all(6.0 < seconds < 10.0 for seconds in handled[at])  # 8 but for real moments between clocks


@pytest.mark.parametrize("blocks", [1, 3])
def test_every_message_was_declared_by_its_receiver(blocks: int) -> None:
    made = case("gpt2")
    training = replace(TRAINING, blocks=blocks)
    assignments = assign(made, cut_evenly(made.dag, 3), training, ScheduleName.ONE_F_ONE_B)
    crew = Crew(made, assignments)
    crew.all("run_step", 0, Cancel())
    crew.all("apply", 0, 1.0)
    crew.all("evaluate", 0, Cancel())
    declared = {
        (arrival.peer, a.worker_of(a.stage), arrival.key)
        for a in assignments
        for arrival in (*step_arrivals(a, 0), *evaluation_arrivals(a, 0))
    }
    assert set(crew.hub.sent) == declared
    assert len(crew.hub.sent) == len(declared)
    assert {key.direction for *_, key in declared} == set(Direction) - {
        Direction.EVALUATION_CODED,
        Direction.REPLAY,
        Direction.PART,  # of replicas
        Direction.TOTAL,
        Direction.COPY,  # of blobs
    }


def test_a_cancelled_step_stops_while_it_waits_for_a_neighbour() -> None:
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    cancel, ended = Cancel(), []

    def run() -> None:
        try:
            crew.runs[1].run_step(0, cancel)
        except Cancelled as stopped:
            ended.append(str(stopped))

    thread = threading.Thread(target=run)
    thread.start()
    cancel.set("released")
    thread.join(HUNG_S)
    assert ended == ["released"]


def test_a_wait_that_lasts_is_told_and_again_when_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.stage.steps.messages.POLL_S", 0.001)
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    cancel, told = Cancel(), []

    def notice(wait: LongWait) -> None:
        told.append(wait)
        if len(told) == 3:
            cancel.set("seen")

    run = crew.runs[1]
    run.messages.notice, run.messages.clock = notice, count(0, 25).__next__
    with pytest.raises(Cancelled):
        run.run_step(0, cancel)
    assert [wait.waited_s for wait in told] == [75, 150, 300]
    assert {(wait.peer, wait.key.direction, wait.key.micro) for wait in told} == {
        ("w-0", Direction.FORWARD, 0)
    }
    line = json.loads(told_of.waiting(told[0]).log.fields_json)
    (edge,) = {arrival.key.edge for arrival in step_arrivals(run.assignment, 0)} & {told[0].key.edge}
    expected = {"peer": "w-0", "direction": "forward", "step": 0, "micro": 0, "edge": edge, "waited_s": 75}
    assert line == expected


def test_a_lost_neighbour_ends_the_step_with_its_name() -> None:
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    for port in crew.hub.ports.values():
        port.receivers["job"].lost("w-0", "connection reset")
    with pytest.raises(PeerLost, match="w-0"):
        crew.runs[1].run_step(0, Cancel())


def sent_forward(crew: Crew, value: Callable[[Arrival], Tensor | None]) -> StageRun:
    """The second stage, which the first has sent these values."""
    for arrival in step_arrivals(crew.runs[1].assignment, 0):
        if arrival.key.direction is Direction.FORWARD:
            crew.links[0].send("w-1", arrival.key, value(arrival))
    return crew.runs[1]


def test_a_value_that_comes_as_a_zero_mark_is_its_senders_fault() -> None:
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    second = sent_forward(crew, lambda arrival: None)
    with pytest.raises(PeerLost, match="zero mark") as lost:
        second.run_step(0, Cancel())
    assert lost.value.peer == "w-0"


def test_an_index_out_of_range_is_the_fault_of_the_stage_that_sent_it() -> None:
    made = case("mlp")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ONE_F_ONE_B))
    second = sent_forward(crew, lambda arrival: torch.zeros(arrival.meta.shape))
    op = second.assignment.program.received[0].op
    second._stage.pieces[0]._ranges = IndexRanges({}, {op: Range(1, 9)}, {})
    with pytest.raises(PeerLost, match="holds the index 0") as lost:
        second.run_step(0, Cancel())
    assert lost.value.peer == "w-0"


def test_a_step_reports_its_times_and_spans() -> None:
    made = case("mlp")
    training = replace(TRAINING, n_micro=2)
    crew = Crew(made, assign(made, (0,), training, ScheduleName.GPIPE))
    report = crew.runs[0].run_step(0, Cancel())
    crew.runs[0].apply(0, 1.0)
    assert report.forward_s > 0
    assert report.backward_s > 0
    # Batches come from another thread: on a busy machine the stage waits for them.
    kinds = [span.kind for span in crew.runs[0].spans.take() if span.kind != "wait"]
    assert kinds == ["F", "B", "F", "B", "opt"] or kinds == ["F", "F", "B", "B", "opt"]
    assert crew.runs[0].run_step(1, Cancel()).optimizer_s > 0


def test_deferred_weight_gradients_are_taken_while_a_stage_waits() -> None:
    made = case("gpt2")
    crew = Crew(made, assign(made, cut_evenly(made.dag, 2), TRAINING, ScheduleName.ZERO_BUBBLE))
    last, first = crew.runs[1], crew.runs[0]
    slow, forward = threading.Event(), first._stage.forward
    backwards = []

    def held_back(micro: int, *arguments: object) -> dict[int, Tensor]:
        if micro == TRAINING.n_micro - 1:
            slow.wait(HUNG_S)  # until the other has nothing left to do but its weight gradients
        return forward(micro, *arguments)  # type: ignore[arg-type]

    first._stage.forward = held_back  # type: ignore[method-assign]
    take, backward = last._stage.weight_gradients, last._stage.backward

    def noted(micro: int, grads: Mapping[int, Tensor | None], piece: int) -> dict[int, Tensor | None]:
        backwards.append(micro)
        return backward(micro, grads, piece)

    def taken(piece: int) -> None:
        take(piece)
        if last._stage.owing is None and len(backwards) == TRAINING.n_micro - 1:
            slow.set()

    last._stage.backward = noted  # type: ignore[method-assign]
    last._stage.weight_gradients = taken  # type: ignore[method-assign]
    crew.all("run_step", 0, Cancel())
    assert slow.is_set()
    assert last._stage.owing is None
    kinds = [(span.kind, span.micro) for span in last.spans.take() if span.kind in "FIW"]
    at_last = kinds.index(("F", TRAINING.n_micro - 1))
    assert {micro for kind, micro in kinds[:at_last] if kind == "W"} == set(range(TRAINING.n_micro - 1))
    assert {micro for kind, micro in kinds[at_last:] if kind == "W"} == {TRAINING.n_micro - 1}


class Ragged(Batches):
    """The last held-out micro-batch has one row."""

    def held_out(self) -> list[dict[str, Tensor]]:
        *full, last = super().held_out()
        return [*full, {name: value[:1] for name, value in last.items()}]


def test_a_last_held_out_micro_batch_with_fewer_rows_goes_through_the_stages_too() -> None:
    made = case("gpt2")
    example = made.batches.example
    evaluation = replace(made.evaluation, tail=dag_at_rows(made.evaluation, 1))
    made = replace(made, evaluation=evaluation, batches=Ragged("gpt2"))
    starts = cut_evenly(made.dag, 2)
    programs, evaluations = made.programs(starts)
    whole = LocalPipeline(programs, TRAINING, made.tensors, eval_programs=evaluations, states=made.states)
    expected = whole.figures(made.batches.held_out())
    crew = Crew(made, assign(made, starts, TRAINING, ScheduleName.GPIPE))
    found = [one for one in crew.all("evaluate", 0, Cancel()) if isinstance(one, Figures)]
    assert found == [expected]
    means, weights = [], []
    net = copy.deepcopy(example.module).eval()
    for batch in made.batches.held_out():
        with torch.no_grad():
            means.append(float(net(**batch).loss))
        weights.append(int((batch["labels"][:, 1:] != -100).sum()))
    exact = sum(m * w for m, w in zip(means, weights, strict=True)) / sum(weights)
    assert expected.loss == pytest.approx(exact, rel=1e-5)
