"""Replicas whose stages run in threads over real links: the bits of one machine with as many blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from atoll.collective import TOTAL
from atoll.exchange import Exchange
from atoll.gradient_exchange import Bucket
from atoll.job import Optimizer, ParamGroup, TrainingSpec
from atoll.messages.to_worker import PeerLink
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from atoll.program import stage_programs
from atoll.step_loss import step_loss
from tests.inprocess.pipeline import LocalPipeline
from tests.worker.stage.steps.crew import TRAINING, Case, Crew, case, cut_evenly
from worker.cancel import Cancel
from worker.exchange.bucket import Outgoing
from worker.stage.assignment import Assignment
from worker.stage.reports import StepReport
from worker.stage.steps.expected import step_arrivals
from worker.stage.steps.joining import GradientExchange
from worker.transport.contract import Paths, PeerLost
from worker.transport.frames import Direction

pytestmark = pytest.mark.usefixtures("one_thread")
FOUR = replace(TRAINING, blocks=4, optimizer=Optimizer(lr=3e-3, weight_decay=0.01, clip_norm=0.5))


def loss_of(reports: Sequence[StepReport]) -> float:
    """What the coordinator makes of all replicas' losses and their weights."""
    return step_loss(
        [loss for report in reports for loss in report.stage.losses],
        [weight for report in reports for weight in report.stage.weights],
    ).mean


def assigned(
    made: Case,
    training: TrainingSpec,
    cuts: Sequence[tuple[tuple[int, int], Sequence[int]]],
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
    exchange: Exchange | None = None,
) -> list[Assignment]:
    """Assignments of a plan with a replica for each of (micro-batches, starts)."""
    replicas = tuple(
        Replica(
            micros,
            tuple(
                StageSpec(
                    a, b, 0, 1, f"r{number}.{at}", len(starts) - at - 1, schedule is ScheduleName.ZERO_BUBBLE
                )
                for at, (a, b) in enumerate(zip(starts, (*starts[1:], len(made.dag.ops)), strict=True))
            ),
        )
        for number, (micros, starts) in enumerate(cuts)
    )
    plan = Plan(
        "job", 1, "", "", "test", schedule, training.n_micro, replicas,
        blocks=training.blocks, exchange=exchange or Exchange(),
    )  # fmt: skip
    peers = tuple(PeerLink(place.worker, Paths()) for place in plan.places)
    return [
        Assignment("job", 1, training, p, evaluation, plan, peers, {}, made.states, 0, replica=number)
        for number, (_, starts) in enumerate(cuts)
        for p, evaluation in zip(*made.programs(starts), strict=True)
    ]


def one_machine(made: Case, training: TrainingSpec) -> LocalPipeline:
    return LocalPipeline(stage_programs(made.dag, (0,)), training, made.tensors, states=made.states)


def both(crew: Crew, whole: LocalPipeline, step: int) -> tuple[list[StepReport], tuple[float, ...]]:
    """Compute and apply a step on the crew and on one machine; the crew's reports, and the other's norms."""
    expected = whole.step(step, [crew.made.batches.of(step, micro) for micro in range(FOUR.n_micro)])
    reports = [r for r in crew.all("run_step", step, Cancel()) if isinstance(r, StepReport)]
    assert loss_of(reports) == expected.loss
    crew.all("apply", step, expected.gradient_scale)
    return reports, expected.square_norms


def same_bits(crew: Crew, whole: LocalPipeline) -> None:
    held = whole.snapshot()
    for run in crew.runs:
        for name, tensors in run.snapshot().items():
            for key, value in tensors.items():
                assert torch.equal(value, held[name][key]), (name, key)


@pytest.mark.parametrize(
    ("stages", "schedule", "sites"),
    [
        ((1, 1), ScheduleName.ZERO_BUBBLE, ()),
        ((2, 1), ScheduleName.ONE_F_ONE_B, ()),
        ((2, 2, 1), ScheduleName.ZERO_BUBBLE, ()),
        ((1, 1, 1, 1), ScheduleName.ONE_F_ONE_B, (0, 0, 1, 1)),
        ((2, 1, 1), ScheduleName.ONE_F_ONE_B, (0, 1, 1, 1)),  # whose first stage is elsewhere than its last
        ((1, 1, 1, 1), ScheduleName.ZERO_BUBBLE, (0, 1, 1, 2)),
    ],
)
def test_replicas_end_in_the_bits_of_one_machine(
    stages: tuple[int, ...], schedule: ScheduleName, sites: tuple[int, ...]
) -> None:
    made = case("gpt2")
    ends = {2: [(0, 1), (1, 4)], 3: [(0, 2), (2, 3), (3, 4)], 4: list(pairwise(range(5)))}[len(stages)]
    cuts = [(micros, cut_evenly(made.dag, count)) for micros, count in zip(ends, stages, strict=True)]
    exchange = Exchange(bucket_bytes=4096, sites=sites, inner=Exchange() if sites else None)
    crew = Crew(made, assigned(made, FOUR, cuts, schedule, exchange))
    whole = one_machine(made, FOUR)
    for step in range(FOUR.steps):
        reports, square_norms = both(crew, whole, step)
        assert len(reports) == sum(stages)
        first = [norm for report in reports[: stages[0]] for norm in report.stage.square_norms]
        assert tuple(first) == square_norms
    same_bits(crew, whole)


