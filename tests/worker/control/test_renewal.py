"""Certificates renew by themselves: a worker's under the old one, the coordinator's own without a restart."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing

from atoll.errors import AccessDenied
from coordinator.config import CoordinatorConfig
from coordinator.server import RENEW_AFTER, Running, serve
from protos.certificate_words import clock_words, shown_certificate
from protos.credentials import Authority, Identity, identity_from, new_key, signing_request
from worker.config import WorkerConfig
from worker.control.bulk import Bulk
from worker.control.enroll import CLOCK_OFF_S, Membership, join, note_clock
from worker.control.renewal import Renewal, renewed
from worker.transport.contract import Paths
from worker.transport.network import PeerNetwork

DAY, HOUR = dt.timedelta(days=1), dt.timedelta(hours=1)
HASH = "ab" * 32


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A coordinator whose certificates last a day."""
    config = CoordinatorConfig(
        state_dir=tmp_path / "coordinator", entry_port=0, certificate_lifetime_s=DAY.total_seconds()
    )
    with serve(config) as started:
        yield started


@pytest.fixture
def config(running: Running, tmp_path: Path) -> WorkerConfig:
    return WorkerConfig(
        host="127.0.0.1",
        port=running.started.entry_port,
        token=running.started.join_token or "",
        state_dir=tmp_path / "worker",
    )


def joined(config: WorkerConfig) -> tuple[Membership, Identity]:
    member = join(config, lambda _: False)
    assert member.identity is not None
    return member, member.identity


def test_a_certificate_of_one_day_renews_by_itself_long_before_it_ends(config: WorkerConfig) -> None:
    member, first = joined(config)
    begun = dt.datetime.now(dt.UTC)
    assert DAY - HOUR < first.expires() - begun <= DAY
    looks = iter([begun, begun + 7 * HOUR, begun + 9 * HOUR, begun + 10 * HOUR])
    used: list[Identity] = []
    left = [4]

    def stopped(_: float) -> bool:
        left[0] -= 1
        return left[0] == 0

    Renewal(config, lambda: member, used.append, lambda: next(looks)).keep(stopped)
    # At the third and the fourth look: the member that was asked about still holds the first.
    assert len(used) == 2
    assert used[0].name == first.name
    assert used[0].key_pem != first.key_pem
    kept = Identity.load(config.identity_dir)
    assert kept is not None
    assert kept.certificate_pem == used[-1].certificate_pem
    again = replace(config, token="")
    assert join(again, lambda _: False).worker == first.name, "the renewed one opens the door without a token"


def test_the_renewed_identity_is_used_for_what_is_opened_from_then_on(
    config: WorkerConfig, tmp_path: Path
) -> None:
    member, first = joined(config)
    bulk = Bulk(lambda m: m.channel(config), member)
    assert bulk.missing([HASH]) == {HASH: 0}
    found = renewed(config, member, first.renewal_due())
    assert found is not None
    bulk.renewed(replace(member, identity=found))
    assert bulk.missing([HASH]) == {HASH: 0}
    bulk.close()


def test_a_worker_that_is_barred_gets_no_new_certificate(config: WorkerConfig, running: Running) -> None:
    member, first = joined(config)
    assert running.server is not None
    register = running.server.register
    register.workers[member.worker] = replace(register.workers[member.worker], barred="a liar")
    with structlog.testing.capture_logs() as logs:
        assert renewed(config, member, first.renewal_due()) is None
    (line,) = [entry for entry in logs if entry["event"] == "certificate.not_renewed"]
    assert "removed for good: a liar" in line["reason"]
    kept = Identity.load(config.identity_dir)
    assert kept is not None
    assert kept.certificate_pem == first.certificate_pem


def test_a_coordinator_that_is_away_is_asked_again_later(config: WorkerConfig, running: Running) -> None:
    member, first = joined(config)
    running.__exit__(None, None, None)
    assert renewed(config, member, first.renewal_due()) is None


