"""A data owner's policy, its words on jobs, and the log of what left."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import StorageError, UsageError
from atoll.federated import ConsentWord as Word
from hostos.files.bounded_log import FILES
from worker.data.consent import ConsentStore
from worker.data.departures import DepartureLog, read_departures
from worker.data.policy import OPEN, UNSTATED, Policy, Terms, judge, rules_of
from worker.data.registry import MANIFEST, add_dataset, load_dataset, set_policy

GRAPH, OTHER = "ab" * 32, "cd" * 32
TERMS = Terms("job-1", "digits", "research", GRAPH, "ef" * 32, 2, 40)
FACTS = (("data set", "digits, 4 samples here"),)


@pytest.mark.parametrize(
    ("accept", "word"),
    [
        (("ask",), Word.AWAITED),
        (("any",), Word.GIVEN),
        (("owner:research",), Word.GIVEN),
        (("owner:others",), Word.AWAITED),
        ((f"graph:{GRAPH}",), Word.GIVEN),
        ((f"graph:{OTHER}", "owner:research"), Word.GIVEN),
        ((f"graph:{OTHER}",), Word.AWAITED),
    ],
)
def test_a_job_that_no_rule_names_waits(accept: tuple[str, ...], word: Word) -> None:
    assert judge(Policy(accept), TERMS, None, "").word is word


@pytest.mark.parametrize(
    ("policy", "terms", "reason"),
    [
        (Policy(("any",), min_clients=3), TERMS, "its rounds may close with 2 updates, at least 3"),
        (Policy(("any",), max_rounds=39), TERMS, "it has 40 rounds, at most 39"),
        (Policy(("any",), clip=1.0), replace(TERMS, unclippable="strategy scaffold sends"), "scaffold"),
        (Policy(("any",)), replace(TERMS, numbers=48, few=3, excess="48 exact sums"), "48 exact sums"),
        (Policy(("any",), statistics=47), replace(TERMS, numbers=48, few=3, excess="too many"), "too many"),
    ],
)
def test_bounds_outweigh_an_acceptance(policy: Policy, terms: Terms, reason: str) -> None:
    found = judge(policy, terms, Word.GIVEN, "")
    assert found.word is Word.REFUSED
    assert reason in found.reason


def test_an_owners_refusal_outweighs_its_policy() -> None:
    found = judge(OPEN, TERMS, Word.REFUSED, "no")
    assert (found.word, found.reason) == (Word.REFUSED, "its data owner refused: no")


@pytest.mark.parametrize(
    "given",
    [
        {"accept": ("all",)},
        {"accept": ("owner:",)},
        {"accept": ("graph:abc",)},
        {"accept": ("any", "owner:research")},
        {"accept": ()},
        {"min_clients": -1},
        {"clip": float("nan")},
        {"noise": 1.0},
        {"statistics": -1},
    ],
)
def test_what_is_no_policy_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Policy(**given)


def test_rules_are_read_as_people_give_them() -> None:
    assert rules_of([" any "]) == ("any",)
    assert rules_of([f"GRAPH:{GRAPH.upper()}", "owner:A", "owner:A"]) == (f"graph:{GRAPH}", "owner:A")


# ---------------------------------------------------------------- with the data set


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    table = tmp_path / "t.csv"
    table.write_text("x,y\n1,0\n2,1\n3,0\n4,1\n")
    add_dataset(tmp_path / "state", "digits", table, ["x:float32=x", "y:int64=y"])
    return tmp_path / "state"


def test_a_policy_is_kept_with_the_data_and_can_be_replaced(state_dir: Path) -> None:
    assert load_dataset(state_dir, "digits").policy == UNSTATED
    policy = Policy(("owner:research",), 3, 100, 1.5, 0.5)
    before = load_dataset(state_dir, "digits").sha256
    set_policy(state_dir, "digits", policy)
    assert load_dataset(state_dir, "digits").policy == policy
    assert load_dataset(state_dir, "digits").sha256 == before


def test_a_registration_from_before_there_were_policies_asks(state_dir: Path) -> None:
    manifest = state_dir / "data" / "digits" / MANIFEST
    found = json.loads(manifest.read_text())
    del found["policy"]
    manifest.write_text(json.dumps(found))
    assert load_dataset(state_dir, "digits").policy == UNSTATED


def test_a_damaged_policy_accepts_nothing(state_dir: Path) -> None:
    manifest = state_dir / "data" / "digits" / MANIFEST
    found = json.loads(manifest.read_text())
    found["policy"]["accept"] = ["everybody"]
    manifest.write_text(json.dumps(found))
    with pytest.raises(StorageError, match="damaged"):
        load_dataset(state_dir, "digits")


# ---------------------------------------------------------------- words on jobs


def test_an_acceptance_is_of_the_terms_that_were_shown(state_dir: Path) -> None:
    store = ConsentStore(state_dir)
    assert store.asked(TERMS, FACTS, 1.0).word is Word.AWAITED
    assert store.decide("job-1", Word.GIVEN, "", 2.0).word is Word.GIVEN
    assert ConsentStore(state_dir).asked(TERMS, FACTS, 3.0).word is Word.GIVEN
    assert store.asked(replace(TERMS, digest=OTHER), FACTS, 4.0).word is Word.AWAITED


def test_a_changed_policy_judges_what_is_open_again(state_dir: Path) -> None:
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    store.asked(replace(TERMS, job="job-2"), FACTS, 2.0)
    store.close("job-2", "finished")
    set_policy(state_dir, "digits", OPEN)
    assert [(r.job, r.word) for r in store.judged_again()] == [("job-1", Word.GIVEN)]


def test_no_update_leaves_without_consent_nor_beyond_the_bound(state_dir: Path) -> None:
    store = ConsentStore(state_dir)
    set_policy(state_dir, "digits", Policy(max_rounds=40))
    store.asked(TERMS, FACTS, 1.0)
    with pytest.raises(UsageError, match="may not send updates"):
        store.spend("job-1", GRAPH)
    store.decide("job-1", Word.GIVEN, "", 2.0)
    for update in range(40):
        store.spend("job-1", f"{update:064x}")
    store.spend("job-1", f"{39:064x}")  # the same again, as after a lost answer
    with pytest.raises(UsageError, match="40 updates of job job-1 were sent"):
        store.spend("job-1", OTHER)


def test_a_job_that_never_asked_cannot_be_accepted(state_dir: Path) -> None:
    with pytest.raises(UsageError, match="has not asked"):
        ConsentStore(state_dir).decide("job-9", Word.GIVEN, "", 1.0)


# ---------------------------------------------------------------- what left


def test_the_log_of_what_left_is_appended_to_and_bounded(tmp_path: Path) -> None:
    log = DepartureLog(tmp_path, clock=lambda: 5.0, max_bytes=2000)
    for at in range(400):
        log.note("job-1", "update", at, round=at)
    lines = list(read_departures(tmp_path))
    assert [line["bytes"] for line in lines] == list(range(400 - len(lines), 400))
    files = sorted((tmp_path / "departures" / "updates").iterdir())
    assert len(files) == FILES
    assert all(file.stat().st_size <= 2000 and file.stat().st_mode & 0o077 == 0 for file in files)


def test_a_log_that_cannot_be_written_lets_nothing_leave(tmp_path: Path) -> None:
    (tmp_path / "departures").write_text("in the way")
    with pytest.raises(StorageError):
        DepartureLog(tmp_path).note("job-1", "update", 1)


def test_the_line_of_an_update_is_not_rotated_away_by_messages(tmp_path: Path) -> None:
    log = DepartureLog(tmp_path, clock=lambda: 5.0, max_bytes=2000)
    log.note("job-1", "update", 12345, blobs=[GRAPH])
    log.note("job-1", "message", 200, message="client_evaluated", round=0)
    for at in range(1000):
        log.note("job-1", "message", 80, message="client_failed", round=at)
        log.note("", "facts", 80, data=["digits"])
    kept = list(read_departures(tmp_path))
    assert [line["bytes"] for line in kept if line["kind"] == "update"] == [12345]
    assert [line["bytes"] for line in kept if line.get("message") == "client_evaluated"] == [200]
    size = sum(file.stat().st_size for file in (tmp_path / "departures").rglob("*.jsonl"))
    assert size <= 3 * FILES * 2000


def test_two_logs_of_one_folder_can_rotate_it_at_once(tmp_path: Path) -> None:
    """As two devices of one daemon have them: what cannot be logged does not leave."""
    failed: list[StorageError] = []

    def notes() -> None:
        log = DepartureLog(tmp_path, max_bytes=300)
        try:
            for line in range(200):
                log.note("job-1", "update", line)
        except StorageError as error:
            failed.append(error)

    threads = [threading.Thread(target=notes) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_departure_with_long_names_is_cut_and_not_lost(tmp_path: Path) -> None:
    log = DepartureLog(tmp_path, clock=lambda: 5.0)
    log.note("\U0001f600" * 500, "update", 7, blobs=[GRAPH] * 100)
    (line,) = read_departures(tmp_path)
    assert (line["bytes"], line["cut"], line["job"][:1]) == (7, True, "\U0001f600")


def test_a_log_from_before_there_were_parts_is_read_with_the_newer_one(tmp_path: Path) -> None:
    (tmp_path / "departures").mkdir()
    old = {"at_s": 1.0, "job": "job-0", "kind": "update", "bytes": 3, "blobs": []}
    (tmp_path / "departures" / "log.jsonl").write_text(json.dumps(old) + "\n")
    DepartureLog(tmp_path, clock=lambda: 5.0).note("job-1", "message", 9, message="loaded")
    assert [line["bytes"] for line in read_departures(tmp_path)] == [3, 9]