@pytest.mark.parametrize("schedule", [ScheduleName.GPIPE, ScheduleName.ZERO_BUBBLE])
@pytest.mark.parametrize(
    ("lost", "ends"), [(0, ((0, 1), (1, 4))), (1, ((0, 3), (3, 4))), (2, ((0, 2), (2, 4)))]
)
def test_replicas_go_on_without_one_in_the_bits_of_one_machine(
    lost: int, ends: tuple[tuple[int, int], ...], schedule: ScheduleName
) -> None:
    """Whichever has the first blocks then; and one goes on without the second."""
    made = case("gpt2")
    stages, micros = (1, 2, 1), [(0, 2), (2, 3), (3, 4)]
    cuts = [(share, cut_evenly(made.dag, count)) for share, count in zip(micros, stages, strict=True)]
    crew = Crew(made, assigned(made, FOUR, cuts, schedule, Exchange(bucket_bytes=4096)))
    whole = one_machine(made, FOUR)
    for step, shares in enumerate((None, ends, ((0, 4),))):
        if shares is not None:
            without(crew, lost if step == 1 else 1, shares, step)
        both(crew, whole, step)
    same_bits(crew, whole)


def test_a_replica_more_begins_with_the_state_of_the_others() -> None:
    made = case("gpt2")
    cut = cut_evenly(made.dag, 2)
    alone = [
        replace(given, plan=replace(given.plan, exchange=None))
        for given in assigned(made, FOUR, [((0, 4), cut)])
    ]
    crew, whole = Crew(made, alone), one_machine(made, FOUR)
    for step in range(FOUR.steps):
        if step == 1:
            state = {**made.tensors, **crew.snapshot()}
            together = assigned(made, FOUR, [((0, 3), cut), ((3, 4), cut)])
            plan = replace(together[0].plan, version=2)
            for run in crew.runs:
                run.reconfigure(run.assignment.reconfigured(plan, together[0].links, step))
            for given in together[2:]:
                run = crew.run_of(replace(given, version=2, plan=plan, first_step=step), state)
                run.open(step)
                crew.runs.append(run)
        both(crew, whole, step)
    same_bits(crew, whole)


@pytest.mark.parametrize("alone", [False, True])
def test_who_missed_a_plan_goes_on_with_other_shares_in_the_bits_of_one_machine(alone: bool) -> None:
    """Of a replica that came and was lost again before its stages were loaded."""
    made = case("gpt2")
    cut = cut_evenly(made.dag, 2)
    before = [((0, 4), cut)] if alone else [((0, 2), cut), ((2, 4), (0,))]
    given = assigned(made, FOUR, before, ScheduleName.GPIPE, Exchange(rates=() if alone else (1.0, 2.0, 4.0)))
    if alone:
        given = [replace(one, plan=replace(one.plan, exchange=None)) for one in given]
    crew, whole = Crew(made, given), one_machine(made, FOUR)
    for step in range(FOUR.steps):
        if step == 1:
            shares = [(0, 4)] if alone else [(0, 1), (1, 4)]
            plan = crew.runs[0].assignment.plan
            replicas = [replace(r, micros=s) for r, s in zip(plan.replicas, shares, strict=True)]
            exchange = None if alone else Exchange()
            later = replace(
                plan,
                version=3,
                schedule=ScheduleName.ONE_F_ONE_B,
                replicas=tuple(replicas),
                exchange=exchange,
            )
            for run in crew.runs:
                run.reconfigure(run.assignment.reconfigured(later, run.assignment.links, step))
        both(crew, whole, step)
    same_bits(crew, whole)


def without(crew: Crew, lost: int, shares: Sequence[tuple[int, int]], step: int) -> None:
    """Have the other replicas go on with these shares of a step."""
    plan = crew.runs[0].assignment.plan
    kept = [replica for number, replica in enumerate(plan.replicas) if number != lost]
    replicas = tuple(replace(r, micros=micros) for r, micros in zip(kept, shares, strict=True))
    schedule = plan.schedule
    if schedule is ScheduleName.GPIPE:
        schedule = ScheduleName.ONE_F_ONE_B
    exchange = plan.exchange if len(replicas) > 1 else None
    later = replace(plan, version=plan.version + 1, replicas=replicas, schedule=schedule, exchange=exchange)
    crew.runs = [run for run in crew.runs if run.assignment.replica != lost]
    for run in crew.runs:
        run.reconfigure(run.assignment.reconfigured(later, run.assignment.links, step))


