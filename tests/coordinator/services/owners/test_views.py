"""What the owner is shown of links: by step, whatever a report is of."""

from __future__ import annotations

import pytest

from coordinator.messages import events as ev
from coordinator.services.owners.views import job_update
from tests.coordinator.pipeline.changes.test_reconfigure import JOB, spec
from tests.sim.scripted import Scripted


def test_what_a_round_carries_is_shown_by_step() -> None:
    """Ten steps of a second, and a megabyte at the end of them."""
    world = Scripted(stages=1, fewest=1)
    world.join("a", "b")
    world.submit(
        what=spec(1, steps=40, blocks=2, replicas="2", exchange="diloco", local_steps=10, spot_checks=0.0)
    )
    world.load()
    for number in range(2):
        world.wait(10.0)
        last = world.state().due
        assert last == 10 * number + 9
        for worker, other in ("ab", "ba"):
            receipt = ev.RoundReceipt(number, (0, 1), 1.0, 10**6, 10**6, "d")
            carried = ev.Goodput(other, 10**6, 1.0, 0.01, dense_bytes=10**6 + 1)
            world.ready(worker, step=last, losses=(0.5,) * 10, receipts=(receipt,), links=(carried,))
    assert world.state().step == 20
    links = job_update(world.scheduler, JOB, 0.0).links
    assert [(link.source, link.target) for link in links] == [("a", "b"), ("b", "a")]
    for link in links:
        assert link.bps == pytest.approx(0.8e6, rel=0.01)
        assert (link.bytes_per_step, link.dense_bytes_per_step) == (100_000, 100_001)
