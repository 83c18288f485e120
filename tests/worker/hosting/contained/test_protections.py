"""What the doctor and the log of a join say of the protections."""

from __future__ import annotations

import pytest

from atoll.errors import UsageError
from worker.hosting.contained import sandbox
from worker.hosting.contained.control_group import memory_groups
from worker.hosting.contained.protections import Protections, protections
from worker.hosting.contained.sandbox import Sandbox, chosen, probe


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
    assert not protections("cuda", probe()).data_limit


def test_what_is_found_is_what_a_launch_would_use() -> None:
    found = protections("cpu", probe())
    assert bool(found.no_sandbox) != bool(probe())
    assert bool(found.no_group) == bool(memory_groups())


def test_a_sandbox_is_taken_where_it_works_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Sandbox("/usr/bin/bwrap")
    monkeypatch.setattr(sandbox, "probe", lambda device: works)
    assert chosen("auto") is works
    assert chosen("require") is works
    assert chosen("off").why_not == "switched off by --sandbox off"
    none = Sandbox("", why_not="bubblewrap is not installed", remedy="install it")
    monkeypatch.setattr(sandbox, "probe", lambda device: none)
    assert chosen("auto") is none
    with pytest.raises(UsageError, match="but bubblewrap is not installed; install it, or give"):
        chosen("require")
