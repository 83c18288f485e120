"""Workers by name in what people read."""

from __future__ import annotations

from atoll.worker_names import distinct, with_names
from coordinator.services.owners.in_names import in_names
from protos import atoll_control_pb2 as pb

ATTIC, OTHER, CELLAR = "w-7f3a2c9e05b1d846", "w-7f3a2c9e05b1d847", "w-00000000000000aa"
NAMES = {ATTIC: "attic", CELLAR: "cellar"}


def test_ids_among_words_become_names() -> None:
    assert with_names(f"link {ATTIC}>{CELLAR} is slow", NAMES) == "link attic>cellar is slow"
    assert with_names(f"attic ({ATTIC}) is lost, {OTHER} stays", NAMES) == f"attic is lost, {OTHER} stays"


def test_two_of_one_name_are_told_apart_by_their_ids() -> None:
    both = {ATTIC: "pc", CELLAR: "pc", OTHER: ""}
    assert distinct(both) == {ATTIC: "pc (w-7f3a)", CELLAR: "pc (w-0000)", OTHER: OTHER}
    assert with_names(f"pc ({ATTIC}) waits for {CELLAR}", both) == "pc (w-7f3a) waits for pc (w-0000)"


def test_devices_of_one_machine_are_told_apart() -> None:
    both = {ATTIC: "attic", f"{ATTIC}/1": "attic"}
    assert distinct(both) == {ATTIC: "attic (w-7f3a)", f"{ATTIC}/1": "attic (w-7f3a/1)"}
    named = {ATTIC: "attic", f"{ATTIC}/1": "attic gpu 1"}
    assert with_names(f"{ATTIC}/1 waits for {ATTIC}", named) == "attic gpu 1 waits for attic"


def test_a_message_names_workers_in_its_words_and_keeps_ids_that_are_addresses() -> None:
    update = pb.JobUpdate(job="j-1", reason=f"lost {ATTIC}")
    update.stages.add(worker=ATTIC, replace_why=f"a copy is at {CELLAR}")
    update.plan.prediction.notes.append(f"{ATTIC} is the fastest")
    update.plan.left_out.add(worker=CELLAR, why=f"slower than {ATTIC}")
    shown = in_names(update, NAMES)
    assert shown.reason == "lost attic"
    assert (shown.stages[0].worker, shown.stages[0].replace_why) == (ATTIC, "a copy is at cellar")
    assert list(shown.plan.prediction.notes) == ["attic is the fastest"]
    assert (shown.plan.left_out[0].worker, shown.plan.left_out[0].why) == (CELLAR, "slower than attic")
