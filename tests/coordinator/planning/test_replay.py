"""The timeline of a plan is the one that it was chosen by."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from atoll.exchange import Exchange
from atoll.job import TrainingSpec
from atoll.plan import Plan, Replica
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.replay import timelines
from tests.coordinator.planning.dags import gpt_like
from tests.coordinator.planning.fleets import two_islands

DAG = gpt_like(4)


def planned(schedule: str = "auto", compress: str = "off") -> tuple[PlanRequest, Plan]:
    training = TrainingSpec(10, 8, compress=compress)
    request = PlanRequest("job", 1, DAG, DAG, training, two_islands(400), "proportional", schedule)
    return request, make_plan(request)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("compress", ["off", "topk:20"])
def test_a_plans_timeline_has_the_bytes_and_seconds_that_its_prediction_has(
    schedule: str, compress: str
) -> None:
    request, plan = planned(schedule, compress)
    [found] = timelines(request, plan)
    assert plan.prediction is not None
    by_pair = {(link.source, link.target): link for link in plan.prediction.links}
    for use in found.links:
        link = by_pair[plan.stages[use.source].worker, plan.stages[use.target].worker]
        assert (use.n_bytes, use.busy_s) == (link.bytes_per_step, link.busy_s)
    assert found.commit_s == plan.prediction.commit_s
    assert [found.busy_share(s) for s in range(4)] == [s.busy_share for s in plan.prediction.stages]
    done = Counter((span.source, span.kind) for span in found.spans if span.kind in ("F", "B", "I"))
    assert set(done.values()) == {8}
    assert len(done) == 8


def test_each_replica_has_its_own_timeline_on_its_own_micro_batches() -> None:
    request, plan = planned()
    stages, links = plan.stages, plan.links
    halves = tuple(Replica(micros, stages, links) for micros in ((0, 6), (6, 8)))
    large, small = timelines(request, replace(plan, replicas=halves, exchange=Exchange()))
    assert {span.micro for span in large.spans if span.kind == "F"} == set(range(6))
    assert {span.micro for span in small.spans if span.kind == "F"} == {6, 7}
    assert small.step_s < large.step_s
