import re
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from atoll.errors import NotEnoughMemory
from atoll.job import TrainingSpec
from atoll.opdag import OpDag
from atoll.plan import Plan, validate
from coordinator.membership.links.table import LinkTable, measured_fleet
from coordinator.planning import TUNED
from coordinator.planning.costs.fleet import Device, Fleet
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem
from coordinator.planning.reasons.left_out import summarised
from coordinator.planning.search.op_fence import Effort
from coordinator.planning.search.preselect import Preselection, candidates
from tests.coordinator.planning.dags import gpt_like
from tests.coordinator.planning.fleets import islands, random_fleet, two_islands

EVERYBODY = Effort(few=10**6)  # the fleet is searched as it is
MIB = 2**20


def plan_for(dag: OpDag, fleet: Fleet, effort: Effort, n_micro: int = 4, **more: int) -> Plan:
    return make_plan(PlanRequest("job", 1, dag, None, TrainingSpec(1, n_micro), fleet, **more), effort)


def step_or_none(dag: OpDag, fleet: Fleet, effort: Effort, n_micro: int = 4) -> float | None:
    try:
        plan = plan_for(dag, fleet, effort, n_micro)
    except NotEnoughMemory:
        return None
    validate(plan, dag, TrainingSpec(1, n_micro))
    assert plan.prediction is not None
    assert all(s.memory_bytes <= s.memory_limit_bytes for s in plan.prediction.stages)
    return plan.prediction.step_s


