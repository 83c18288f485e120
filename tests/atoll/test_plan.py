"""A plan's places, actions and checks: which worker runs which stage of which replica, by rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import PlanError
from atoll.exchange import Exchange
from atoll.job import TrainingSpec
from atoll.microbatch import Action, ScheduleName, Work
from atoll.opdag import Kind, LeafRef, OpDag, OpNode, Source, StateMeta, TensorMeta
from atoll.plan import LinkSpec, Piece, Place, Plan, Replica, StageSpec, one_replica, stage_of, validate

META = TensorMeta((2,), "float32")
TRAINING = TrainingSpec(1, 4, blocks=2)


def dag(buffer: str = "fixed", mutated: bool = False) -> OpDag:
    """Three ops; the last two must stay in one stage."""
    leaves = (LeafRef(Source.INPUT, "x"), LeafRef(Source.BUFFER, buffer), LeafRef(Source.PARAMETER, "w"))
    ops = tuple(
        OpNode(f"op{at}", Kind.LOSS, "aten.add.Tensor", (leaf,), (), (META,))
        for at, leaf in enumerate(leaves)
    )
    buffers = {buffer: StateMeta(META, mutated=mutated)}
    return OpDag(ops, {"x": META}, {"w": StateMeta(META, True)}, buffers, {}, 2, unsplittable=((1, 3),))


def cut(*starts: int, names: str) -> tuple[StageSpec, ...]:
    return tuple(
        StageSpec(a, b, 0, 0, name, 1) for a, b, name in zip(starts, (*starts[1:], 3), names, strict=True)
    )


def plan(*replicas: Replica, schedule: ScheduleName = ScheduleName.ONE_F_ONE_B) -> Plan:
    exchange = Exchange() if len(replicas) > 1 else None
    return Plan("job", 1, "", "", "even", schedule, 4, replicas, blocks=2, exchange=exchange)


ONE = Replica((0, 4), cut(0, 1, names="ab"))
FIRST, SECOND = Replica((0, 2), cut(0, 1, names="ab")), Replica((2, 4), cut(0, names="c"))


def test_with_one_replica_a_rank_is_a_stage() -> None:
    found = plan(ONE)
    assert found.places == (Place("a", 0, 0), Place("b", 1, 0))
    assert [found.rank_of(worker) for worker in "abc"] == [0, 1, None]
    assert (found.stages, found.links) == (ONE.stages, ())
    assert found.replicas == one_replica(4, ONE.stages)


def test_replicas_come_one_after_another_each_in_the_order_of_its_stages() -> None:
    found = plan(FIRST, SECOND)
    assert [(place.worker, place.stage, place.replica) for place in found.places] == [
        ("a", 0, 0), ("b", 1, 0), ("c", 0, 1),
    ]  # fmt: skip
    assert found.rank_of("c") == 2


def test_who_takes_a_plan_of_two_replicas_for_a_pipeline_hears_of_it() -> None:
    with pytest.raises(PlanError, match="2 replicas where one"):
        _ = plan(FIRST, SECOND).stages


@pytest.mark.parametrize("schedule", ScheduleName)
def test_a_rank_works_on_its_replicas_micro_batches(schedule: ScheduleName) -> None:
    found = plan(FIRST, SECOND, schedule=schedule)
    whole = replace(plan(Replica((0, 2), FIRST.stages), schedule=schedule), n_micro=2)
    assert found.actions(0) == whole.actions(0)
    assert found.actions(2) == tuple(Action(a.work, a.micro + 2) for a in found.actions(0))
    assert [a.micro for a in found.actions(2) if a.work is Work.FORWARD] == [2, 3]


def test_new_links_change_nothing_else() -> None:
    links = (LinkSpec(0, 1, "fp16"),)
    assert plan(ONE).relinked(2, links) == replace(plan(replace(ONE, links=links)), version=2)


def test_valid_plans_are_valid() -> None:
    validate(plan(ONE), dag(), TRAINING)
    validate(plan(FIRST, SECOND), dag(), TRAINING)
    for rule in ("diloco", "streaming_diloco", "sparseloco", "wagma", "swarm"):
        validate(replace(plan(FIRST, SECOND), exchange=Exchange(rule, every=4)), dag(), TRAINING)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (plan(), "no replicas"),
        (plan(Replica((0, 4), ())), "no stages"),
        (plan(replace(ONE, stages=cut(0, 2, names="ab"))), "stage 1 begins at op 2, inside a group"),
        (plan(replace(ONE, stages=ONE.stages[:1])), "stages end at op 1, the DAG has 3"),
        (plan(replace(ONE, stages=ONE.stages[1:])), "expected to begin at 0"),
        (plan(replace(ONE, links=(LinkSpec(0, 2),))), "a link from piece 0 to 2, but there are 2"),
        (plan(replace(ONE, stages=cut(0, 1, names="aa"))), "two places: a"),
        (plan(FIRST), "replicas end at micro-batch 2, the step has 4"),
        (plan(SECOND), "expected to begin at 0"),
        (plan(FIRST, replace(SECOND, micros=(2, 2))), "hold at least one"),
        (plan(FIRST, replace(SECOND, stages=cut(1, names="c"))), "replica 1: stage 0 covers"),
        (plan(FIRST, replace(SECOND, stages=cut(0, names="a"))), "two places: a"),
        (plan(replace(FIRST, micros=(0, 3)), replace(SECOND, micros=(3, 4))), "blocks end at 2, 4"),
        (replace(plan(FIRST, SECOND), exchange=None), "2 replicas without an exchange"),
        (replace(plan(ONE), exchange=Exchange()), "1 replicas with an exchange"),
        (replace(plan(FIRST, SECOND), exchange=Exchange(every=0)), "exchange every 0 steps"),
        (replace(plan(ONE), blocks=1), "in 1 blocks, training declares 4 in 2"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_with_what_is_wrong(wrong: Plan, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        validate(wrong, dag(), TRAINING)


def test_buffers_that_training_writes_are_replicated_only_where_the_owner_allows_averages() -> None:
    written = dag("norm.running_mean", mutated=True)
    validate(plan(ONE), written, TRAINING)
    with pytest.raises(PlanError, match=r"1 buffers, as norm\.running_mean"):
        validate(plan(FIRST, SECOND), written, TRAINING)
    validate(plan(FIRST, SECOND), written, replace(TRAINING, average_buffers=True))


def test_who_has_the_last_piece_that_evaluates_has_the_held_out_loss() -> None:
    both = tuple(stage_of(name, (Piece(a, a + 1, a, a + 1, 0),)) for a, name in enumerate("ab"))
    assert plan(replace(ONE, stages=both)).evaluator == 1
    ring = (stage_of("a", (Piece(0, 1, 0, 1, 1), Piece(2, 3, 2, 3, 0))), both[1])
    assert plan(replace(ONE, stages=ring)).evaluator == 0
    idle = (ring[0].with_pieces((Piece(0, 1, 0, 1, 1), Piece(2, 3, 3, 3, 0))), both[1])
    assert plan(replace(ONE, stages=idle)).evaluator == 1
    assert plan(replace(ONE, stages=cut(0, 1, names="ab"))).evaluator == 1  # nobody evaluates


def test_a_step_of_signs_is_not_divided_by_the_weight_of_its_loss() -> None:
    signs = replace(plan(FIRST, SECOND), exchange=Exchange("demo"))
    assert (signs.divisor(40.0), signs.divisor(0.0)) == (1.0, 0.0)
    assert replace(plan(FIRST, SECOND), exchange=Exchange("gtopk")).divisor(40.0) == 40.0
    assert replace(plan(FIRST, SECOND), exchange=Exchange("diloco", every=5)).divisor(40.0) == 1.0
