"""Where a process stands in its site, by what torchrun sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import UsageError
from worker.site.places import Place, device_of, place_in, site_interface, site_secret

GIVEN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


def test_torchruns_variables_are_a_place() -> None:
    assert place_in(GIVEN) == Place(3, 4, 1, 2, "127.0.0.1", 29501)
    assert place_in({**GIVEN, "MASTER_PORT": ""}, 7710).port == 7710


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "4"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "-1"), ("MASTER_PORT", "65535"), ("MASTER_ADDR", "")],
)
def test_variables_that_contradict_each_other_are_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        place_in({**GIVEN, name: value})


def test_each_process_has_a_device_of_its_own() -> None:
    assert device_of(None, 1, 2) == "cuda:1"
    assert device_of("cpu", 1, 2) == device_of("auto", 0, 0) == "cpu"
    with pytest.raises(UsageError, match="no GPU of its own"):
        device_of(None, 2, 2)
    with pytest.raises(UsageError, match="each process takes its own"):
        device_of("cuda:0", 0, 2)


def test_the_network_is_that_by_which_rank_0_is_reached_or_the_one_given() -> None:
    place = place_in(GIVEN)
    name, address = site_interface(place)
    assert (name, address) == ("lo", "127.0.0.1")
    assert site_interface(place, "lo")[0] == "lo"
    with pytest.raises(UsageError, match="this host has"):
        site_interface(place, "nothing0")


def test_a_name_that_is_the_loopback_device_here_reaches_no_other_host() -> None:
    place = place_in({**GIVEN, "MASTER_ADDR": "127.0.0.1"})
    named = Place(0, place.size, 0, 2, "localhost.localdomain", place.port)
    with pytest.raises(UsageError, match="--interface"):
        site_interface(named)


def test_a_secret_is_long_enough_and_nobody_elses(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        site_secret(file)
    file.chmod(0o600)
    assert site_secret(file) == b"0123456789abcdef0123456789abcdef"
    assert site_secret(None, {"ATOLL_SITE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    for given in ({}, {"ATOLL_SITE_SECRET": "short"}):
        with pytest.raises(UsageError, match="ATOLL_SITE_SECRET has"):
            site_secret(None, given)
