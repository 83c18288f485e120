"""Every fact, and the state that facts fold to, is the same after its way through JSON."""

from __future__ import annotations

import json
import typing
from dataclasses import replace

import pytest

from atoll.exchange import Exchange, PairTable
from atoll.messages.from_worker import HostRows, Row, UpdateReady
from atoll.microbatch import ScheduleName
from atoll.plan import LinkSpec, Mask, Plan, StageSpec, one_replica
from coordinator.messages import facts
from coordinator.messages.encoding import from_json, to_json
from coordinator.messages.facts import Ledger, from_record, to_record
from strategies.privacy.accountant import Spent
from tests.sim.scripted import HASH, spec
from tests.sim.world import federated_job

STAGES = (StageSpec(0, 1, 0, 0, "w", 1), StageSpec(1, 2, 0, 0, "v", 1))
PLAN = Plan("j", 3, HASH, "", "even", ScheduleName.GPIPE, 2, one_replica(2, STAGES))
LINKS = (LinkSpec(0, 1, "topk", 8.0, Mask.NONE, "slow"), LinkSpec(1, 0))
FACTS: list[facts.Fact] = [
    facts.CoordinatorStarted(7),
    facts.JobSubmitted("s", "", replace(spec(), standbys=2), 0, {}, 1.5),
    facts.JobSubmitted("j", "s", spec(), 2, {"w0": HASH}, 1.5),
    facts.JobSubmitted("f", "", federated_job(), 0, {}, 1.5),
    facts.PlanAdopted("j", PLAN),
    facts.LinksChanged("j", 4, 9, LINKS, "slower"),
    facts.RatioCapped("j", 5, 11.2),
    facts.StepCommitted("j", 3, 8, 1 / 3, 2.5, 0.75, store=True, evaluate=True, coded=True),
    facts.StepCommitted("j", 3, 9, 0.5, 2.5, 0.75, digests=("0123456789abcdef" * 2, "")),
    facts.RoundMet("j", 3, 9, 4, ("w-a", "w-b"), {"w-c": "w-c is lost"}, 2000, "ab" * 16, 2.5),
    facts.RoundMet("j", 3, 9, 4, ("w-a", "w-b", "w-c"), {}, 2000, "ab" * 16, 2.5, ((0, 2), (1,))),
    facts.SpotChecked("j", 1, 6, 9, "w-b"),
    facts.WorkRejected("j", 6, "w-a", "wrong: w-a computed step 8 of stage 1 otherwise than w-b and w-c"),
    facts.Evaluated("j", 9, 0.25),
    facts.CheckpointStored("j", 9, {"w0": HASH, "w1": HASH}),
    facts.CheckpointTorn("j", 6, "its blob is gone"),
    facts.NoisedAsked("f", 0, Spent(1, {"2": 0.5, "3": 0.75})),
    facts.RoundClosed(
        "f", 0, HASH, HASH, 10, None, {"w": {"bytes_up": 3}}, {"v": "late"}, {"n": [1]}, 2.0, 3.0
    ),
    facts.UpdateTaken(
        "f", "w", UpdateReady("f", 3, HASH, 10, 90, 3, {"a": 1.0}, {"loss": 0.5}), 100, "topk", 32.0, HASH
    ),
    facts.UpdateTaken(
        "f",
        "w",
        UpdateReady(
            "f",
            3,
            HASH,
            10,
            90,
            3,
            host=HostRows({"c": Row(9, 2, 0.5, 0.25, 1.0)}, {"d": "nan"}, {"t": 1}, {"s": 2}),
        ),
        100,
        "none",
        1.0,
        HASH,
        {"c": 90},
        (8, 512),
    ),
    facts.RoundEvaluated("f", 0, "central", 1.0, {"accuracy": 0.5}, 10, 1),
    facts.Reconfigured("j", 5, 9, 4, tuple(place.worker for place in PLAN.places), (0,), "w is lost"),
    facts.Reconfigured(
        "j", 5, 9, 4, ("a", "b"), (), "moved", (1,), Exchange("saps", pairs=PairTable((0.0, 2.5) * 2, 1.5))
    ),
    facts.Reconfigured("j", 5, 9, 4, ("a", "b"), (), "moved", (1,), Exchange("sum", inner=Exchange())),
    facts.Reconfigured("j", 6, 12, 5, ("w-b",), (), "w-a is lost; w-b goes on", plan=PLAN),
    facts.JobEnded("f", "failed", "why"),
    facts.JobForgotten("f"),
]


def test_a_fact_that_is_renamed_is_still_read_by_its_name_in_journals():
    written = {
        "CoordinatorStarted",
        "JobForgotten",
        "JobSubmitted",
        "PlanAdopted",
        "LinksChanged",
        "Reconfigured",
        "RatioCapped",
        "StepCommitted",
        "RoundMet",
        "SpotChecked",
        "WorkRejected",
        "Evaluated",
        "CheckpointStored",
        "CheckpointTorn",
        "NoisedAsked",
        "UpdateTaken",
        "RoundClosed",
        "RoundEvaluated",
        "JobEnded",
    }
    assert {to_record(fact, 0.0).kind for fact in FACTS} == written


def through_json(value: object) -> typing.Any:
    return json.loads(json.dumps(to_json(value)))


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_a_fact_is_read_back_as_it_was(fact: facts.Fact) -> None:
    record = to_record(fact, 1.0)
    assert from_record(facts.Record(record.kind, 1.0, through_json(record.payload))) == fact


def test_every_kind_of_fact_is_among_them() -> None:
    assert {type(fact) for fact in FACTS} == set(typing.get_args(facts.Fact))


def test_a_ledger_of_all_of_them_is_read_back_as_it_was() -> None:
    ledger = Ledger(keep=1)
    for fact in (*FACTS, facts.CheckpointStored("j", 12, {"w0": "cd" * 32})):
        ledger.apply(fact)
    assert from_json(Ledger, through_json(ledger)) == ledger
    assert ledger.jobs.keys() == {"s", "j"}
    assert HASH in ledger.superseded
    copy = ledger.copy()
    ledger.apply(facts.Evaluated("j", 12, 0.125))
    assert copy != ledger


def test_a_field_that_was_added_since_has_its_default() -> None:
    text = through_json(facts.Checkpoint(3, {"w": HASH}))
    assert from_json(facts.Checkpoint, text) == facts.Checkpoint(3, {"w": HASH})
    shorter = through_json(Ledger())
    del shorter["term"]
    assert from_json(Ledger, shorter) == Ledger()
    with pytest.raises(TypeError, match="unexpected"):
        from_json(facts.Checkpoint, {**text, "unexpected": 1})