@pytest.mark.parametrize("lifetime", [DAY, 365 * DAY])
def test_renewal_is_due_thirty_days_ahead_or_a_third_of_a_short_time(
    lifetime: dt.timedelta, tmp_path: Path
) -> None:
    authority, key = Authority.open(tmp_path, lifetime), new_key()
    made = identity_from(key, authority.sign(signing_request(key, "x"), "w-1"), authority.certificate_pem)
    ahead = made.expires() - made.renewal_due()
    assert ahead == min(30 * DAY, (lifetime + DAY) / 3)


def test_the_coordinator_shows_a_new_certificate_each_week_without_a_restart(
    config: WorkerConfig, running: Running
) -> None:
    server = running.server
    assert server is not None
    assert server.identity is not None
    ports = [f"127.0.0.1:{port}" for port in (running.started.entry_port, running.started.work_port)]
    first, now = server.identity.now, dt.datetime.now(dt.UTC)
    server.renew(now)
    assert server.identity.now is first
    server.renew(now + 8 * HOUR)  # a certificate of a day, a week of seven
    second = server.identity.now
    assert second is not first
    assert [shown_certificate(port) for port in ports[:1]] == [second.certificate_pem]
    joined(config)
    for identity, due in ((first, RENEW_AFTER), (second, RENEW_AFTER)):
        assert identity.issued() + due > now


def test_peers_see_the_renewed_certificate_and_open_connections_stay(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path)

    def made(name: str) -> Identity:
        key = new_key()
        return identity_from(key, authority.sign(signing_request(key, name), name), authority.certificate_pem)

    a = PeerNetwork(made("w-a"), ("127.0.0.1", 0))
    b = PeerNetwork(made("w-b"), ("127.0.0.1", 0))
    try:
        b.admit("w-a")
        a.meet("w-b", Paths((("127.0.0.1", b.port),), dial=True), 20.0)
        newest = made("w-b")
        b.renew(newest)
        assert shown_certificate(f"127.0.0.1:{b.port}") == newest.certificate_pem
        assert a.rtt("w-b") >= 0.0
        a.renew(made("w-a"))
        a.admit("w-b")
        b.meet("w-a", Paths((("127.0.0.1", a.port),), dial=True), 20.0)
    finally:
        a.close()
        b.close()


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize(
    ("offset_s", "words"),
    [
        (172_800.0, "this machine's clock is 2.0 days behind the coordinator's"),
        (-172_800.0, "this machine's clock is 2.0 days ahead of the coordinator's"),
        (7200.0, "this machine's clock is 2.0 hours behind the coordinator's"),
        (-0.5, "this machine's clock is 0.5 seconds ahead of the coordinator's"),
    ],
)
def test_a_wrong_clock_is_said_with_its_side(offset_s: float, words: str) -> None:
    assert clock_words(offset_s) == words
    with structlog.testing.capture_logs() as logs:
        note_clock(offset_s)
    noted = [entry["reason"] for entry in logs if entry["event"] == "clock.wrong"]
    assert noted == ([f"{words}: set the clock, or the coordinator's"] if abs(offset_s) > CLOCK_OFF_S else [])


def test_a_clock_two_days_ahead_is_the_reason_given_for_a_certificate_that_looks_ended(
    tmp_path: Path,
) -> None:
    authority, key = Authority.open(tmp_path, DAY), new_key()
    certificate = authority.sign(signing_request(key, "x"), "w-1")
    late = dt.datetime.now(dt.UTC) + 2 * DAY
    with pytest.raises(AccessDenied, match=r"ended on .* this machine's clock says .* set the clock"):
        identity_from(key, certificate, authority.certificate_pem, late)
    early = dt.datetime.now(dt.UTC) - 2 * DAY
    with pytest.raises(AccessDenied, match=r"is not valid before .* set the clock"):
        identity_from(key, certificate, authority.certificate_pem, early)
