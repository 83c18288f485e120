"""A coordinator that runs for years keeps nothing of the jobs that its owners had it forget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from coordinator.messages import events as ev
from tests.sim.world import scenario, violation_of

TOLD = ("forgotten", "heard_job")  # names that are kept: no such job comes again; a worker's last words


def mentions(owner: object, job: str, seen: set[int], path: str = "") -> Iterator[str]:
    """Yield where a job is the key of a mapping, or a member of a collection, below an object of ours."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    below: list[tuple[str, Any]] = []
    if isinstance(owner, dict):
        if any(key == job or (isinstance(key, tuple) and job in key) for key in owner):
            yield path
        below = [(f"{path}[{key!r}]", value) for key, value in owner.items()]
    elif isinstance(owner, list | tuple | set | frozenset):
        if job in owner:
            yield path
        below = [(f"{path}[]", value) for value in owner]
    elif is_dataclass(owner) and type(owner).__module__.startswith("coordinator."):
        names = (each.name for each in fields(owner) if each.name not in TOLD)
        below = [(f"{path}.{name}", getattr(owner, name)) for name in names if hasattr(owner, name)]
    for there, value in below:
        yield from mentions(value, job, seen, there)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_of_a_forgotten_job_is_kept(seed: int) -> None:
    why, world = violation_of(scenario(seed))
    scheduler, now_s = world.coordinator.scheduler, world.clock.now_s
    assert not why
    assert list(mentions(scheduler, "job-1", set())), "while its owner may ask for it"
    for job in world.specs:
        scheduler.handle(ev.ForgetAsked(job), now_s)
    scheduler.handle(ev.Tick(), now_s + 1.0)
    for job in world.specs:
        assert not list(mentions(scheduler, job, set()))
