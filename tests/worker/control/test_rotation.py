"""The coordinator's authority is exchanged: who is there follows by itself, who was away hears what to do."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import AccessDenied, ConnectionFailed, UsageError
from coordinator.client.client import Client, connect
from coordinator.config import CoordinatorConfig
from coordinator.server import Running, serve
from protos.credentials import Authority, Identity, JoinToken, authorities_in, identity_from
from tests.patience import HUNG_S, eventually
from tests.worker.transport.hosts import Host, enroll
from worker.config import WorkerConfig
from worker.control.enroll import Membership, find_work_address, join
from worker.control.renewal import Renewal, renewed
from worker.transport.contract import Paths

DAY_S = 86_400.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serve(CoordinatorConfig(state_dir=tmp_path / "coordinator", entry_port=0)) as started:
        yield started


@pytest.fixture
def owner(running: Running, tmp_path: Path) -> Iterator[Client]:
    endpoint = f"127.0.0.1:{running.started.entry_port}"
    with connect(endpoint, running.started.owner_token) as client:
        yield client


def config_of(running: Running, folder: Path, token: str) -> WorkerConfig:
    return WorkerConfig(host="127.0.0.1", port=running.started.entry_port, token=token, state_dir=folder)


class Worker:
    """A worker's folder and what its daemon does about its identity."""

    def __init__(self, running: Running, folder: Path) -> None:
        self.config = config_of(running, folder, running.started.join_token or "")
        self.member = join(self.config, lambda _: False)
        self.renewal = Renewal(self.config, lambda: self.member, self._use, draw=lambda: 0.0)

    def _use(self, identity: Identity) -> None:
        self.member = replace(self.member, identity=identity)

    @property
    def identity(self) -> Identity:
        assert self.member.identity is not None
        return self.member.identity

    def reconnects(self) -> None:
        """As a daemon does before each session."""
        found = find_work_address(self.config, self.member)
        assert found.identity is not None
        self.renewal.trust(found.identity.ca_pem, found.overlap_s)

    def comes_back(self, token: str = "") -> Membership:
        """Started anew on its folder."""
        return join(replace(self.config, token=token), lambda _: False)


def test_a_worker_that_reconnects_trusts_both_and_gets_a_certificate_of_the_new_one(
    running: Running, owner: Client, tmp_path: Path
) -> None:
    worker = Worker(running, tmp_path / "w")
    first = worker.identity
    found = owner.rotate_authority(60 * DAY_S)
    assert found.behind == [first.name]
    worker.reconnects()
    assert len(authorities_in(worker.identity.ca_pem)) == 2
    eventually(lambda: worker.identity.of_newest())
    assert worker.identity.name == first.name
    assert worker.identity.key_pem != first.key_pem
    assert Identity.load(worker.config.identity_dir) == worker.identity
    assert owner.authorities().behind == []
    owner.drop_authority()
    worker.reconnects()
    assert len(authorities_in(worker.identity.ca_pem)) == 1
    assert worker.comes_back().worker == first.name, "without a token"
    assert renewed(worker.config, worker.member, worker.identity.renewal_due()) is not None


def test_tokens_from_before_and_from_during_the_exchange_open_until_they_name_nobody(
    running: Running, owner: Client, tmp_path: Path
) -> None:
    before = running.started.join_token or ""
    owner.rotate_authority(60 * DAY_S)
    during = owner.create_token("during").token
    assert len(authorities_in(JoinToken.decode(before).ca_pem)) == 1
    assert len(authorities_in(JoinToken.decode(during).ca_pem)) == 2
    for name, token in (("a", before), ("b", during)):
        made = join(config_of(running, tmp_path / name, token), lambda _: False)
        assert made.identity is not None
        assert made.identity.of_newest()
    owner.drop_authority()
    with pytest.raises(AccessDenied, match="ask for a token"):
        join(config_of(running, tmp_path / "c", before), lambda _: False)
    made = join(config_of(running, tmp_path / "d", during), lambda _: False)
    assert made.identity is not None
    assert len(authorities_in(made.identity.ca_pem)) == 1


def test_who_was_away_all_the_while_hears_to_ask_for_a_new_token(
    running: Running, owner: Client, tmp_path: Path
) -> None:
    worker = Worker(running, tmp_path / "w")
    owner.rotate_authority(0.0)
    with pytest.raises(AccessDenied, match=r"its authority was exchanged .* ask for a token"):
        worker.comes_back()
    kept = (tmp_path / "coordinator" / "join-token").read_text().strip()
    assert JoinToken.decode(kept).presented == JoinToken.decode(running.started.join_token or "").presented
    again = worker.comes_back(kept)
    assert again.worker != worker.member.worker, "a new identity"