def case(seed: int, layers: int = 16) -> tuple[OpDag, Fleet]:
    """A fleet of 40 to 64 workers: alike islands, small islands short of memory, links at random."""
    n = 40 + 7 * seed % 25
    if seed % 3 == 0:
        return gpt_like(layers, d=128, tokens=128, tied=False), islands(seed, n // 6, 6, 20.0)[0]
    if seed % 3 == 1:
        return gpt_like(24, d=256, tokens=128, tied=False), islands(seed, n // 8, 8, 200.0)[0]
    return gpt_like(8), random_fleet(seed, n, (50, 200))


def ratios(
    seeds: range, n_micros: tuple[int, ...], effort: Effort, thorough: bool, layers: int = 16
) -> list[float]:
    """Predicted step of the preselected search over that of the search of everybody, by fleet."""
    found = []
    for seed in seeds:
        dag, fleet = case(seed, layers)
        n_micro = n_micros[seed % len(n_micros)]
        whole = [step_or_none(dag, fleet, EVERYBODY, n_micro)]
        if thorough:  # as fleets of up to 24 devices are searched
            detailed = replace(EVERYBODY, dense_stages=len(fleet.devices))
            whole.append(step_or_none(dag, fleet, detailed, n_micro))
        best = min((step for step in whole if step is not None), default=None)
        mine = step_or_none(dag, fleet, effort, n_micro)
        assert best is None or mine is not None, f"seed {seed}: no plan where there is one"
        if best is not None and mine is not None:
            found.append(mine / best)
    print(
        f"{len(found)} fleets: median {median(found):.3f}, worst {max(found):.3f}, best {min(found):.3f} "
        "of the step that a search of everybody finds"
    )
    return found


def test_the_plan_is_about_as_good_as_that_of_a_search_of_everybody():
    (found,) = ratios(range(1), (4,), Effort(candidates=32), thorough=False, layers=8)
    assert found <= 1.02


@pytest.mark.slow
def test_the_plan_is_about_as_good_as_the_better_of_two_searches_of_everybody_on_12_fleets():
    found = ratios(range(100, 112), (4, 8), Effort(candidates=32), thorough=True)
    assert len(found) == 12
    assert median(found) <= 1.02
    assert max(found) <= 1.1


def test_a_plan_is_found_where_the_search_of_everybody_finds_one_however_short_memory_is():
    dag, found, refused = gpt_like(2, tied=False), 0, 0
    quick = Effort(judged=4, improved=1, moves=4)
    for seed in (0, 2, 3, 4):
        fleet = random_fleet(seed, 40 + seed, (6, 12 + 8 * seed))
        whole = step_or_none(dag, fleet, replace(quick, few=EVERYBODY.few))
        few = step_or_none(dag, fleet, replace(quick, candidates=8, few=4))
        assert whole is None or few is not None, f"seed {seed}"
        found, refused = found + (whole is not None), refused + (few is None)
    assert found >= 3
    assert refused >= 1


def test_a_fleet_within_the_bound_is_searched_as_ever():
    dag, fleet = gpt_like(4), random_fleet(5, 12)
    first, second = (plan_for(dag, fleet, effort) for effort in (Effort(few=12), EVERYBODY))
    assert first == second
    assert first.prediction == second.prediction


def test_partitioners_that_take_devices_as_they_joined_see_all_of_them():
    dag, fleet = gpt_like(8), random_fleet(5, 40, (400, 800))
    plans = [
        make_plan(PlanRequest("job", 1, dag, None, TrainingSpec(1, 4), fleet, "even"), effort)
        for effort in (Effort(candidates=6, few=6), EVERYBODY)
    ]
    assert plans[0] == plans[1]


def test_the_same_fleet_gives_the_same_selection_and_plan():
    dag, fleet = gpt_like(8), islands(0, 3, 6, 40.0)[0]
    plans = [plan_for(dag, fleet, Effort(candidates=8, few=8)) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].prediction == plans[1].prediction


def test_memory_that_would_do_for_a_cut_that_was_not_tried_is_not_called_short():
    dag, fleet = gpt_like(8), islands(0, 5, 6, 20.0)[0]
    with pytest.raises(NotEnoughMemory, match="would do for some cut, but for none that op_fence has tried"):
        plan_for(dag, fleet, Effort(candidates=12, few=8))


def preselection(dag: OpDag, fleet: Fleet, n_micro: int = 8) -> Preselection:
    return Preselection(
        fleet, Problem(dag, TrainingSpec(1, n_micro), fleet.subset([fleet.devices[0].worker]))
    )


def test_the_chosen_are_whole_islands_with_the_fastest_machines_and_the_most_memory():
    fleet, home = islands(4, 12, 8, 400.0)
    large = replace(fleet.devices[17], memory_limit_bytes=5000 * MIB, gflops={"": 1.0})
    fleet = replace(fleet, devices=(*fleet.devices[:17], large, *fleet.devices[18:]))
    chosen = preselection(gpt_like(24, d=256, tokens=128, tied=False), fleet).choose(24)
    assert len(chosen.workers) == 24
    at = [fleet.index[worker] for worker in chosen.workers]
    assert at == sorted(at)
    assert 17 in at
    fastest = sorted(range(96), key=lambda d: -fleet.devices[d].gflops[""])[:4]
    assert set(fastest) <= set(at)
    members = [sum(home[d] == k for d in at) for k in range(12)]
    assert sorted(members)[-2:] >= [7, 7]  # not a few of every island
    assert all(len({home[at[d]] for d in order}) <= 2 for order in chosen.orders)


def test_more_are_chosen_where_only_more_hold_the_model():
    dag, fleet = gpt_like(16, d=128, tokens=128, tied=False), islands(3, 10, 8, 4.0)[0]
    looked_at = preselection(dag, fleet)
    chosen = looked_at.choose(8)
    needed = looked_at.job.memory.bytes(0, len(dag.ops), 1)
    assert len(chosen.workers) * 4 * MIB >= needed > 8 * 4 * MIB
    assert len(chosen.workers) < 80


def test_links_that_were_never_measured_count_as_a_home_uplink():
    devices = tuple(Device(f"w{i}", 60 * MIB, gflops={"": 5.0 + i}, memory_gbps=10.0) for i in range(40))
    plan = plan_for(gpt_like(4), measured_fleet(devices, LinkTable()), Effort(), 8)
    assert plan.prediction is not None
    assert plan.stages[0].worker in {f"w{i}" for i in range(16, 40)}


def test_whoever_was_not_tried_is_named_with_the_reason_and_long_lists_are_counted():
    fleet, _ = islands(6, 15, 8, 100.0, gflops=(5.0, 60.0))
    plan = plan_for(gpt_like(4), fleet, Effort(), beyond=9000)
    used, known = {stage.worker for stage in plan.stages}, set(fleet.index)
    *reasons, rest, beyond = plan.left_out
    assert len(reasons) == TUNED.listed
    named = [worker for worker, _ in reasons]
    assert used | set(named) <= known
    assert not used & set(named)
    assert rest == (f"{120 - len(used) - TUNED.listed} more workers", "for reasons like these")
    assert beyond == (
        "9000 more workers",
        "slower, worse linked or not measured yet: a plan is made among the best 120",
    )
    passed = [
        why for _, why in reasons if why.startswith("not among the 64 of 120 workers that were tried: ")
    ]
    assert len(passed) == TUNED.listed - (64 - len(used))
    for why in passed:
        if alone := re.search(r"alone it takes (\S+) s a micro-batch, half of those at most (\S+) s$", why):
            assert float(alone[1]) > float(alone[2])
        elif link := re.search(r"carries (\S+) Mbit/s, half of theirs at least (\S+)$", why):
            assert float(link[1]) < float(link[2])
        else:
            assert why.endswith("it is about as good as they are, and they suffice")


def test_short_lists_of_reasons_stay_as_they_are():
    reasons = tuple((f"w{i}", "slow") for i in range(TUNED.listed + 1))
    assert summarised(reasons) == reasons
    assert summarised((*reasons, ("last", "slow")))[-1] == ("2 more workers", "for reasons like these")


# ---------------------------------------------------------------- candidates


def pool(n: int, seed: int = 1) -> list[Device]:
    draw = np.random.default_rng(seed)
    return [Device(f"w{i}", 1000 * MIB, gflops={"": float(draw.uniform(10, 50))}) for i in range(n)]


def test_candidates_are_the_fastest_whose_links_are_not_slow_in_join_order():
    devices = pool(2000)
    by_speed = sorted(devices, key=lambda d: -d.gflops[""])
    slow = {d.worker: 1e5 for d in by_speed[:20]}
    rates = {d.worker: 1e8 for d in devices} | slow | {d.worker: None for d in by_speed[20:40]}
    found = candidates(devices, 100, rates, {})
    assert len(found) == len(set(found)) == 100
    assert found == sorted(found, key=lambda worker: int(worker[1:]))
    assert not slow.keys() & set(found[2:])
    assert {d.worker for d in by_speed[20:40]} <= set(found)  # not measured: taken as usual
    assert found == candidates(devices, 100, rates, {})


def test_candidates_bring_their_place_and_the_most_memory():
    devices = pool(2000)
    devices[1234] = replace(devices[1234], memory_limit_bytes=9000 * MIB, gflops={"": 1.0})
    at_home = {f"w{i}": "lab" for i in range(500, 540)}
    for i in range(500, 540):
        devices[i] = replace(devices[i], gflops={"": 40.0})
    found = set(candidates(devices, 100, {}, at_home | {"w3": "alone"}))
    assert "w1234" in found
    assert len(found & at_home.keys()) >= 12


def test_a_pool_within_the_bound_is_all_candidates():
    devices = pool(10)
    assert candidates(devices, 10, {}, {}) == [d.worker for d in devices]
    assert len(candidates(devices, 1, {}, {})) == 1
    assert candidates(devices, 0, {}, {}) == []
    assert candidates([], 5, {}, {}) == []


def test_two_islands_have_one_selection_without_a_second_look():
    assert preselection(gpt_like(4), two_islands()).choose(24).workers == ("fast1", "slow1", "fast2", "slow2")
