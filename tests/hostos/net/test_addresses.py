"""Addresses: as people write them, and refused with an example."""

from __future__ import annotations

import pytest

from atoll.errors import UsageError
from hostos.net.addresses import join_address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("h:1", ("h", 1)),
        ("lab", ("lab", 7700)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 7700)),
        ("fe80::1", ("fe80::1", 7700)),
        ("2001:db8::a1b2", ("2001:db8::a1b2", 7700)),
        ("[2001:db8::1234]", ("2001:db8::1234", 7700)),
        ("2001:db8:0:0:0:0:0:1234", ("2001:db8:0:0:0:0:0:1234", 7700)),
        ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert parse_address(join_address(*address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:",
        "h:x",
        "h:99999",
        "lab:70000",
        "http://h:1",
        "a b:1",
        "[h]:1",
        "x:b:1",
        "[1:2]:3",
        "::1::2",
        "a:b:c",
    ],
)
def test_other_addresses_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_a_port_of_0_is_for_who_listens() -> None:
    assert parse_address("h:0") == ("h", 0)
    with pytest.raises(UsageError, match="port 0 of 'h:0'; write HOST:PORT, a port from 1 to 65535"):
        parse_address("h:0", lowest_port=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("::1:7700", r"\[::1\]:7700, or \[::1:7700\] if 7700 belongs to the address"),
        ("fd00::1:17700", r"\[fd00::1\]:17700$"),
    ],
)
def test_a_port_behind_an_ipv6_address_without_brackets_is_not_taken_for_a_part_of_it(
    text: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        parse_address(text)
