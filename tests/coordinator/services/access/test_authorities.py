"""A coordinator's authority is exchanged for a new one, whenever it is killed meanwhile."""

from __future__ import annotations

import datetime as dt
import json
import stat
from pathlib import Path

import pytest

from atoll.errors import AccessDenied, StorageError, UsageError
from coordinator.services.access.authorities import EXCHANGE, MAX_OVERLAP_S, NEXT, Authorities
from protos.credentials import (
    Authority,
    authorities_in,
    identity_from,
    new_key,
    signing_request,
    verify_certificate,
)

YEAR = dt.timedelta(days=365)
OVERLAP_S = 60.0


def opened(folder: Path, now_s: float = 0.0) -> Authorities:
    return Authorities(folder, YEAR, now_s)


def signed(authorities: Authorities, worker: str = "w-1") -> bytes:
    return authorities.sign(signing_request(new_key(), "x"), worker)


def test_both_are_trusted_during_an_exchange_and_the_new_one_alone_after_it(tmp_path: Path) -> None:
    found = opened(tmp_path)
    first, before = found.newest, signed(found)
    found.rotate(OVERLAP_S, 100.0)
    second, during = found.newest, signed(found)
    assert authorities_in(found.trusted_pem) == (second.certificate_pem, first.certificate_pem)
    for certificate in (before, during):
        assert verify_certificate(certificate, found.trusted_pem) == "w-1"
    assert verify_certificate(during, second.certificate_pem) == "w-1", "the new one signs at once"
    shown = found.server_identity()
    assert verify_certificate(shown.certificate_pem, first.certificate_pem) == "coordinator", "whom all know"
    assert shown.ca_pem == found.trusted_pem
    assert found.left_s(130.0) == 30.0
    assert not found.end_if_due(159.0)
    assert found.end_if_due(160.0)
    assert found.trusted_pem == second.certificate_pem
    assert (
        verify_certificate(found.server_identity().certificate_pem, second.certificate_pem) == "coordinator"
    )
    with pytest.raises(AccessDenied, match="not issued by this coordinator"):
        verify_certificate(before, found.trusted_pem)
    assert Authority.open(tmp_path).key_pem == second.key_pem, "its files are where every version looks"
    assert not (tmp_path / NEXT).exists()
    assert first.key_pem not in {path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_restart_goes_on_with_the_exchange_and_ends_it_where_its_time_is_over(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.rotate(OVERLAP_S, 100.0)
    signed(found, "w-1")
    again = opened(tmp_path, 120.0)
    assert again.trusted_pem == found.trusted_pem
    assert (again.holds_newest("w-1"), again.holds_newest("w-2")) == (True, False)
    assert opened(tmp_path, 200.0).trusted_pem == found.newest.certificate_pem
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}


def test_killed_before_it_began_nothing_has_changed(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.rotate(OVERLAP_S, 0.0)
    (tmp_path / NEXT / EXCHANGE).unlink()
    assert opened(tmp_path).trusted_pem == found.trusted[1].certificate_pem
    assert not (tmp_path / NEXT).exists()


def test_killed_between_key_and_certificate_the_next_start_completes_it(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.rotate(OVERLAP_S, 0.0)
    newest = found.newest
    (tmp_path / "ca-key.pem").write_bytes(newest.key_pem)
    again = opened(tmp_path, 1.0)
    assert again.trusted_pem == newest.certificate_pem
    assert not again.exchanging
    assert identity_from_server(again) == "coordinator"


def identity_from_server(authorities: Authorities) -> str:
    shown = authorities.server_identity()
    return identity_from(shown.key_pem, shown.certificate_pem, shown.ca_pem).name


def test_with_no_overlap_the_new_one_is_alone_at_once(tmp_path: Path) -> None:
    found, heard = opened(tmp_path), []
    found.changed = lambda: heard.append(found.trusted_pem)
    found.rotate(0.0, 5.0)
    assert heard == [found.newest.certificate_pem]
    assert not found.exchanging


def test_everybody_hears_of_each_change_once(tmp_path: Path) -> None:
    found, heard = opened(tmp_path), []
    found.changed = lambda: heard.append(len(found.trusted))
    found.rotate(OVERLAP_S, 0.0)
    found.end_if_due(1.0)
    found.drop()
    assert heard == [2, 1]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    found = opened(tmp_path)
    with pytest.raises(UsageError, match="begins to exchange it"):
        found.drop()
    for overlap_s in (-1.0, float("nan"), MAX_OVERLAP_S + 1):
        with pytest.raises(UsageError, match="give 0 to"):
            found.rotate(overlap_s, 0.0)
    found.rotate(OVERLAP_S, 0.0)
    with pytest.raises(UsageError, match="being exchanged already"):
        found.rotate(OVERLAP_S, 1.0)


@pytest.mark.parametrize(
    "noted", ["", "{}", json.dumps({"began_s": 1.0}), json.dumps({"began_s": [], "ends_s": 1})]
)
def test_a_damaged_note_of_the_exchange_is_named(noted: str, tmp_path: Path) -> None:
    opened(tmp_path).rotate(OVERLAP_S, 0.0)
    (tmp_path / NEXT / EXCHANGE).write_text(noted)
    with pytest.raises(StorageError, match=r"exchange\.json cannot be read .* from a backup"):
        opened(tmp_path)
