"""Short join tokens: what they hold, what of them is refused, and which authority they open."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import AccessDenied
from protos.credentials import (
    Authority,
    JoinToken,
    authorities_in,
    join_command,
    new_token,
    opened,
    pin_of,
    read_token,
    shortened,
)
from protos.short_tokens import MAX_SHORT_CHARS, SHORT_PREFIX, ShortToken


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    one, other = (Authority.open(tmp_path_factory.mktemp("ca") / name) for name in ("one", "other"))
    return one, other


@pytest.fixture(scope="module")
def token(authorities: tuple[Authority, Authority]) -> JoinToken:
    return new_token(authorities[0], 7701)


def rewritten(text: str, change: bytes) -> str:
    """A token whose body ends with ``change``, with the right checksum."""
    body = base64.urlsafe_b64decode(text.removeprefix(SHORT_PREFIX) + "==")
    body = body[: -4 - len(change)] + change
    return SHORT_PREFIX + base64.urlsafe_b64encode(
        body + zlib.crc32(body).to_bytes(4, "big")
    ).decode().rstrip("=")


@pytest.mark.parametrize("host", ["", "192.0.2.7", "2001:db8::7", "train.example.org"])
def test_a_short_token_has_at_most_ninety_characters_and_names_secret_address_and_authority(
    token: JoinToken, host: str
) -> None:
    short = shortened(token, host, 7700 if host else 0)
    text = short.encode()
    assert len(text) <= MAX_SHORT_CHARS == 90
    found = read_token(f" {text[:40]}\n{text[40:]} ")
    assert found == short
    assert (short.host, short.secret, short.pins) == (host, token.secret, (pin_of(token.ca_pem),))
    assert opened(short, token.ca_pem).presented == token.presented


def test_an_address_too_long_for_the_token_stands_beside_it(token: JoinToken) -> None:
    host = "ec2-192-0-2-7.eu-west-1.compute.example.org"
    short = shortened(token, host, 7700)
    assert (short.host, short.port) == ("", 0)
    assert join_command(token, host, 7700) == f"atoll-worker join {host}:7700 --token {short.encode()}"
    assert join_command(token, "", 7700) == f"atoll-worker join HOST:7700 --token {short.encode()}"
    assert join_command(token, "192.0.2.7", 7700).split()[2] == "--token"


def test_during_an_exchange_a_token_names_both_authorities(authorities: tuple[Authority, Authority]) -> None:
    one, other = authorities
    both = JoinToken(other.certificate_pem + one.certificate_pem, bytes(16), 0)
    short = shortened(both, "192.0.2.7", 7700)
    assert len(short.encode()) <= MAX_SHORT_CHARS
    assert len(short.pins) == 2
    assert opened(short, one.certificate_pem).ca_pem == one.certificate_pem
    assert opened(short, other.certificate_pem).ca_pem == other.certificate_pem


def test_only_authorities_that_the_token_names_are_trusted(
    token: JoinToken, authorities: tuple[Authority, Authority]
) -> None:
    short, (one, other) = shortened(token), authorities
    with pytest.raises(AccessDenied, match="nothing was sent"):
        opened(short, other.certificate_pem)
    with pytest.raises(AccessDenied, match="malformed"):
        opened(short, b"")
    with pytest.raises(AccessDenied, match="at most"):
        opened(short, one.certificate_pem * 100)
    found = opened(short, other.certificate_pem + one.certificate_pem)
    assert authorities_in(found.ca_pem) == (one.certificate_pem,)


def test_a_token_that_was_changed_or_cut_off_is_refused(token: JoinToken) -> None:
    text = shortened(token, "192.0.2.7", 7700).encode()
    for at in range(len(SHORT_PREFIX), len(text)):
        changed = "A" if text[at] != "A" else "B"
        with pytest.raises(AccessDenied):
            read_token(text[:at] + changed + text[at + 1 :])
    for length in range(len(SHORT_PREFIX), len(text)):
        with pytest.raises(AccessDenied):
            read_token(text[:length])
    with pytest.raises(AccessDenied, match="at most 90"):
        read_token(text + "A" * 40)


@pytest.mark.parametrize("host", [b"a b", b"$(id)", b"\xff\xff\xff", b"../../x"])
def test_an_address_that_is_none_is_refused(token: JoinToken, host: bytes) -> None:
    text = shortened(token, "192.0.2.7", 7700).encode()
    with pytest.raises(AccessDenied, match="as it was issued"):
        read_token(rewritten(text, host))


@given(st.binary(max_size=70))
def test_no_bytes_make_a_token_that_is_read_as_another(body: bytes) -> None:
    body += zlib.crc32(body).to_bytes(4, "big")
    text = SHORT_PREFIX + base64.urlsafe_b64encode(body).decode().rstrip("=")
    try:
        found = read_token(text)
    except AccessDenied:
        return
    assert isinstance(found, ShortToken)
    assert found.encode() == text


def test_the_secret_is_in_no_repr_and_a_short_token_is_no_owners(token: JoinToken) -> None:
    short = shortened(token)
    assert repr(token.secret) not in repr(short)
    assert token.presented not in repr(short)
    with pytest.raises(AccessDenied, match="short join token"):
        JoinToken.decode(short.encode())


def test_long_tokens_are_read_as_before(token: JoinToken) -> None:
    assert read_token(token.encode()) == token
