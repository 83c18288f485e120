"""Whose a job's pinned data are, and whether they fit the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.dataset_spec import DataSpec, PinnedData
from atoll.errors import UsageError
from atoll.federated import DatasetFacts, FieldFacts
from atoll.opdag import TensorMeta
from coordinator.config import Liveness, Probing
from coordinator.federated.checks import pinned_to
from coordinator.membership import member as members
from coordinator.membership.roster import Roster
from coordinator.messages.events import Introduction

INPUTS = {"tokens": TensorMeta((4, 8), "int64"), "labels": TensorMeta((4,), "int64")}
DIARY = DatasetFacts("diary", 20, (FieldFacts("text", "int32", (8,)), FieldFacts("next", "int64", ())))
ASKED = DataSpec((), 0, 4, 0, PinnedData("", "diary", {"tokens": "text", "labels": "next"}))


def roster(**held: tuple[DatasetFacts, ...]) -> Roster:
    found = Roster(Liveness(), Probing())
    for number, (worker, datasets) in enumerate(held.items()):
        told = Introduction(f"{worker}-name", number, "cpu", "m", 1, 1 << 30, 1 << 30, datasets=datasets)
        found.open(worker, number, told, 0.0)
        found.move(worker, members.Admitted(), 0.0)
    return found


def named(worker: str) -> DataSpec:
    assert ASKED.pinned is not None
    return replace(ASKED, pinned=replace(ASKED.pinned, worker=worker))


def test_the_only_worker_that_has_them_is_the_owner() -> None:
    pool = roster(w1=(), w2=(DIARY,))
    for asked in (ASKED, named("w2"), named("w2-name")):
        found = pinned_to(asked, pool, INPUTS)
        assert found.pinned == replace(ASKED.pinned, worker="w2")  # type: ignore[type-var]
        assert (found.n_samples, found.batch) == (20, 4)
    served = DataSpec((), 20, 4)
    assert pinned_to(served, pool, INPUTS) is served


def test_of_several_one_is_named() -> None:
    pool = roster(w1=(DIARY,), w2=(DIARY,))
    with pytest.raises(UsageError, match=r"2 workers have registered 'diary': w1-name \(w1\), w2-name"):
        pinned_to(ASKED, pool, INPUTS)
    found = pinned_to(named("w1-name"), pool, INPUTS).pinned
    assert found is not None
    assert found.worker == "w1"


@pytest.mark.parametrize(
    ("held", "asked", "why"),
    [
        ((), ASKED, "no worker of the pool has registered data set 'diary'"),
        ((DIARY,), named("w9"), "no worker named 'w9' has registered"),
        ((replace(DIARY, n_samples=3),), ASKED, "has 3 samples, a micro-batch 4"),
        (
            (replace(DIARY, fields=DIARY.fields[:1]),),
            ASKED,
            "no field 'next' for input 'labels'; it has text",
        ),
        (
            (replace(DIARY, fields=(FieldFacts("text", "float32", (8,)), DIARY.fields[1])),),
            ASKED,
            "is float32",
        ),
        (
            (replace(DIARY, fields=(FieldFacts("text", "int32", (9,)), DIARY.fields[1])),),
            ASKED,
            r"shape \(9,\)",
        ),
    ],
)
def test_what_does_not_do_is_said(held: tuple[DatasetFacts, ...], asked: DataSpec, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        pinned_to(asked, roster(w1=held), INPUTS)


def test_who_is_gone_owns_nothing() -> None:
    pool = roster(w1=(DIARY,), w2=())
    pool.move("w1", members.LeavingSaid("bye"), 1.0)
    with pytest.raises(UsageError, match="no worker of the pool"):
        pinned_to(ASKED, pool, INPUTS)
