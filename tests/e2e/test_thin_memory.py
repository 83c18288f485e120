"""A real worker with two thirds of the memory that its stage takes as it is."""

from __future__ import annotations

import pytest

from benchmarks.thin_memory import on_workers
from worker.hosting.contained.control_group import memory_groups


@pytest.mark.slow
def test_a_stage_larger_than_its_worker_trains_elsewhere_or_in_few_bits() -> None:
    if why_not := memory_groups():
        pytest.skip(why_not)
    found, _ = on_workers(0, 1.5, steps=3)
    room, plain, elsewhere, few = found
    assert room.state == "finished"
    assert "it fits with" in plain.state
    assert "finished" not in plain.state
    for one, kept in ((elsewhere, "host"), (few, "int")):
        assert one.state == "finished", one.state
        assert kept in one.kept
        assert one.planned_mib <= room.planned_mib / 1.5
        assert 0.0 < one.measured_mib < room.measured_mib  # page cache of files included
