"""What the ledger keeps of checks: digests since the checkpoint, who computed, a state to go back to."""

from __future__ import annotations

from atoll.dataset_spec import DataSpec
from atoll.job import JobSpec, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import LinkSpec, Plan, StageSpec, one_replica
from coordinator.messages.facts import (
    MOST_REPLAYED,
    CheckpointStored,
    JobRecord,
    JobSubmitted,
    Ledger,
    PlanAdopted,
    Reconfigured,
    SpotChecked,
    StepCommitted,
    WorkRejected,
)
from coordinator.pipeline.health.spot_checks import trusted

HASH = "ab" * 32


def plan(version: int, *workers: str) -> Plan:
    stages = tuple(StageSpec(at, at + 1, 0, 0, worker, 1) for at, worker in enumerate(workers))
    links = tuple(LinkSpec(at, at + 1) for at in range(len(workers) - 1))
    return Plan("job", version, HASH, "", "even", ScheduleName.ONE_F_ONE_B, 2, one_replica(2, stages, links))


def begun(*workers: str) -> Ledger:
    """Return the ledger of a job that trains on these workers."""
    ledger = Ledger()
    spec = JobSpec("job", TrainingSpec(1000, 2), HASH, "", {"w": HASH}, DataSpec((), 8, 1), None)
    ledger.apply(JobSubmitted("job", "", spec, 0, {}, 0.0))
    ledger.apply(PlanAdopted("job", plan(1, *(workers or ("a", "b")))))
    return ledger


def train(ledger: Ledger, until: int) -> JobRecord:
    """Commit steps until so many are, each with digests that name it."""
    record = ledger.jobs["job"]
    for step in range(record.steps, until):
        ledger.apply(StepCommitted("job", 1, step, 1.0, 0.0, 0.5, digests=(f"a{step}", f"b{step}")))
    return record


def store(ledger: Ledger, step: int) -> None:
    ledger.apply(CheckpointStored("job", step, {"w": f"{step:064x}"}))


def test_digests_are_kept_since_the_newest_checkpoint_alone() -> None:
    ledger = begun()
    train(ledger, 7)
    store(ledger, 5)
    record = train(ledger, 8)
    assert record.digests == [("a5", "b5"), ("a6", "b6"), ("a7", "b7")]
    assert len(record.scales) == 3


def test_digests_are_bounded_like_scales() -> None:
    record = train(begun(), 3 * MOST_REPLAYED)
    assert len(record.digests) == len(record.scales) < 2 * MOST_REPLAYED
    assert record.digests[-1] == (f"a{record.steps - 1}", f"b{record.steps - 1}")


def test_who_computed_a_step_is_known_beyond_a_takeover() -> None:
    ledger = begun("a", "b")
    train(ledger, 4)
    ledger.apply(Reconfigured("job", 2, 4, 1, ("a", "c"), (1,), "b is lost"))
    record = train(ledger, 6)
    assert [record.worker_at(1, step) for step in range(6)] == ["b", "b", "b", "b", "c", "c"]
    store(ledger, 5)
    assert record.worker_at(1, 5) == "c"
    assert record.worker_at(0, 5) == "a"


def test_a_checkpoint_that_every_stage_is_agreed_through_stays_however_old() -> None:
    ledger = begun()
    for step in (10, 20):
        train(ledger, step)
        store(ledger, step)
    ledger.apply(SpotChecked("job", 0, 10, 18, "c"))
    ledger.apply(SpotChecked("job", 1, 10, 12, "c"))
    for step in (30, 40, 50):
        record = train(ledger, step)
        store(ledger, step)
    assert [checkpoint.step for checkpoint in record.checkpoints] == [10, 40, 50]
    assert f"{10:064x}" in ledger.referenced_blobs()
    assert ledger.superseded == {f"{step:064x}" for step in (20, 30)}
    for rank in (0, 1):
        ledger.apply(SpotChecked("job", rank, 50, 58, "c"))
    train(ledger, 60)
    store(ledger, 60)
    assert [checkpoint.step for checkpoint in record.checkpoints] == [50, 60]


def test_replaced_blobs_that_are_to_stay_are_handed_out_another_time() -> None:
    ledger = begun()
    first, second, *_ = (f"{step:064x}" for step in (10, 20, 30, 40))
    for step in (10, 20, 30, 40):
        train(ledger, step)
        store(ledger, step)
    assert ledger.take_superseded({first, HASH}) == {second}
    assert ledger.take_superseded() == {first}
    assert ledger.take_superseded() == set()


def test_work_goes_on_from_what_the_suspect_s_own_stage_is_agreed_through() -> None:
    ledger = begun()
    for step in (10, 20, 30):
        record = train(ledger, step)
        store(ledger, step)
        if step == 10:
            ledger.apply(SpotChecked("job", 0, 0, 10, "c"))
            ledger.apply(SpotChecked("job", 1, 0, 10, "c"))
    assert [checkpoint.step for checkpoint in record.checkpoints] == [10, 20, 30]
    ledger.apply(SpotChecked("job", 0, 20, 25, "c"))
    assert trusted(record, 0, base=30, step=33).step == 20, "newer than what was agreed is not trusted"
    assert trusted(record, 1, base=30, step=33).step == 10
    assert trusted(record, 1, base=0, step=7) == record.start, "nor is what follows a wrong step"


def test_a_checkpoint_from_which_nothing_comes_out_the_same_is_not_trusted() -> None:
    ledger = begun()
    record = train(ledger, 10)
    store(ledger, 10)
    train(ledger, 15)
    ledger.apply(SpotChecked("job", 0, 0, 10, "c"))
    assert trusted(record, 0, base=10, step=10) == record.start
    assert trusted(record, 0, base=10, step=11).step == 10


def test_rejected_work_counts_no_more_and_no_plan_goes_on_with_it() -> None:
    ledger = begun()
    for step in (10, 20):
        record = train(ledger, step)
        store(ledger, step)
    train(ledger, 25)
    ledger.apply(WorkRejected("job", 10, "b", "wrong"))
    assert record.last_checkpoint.step == 10
    assert record.plan is None
    assert f"{20:064x}" in ledger.superseded
    ledger.apply(PlanAdopted("job", plan(2, "a", "c")))
    assert (record.steps, record.agreed) == (10, (0, 0))
    assert record.digests == []


def test_another_cut_is_agreed_through_what_all_stages_were() -> None:
    ledger = begun("a", "b")
    train(ledger, 20)
    store(ledger, 20)
    ledger.apply(SpotChecked("job", 0, 0, 18, "c"))
    ledger.apply(SpotChecked("job", 1, 0, 12, "c"))
    ledger.apply(PlanAdopted("job", plan(2, "a", "b", "c")))
    assert ledger.jobs["job"].agreed == (12, 12, 12)