@pytest.mark.parametrize("count", [2, 3])
def test_an_exchange_carries_what_owners_need_and_no_more(count: int) -> None:
    made = case("gpt2")
    training = replace(FOUR, n_micro=count, blocks=count)
    given = assigned(made, training, [((at, at + 1), (0,)) for at in range(count)])
    crew = Crew(made, given)
    crew.all("run_step", 0, Cancel())
    dense = 4 * sum(bucket.elements for bucket in given[0].buckets)
    for sender in crew.hub.ports:
        keys = [
            k
            for who, _, k in crew.hub.sent
            if who == sender and k.direction in (Direction.PART, Direction.TOTAL)
        ]
        sent = sum(len(crew.hub.packets[key][0]) for key in keys)
        # 2 (R - 1) / R of the gradients, beside headers.
        assert sent - 2 * (count - 1) / count * dense == pytest.approx(
            0.0, abs=0.02 * dense + 128 * len(keys)
        )


def exchanged(crew: Crew) -> dict[tuple[str, str], int]:
    """Bytes of the messages that replicas exchanged, by sender and receiver."""
    found: dict[tuple[str, str], int] = {}
    for sender, receiver, key in crew.hub.sent:
        if key.direction in (Direction.PART, Direction.TOTAL):
            found[sender, receiver] = found.get((sender, receiver), 0) + len(crew.hub.packets[key][0])
    return found


def test_with_a_frozen_base_what_replicas_exchange_is_the_trained_share() -> None:
    made = case("gpt2")
    training = replace(FOUR, n_micro=2, blocks=2)
    adapters = [name for name in made.states if ".mlp." in name]
    frozen = tuple(ParamGroup((name,), frozen=True) for name in made.states if name not in adapters)
    sizes = {}
    for groups in ((), frozen):
        tuned = replace(training, optimizer=replace(training.optimizer, groups=groups))
        crew = Crew(made, assigned(made, tuned, [((0, 1), (0,)), ((1, 2), (0,))]))
        crew.all("run_step", 0, Cancel())
        sizes[bool(groups)] = sum(exchanged(crew).values())
    every = {name: state.meta.elements for name, state in made.states.items() if state.requires_grad}
    share = sum(every[name] for name in adapters) / sum(every.values())
    print(f"trained {share:.4f} of the elements, exchanged {sizes[True] / sizes[False]:.4f} of the bytes")
    assert sizes[True] / sizes[False] == pytest.approx(share, rel=0.02)


def test_parts_of_blocks_that_are_whole_leave_before_the_step_is_over() -> None:
    made = case("gpt2")
    crew = Crew(made, assigned(made, FOUR, [((0, 1), (0,)), ((1, 4), (0,))]))
    crew.all("run_step", 0, Cancel())
    stage = crew.runs[1]
    assert [tuple(bucket.labels) for bucket in stage.assignment.buckets] == [(1, 2, 3)] * len(
        stage.assignment.buckets
    )
    order = [key.micro for who, _, key in crew.hub.sent if who == "r1.0" and key.direction is Direction.PART]
    assert order == sorted(order)


def test_parts_leave_while_the_backward_still_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case("mlp")
    training = replace(FOUR, n_micro=2, blocks=2)
    crew = Crew(
        made, assigned(made, training, [((0, 1), (0,)), ((1, 2), (0,))], exchange=Exchange(bucket_bytes=1))
    )
    at_once: list[bool] = []
    send = GradientExchange._sent

    def noting(self: GradientExchange, bucket: Bucket, messages: Iterable[Outgoing]) -> None:
        found = list(messages)
        at_once.extend(not self._stage.whole_blocks for message in found if message.label != TOTAL)
        send(self, bucket, found)

    monkeypatch.setattr(GradientExchange, "_sent", noting)
    crew.all("run_step", 0, Cancel())
    assert any(at_once)


def test_a_part_that_comes_as_a_zero_mark_is_its_senders_fault() -> None:
    made = case("gpt2")
    crew = Crew(made, assigned(made, FOUR, [((0, 2), (0,)), ((2, 4), (0,))]))
    first, second = crew.runs[0], crew.links[1]
    for arrival in step_arrivals(first.assignment, 0):
        if arrival.key.direction is Direction.PART:
            second.send(first.assignment.worker_of(0), arrival.key, None)
    with pytest.raises(PeerLost, match="a part came as a zero mark") as lost:
        first.run_step(0, Cancel())
    assert lost.value.peer == "r1.0"
