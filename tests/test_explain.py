from dataclasses import replace

import pytest

from atoll.job import TrainingSpec
from coordinator.explain import explain, plot, timeline_of
from coordinator.partition import make_plan
from coordinator.plot import plot_plan
from tests.dags import gpt_like
from tests.fleets import two_islands

TRAINING = TrainingSpec(10, 8)
DAG = gpt_like(4)


@pytest.fixture(scope="module")
def plan():
    return make_plan("job", 1, DAG, None, TRAINING, two_islands())


def test_a_plan_explains_its_stages_links_step_bound_and_bottleneck(plan):
    text = explain(plan, DAG, two_islands())
    for word in (
        "stage",
        "memory MiB",
        "Mbit/s",
        "predicted",
        "no schedule of this cut",
        "bottleneck",
        "one machine",
    ):
        assert word in text, word
    assert all(stage.worker in text for stage in plan.stages)
    assert "wte" in text
    assert "uplink        fast: 8 Mbit/s up" in text
    assert max(map(len, text.splitlines())) < 260


def test_a_compressed_plan_explains_every_link(tmp_path):
    training = TrainingSpec(10, 8, compress="auto")
    plan = make_plan("job", 1, DAG, None, training, two_islands())
    text = explain(plan, DAG, two_islands())
    assert "topk:" in text
    assert text.count("a micro-batch at") == sum(bool(link.reason) for link in plan.links) > 0
    assert timeline_of(plan, DAG, training, two_islands()).step_s == pytest.approx(plan.prediction.step_s)
    plot_plan(plan, {}, tmp_path / "plan.png")


def test_devices_left_out_are_named_with_the_reason():
    alone = make_plan("job", 1, DAG, None, TrainingSpec(10, 1), two_islands(4096))
    text = explain(alone, DAG, two_islands(4096))
    assert text.count("left out") == 4 - len(alone.stages) > 0


def test_a_plan_without_prediction_has_nothing_to_explain(plan):
    with pytest.raises(ValueError, match="without prediction"):
        explain(replace(plan, prediction=None), DAG)


def test_the_timeline_of_a_plan_is_what_its_prediction_says(plan):
    timeline = timeline_of(plan, DAG, TRAINING, two_islands())
    assert timeline.step_s == pytest.approx(plan.prediction.step_s)
    assert len([s for s in timeline.spans if s.kind in "FB"]) == 2 * 8 * len(plan.stages)


def test_a_plan_is_drawn(plan, tmp_path):
    path = tmp_path / "plan.png"
    plot(plan, timeline_of(plan, DAG, TRAINING, two_islands()), path)
    assert path.read_bytes()[:4] == b"\x89PNG"
