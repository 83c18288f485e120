"""Tickets of a relay: nobody makes one, changes one, or uses another's."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from atoll.errors import AccessDenied, BadFrame, UsageError
from protos import relay_tickets as relay
from protos.relay_tickets import Ticket

KEY = bytes(range(32))
TICKET = Ticket(relay.pair_id(KEY, "w-a", "w-b"), b"serial 1", True, 1000, 1 << 40, 32)
NONCE = b"n" * relay.NONCE_BYTES


def shown(ticket: Ticket = TICKET, key: bytes = KEY, nonce: bytes = NONCE) -> bytes:
    sealed = relay.seal(key, ticket)
    return relay.answer(sealed, relay.ticket_key(key, sealed), nonce)


def test_the_holder_of_a_ticket_gets_in_until_it_ends() -> None:
    assert relay.nonce_of(relay.greeting(NONCE)) == NONCE
    assert len(shown()) == relay.ANSWER_BYTES
    assert relay.admitted(KEY, shown(), NONCE, 1000.0) == TICKET
    with pytest.raises(AccessDenied, match="ended 5 s ago"):
        relay.admitted(KEY, shown(), NONCE, 1005.0)


def test_both_ends_of_a_pair_have_one_name_and_other_pairs_another() -> None:
    assert relay.pair_id(KEY, "w-b", "w-a") == TICKET.pair
    others = {relay.pair_id(KEY, a, b) for a, b in (("w-a", "w-c"), ("w-", "aw-b"), ("w", "-aw-b"))}
    assert len(others | {TICKET.pair}) == 4
    assert b"w-a" not in relay.seal(KEY, TICKET)


def test_a_ticket_of_another_key_is_forged() -> None:
    with pytest.raises(AccessDenied, match="forged"):
        relay.admitted(KEY, shown(key=bytes(32)), NONCE, 0.0)


def test_an_answer_that_was_overheard_opens_nothing_under_the_next_nonce() -> None:
    with pytest.raises(AccessDenied, match="somebody else's"):
        relay.admitted(KEY, shown(), b"m" * relay.NONCE_BYTES, 0.0)


def test_a_ticket_without_its_key_opens_nothing() -> None:
    sealed = relay.seal(KEY, TICKET)
    for holder in (bytes(32), sealed[-32:]):
        with pytest.raises(AccessDenied, match="somebody else's"):
            relay.admitted(KEY, relay.answer(sealed, holder, NONCE), NONCE, 0.0)


def test_no_bit_of_an_answer_can_be_changed() -> None:
    rng, good = Random(4711), shown()
    for at in {rng.randrange(len(good)) for _ in range(200)} | {0, len(good) - 1}:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        with pytest.raises(AccessDenied):
            relay.admitted(KEY, bytes(bad), NONCE, 0.0)


@pytest.mark.parametrize("said", [b"", b"x", shown()[:-1], shown() + b"x"])
def test_an_answer_of_another_length_is_refused(said: bytes) -> None:
    with pytest.raises((BadFrame, AccessDenied)):
        relay.admitted(KEY, said, NONCE, 0.0)


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 400 Bad Request", relay.greeting(NONCE)[:-1]])
def test_what_is_no_relay_is_known_by_its_first_bytes(first: bytes) -> None:
    with pytest.raises(BadFrame, match="no relay"):
        relay.nonce_of(first)


def test_a_refusal_has_a_bound() -> None:
    assert relay.refusal("no") == b"R\x02no"
    assert len(relay.refusal("x" * 10_000)) == 2 + relay.MAX_REASON_BYTES


def test_the_key_lies_in_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "relay-key"
    key = relay.made_key_file(path)
    assert relay.made_key_file(path) == relay.key_file(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", path.read_text())
    path.write_text("abc")
    with pytest.raises(UsageError, match="64 hexadecimal"):
        relay.key_file(path)
