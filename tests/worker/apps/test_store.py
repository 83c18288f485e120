"""Consent is a word about one hash, kept in a file that cannot be believed into more."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from atoll.errors import UsageError
from hostos.command_line import run
from protos import atoll_apps_pb2 as pb
from protos.app_signing import make_key, sign
from worker.apps.offers import KEPT_S, MAX_OFFERS, Offers
from worker.apps.store import MAX_ASKED, AppStore, KnownApp
from worker.cli import main as cli
from worker.config import WorkerConfig, make_config

A, B = "a" * 64, "ab" * 32


def test_accepted_is_what_was_accepted_and_nothing_else(tmp_path: Path) -> None:
    store = AppStore(tmp_path)
    store.asked(KnownApp(A, "mine", "1.0", "me", 5.0))
    assert not store.is_accepted(A)
    assert store.accept(A[:12]).name == "mine"
    assert store.is_accepted(A)
    store.asked(KnownApp(A, "mine", "1.0", "me", 9.0))
    assert AppStore(tmp_path).is_accepted(A)
    store.revoke(A)
    assert not AppStore(tmp_path).is_accepted(A)
    with pytest.raises(UsageError, match="is not accepted"):
        store.revoke(A)


def test_a_publisher_is_accepted_for_what_it_signs_until_it_is_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    who = make_key(tmp_path / "lab.key")
    key, signature = sign(tmp_path / "lab.key", A)
    app = pb.AppIdentity(hash=A, signer=key, signature=signature)
    forged = pb.AppIdentity(hash=B, signer=key, signature=signature)
    store, here = AppStore(tmp_path / "state"), ["--state-dir", str(tmp_path / "state")]
    assert not store.accepts(app)
    assert run(cli.app, ["apps", "accept", who, *here]) == 0
    assert (store.accepts(app), store.accepts(forged), store.is_accepted(A)) == (True, False, False)
    assert not store.accepts(pb.AppIdentity(hash=A))
    assert run(cli.app, ["apps", "publishers", *here]) == 0
    assert who in capsys.readouterr().out
    assert run(cli.app, ["apps", "revoke", who, *here]) == 0
    assert not store.accepts(app)
    assert run(cli.app, ["apps", "revoke", who, *here]) == 2
    (tmp_path / "state" / "apps" / "publishers.json").write_text('{"ed25519:x": 1}')
    assert not store.accepts(app)


def test_a_short_or_unclear_name_accepts_nothing(tmp_path: Path) -> None:
    store = AppStore(tmp_path)
    store.asked(KnownApp(A))
    store.asked(KnownApp("a" * 63 + "b"))
    for name in ("", "a", "a" * 12, "zz", "../" * 22):
        with pytest.raises(UsageError, match=r"names [02] of the apps"):
            store.accept(name)
    # One that was never asked for may be accepted by its whole hash.
    assert store.accept(B).hash == B
    assert [app.hash for app in store.known() if app.accepted] == [B]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"x": 3}', json.dumps({A: {"accepted_s": "often"}}), json.dumps({A: None})]
)
def test_a_damaged_list_accepts_nothing(tmp_path: Path, text: str) -> None:
    store = AppStore(tmp_path)
    store.accept(A)
    (tmp_path / "apps" / "apps.json").write_text(text)
    assert not store.is_accepted(A)


def test_the_command_lists_accepts_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AppStore(tmp_path).asked(KnownApp(A, "mine", "1.0", "me", 5.0))
    folder = ["--state-dir", str(tmp_path)]
    assert run(cli.app, ["apps", "list", "--json", *folder]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["hash"], found["name"], found["accepted"]) == (A, "mine", False)
    assert run(cli.app, ["apps", "accept", A[:16], *folder]) == 0
    assert "accepted " + A in capsys.readouterr().out
    assert run(cli.app, ["apps", "list", *folder]) == 0
    assert "yes" in capsys.readouterr().out
    assert run(cli.app, ["apps", "revoke", A[:16], *folder]) == 0
    assert run(cli.app, ["apps", "revoke", A[:16], *folder]) == 2


def test_running_apps_is_never_remembered_but_what_apps_are_told_is(tmp_path: Path) -> None:
    from worker.config import remember

    given = {"host": "h", "state_dir": tmp_path, "allow_apps": True, "accept_apps": (A,)}
    given["node_config"] = (("data", "/d"),)
    remember(make_config(given, {}))
    again = make_config({"state_dir": tmp_path}, {})
    assert (again.allow_apps, again.accept_apps) == (False, ())
    assert again.node_config == (("data", "/d"),)


def test_accepting_without_allowing_or_half_a_hash_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="--allow-apps"):
        WorkerConfig("h", accept_apps=(A,))
    with pytest.raises(UsageError, match="64 hexadecimal"):
        WorkerConfig("h", allow_apps=True, accept_apps=(A[:12],))
    with pytest.raises(UsageError, match="is not a publisher"):
        WorkerConfig("h", allow_apps=True, accept_apps=("ed25519:AAAA",))


def test_states_of_runs_long_ended_go_and_those_of_other_runs_stay(tmp_path: Path) -> None:
    store = AppStore(tmp_path)
    old, new = (store.runs_dir(A) / name for name in ("5-9", "6-9"))
    former = tmp_path / "apps" / "runs" / "7-9"  # of a version that kept them without the app's hash
    for folder in (old, new, former, store.runs_dir(B) / "5-9"):
        folder.mkdir(parents=True)
        (folder / "state").write_bytes(b"x")
    for folder in (old, former):
        os.utime(folder, (1.0, 1.0))
    store.sweep(time.time())
    assert [folder.exists() for folder in (old, new, former)] == [False, True, False]
    store.drop_state(A, 6, 9)
    assert not store.runs_dir(A).exists()
    assert (store.runs_dir(B) / "5-9" / "state").exists()


def test_a_refusal_outweighs_a_publisher_and_is_not_forgotten_for_many_offers(tmp_path: Path) -> None:
    who = make_key(tmp_path / "lab.key")
    key, signature = sign(tmp_path / "lab.key", A)
    app = pb.AppIdentity(hash=A, signer=key, signature=signature)
    store = AppStore(tmp_path / "state")
    store.accept_publisher(who)
    store.asked(KnownApp(A, "mine", signer=who, asked_s=1.0))
    store.refuse(A)
    store.accept(B)
    for at in range(300):
        store.asked(KnownApp(f"{at:064x}", "\U0001f600" * 5000, asked_s=10.0 + at))
    assert (store.accepts(app), store.is_refused(A), store.is_accepted(B)) == (False, True, True)
    assert len(store.known()) == MAX_ASKED + 2
    store.accept(A)
    assert store.accepts(app)


def test_bundles_that_wait_are_bounded_in_number_bytes_and_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Offers(tmp_path, clock=lambda: 1e9)
    names = []
    for at in range(MAX_OFFERS + 5):
        data = b"%d" % at
        names.append(hashlib.sha256(data).hexdigest())
        found.keep(names[-1], data)
        os.utime(tmp_path / "offered" / f"{names[-1]}.bundle", (1e9 + at, 1e9 + at))
    assert [name for name in names if found.read(name)] == names[5:]
    Offers(tmp_path, clock=lambda: 1e9 + KEPT_S + 10).sweep()
    assert [name for name in names if found.read(name)] == names[10:], "those that nobody accepted in time go"
    monkeypatch.setattr("worker.apps.offers.MAX_BYTES", 5)
    found.sweep()
    assert len([name for name in names if found.read(name)]) == 2
    (tmp_path / "offered" / f"{names[-1]}.bundle").write_bytes(b"other")
    assert found.read(names[-1]) is None


def test_files_of_apps_that_nobody_accepts_any_more_are_swept(tmp_path: Path) -> None:
    """As versions up to 0.6.0 left them, which unpacked before they asked."""
    store = AppStore(tmp_path)
    store.asked(KnownApp(A))
    store.accept(B)
    for name in (A, B):
        (store.code_dir(name) / "mine").mkdir(parents=True)
        (store.code_dir(name) / "mine" / "native.so").write_bytes(b"ELF")
        store.code_dir(name).chmod(0o500)
    store.sweep(time.time())
    assert [path.name for path in (tmp_path / "apps" / "code").iterdir()] == [B]
