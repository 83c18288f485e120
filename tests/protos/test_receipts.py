"""A receipt says what its coordinator signed, to who trusts that authority, and nothing else to anybody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import AccessDenied, UsageError
from protos.credentials import Authority
from protos.receipts import Receipt, checked, read_receipt, signed, stated

ROWS = [{"day": "2026-11-30", "worker": "w-1", "owner": "alice", "useful": {"steps": 3}}]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "ca")


def test_a_receipt_is_read_back_from_its_file_and_holds(authority: Authority) -> None:
    receipt = read_receipt(signed(stated("w-1", "my laptop", 5.0, ROWS), authority).file())
    assert checked(receipt, [authority.certificate_pem]) == {
        "machine": "w-1", "name": "my laptop", "at_s": 5.0, "credits": ROWS,
    }  # fmt: skip


def test_a_changed_statement_and_another_authority_are_refused(authority: Authority, tmp_path: Path) -> None:
    receipt = signed(stated("w-1", "", 5.0, ROWS), authority)
    more = replace(receipt, statement=receipt.statement.replace('"steps":3', '"steps":4'))
    assert more.statement != receipt.statement
    with pytest.raises(AccessDenied, match="not signed by an authority"):
        checked(more, [authority.certificate_pem])
    other = Authority.open(tmp_path / "other")
    with pytest.raises(AccessDenied, match="not signed by an authority"):
        checked(receipt, [other.certificate_pem])
    assert checked(receipt, [other.certificate_pem, authority.certificate_pem])


def test_what_a_receipt_brings_as_its_authority_is_not_trusted(authority: Authority, tmp_path: Path) -> None:
    forged = signed(stated("w-1", "", 5.0, ROWS), Authority.open(tmp_path / "forger"))
    with pytest.raises(AccessDenied):
        checked(read_receipt(forged.file()), [authority.certificate_pem])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"statement": "", "signature": "%", "authority": ""})]
)
def test_a_file_that_is_no_receipt_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no receipt"):
        read_receipt(text)


def test_a_signature_of_something_else_is_none_of_a_receipt(authority: Authority) -> None:
    statement = stated("w-1", "", 5.0, ROWS)
    bare = Receipt(statement, authority.attest(statement.encode()), authority.certificate_pem)
    with pytest.raises(AccessDenied):
        checked(bare, [authority.certificate_pem])
