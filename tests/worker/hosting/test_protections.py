"""What the doctor and the log of a join say of the protections."""

from __future__ import annotations

from worker.hosting.control_group import memory_groups
from worker.hosting.protections import Protections, protections
from worker.hosting.sandbox import probe


def test_all_that_is_on_is_named_and_what_is_not_has_its_reason() -> None:
    full = Protections("", "", "", True)
    assert full.line() == "own process, bubblewrap, memory by control group"
    assert [one.remedy for one in full.words()] == ["", "", ""]
    bare = Protections("bubblewrap is not installed", "install it", "not for this user", True)
    memory = "RLIMIT_DATA and watchdog every 0.1 s"
    assert bare.line() == f"own process, no sandbox (bubblewrap is not installed), memory by {memory}"
    found = {one.name: one for one in bare.words()}
    assert (found["sandbox"].found, found["sandbox"].remedy) == (
        "none: bubblewrap is not installed",
        "install it",
    )
    assert found["memory bound"].found.endswith("watchdog every 0.1 s (not for this user)")


def test_a_gpus_memory_of_addresses_is_never_limited() -> None:
    assert Protections("", "", "none", False).memory == "watchdog every 0.1 s"
    assert not protections("cuda").data_limit


def test_what_is_found_is_what_a_launch_would_use() -> None:
    found = protections("cpu")
    assert bool(found.no_sandbox) != bool(probe())
    assert bool(found.no_group) == bool(memory_groups())
