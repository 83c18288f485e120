"""Forms of what stages keep: which a job leaves open, which plans take, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import NotEnoughMemory
from atoll.job import EXACTLY, Activations, Keeping, Place, Recompute, TrainingSpec
from atoll.opdag import OpDag
from coordinator.planning.costs.op_seconds import OpTable, away_rates, packing_rates
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from coordinator.planning.search.keepings import forms, mildest_first
from tests.coordinator.planning.dags import gpt_like
from tests.coordinator.planning.fleets import random_fleet

ANY = TrainingSpec(
    10, 8, activations=Activations.AUTO, saved_on=Place.AUTO, state_on=Place.AUTO, recompute=Recompute.OFF
)
LIMIT_MIB = 4000.0


def few(dag: OpDag) -> OpDag:
    """All that ops save is activations in float32."""
    ops = [replace(n, bytes_few=n.bytes_saved, elements_few=n.bytes_saved // 4) for n in dag.ops]
    return replace(dag, ops=tuple(ops))


DAG = few(gpt_like(4))
ALONE = random_fleet(3, 1, memory_mib=(LIMIT_MIB, LIMIT_MIB))
FAST = {"saved_int8": (1e12, 1e12), "saved_int4": (1e11, 1e11), "kept_on_disk": (1e9, 1e9)}


def with_limit(limit: float, speeds: dict[str, tuple[float, float]] = FAST):
    (device,) = ALONE.devices
    device = replace(device, memory_limit_bytes=round(limit), codec_speeds=speeds)
    return replace(ALONE, devices=(device,))


def need(keeping: Keeping) -> float:
    return Problem(DAG, ANY, ALONE, keeping=keeping).memory.bytes(0, len(DAG.ops), 1)


def plan_on(fleet, training: TrainingSpec):
    return make_plan(PlanRequest("job", 1, DAG, None, training, fleet))


def test_a_job_that_leaves_nothing_open_has_one_form() -> None:
    asked = TrainingSpec(1, 1, recompute=Recompute.FULL, activations=Activations.INT4)
    assert forms(asked, cheap=True) == [Keeping(Recompute.FULL, Activations.INT4)]
    assert TrainingSpec(1, 1).keeping.decided == EXACTLY


def test_forms_that_are_others_under_another_name_are_left_out() -> None:
    found = forms(replace(ANY, recompute=Recompute.AUTO), cheap=True)
    assert len(found) == len(set(found)) == 2 + 4 * 4
    assert all(not each.open for each in found)
    assert all(each.saved_on is Place.DEVICE and not each.bits for each in found if each.recompute == "full")
    assert len(forms(replace(ANY, recompute=Recompute.AUTO), cheap=False)) == 2 + 3 * 4


def test_each_form_takes_less_memory_and_more_time() -> None:
    problem = Problem(DAG, ANY, with_limit(1e12))
    ordered = [each.keeping for each in mildest_first(problem, forms(ANY, cheap=False))]
    assert ordered[0] == EXACTLY
    away = Keeping(saved_on=Place.HOST, state_on=Place.HOST)
    int8, int4 = Keeping(activations=Activations.INT8), Keeping(activations=Activations.INT4)
    assert need(EXACTLY) > need(int8) > need(int4)
    assert need(EXACTLY) > need(Keeping(state_on=Place.HOST)) > need(away)
    table = OpTable(DAG)
    (device,) = problem.fleet.devices
    plain, packed = table.costs(device), table.costs(device, int8)
    dense = sum(node.bytes_few for node in DAG.ops)
    pack_bps, unpack_bps = packing_rates(device, int8)
    assert (packed.forward_s - plain.forward_s).sum() == pytest.approx(dense / pack_bps)
    assert (packed.backward_s - plain.backward_s).sum() == pytest.approx(dense / unpack_bps)
    stored = table.costs(device, Keeping(saved_on=Place.HOST))
    there, _ = away_rates(device, Place.HOST)
    assert (stored.forward_s - plain.forward_s).sum() == pytest.approx(dense / there)


def test_a_plan_keeps_all_as_it_is_where_that_fits() -> None:
    plan = plan_on(with_limit(1e12), ANY)
    assert plan.stages[0].keeping == EXACTLY


@pytest.mark.parametrize(
    ("training", "keeping", "said"),
    [
        (
            replace(ANY, saved_on=Place.DEVICE, state_on=Place.DEVICE),
            Keeping(activations=Activations.INT8),
            "activations are stored in int8",
        ),
        (
            replace(ANY, activations=Activations.EXACT, saved_on=Place.DEVICE),
            Keeping(state_on=Place.HOST),
            "optimizer state is put on the host",
        ),
        (
            replace(ANY, activations=Activations.EXACT, state_on=Place.DEVICE),
            Keeping(saved_on=Place.HOST),
            "activations are put on the host",
        ),
    ],
)
def test_what_does_not_fit_as_it_is_takes_the_form_that_is_left_open(
    training: TrainingSpec, keeping: Keeping, said: str
) -> None:
    limit = need(keeping) + 4096
    assert limit < need(EXACTLY)
    plan = plan_on(with_limit(limit), training)
    assert plan.stages[0].keeping == keeping
    assert any(said in note and "would need" in note for note in plan.prediction.notes)
    assert plan.prediction.stages[0].memory_bytes <= limit
    with pytest.raises(NotEnoughMemory) as refused:
        plan_on(with_limit(limit), TrainingSpec(10, 8, recompute=Recompute.OFF))
    field = {"int8": "activations=int8", "state": "state_on=host", "put": "saved_on=host"}
    wanted = next(words for name, words in field.items() if name in said.split()[-1] or name in said)
    assert wanted in str(refused.value)


def test_the_faster_of_two_forms_that_fit_is_taken() -> None:
    int8, host = Keeping(activations=Activations.INT8), Keeping(saved_on=Place.HOST)
    limit = max(need(int8), need(host)) + 4096
    training = replace(ANY, state_on=Place.DEVICE)
    slow = {**FAST, "kept_on_disk": (1e6, 1e6)}
    quick = {**FAST, "kept_on_disk": (1e14, 1e14), "saved_int8": (1e6, 1e6), "saved_int4": (1e6, 1e6)}
    assert plan_on(with_limit(limit, slow), training).stages[0].keeping == int8
    assert plan_on(with_limit(limit, quick), training).stages[0].keeping == host


def test_only_the_stage_that_is_short_of_memory_keeps_less() -> None:
    fleet = random_fleet(5, 2, memory_mib=(LIMIT_MIB, LIMIT_MIB))
    cut = "cut:" + str(int(DAG.cuttable()[len(DAG.cuttable()) // 2]))
    at = int(cut.removeprefix("cut:"))
    memory = Problem(DAG, ANY, fleet).memory
    exact = [memory.bytes(0, at, 1), memory.bytes(at, len(DAG.ops), 1)]
    training = replace(ANY, saved_on=Place.DEVICE, activations=Activations.EXACT)
    devices = [
        replace(fleet.devices[0], memory_limit_bytes=round(exact[0]) - 4096, codec_speeds=FAST),
        replace(fleet.devices[1], memory_limit_bytes=10**12, codec_speeds=FAST),
    ]
    fleet = replace(fleet, devices=tuple(devices))
    plan = make_plan(PlanRequest("job", 1, DAG, None, training, fleet, cut))
    assert [stage.keeping.state_on for stage in plan.stages] == [Place.HOST, Place.DEVICE]
    notes = [note for note in plan.prediction.notes if "is put on" in note]
    assert len(notes) == 1
    assert "stage 0" in notes[0]
