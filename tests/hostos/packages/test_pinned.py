"""What an app may declare: exact versions and hashes; nothing that pip would take for an order."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from atoll.errors import UsageError
from hostos.packages.pinned import Pinned, key, lacking, parse, requirements

HASH = "ab" * 32


def test_a_table_becomes_pinned_packages_and_lines_of_one_package_each() -> None:
    other = "cd" * 32
    found = parse(
        {
            "Tiny_Math": {"version": "1.0.post1", "sha256": [other, HASH]},
            "a": {"version": "2", "sha256": [HASH]},
        },
        "here",
    )
    assert found == (Pinned("a", "2", (HASH,)), Pinned("tiny-math", "1.0.post1", (HASH, other)))
    assert requirements(found) == (
        f"a==2 --hash=sha256:{HASH}\ntiny-math==1.0.post1 --hash=sha256:{HASH} --hash=sha256:{other}\n"
    )


@pytest.mark.parametrize("name", [
    "--index-url", "-e", "-r", "a b", "a\n--extra-index-url", "../a", "/etc/passwd", "a[x]",
    "a;python_version>'3'", "https://h/x.whl", "a @ file:///x", "", "a" * 200, "ä", "a==1", "a#",
])  # fmt: skip
def test_no_name_can_be_an_option_an_address_a_path_or_a_marker(name: str) -> None:
    with pytest.raises(UsageError, match="not a package name"):
        parse({name: {"version": "1", "sha256": [HASH]}}, "here")


@pytest.mark.parametrize("facts", [
    "1.0", {"version": "1.0"}, {"version": "1.*", "sha256": [HASH]}, {"version": ">=1", "sha256": [HASH]},
    {"version": "1 --pre", "sha256": [HASH]}, {"version": "1\n-e .", "sha256": [HASH]},
    {"version": "1", "sha256": []}, {"version": "1", "sha256": HASH}, {"version": "1", "sha256": ["AB" * 32]},
    {"version": "1", "sha256": [HASH + "\n"]}, {"version": "1", "sha256": [HASH], "url": "https://h"},
    {"version": 1, "sha256": [HASH]}, {"version": "1", "sha256": [HASH] * 65},
    {"version": "1" * 65, "sha256": [HASH]},
])  # fmt: skip
def test_a_package_is_an_exact_version_and_hashes_and_nothing_else(facts: Any) -> None:
    with pytest.raises(UsageError, match=r"here: package a: .*sha256|not a SHA-256|hashes of wheels"):
        parse({"a": facts}, "here")


def test_there_are_no_more_than_64_and_none_stands_there_twice() -> None:
    with pytest.raises(UsageError, match="at most 64"):
        parse({f"a{n}": {"version": "1", "sha256": [HASH]} for n in range(65)}, "here")
    with pytest.raises(UsageError, match="twice"):
        parse({name: {"version": "1", "sha256": [HASH]} for name in ("a-b", "A_B")}, "here")


def test_what_is_installed_is_not_lacking_and_another_version_of_it_is_refused() -> None:
    mine = Pinned("no-such-package", "1", (HASH,))
    assert lacking([Pinned("numpy", version("numpy"), (HASH,)), mine]) == [mine]
    with pytest.raises(UsageError, match=r"pins grpcio 0\.1.*never replaced"):
        lacking([Pinned("grpcio", "0.1", (HASH,))])


def test_a_list_has_one_key_whatever_its_order_and_another_for_another_hash() -> None:
    a, b = Pinned("a", "1", (HASH,)), Pinned("b", "1", (HASH,))
    assert key([a, b]) == key([b, a]) != key([a, Pinned("b", "1", ("cd" * 32,))])
