"""What a data owner decided, and what was counted, is not forgotten: by floods, renaming, crashes, damage."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import BadFrame, StorageError, UsageError
from atoll.federated import ConsentWord as Word
from hostos.command_line import run
from hostos.files.folder_version import VERSION_FILE
from worker.cli import main as cli
from worker.config import FOLDER_VERSION
from worker.data import consent
from worker.data.consent import MAX_FACT_CHARS, ConsentStore, Request
from worker.data.consent_file import FILE, OLDER_FILE
from worker.data.policy import OPEN, Policy, Terms
from worker.data.registry import add_dataset, set_policy

GRAPH, OTHER = "ab" * 32, "cd" * 32
TERMS = Terms("job-1", "digits", "research", GRAPH, "ef" * 32, 2, 40)
FACTS = (("data set", "digits, 4 samples here"),)
BEFORE = Path(__file__).resolve().parents[2] / "fixtures" / "consent" / "cfcbb34a" / OLDER_FILE


def job(name: str, owner: str = "strangers", graph: str = OTHER, digest: str = "0" * 64) -> Terms:
    return Terms(name, "digits", owner, graph, digest, 2, 40)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    table = tmp_path / "t.csv"
    table.write_text("x,y\n1,0\n2,1\n3,0\n4,1\n")
    add_dataset(tmp_path / "state", "digits", table, ["x:float32=x", "y:int64=y"])
    return tmp_path / "state"


def request_of(store: ConsentStore, name: str) -> Request:
    return next(request for request in store.known() if request.job == name)


def flood(store: ConsentStore, invitations: int, facts: tuple[tuple[str, str], ...] = FACTS) -> None:
    for at in range(invitations):
        store.asked(job(f"x{at}", owner=f"somebody {at}", graph=f"{at:064x}"), facts, 10.0 + at)


# ---------------------------------------------------------------- floods


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_a_flood_of_invitations_undoes_neither_a_refusal_nor_a_count(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setattr(consent, "MAX_ASKING", 20)
    set_policy(state_dir, "digits", Policy(("any",), max_rounds=40))
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    store.asked(job("refused", "a group", "12" * 32), FACTS, 1.0)
    store.decide("refused", Word.REFUSED, "no", 2.0)
    for at in range(40):
        store.spend("job-1", f"{at:064x}")
    # 32 texts of 2,000 characters each: 227 of these were more than the 16 MiB that were read of one file.
    flood(store, 60, tuple((f"h{at}", "\U0001f600" * 2000) for at in range(32)) if long else FACTS)
    assert store.asked(TERMS, FACTS, 9999.0).updates == 40
    with pytest.raises(UsageError, match="40 updates of job job-1 were sent, the data owner allows 40"):
        store.spend("job-1", OTHER)
    assert store.asked(job("refused", "a group", "12" * 32), FACTS, 9999.0).word is Word.REFUSED
    asking = [request for request in store.known() if not request.decided and not request.updates]
    assert [request.job for request in asking[:2]] == ["x59", "x58"], "the newest stay"
    assert len(asking) == 20
    assert all(len(text) < MAX_FACT_CHARS + 20 for request in asking for _, text in request.facts)


def test_jobs_that_are_over_are_forgotten_before_those_that_wait(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "MAX_ASKING", 4)
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    for at in range(10):
        store.asked(job(f"x{at}"), FACTS, 2.0)
        store.close(f"x{at}", "finished")
    assert request_of(store, "job-1").word is Word.AWAITED


def test_a_clock_that_was_set_back_forgets_no_new_invitation(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "MAX_ASKING", 4)
    store = ConsentStore(state_dir)
    flood(store, 4)
    store.asked(TERMS, FACTS, now_s=-5.0)
    assert store.known()[0].job == "job-1"
    store.asked(job("next"), FACTS, now_s=-6.0)
    assert [request.job for request in store.known()][:2] == ["next", "job-1"]


def test_when_too_much_was_decided_to_remember_more_nothing_new_is_taken_up(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "MAX_KEPT", 2)
    store = ConsentStore(state_dir)
    for name in ("a", "b"):
        store.asked(job(name), FACTS, 1.0)
        store.decide(name, Word.REFUSED, "", 2.0)
    with pytest.raises(UsageError, match="remembers 2 jobs"):
        store.asked(job("c"), FACTS, 3.0)
    assert store.asked(job("a"), FACTS, 4.0).word is Word.REFUSED


def test_a_name_of_many_bytes_is_refused(state_dir: Path) -> None:
    with pytest.raises(BadFrame, match="a job's name of 240 bytes; at most 200"):
        ConsentStore(state_dir).asked(job("\U0001f600" * 60), FACTS, 1.0)


# ---------------------------------------------------------------- what a refusal means


def test_a_refused_job_stays_refused_under_other_terms_until_its_owner_accepts_it(state_dir: Path) -> None:
    set_policy(state_dir, "digits", OPEN)
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    store.decide("job-1", Word.REFUSED, "no agreement", 2.0)
    other = replace(TERMS, digest=OTHER, graph=OTHER, owner="others")
    found = store.asked(other, (("data set", "other words"),), 3.0)
    assert (found.word, found.why) == (Word.REFUSED, "its data owner refused: no agreement")
    assert dict(found.facts)["data set"] == "other words", "what is shown is what it asks now"
    assert store.decide("job-1", Word.GIVEN, "", 4.0).word is Word.GIVEN


@pytest.mark.parametrize(
    ("renamed", "word"),
    [
        (replace(TERMS, job="job-2"), Word.AWAITED),
        (replace(TERMS, job="job-2", owner="a new token"), Word.AWAITED),
        (replace(TERMS, job="job-2", graph=OTHER, digest=OTHER), Word.AWAITED),
        (replace(TERMS, job="job-2", graph=OTHER, digest=OTHER, owner="others"), Word.GIVEN),
    ],
    ids=["renamed", "same graph", "same submitter", "others"],
)
def test_a_rule_does_not_accept_what_was_refused_under_another_name(
    state_dir: Path, renamed: Terms, word: Word
) -> None:
    set_policy(state_dir, "digits", OPEN)
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    store.decide("job-1", Word.REFUSED, "", 2.0)
    found = store.asked(renamed, FACTS, 3.0)
    assert found.word is word
    if word is Word.AWAITED:
        assert "refused job job-1" in found.why
        assert store.decide("job-2", Word.GIVEN, "", 4.0).word is Word.GIVEN, "one by one they may"


def test_a_refusal_stops_a_running_job_of_the_same_submitter_that_a_rule_accepted(state_dir: Path) -> None:
    set_policy(state_dir, "digits", OPEN)
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    store.asked(replace(TERMS, job="job-2", graph=OTHER), FACTS, 1.0)
    store.spend("job-2", GRAPH)
    store.decide("job-1", Word.REFUSED, "", 2.0)
    with pytest.raises(UsageError, match=r"job job-2 may not send updates.*refused job job-1"):
        store.spend("job-2", OTHER)
    words = {request.job: request.word for request in store.judged_again()}
    assert words == {"job-1": Word.REFUSED, "job-2": Word.AWAITED}


def test_an_update_is_judged_by_the_policy_as_it_is_now(state_dir: Path) -> None:
    set_policy(state_dir, "digits", OPEN)
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    store.spend("job-1", GRAPH)
    set_policy(state_dir, "digits", Policy(("ask",)))
    with pytest.raises(UsageError, match="may not send updates"):
        store.spend("job-1", OTHER)


def test_an_acceptance_is_of_the_terms_that_its_owner_saw(state_dir: Path) -> None:
    """Another invitation under the same name, between looking and accepting, is not accepted unseen."""
    store, here = ConsentStore(state_dir), ["--state-dir", str(state_dir)]
    store.asked(TERMS, FACTS, 1.0)
    assert run(cli.app, ["jobs", *here]) == 0
    store.asked(replace(TERMS, digest=OTHER, rounds=10_000), FACTS, 2.0)
    assert run(cli.app, ["jobs", "accept", "job-1", *here]) == 2
    assert request_of(store, "job-1").word is Word.AWAITED
    assert run(cli.app, ["jobs", *here]) == 0
    assert run(cli.app, ["jobs", "accept", "job-1", *here]) == 0
    assert request_of(store, "job-1").word is Word.GIVEN


def test_an_acceptance_is_of_one_coordinator_and_of_the_data_as_they_were(state_dir: Path) -> None:
    store = ConsentStore(state_dir)
    here = replace(TERMS, place="train.example.org:7700 sha-1")
    store.asked(here, FACTS, 1.0)
    store.decide("job-1", Word.GIVEN, "", 2.0)
    assert store.asked(here, FACTS, 3.0).word is Word.GIVEN
    for place in ("other.example.org:7700 sha-1", "train.example.org:7700 sha-2"):
        store.decide("job-1", Word.GIVEN, "", 4.0)
        assert store.asked(replace(TERMS, place=place), FACTS, 5.0).word is Word.AWAITED


# ---------------------------------------------------------------- limits of the accepted terms


def test_a_job_gets_no_more_updates_than_the_rounds_that_were_accepted_and_those_repeated(
    state_dir: Path,
) -> None:
    store = ConsentStore(state_dir)
    store.asked(replace(TERMS, rounds=3), FACTS, 1.0)
    store.decide("job-1", Word.GIVEN, "", 2.0)
    for at in range(14):
        store.spend("job-1", f"{at:064x}")
    with pytest.raises(UsageError, match=r"14 updates of job job-1 were sent, its 3 rounds.*at most 14"):
        store.spend("job-1", OTHER)


def test_evaluations_are_bounded_as_updates_are(state_dir: Path) -> None:
    set_policy(state_dir, "digits", Policy(("any",), max_rounds=40))
    store = ConsentStore(state_dir)
    with pytest.raises(UsageError, match="has not asked"):
        store.evaluates("job-1")
    store.asked(TERMS, FACTS, 1.0)
    for _ in range(80):
        store.evaluates("job-1")
    with pytest.raises(UsageError, match="80 evaluations of job job-1 were made, at most 2 for each update"):
        store.evaluates("job-1")
    assert request_of(store, "job-1").evaluations == 80


# ---------------------------------------------------------------- crashes, damage, races


def test_what_was_counted_outlives_the_process_and_is_private(state_dir: Path) -> None:
    set_policy(state_dir, "digits", OPEN)
    store = ConsentStore(state_dir)
    store.asked(TERMS, FACTS, 1.0)
    store.spend("job-1", GRAPH)
    store.sent("job-1", 500)
    found = request_of(ConsentStore(state_dir), "job-1")
    assert (found.updates, found.last_update, found.sent_bytes) == (1, GRAPH, 500)
    files = [path for path in (state_dir / "consent").iterdir() if path.name != "lock"]
    assert [path.name for path in files] == [FILE]
    assert files[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["empty", "no database", "torn", "another word"])
def test_a_damaged_file_lets_nothing_leave_and_says_so(state_dir: Path, damage: str) -> None:
    set_policy(state_dir, "digits", OPEN)
    store = ConsentStore(state_dir)
    flood(store, 60)
    store.asked(TERMS, FACTS, 1.0)
    store.decide("job-1", Word.REFUSED, "", 2.0)
    path = state_dir / "consent" / FILE
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "no database":
        path.write_bytes(b"{}" * 4096)
    elif damage == "torn":
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + b"\xff" * (len(whole) - len(whole) // 2))
    else:
        with sqlite3.connect(path) as database:
            database.execute("UPDATE requests SET decided = 'perhaps'")
        database.close()
    store = ConsentStore(state_dir)
    for use in (
        lambda: store.asked(TERMS, FACTS, 3.0),
        lambda: store.spend("job-1", GRAPH),
        lambda: store.known(),
    ):
        with pytest.raises(StorageError, match=r"is damaged.*nothing of a federated job leaves"):
            use()


def test_a_file_of_a_later_version_is_left_alone(state_dir: Path) -> None:
    ConsentStore(state_dir).asked(TERMS, FACTS, 1.0)
    path = state_dir / "consent" / FILE
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    database.close()
    with pytest.raises(StorageError, match="of version 7 and this Atoll reads 1: update Atoll"):
        ConsentStore(state_dir).known()


def test_two_processes_that_count_at_once_count_both(state_dir: Path) -> None:
    set_policy(state_dir, "digits", OPEN)
    ConsentStore(state_dir).asked(TERMS, FACTS, 1.0)

    def spends(who: int) -> None:
        store = ConsentStore(state_dir)  # as another process has it: a connection of its own each time
        for at in range(20):
            store.spend("job-1", f"{who:032x}{at:032x}")

    threads = [threading.Thread(target=spends, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert request_of(ConsentStore(state_dir), "job-1").updates == 60


# ---------------------------------------------------------------- from the file before


@pytest.fixture
def older(state_dir: Path) -> Path:
    """A state folder as version 0.6.0 left it."""
    (state_dir / VERSION_FILE).write_text("1\n")
    (state_dir / "consent").mkdir(mode=0o700)
    shutil.copy(BEFORE, state_dir / "consent" / OLDER_FILE)
    return state_dir


def test_the_json_file_of_an_older_atoll_is_taken_over(older: Path) -> None:
    set_policy(older, "digits", Policy(("owner:research", "owner:strangers"), max_rounds=40))
    store = ConsentStore(older)
    assert [(r.job, r.decided, r.updates) for r in store.known()] == [
        ("waits-4", None, 0),
        ("refused-3", Word.REFUSED, 0),
        ("accepted-2", Word.GIVEN, 1),
        ("given-1", None, 3),
    ]
    assert request_of(store, "accepted-2").over == "finished"
    assert store.asked(job("refused-3"), FACTS, 200.0).word is Word.REFUSED
    store.spend("given-1", "9" * 64)
    assert request_of(store, "given-1").updates == 4
    assert not (older / "consent" / OLDER_FILE).exists()
    assert (older / VERSION_FILE).read_text().strip() == str(FOLDER_VERSION), "an older Atoll leaves it alone"


@pytest.mark.parametrize("text", ["{", "[]", '{"job-1": {"word": "given"}}', '{"job-1": 3}'])
def test_a_damaged_json_file_lets_nothing_leave_and_is_kept(older: Path, text: str) -> None:
    path = older / "consent" / OLDER_FILE
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(
            StorageError, match=r"requests.json is damaged.*nothing of a federated job leaves"
        ):
            ConsentStore(older).asked(TERMS, FACTS, 1.0)
    assert path.read_text() == text
    assert [file.name for file in path.parent.iterdir() if file.name != "lock"] == [OLDER_FILE]


def test_a_crash_while_the_older_file_is_taken_over_loses_nothing(
    older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads(BEFORE.read_text())
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StorageError, match="No space left on device"):
            ConsentStore(older).known()
    assert json.loads((older / "consent" / OLDER_FILE).read_text()) == whole
    assert len(ConsentStore(older).known()) == len(whole)