def test_who_was_away_before_it_renewed_hears_to_join_again(
    running: Running, owner: Client, tmp_path: Path
) -> None:
    worker = Worker(running, tmp_path / "w")
    owner.rotate_authority(60 * DAY_S)
    worker.member = worker.comes_back()  # it has heard of both, and is off again
    with pytest.raises(UsageError, match=rf"1 workers .* first {worker.member.worker}: .* --anyway"):
        owner.drop_authority()
    owner.drop_authority(anyway=True)
    with pytest.raises(
        AccessDenied, match=r"was exchanged and is trusted no more: join again with a new token"
    ):
        worker.comes_back()
    with pytest.raises(AccessDenied, match="join again with a new token"):
        find_work_address(worker.config, worker.member)
    token = (tmp_path / "coordinator" / "join-token").read_text().strip()
    assert worker.comes_back(token).worker != worker.member.worker


def test_an_exchange_ends_by_itself(running: Running, owner: Client) -> None:
    owner.rotate_authority(0.2)
    eventually(lambda: len(owner.authorities().authorities) == 1)


def test_owners_commands_go_on_and_their_tokens_are_written_anew(
    running: Running, owner: Client, tmp_path: Path
) -> None:
    owner.rotate_authority(60 * DAY_S)
    assert len(owner.status().workers) == 0, "a token of before still opens"
    kept = JoinToken.decode((tmp_path / "coordinator" / "owner-token").read_text())
    assert kept.presented == JoinToken.decode(running.started.owner_token or "").presented
    owner.drop_authority()
    with connect(f"127.0.0.1:{running.started.entry_port}", kept.encode()) as client:
        assert client.status().version


def test_peers_with_certificates_of_either_authority_meet_while_both_trust_both(tmp_path: Path) -> None:
    old, new = Authority.open(tmp_path / "old"), Authority.open(tmp_path / "new")
    both = new.certificate_pem + old.certificate_pem
    a = Host(enroll(new, "w-a").trusting(both))
    b = Host(enroll(old, "w-b").trusting(both))
    late = Host(enroll(old, "w-c"), listen=False)
    try:
        for one, other in ((a, b), (b, a)):
            other.network.admit(one.network.name)
            one.network.meet(other.network.name, Paths((other.address,), dial=True), HUNG_S)
        a.network.admit("w-c")
        with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
            late.network.meet("w-a", Paths((a.address,), dial=True), 2.0)
        late.network.renew(enroll(old, "w-c").trusting(both))
        late.network.meet("w-a", Paths((a.address,), dial=True), HUNG_S)
        # At the end: the older one opens nothing any more, what is open stays.
        a.network.renew(enroll(new, "w-a"))
        assert a.network.rtt("w-b") >= 0.0
        stranger = Host(enroll(old, "w-d").trusting(both), listen=False)
        a.network.admit("w-d")
        with pytest.raises(ConnectionFailed):
            stranger.network.meet("w-a", Paths((a.address,), dial=True), 1.0)
        stranger.network.close()
    finally:
        for host in (a, b, late):
            host.network.close()


def test_a_certificate_that_was_dropped_opens_the_work_port_no_more(
    running: Running, owner: Client, tmp_path: Path
) -> None:
    worker = Worker(running, tmp_path / "w")
    owner.rotate_authority(60 * DAY_S)
    worker.comes_back()
    both = Identity.load(worker.config.identity_dir)
    assert both is not None
    owner.drop_authority(anyway=True)
    member = replace(worker.member, identity=both)
    assert renewed(worker.config, member, dt.datetime.now(dt.UTC), anyway=True) is None


def test_a_renewal_that_fails_is_tried_again(
    running: Running, owner: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(running, tmp_path / "w")
    monkeypatch.setattr("worker.control.renewal.LEAST_PAUSE_S", 0.01)
    failures = [2]
    real = Membership.channel

    def channel(member: Membership, config: WorkerConfig) -> object:
        failures[0] -= 1
        address = "127.0.0.1:1" if failures[0] >= 0 else member.work_address
        return real(replace(member, work_address=address), config)

    monkeypatch.setattr(Membership, "channel", channel)
    owner.rotate_authority(60.0)
    find = find_work_address(worker.config, worker.member)
    assert find.identity is not None
    worker.renewal.trust(find.identity.ca_pem, 0.1)
    eventually(lambda: worker.identity.of_newest())
    assert failures[0] < 0


def test_a_bundle_of_too_many_authorities_or_of_none_is_refused(tmp_path: Path) -> None:
    made = [Authority.open(tmp_path / name) for name in "abc"]
    identity = enroll(made[0], "w-1")
    for pem, words in (
        (b"".join(one.certificate_pem for one in made), "3 authorities"),
        (b"no certificate", "malformed"),
        (made[0].certificate_pem * 40, "at most"),
    ):
        with pytest.raises(AccessDenied, match=words):
            identity.trusting(pem)
    with pytest.raises(AccessDenied, match="not issued"):
        identity_from(
            identity.key_pem, identity.certificate_pem, made[1].certificate_pem + made[2].certificate_pem
        )
