"""The ledger keeps the checkpoint nearest to the best held-out loss, however old it is."""

from __future__ import annotations

import math

from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.facts import Evaluated, JobRecord, Ledger, PlanAdopted, WorkRejected
from coordinator.messages.held_out import MOST_BESTS, Best, HeldOut
from tests.coordinator.messages.test_agreed import begun, plan, store, train


def evaluate(ledger: Ledger, step: int, loss: float) -> None:
    ledger.apply(Evaluated("job", step, loss, counts=True))


def steps(record: JobRecord) -> list[int]:
    return [checkpoint.step for checkpoint in record.checkpoints]


def best_step(record: JobRecord) -> int | None:
    return record.best.step if record.best is not None else None


def losses(*found: float) -> HeldOut:
    known = HeldOut()
    for step, loss in enumerate(found, 1):
        known = known.after(step, loss)
    return known


def test_the_lowest_loss_is_the_best_and_of_two_as_low_the_first() -> None:
    known = losses(3.0, 2.0, 2.0, math.nan, 2.5)
    assert (known.best, known.newest, known.since) == (Best(2, 2.0), 5, 3)
    assert losses(math.nan, math.inf).best is None
    assert losses(math.nan, 1.0).best == Best(2, 1.0)


def test_an_evaluation_that_is_repeated_counts_once_unless_it_is_better() -> None:
    known = losses(3.0, 2.0, 2.5)
    assert known.after(3, 2.5) == known.after(2, 2.0) == known
    assert known.after(3, 1.5) == HeldOut((Best(1, 3.0), Best(2, 2.0), Best(3, 1.5)), 3, 0)
    assert known.after(1, 1.5).bests == (Best(1, 1.5),)


def test_wrong_steps_take_their_losses_with_them() -> None:
    known = losses(3.0, 2.0, 1.0, 1.5)
    assert known.until(2) == HeldOut((Best(1, 3.0), Best(2, 2.0)), 2, 0)
    assert known.until(4) == known
    assert len(losses(*(1.0 / at for at in range(1, 100))).bests) == MOST_BESTS


def test_the_best_checkpoint_stays_beside_the_newest_two_and_its_blobs_are_needed() -> None:
    ledger = begun()
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.6), (50, 2.7)):
        train(ledger, step)
        store(ledger, step)
        evaluate(ledger, step, loss)
    record = ledger.jobs["job"]
    assert (steps(record), best_step(record)) == ([20, 40, 50], 20)
    assert f"{20:064x}" in ledger.referenced_blobs()
    assert ledger.take_superseded() == {f"{step:064x}" for step in (10, 30)}
    evaluate(ledger, 60, 1.9)
    train(ledger, 60)
    store(ledger, 60)
    assert (steps(record), best_step(record)) == ([50, 60], 60)
    assert ledger.take_superseded() == {f"{step:064x}" for step in (20, 40)}


def test_the_nearest_checkpoint_may_be_stored_before_or_after_the_evaluation() -> None:
    ledger = begun()
    record = train(ledger, 40)
    store(ledger, 10)
    evaluate(ledger, 18, 1.0)
    assert best_step(record) == 10
    store(ledger, 20)
    assert best_step(record) == 20
    for step in (30, 40, 50):
        store(ledger, step)
    assert (steps(record), best_step(record)) == ([20, 40, 50], 20)


def test_a_job_without_a_held_out_loss_keeps_the_newest_two_alone() -> None:
    ledger = begun()
    record = train(ledger, 40)
    for step in (10, 20, 30):
        store(ledger, step)
        ledger.apply(Evaluated("job", step, float(step)))  # of a journal whose best one may be swept
    assert (steps(record), record.best, record.held_out) == ([20, 30], None, HeldOut())
    assert record.eval_loss == 30.0


def test_a_rejected_best_gives_way_to_the_best_before_it() -> None:
    ledger = begun()
    for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0)):
        train(ledger, step)
        store(ledger, step)
        evaluate(ledger, step, loss)
    record = ledger.jobs["job"]
    assert best_step(record) == 30
    ledger.apply(WorkRejected("job", 20, "b", "wrong"))
    assert (steps(record), best_step(record), record.held_out.best) == ([20], 20, Best(20, 2.0))


def test_steps_that_are_done_again_leave_the_best_as_it_is_and_a_snapshot_holds_it() -> None:
    ledger = begun()
    for step, loss in ((10, 2.0), (20, 2.5), (30, 2.6)):
        train(ledger, step)
        store(ledger, step)
        evaluate(ledger, step, loss)
    known = ledger.jobs["job"].held_out
    ledger.apply(PlanAdopted("job", plan(2, "a", "c")))
    evaluate(ledger, 30, 2.6)
    assert ledger.jobs["job"].held_out == known
    again = from_json(Ledger, to_json(ledger)).jobs["job"]
    assert (again.held_out, steps(again), best_step(again)) == (known, [10, 20, 30], 10)
