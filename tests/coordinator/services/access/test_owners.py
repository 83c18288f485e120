"""Owners have roles: each token opens what its role may and no more, and what it did is put down."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AccessDenied, StorageError, UsageError
from coordinator.client.client import Client, connect
from coordinator.server import Running
from coordinator.services.access.owners import Owner, Owners, Role, needed_role
from hostos.files.bounded_log import read_log
from protos import atoll_control_pb2 as pb
from protos.convert import from_proto, to_proto
from protos.credentials import secret_hash
from tests.coordinator.serving import Owner as FirstOwner
from tests.coordinator.serving import start

METHODS = {
    f"/atoll.v1.Owner/{method.name}": needed_role(f"/atoll.v1.Owner/{method.name}")
    for method in pb.DESCRIPTOR.services_by_name["Owner"].methods
}


def owners(folder: Path) -> Owners:
    return Owners(folder, secret_hash("first"), lambda: 7.0)


def test_each_role_opens_what_the_one_before_does_and_more() -> None:
    assert {name.rpartition("/")[2] for name, role in METHODS.items() if role is Role.WATCH} == {
        "Status", "Watch", "Logs", "Trace", "Metrics", "Checkpoints", "Credits",
        "ListAuthorities",
    }  # fmt: skip
    assert METHODS["/atoll.v1.Owner/Kick"] is METHODS["/atoll.v1.Owner/CreateOwner"] is Role.ADMINISTER
    assert METHODS["/atoll.v1.Owner/Result"] is needed_role("/atoll.v1.Blobs/Get") is Role.SUBMIT
    assert needed_role("/atoll.v1.Owner/WhatComesLater") is Role.ADMINISTER
    for role, count in ((Role.WATCH, 1), (Role.SUBMIT, 2), (Role.ADMINISTER, 3)):
        assert sum(Owner("x", role, "").may(needed) for needed in Role) == count


def test_owners_are_kept_and_known_by_their_secrets_alone(tmp_path: Path) -> None:
    known = owners(tmp_path)
    known.create("research", Role.SUBMIT, "its secret")
    again = owners(tmp_path)
    found = again.presenting("its secret")
    assert found is not None
    assert (found.name, found.role, found.created_s) == ("research", Role.SUBMIT, 7.0)
    first = again.presenting("first")
    assert first is not None
    assert first.role is Role.ADMINISTER
    assert again.presenting("") is again.presenting("research") is None
    assert "its secret" not in (tmp_path / "owners.json").read_text()
    again.revoke("research")
    assert owners(tmp_path).presenting("its secret") is None


@pytest.mark.parametrize("name", ["", "owner", "x" * 61, "a\nb", "research"])
def test_a_name_that_is_none_or_taken_is_refused(tmp_path: Path, name: str) -> None:
    known = owners(tmp_path)
    known.create("research", Role.SUBMIT, "its secret")
    with pytest.raises(UsageError):
        known.create(name, Role.WATCH, "another")


def test_nobody_has_rights_by_a_damaged_file(tmp_path: Path) -> None:
    known = owners(tmp_path)
    known.create("research", Role.SUBMIT, "its secret")
    text = (tmp_path / "owners.json").read_text()
    (tmp_path / "owners.json").write_text(text.replace("submit", "everything"))
    assert [owner.name for owner in owners(tmp_path).all()] == ["owner"]


def test_the_first_owner_cannot_be_revoked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="owner-token"):
        owners(tmp_path).revoke("owner")


def test_what_cannot_be_put_down_is_not_done(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("in the way")
    known = owners(tmp_path)
    with pytest.raises(StorageError):
        known.did(known.all()[0], "kick", "ipv4:192.0.2.7:1", worker="w-1")


# ---------------------------------------------------------------- over the wire


def another(stack: ExitStack, running: Running, name: str, role: str) -> Client:
    """A client with a token of its own."""
    address = f"127.0.0.1:{running.started.entry_port}"
    admin = stack.enter_context(connect(address, running.started.owner_token))
    return stack.enter_context(connect(address, admin.create_owner(name, role).token))


def test_a_token_opens_what_its_role_may(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    watcher = another(stack, running, "press", "watch")
    researcher = another(stack, running, "research", "submit")
    assert watcher.status().version
    with pytest.raises(AccessDenied, match="the token of press opens what watch may, this needs submit"):
        watcher.cancel("gpt-1")
    with pytest.raises(UsageError, match="no job"):
        researcher.cancel("gpt-1")
    calls: tuple[Any, ...] = (
        lambda: researcher.create_token("lab"),
        lambda: researcher.kick("w-1"),
        lambda: researcher.create_owner("more", "administer"),
        lambda: researcher.tokens(),
    )
    for call in calls:
        with pytest.raises(AccessDenied, match="needs administer"):
            call()
    admin = another(stack, running, "operator", "administer")
    assert [owner.name for owner in admin.owners()] == ["owner", "press", "research", "operator"]
    admin.revoke_owner("press")
    with pytest.raises(AccessDenied, match="not an owner's token"):
        watcher.status()


def test_a_job_bears_its_owners_name_and_another_who_may_submit_cannot_cancel_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    running = start(stack, tmp_path)
    first = FirstOwner(running)
    job = first.submit()
    assert running.server is not None
    spec = running.server.ledger.jobs[job].submitted.spec
    assert spec.owner == "owner"
    researcher = another(stack, running, "research", "submit")
    with pytest.raises(AccessDenied, match=f"{job} is a job of owner, and research is not"):
        researcher.cancel(job)
    lines = [line for line in read_log(tmp_path / "audit") if line["call"] in ("submit", "cancel")]
    assert [(line["owner"], line["call"]) for line in lines] == [("owner", "submit")]
    assert lines[0]["peer"].startswith("ipv4:127.0.0.1:")
    another(stack, running, "operator", "administer").cancel(job)
    last = list(read_log(tmp_path / "audit"))[-1]
    assert (last["owner"], last["call"], last["job"]) == ("operator", "cancel", job)


def test_what_a_submission_says_of_its_owner_counts_for_nothing(stack: ExitStack, tmp_path: Path) -> None:
    running = start(stack, tmp_path)
    job = FirstOwner(running).submit()
    assert running.server is not None
    spec = replace(running.server.ledger.jobs[job].submitted.spec, owner="somebody else")
    with connect(f"127.0.0.1:{running.started.entry_port}", running.started.owner_token) as client:
        request = pb.SubmitRequest(spec=to_proto(spec), submission="again")
        assert from_proto(request.spec).owner == "somebody else"
        reply = client._owner.Submit(request, **client._short())
    assert running.server.ledger.jobs[reply.job].submitted.spec.owner == "owner"
