"""Reports of several replicas of one step, taken together."""

from __future__ import annotations

from dataclasses import replace

from atoll.exchange import Exchange
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, Replica, StageSpec
from coordinator.messages.events import StepReady
from coordinator.pipeline.joined import disagreement, loss_of, ranks_of, square_norms


def stage(start: int, stop: int, worker: str) -> StageSpec:
    return StageSpec(start, stop, 0, 0, worker, 0)


PLAN = Plan(
    "j", 1, "", "", "", ScheduleName.ONE_F_ONE_B, 3,
    (
        Replica((0, 1), (stage(0, 2, "a"), stage(2, 4, "b"))),
        Replica((1, 3), (stage(0, 4, "c"),)),
    ),
    blocks=3, exchange=Exchange(),
)  # fmt: skip
NAN = float("nan")


def ready(losses: tuple[float, ...] = (), norms: tuple[float, ...] = ()) -> StepReady:
    return StepReady("j", 1, 0, losses=losses, square_norms=norms)


REPORTS = {0: ready((), (1.0, 2.0)), 1: ready((0.1,), (3.0,)), 2: ready((0.2, 0.3), (1.0, 2.0, 3.0))}


def test_losses_are_added_in_the_order_of_the_micro_batches() -> None:
    assert loss_of(PLAN, dict(reversed(REPORTS.items()))).mean == (0.1 + 0.2) + 0.3


def test_norms_of_gradients_that_all_replicas_hold_count_once() -> None:
    assert square_norms(PLAN, REPORTS) == [1.0, 2.0, 3.0]
    assert ranks_of(PLAN, 0) == (0, 1)
    assert disagreement(PLAN, REPORTS) is None


def test_a_ring_reports_its_first_and_last_parameters_together() -> None:
    """The other replica has them in the order of the ops."""
    ring = REPORTS | {0: ready((0.1,), (1.0, 3.0)), 1: ready((), (2.0,))}
    assert disagreement(PLAN, ring) is None


def test_a_replica_with_other_gradients_is_named() -> None:
    other = REPORTS | {2: ready((0.2, 0.3), (1.0, 2.0, 3.0000000000000004))}
    found = disagreement(PLAN, other)
    assert found is not None
    assert "those of c" in found.words
    assert found.ranks == (), "one replica against another: nobody knows which"
    shown = {0: ready((), (NAN,)), 1: ready((0.1,), (2.0,)), 2: ready((0.2, 0.3), (NAN, 2.0))}
    assert disagreement(PLAN, shown) is None


def test_a_share_without_all_of_its_losses_is_named() -> None:
    found = disagreement(PLAN, REPORTS | {2: ready((0.2,), (1.0, 2.0, 3.0))})
    assert found is not None
    assert "replica 1 reports 1 losses of 2" in found.words
    assert found.ranks == (2,)


def test_a_stage_before_the_one_with_the_loss_that_reports_some_is_named() -> None:
    more = REPORTS | {0: ready((7.0,), (1.0, 2.0))}
    found = disagreement(PLAN, more)
    assert found is not None
    assert found.words == "losses of replica 0 come from a beside b"
    assert found.ranks == (0,)
    assert loss_of(PLAN, more).mean == (0.1 + 0.2) + 0.3


def test_a_pipelines_loss_is_the_last_stages_word() -> None:
    alone = replace(PLAN, replicas=(replace(PLAN.replicas[0], micros=(0, 3)),), exchange=None)
    assert loss_of(alone, {0: ready((7.0,)), 1: ready((0.5,))}).mean == 0.5
