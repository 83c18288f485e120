"""Join tokens and enrolled workers: a fold that survives a restart."""

from pathlib import Path

import pytest

from atoll.errors import AccessDenied, UsageError
from coordinator.messages.facts import Record
from coordinator.services.access.register import Register
from coordinator.storage.journal import Journal
from protos.credentials import Authority, new_token
from protos.telemetry import Event


def test_a_token_opens_until_it_is_revoked_expired_or_used_up(tmp_path: Path) -> None:
    register, authority = Register(), Authority.open(tmp_path / "ca")
    secret = new_token(authority).presented
    made = register.created(secret, "lab", lifetime_s=100.0, max_uses=2, now_s=1000.0)
    register.apply(Record(Event.TOKEN_CREATED, 1000.0, made))
    assert register.admit(secret, 1050.0).name == "lab"
    with pytest.raises(AccessDenied, match="expired"):
        register.admit(secret, 1101.0)
    for n in range(2):
        payload = {"worker": f"w-{n}", "name": "n", "token": made["id"]}
        register.apply(Record(Event.WORKER_ENROLLED, 1060.0, payload))
    with pytest.raises(AccessDenied, match="used 2 of 2"):
        register.admit(secret, 1060.0)
    register.apply(Record(Event.TOKEN_REVOKED, 1070.0, {"id": made["id"]}))
    with pytest.raises(AccessDenied, match="revoked"):
        register.admit(secret, 1070.0)


def test_an_unknown_secret_is_refused_and_no_secret_is_kept(tmp_path: Path) -> None:
    register, authority = Register(), Authority.open(tmp_path / "ca")
    secret = new_token(authority).presented
    made = register.created(secret, "", 0.0, 0, 5.0)
    assert secret not in repr(made)
    register.apply(Record(Event.TOKEN_CREATED, 5.0, made))
    assert secret not in repr(register)
    with pytest.raises(AccessDenied, match="does not know"):
        register.admit(new_token(authority).presented, 6.0)


def test_a_worker_kicked_for_good_stays_out_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.append(
        [
            Record(Event.WORKER_ENROLLED, 1.0, {"worker": "w-1", "name": "a", "token": ""}),
            Record(Event.WORKER_ENROLLED, 2.0, {"worker": "w-2", "name": "b", "token": ""}),
            Record(Event.WORKER_KICKED, 3.0, {"worker": "w-1", "reason": "noise", "for_good": True}),
            Record(Event.WORKER_KICKED, 4.0, {"worker": "w-2", "reason": "", "for_good": False}),
        ]
    )
    journal.close()
    again = Journal(tmp_path / "j.sqlite")
    register = Register()
    for record in again.replay():
        register.apply(record)
    again.close()
    assert "noise" in (register.refusal("w-1") or "")
    assert register.refusal("w-2") is None
    assert "not enrolled" in (register.refusal("w-3") or "")


def test_an_id_that_an_old_register_gave_out_twice_stays_barred_and_whose_it_was() -> None:
    register = Register()
    for name, at_s in (("first", 1.0), ("second", 3.0)):
        register.apply(Record(Event.WORKER_ENROLLED, at_s, {"worker": "w-7f3a2c", "name": name, "token": ""}))
        kick = {"worker": "w-7f3a2c", "reason": "noise", "for_good": True}
        if name == "first":
            register.apply(Record(Event.WORKER_KICKED, 2.0, kick))
    assert register.workers["w-7f3a2c"].name == "first"
    assert "noise" in (register.refusal("w-7f3a2c") or "")


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(UsageError, match="lifetime"):
        Register().created("s", "n", -1.0, 0, 0.0)
    with pytest.raises(UsageError, match="characters"):
        Register().created("s", "n" * 101, 0.0, 0, 0.0)


def test_a_forgotten_worker_is_no_longer_enrolled_and_an_older_coordinator_bars_it() -> None:
    register = Register()
    for worker, name in (("w-1", "lab"), ("w-2", "lab"), ("w-3", "home")):
        register.apply(Record(Event.WORKER_ENROLLED, 1.0, {"worker": worker, "name": name, "token": ""}))
    payload = {"worker": "w-1", "reason": "forgotten", "for_good": True, "forgotten": True}
    assert payload["for_good"], "what a coordinator obeys that does not know `forgotten`"
    register.apply(Record(Event.WORKER_KICKED, 2.0, payload))
    assert sorted(register.workers) == ["w-2", "w-3"]
    assert "not enrolled here" in str(register.refusal("w-1"))
    register.apply(Record(Event.WORKER_KICKED, 3.0, payload))  # said twice


def test_a_worker_is_named_by_its_id_or_a_name_that_it_alone_has() -> None:
    register = Register()
    for worker, name in (("w-1", "lab"), ("w-2", "lab"), ("w-3", "home")):
        register.apply(Record(Event.WORKER_ENROLLED, 1.0, {"worker": worker, "name": name, "token": ""}))
    assert (register.named("home"), register.named("w-2")) == ("w-3", "w-2")
    with pytest.raises(UsageError, match="names 2 of the enrolled workers \\(w-1, w-2\\)"):
        register.named("lab")
    with pytest.raises(UsageError, match="names 0"):
        register.named("w-9")
