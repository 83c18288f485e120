import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from atoll.device_class import DeviceClass
from atoll.errors import NotEnoughMemory, NoWorkers, PlanError, UsageError
from atoll.job import EXACTLY, Keeping, Precision, Recompute, TrainingSpec
from atoll.microbatch import Depth, ScheduleName
from atoll.opdag import OpDag
from atoll.plan import Plan, validate
from coordinator.planning.baselines import layer_starts
from coordinator.planning.costs.fleet import Fleet
from coordinator.planning.costs.lower_bound import lower_bound
from coordinator.planning.planner import PlanRequest, make_plan, plan_candidates
from coordinator.planning.problem import Candidate, Problem
from coordinator.planning.search.op_fence import Effort
from tests.coordinator.planning.dags import chain_dag, gpt_like
from tests.coordinator.planning.fleets import eight_hosts, random_fleet, two_islands

TRAINING = TrainingSpec(10, 8)
WIDER = Effort(orders_kept=100, judged=100, improved=6, moves=200, actions=10**8)
THOROUGH = Effort(orders_kept=300, judged=300, improved=12, moves=600, actions=10**8)


def plan_for(dag, fleet, partitioner="op_fence", schedule="auto", training=TRAINING):
    return make_plan(PlanRequest("job", 1, dag, dag, training, fleet, partitioner, schedule))


def test_a_plan_says_what_each_checkpoint_sends() -> None:
    dag = gpt_like(4)
    plan = plan_for(dag, two_islands(), "even")
    (words,) = [note for note in plan.prediction.notes if note.startswith("a checkpoint sends")]
    n_bytes = 3 * sum(state.meta.nbytes for state in dag.parameters.values())
    assert f"at most {n_bytes / 1e6:.3g} MB" in words
    assert "who keeps a copy fetches as much" in words


def best_of_all(problem: Problem) -> float:
    """Every subset of the devices in every order, every cut: the least step of the timeline."""
    best = float("inf")
    inner = [int(p) for p in problem.positions[1:-1]]
    devices = range(len(problem.fleet.devices))
    for k in range(1, len(problem.fleet.devices) + 1):
        for cuts in itertools.combinations(inner, k - 1):
            for order in itertools.permutations(devices, k):
                candidate = Candidate(order, (0, *cuts))
                work = problem.workload(candidate, [Depth(problem.n_micro)] * k)
                if lower_bound(work).step_s < best and (scored := problem.score(candidate)):
                    best = min(best, scored.step_s)
    return best


@pytest.mark.parametrize(
    ("slow", "more"),
    [
        ((5.0, 5.0, 5.0, 5.0), WIDER),
        *(
            pytest.param(slow, THOROUGH, marks=pytest.mark.slow)
            for slow in ((5.0, 5.0, 5.0, 5.0), (3.6, 3.6, 3.6, 5.0), (4.5, 4.0, 3.5, 5.0))
        ),
    ],
)
def test_where_memory_is_short_there_are_stages_enough_to_keep_micro_batches_in_flight(slow, more):
    """Five devices hold the model, but not what more than one or two micro-batches leave behind: with them
    each step would wait for the slow line again and again."""
    problem = Problem(gpt_like(8, tokens=128), TrainingSpec(10, 16), eight_hosts(slow))
    best = plan_candidates(problem, "op_fence", more)[0].step_s
    assert plan_candidates(problem, "op_fence")[0].step_s <= 1.05 * best


def check_against_exhaustive(seeds):
    worst, checked = 1.0, 0
    for seed in seeds:
        tight = seed % 2 == 1
        fleet = random_fleet(seed, 4, memory_mib=(3, 7) if tight else (50, 200))
        dag = chain_dag(
            seed, 9, skips=0.25, tied=seed % 3 == 0, max_elements=100_000, parameter_elements=150_000
        )
        n_micro = (2, 4, 8)[seed % 3]
        try:
            found = plan_candidates(Problem(dag, TrainingSpec(10, n_micro), fleet), "op_fence")[0].step_s
        except NotEnoughMemory:
            assert best_of_all(Problem(dag, TrainingSpec(10, n_micro), fleet)) == float("inf"), f"seed {seed}"
            continue
        best = best_of_all(Problem(dag, TrainingSpec(10, n_micro), fleet))
        worst, checked = max(worst, found / best), checked + 1
        assert found <= 1.05 * best, f"seed {seed}: {found} against {best}"
    return worst, checked


def test_the_plan_is_within_5_percent_of_the_best_of_all_plans():
    _, checked = check_against_exhaustive(range(4))
    assert checked >= 3


@pytest.mark.slow
def test_the_plan_is_within_5_percent_of_the_best_of_all_plans_on_50_fleets():
    worst, checked = check_against_exhaustive(range(100, 160))
    assert checked >= 50
    assert worst <= 1.05


@pytest.mark.parametrize("partitioner", ["op_fence", "proportional", "even"])
def test_every_partitioner_makes_a_valid_plan_within_memory(partitioner):
    dag = gpt_like(4)
    plan = plan_for(dag, two_islands(), partitioner)
    validate(plan, dag, TRAINING)
    assert plan.prediction is not None
    for stage in plan.prediction.stages:
        assert stage.memory_bytes <= stage.memory_limit_bytes
    assert plan.prediction.step_s >= plan.prediction.lower_bound_s > 0
    assert [s.eval_stop for s in plan.stages][-1] == len(dag.ops)


def test_op_fence_crosses_the_slow_line_once_where_join_order_crosses_it_at_every_cut():
    dag = gpt_like(4)
    plans = {p: plan_for(dag, two_islands(), p) for p in ("op_fence", "even", "proportional")}
    islands = [s.worker[0] for s in plans["op_fence"].stages]
    assert sum(a != b for a, b in itertools.pairwise(islands)) == 1
    step = {name: plan.prediction.step_s for name, plan in plans.items()}
    assert step["even"] >= 1.45 * step["op_fence"]
    assert step["proportional"] >= step["op_fence"]


def test_one_machine_is_used_alone_where_it_has_the_memory_and_is_faster():
    plan = plan_for(gpt_like(2), two_islands(memory_mib=4096), training=TrainingSpec(10, 1))
    assert len(plan.stages) == 1
    assert plan.stages[0].worker.startswith("fast")
    assert {worker for worker, _ in plan.left_out} == {"fast1", "fast2", "slow1", "slow2"} - {
        plan.stages[0].worker
    }
    assert all("slow the step from" in why or "not help" in why for _, why in plan.left_out)


def test_a_plan_that_only_memory_forces_says_how_much_faster_one_machine_would_be():
    notes = plan_for(gpt_like(4), two_islands(), "even").prediction.notes
    assert any("faster on fast" in note and "if it had the memory" in note for note in notes)


def test_the_bottleneck_names_what_would_help_most():
    def bottleneck(fleet, training=TRAINING):
        return plan_for(gpt_like(4, tied=False), fleet, "even", training=training).prediction.bottleneck

    starved, roomy = two_islands(memory_mib=31), two_islands(memory_mib=400)
    assert bottleneck(starved, TrainingSpec(10, 16)) == "memory"
    assert bottleneck(roomy).startswith("uplink ")
    n = len(roomy.devices)
    instant = Fleet(roomy.devices, np.full((n, n), 1e12), np.full((n, n), 1e-6))
    assert bottleneck(instant).startswith("stage ")
    far = Fleet(roomy.devices, np.full((n, n), 1e12), np.full((n, n), 5.0))
    assert bottleneck(far) == "latency"


@pytest.mark.parametrize("recompute", [Recompute.OFF, Recompute.FULL])
def test_what_is_recomputed_already_is_not_advised(recompute: Recompute) -> None:
    training = TrainingSpec(10, 16, recompute=recompute)
    dag = gpt_like(4, tied=False)
    found = plan_for(dag, two_islands(memory_mib=31), "even", training=training).prediction
    assert found.bottleneck == "memory"
    assert ("set recompute=full" in found.reason) is (recompute is Recompute.OFF)
    with pytest.raises(NotEnoughMemory) as refused:
        plan_for(dag, two_islands(memory_mib=5), training=training)
    assert ("set recompute=full" in str(refused.value)) is (recompute is Recompute.OFF)


def test_too_little_memory_is_refused_with_the_shortage_and_the_limits():
    with pytest.raises(NotEnoughMemory, match=r"needs \d+ MiB .* MiB short; lower the micro-batch"):
        plan_for(gpt_like(4), two_islands(memory_mib=10))


@pytest.mark.parametrize(("memory_mib", "scale", "heap"), [(3, 1.0, 0.0), (8, 1.3, 0.1), (2, 2.0, 0.0)])
def test_with_as_much_more_memory_as_a_refusal_says_the_model_fits(memory_mib, scale, heap):
    def fleet(mib: int) -> Fleet:
        found = two_islands(memory_mib=mib)
        devices = tuple(replace(device, memory_scale=scale, heap_share=heap) for device in found.devices)
        return replace(found, devices=devices)

    with pytest.raises(
        NotEnoughMemory, match=r"raise --memory \(\d+ MiB more on each are enough\)"
    ) as refused:
        plan_for(gpt_like(4), fleet(memory_mib))
    (more,) = re.findall(r"(\d+) MiB more on each", str(refused.value))
    assert plan_for(gpt_like(4), fleet(memory_mib + int(more)))
    with pytest.raises(NotEnoughMemory):
        plan_for(gpt_like(4), fleet(memory_mib + int(more) - 3))


def test_a_shortage_is_told_as_was_measured_of_the_job():
    fleet = two_islands(memory_mib=10)

    def needed(scale: float) -> tuple[float, str]:
        devices = tuple(replace(device, memory_scale=scale) for device in fleet.devices)
        with pytest.raises(NotEnoughMemory) as refused:
            plan_for(gpt_like(4), replace(fleet, devices=devices))
        words = str(refused.value)
        return float(words.split("needs ")[1].split()[0]), words

    (model, plain), (measured, words) = needed(1.0), needed(2.0)
    assert measured == pytest.approx(2 * model, abs=1.0)
    assert "take 2.00 x the model's figure, as measured" in words
    assert "as measured" not in plain


def test_a_stage_is_planned_with_what_was_measured_over_the_model():
    dag, fleet = gpt_like(4), two_islands(memory_mib=60)
    devices = tuple(replace(device, memory_scale=1.5) for device in fleet.devices)
    plan = plan_for(dag, replace(fleet, devices=devices))
    for told in plan.prediction.stages:
        assert told.memory_bytes <= told.memory_limit_bytes
        assert told.memory_scale == 1.5
        assert told.model_bytes == pytest.approx(told.memory_bytes / 1.5)


def test_a_piece_that_fits_no_worker_is_named():
    dag = gpt_like(1, d=512, tokens=16)
    fleet = two_islands(memory_mib=15)
    with pytest.raises(NotEnoughMemory, match=r"must stay together and need .* MiB; the largest worker"):
        plan_for(dag, fleet)


def test_gpipe_that_does_not_fit_points_to_1f1b():
    dag = chain_dag(1, 30, max_elements=200_000)
    training = TrainingSpec(10, 64, recompute=Recompute.OFF)
    fleet = two_islands(memory_mib=16)
    assert plan_for(dag, fleet, schedule="1f1b", training=training).schedule is ScheduleName.ONE_F_ONE_B
    with pytest.raises(NotEnoughMemory, match="1f1b"):
        plan_for(dag, fleet, schedule="gpipe", training=training)


def test_an_empty_fleet_and_unknown_names_are_refused():
    nobody = Fleet((), np.zeros((0, 0)), np.zeros((0, 0)))
    with pytest.raises(NoWorkers, match="atoll-worker join"):
        plan_for(chain_dag(1, 5), nobody)
    with pytest.raises(UsageError, match="op_fence, one_piece, proportional, even"):
        plan_for(chain_dag(1, 5), two_islands(), "best")
    with pytest.raises(UsageError, match="auto, gpipe, 1f1b"):
        plan_for(chain_dag(1, 5), two_islands(), schedule="zigzag")


def test_a_given_cut_waits_for_devices_and_is_refused_where_the_model_cannot_be_cut():
    dag = chain_dag(1, 30)
    starts = dag.cuttable()[:6]
    with pytest.raises(PlanError, match="makes 7 stages, 4 devices are free"):
        plan_for(dag, two_islands(), f"cut:{','.join(map(str, starts))}")
    with pytest.raises(UsageError, match="cannot be cut at op 31 of 30"):
        plan_for(dag, two_islands(), "cut:31")


def test_even_gives_each_device_one_block_and_begins_where_blocks_do():
    dag = gpt_like(4)
    plan = plan_for(dag, two_islands(memory_mib=400), "even")
    assert [s.worker for s in plan.stages] == ["fast1", "slow1", "fast2", "slow2"]
    assert [s.start for s in plan.stages][1:] == layer_starts(dag, 4)[1:]


def test_proportional_gives_the_fast_devices_more_work():
    dag = gpt_like(8)
    plan = plan_for(dag, two_islands(memory_mib=400), "proportional")
    flops = {s.worker: sum(dag.ops[i].flops_forward for i in range(s.start, s.stop)) for s in plan.stages}
    assert flops["fast1"] + flops["fast2"] > 1.5 * (flops["slow1"] + flops["slow2"])
    assert all(s.memory_bytes <= s.memory_limit_bytes for s in plan.prediction.stages)


def test_the_same_fleet_gives_the_same_plan():
    dag = gpt_like(4)
    assert plan_for(dag, two_islands()) == plan_for(dag, two_islands())


def test_warm_up_never_rises_along_the_pipeline():
    for seed in range(3):
        plan = plan_for(chain_dag(seed, 40), random_fleet(seed, 5, (1, 6)), schedule="1f1b")
        depths = [s.warmup for s in plan.stages]
        assert depths == sorted(depths, reverse=True), f"seed {seed}"


def test_evaluation_that_no_cut_can_follow_is_a_note_and_not_an_error():
    dag = gpt_like(2, tied=False)
    swapped = {"h.0.fc1": "h.1.fc1", "h.1.fc1": "h.0.fc1"}
    ops = []
    for node in dag.ops:
        args = tuple(
            replace(a, name=swapped.get(a.name, a.name)) if getattr(a, "name", None) else a for a in node.args
        )
        ops.append(replace(node, args=args))
    eval_dag = replace(dag, ops=tuple(ops), training=False)
    fleet = two_islands(memory_mib=400)
    plan = make_plan(PlanRequest("job", 1, dag, eval_dag, TRAINING, fleet, "even"))
    assert all(s.eval_start == s.eval_stop == 0 for s in plan.stages)
    assert any("no evaluation" in note for note in plan.prediction.notes)


def test_evaluation_ops_run_where_their_parameters_are():
    for seed in range(8):
        dag = chain_dag(seed, 30, skips=0.3, tied=True)
        fewer = replace(dag, training=False)
        plan = make_plan(PlanRequest("job", 1, dag, fewer, TRAINING, random_fleet(seed, 4), "even"))
        for stage in plan.stages:
            held = {
                a.name
                for i in range(stage.start, stage.stop)
                for a in dag.ops[i].args
                if hasattr(a, "source")
            }
            used = {
                a.name
                for i in range(stage.eval_start, stage.eval_stop)
                for a in dag.ops[i].args
                if hasattr(a, "source")
            }
            assert used - {"tokens"} <= held, f"seed {seed}"


def test_no_stage_evaluates_behind_the_loss_alone():
    """Whose held-out loss is the job's follows from the plan: the last stage's that evaluates anything."""
    dag = chain_dag(1, 30)
    early = replace(dag, training=False, loss=12)
    plan = make_plan(PlanRequest("job", 1, dag, early, TRAINING, random_fleet(1, 4), "even"))
    assert all(stage.eval_start <= 12 for stage in plan.stages if stage.eval_start < stage.eval_stop)


def test_eight_devices_and_400_ops_are_planned_with_devices_left_out():
    plan = plan_for(gpt_like(30), random_fleet(4, 8))
    assert len(plan.stages) + len(plan.left_out) == 8


def test_weights_are_deferred_where_that_pays_and_within_memory():
    """Large micro-batches, equal machines: the timeline says about what theory does."""
    dag = gpt_like(8, tokens=512)
    training = TrainingSpec(10, 8)
    fleet = random_fleet(3, 4, memory_mib=(4000, 4000))
    devices = tuple(replace(fleet.devices[0], worker=d.worker) for d in fleet.devices)
    fleet = replace(fleet, devices=devices)
    steps = {}
    for schedule in ("1f1b", "zero-bubble", "auto"):
        plan = plan_for(dag, fleet, "even", training=training, schedule=schedule)
        steps[schedule] = plan.prediction.step_s
        held = [stage.held for stage in plan.stages]
        assert held[0] == 0  # nobody waits for its backward
        assert all(held[1:]) == (schedule != "1f1b")
        assert all(s.memory_bytes <= s.memory_limit_bytes for s in plan.prediction.stages)
        assert plan.schedule == ("zero-bubble" if schedule == "auto" else schedule)
    assert steps["auto"] == steps["zero-bubble"] <= 0.97 * steps["1f1b"]
    assert steps["1f1b"] / (8 + 3) * 8 <= steps["auto"]


def test_without_room_for_deferred_weights_backwards_stay_whole_and_the_plan_says_so():
    # Under autocast what deferred weights need comes on top of what a micro-batch keeps anyway.
    dag, training = gpt_like(4), TrainingSpec(10, 8, precision=Precision.BF16)
    fleet = random_fleet(3, 2, memory_mib=(4000, 4000))
    roomy = plan_for(dag, fleet, "even", training=training, schedule="zero-bubble")
    last = roomy.stages[-1]
    memory = Problem(dag, training, fleet).memory
    least = memory.bytes(last.start, last.stop, 1)
    tight = replace(
        fleet, devices=(fleet.devices[0], replace(fleet.devices[1], memory_limit_bytes=round(least) + 8))
    )
    plan = plan_for(dag, tight, "cut:" + str(last.start), training=training, schedule="zero-bubble")
    assert [stage.held for stage in plan.stages] == [0, 0]
    assert plan.schedule == "1f1b"
    assert any("no stage can defer" in note for note in plan.prediction.notes)


def kept_in(plan: Plan) -> set[Keeping]:
    return {stage.keeping for replica in plan.replicas for stage in replica.stages}


def with_cheap_ops(dag: OpDag) -> OpDag:
    """Every second op without weights gives what can be computed again, half of all that is kept."""
    ops = [
        replace(
            node,
            target="aten.gelu.default" if at % 2 and node.target == "aten.add.Tensor" else node.target,
            bytes_repeatable=node.bytes_saved // 2,
        )
        for at, node in enumerate(dag.ops)
    ]
    return replace(dag, ops=tuple(ops))


def test_cheap_results_are_computed_again_where_memory_keeps_the_pipeline_from_being_full():
    dag, fleet = with_cheap_ops(gpt_like(6, tokens=128)), eight_hosts((5.0, 5.0, 5.0, 5.0))
    off, auto, roomy = (
        plan_for(dag, fleet, training=replace(TRAINING, recompute=recompute))
        for recompute, fleet in (
            (Recompute.OFF, fleet),
            (Recompute.AUTO, fleet),
            (Recompute.AUTO, with_memory(fleet, 10**10)),
        )
    )
    assert kept_in(off) == kept_in(roomy) == {EXACTLY}
    assert Keeping(Recompute.SELECTIVE) in kept_in(auto) <= {EXACTLY, Keeping(Recompute.SELECTIVE)}
    assert auto.prediction.step_s <= 0.9 * off.prediction.step_s
    assert any("computed again" in note for note in auto.prediction.notes)
    assert all(s.memory_bytes <= s.memory_limit_bytes for s in auto.prediction.stages)


def test_only_what_fits_no_other_way_recomputes_more():
    dag, training = with_cheap_ops(gpt_like(4)), TRAINING
    alone = replace(random_fleet(3, 1, memory_mib=(4000, 4000)))
    needed = {
        recompute: Problem(dag, training, alone, keeping=Keeping(recompute)).memory.bytes(0, len(dag.ops), 1)
        for recompute in (Recompute.OFF, Recompute.SELECTIVE, Recompute.FULL)
    }
    assert needed[Recompute.OFF] > needed[Recompute.SELECTIVE]
    for recompute, n_bytes in needed.items():
        plan = plan_for(dag, with_memory(alone, round(n_bytes) + 8), training=training)
        if needed[Recompute.FULL] < needed[Recompute.SELECTIVE] or recompute is not Recompute.FULL:
            assert kept_in(plan) == {Keeping(recompute)}
    with pytest.raises(NotEnoughMemory):
        plan_for(dag, with_memory(alone, round(min(needed.values())) - 8), training=training)


def with_memory(fleet: Fleet, n_bytes: int) -> Fleet:
    devices = tuple(replace(device, memory_limit_bytes=n_bytes) for device in fleet.devices)
    return replace(fleet, devices=devices)


def test_a_plan_over_two_classes_of_devices_says_that_it_is_not_bit_equal_elsewhere():
    fleet = two_islands()
    classes = [DeviceClass("cpu AVX2", "2.13.0", 1 + at % 2) for at in range(len(fleet.devices))]
    devices = tuple(replace(d, device_class=c) for d, c in zip(fleet.devices, classes, strict=True))
    mixed = plan_for(chain_dag(3, 12), replace(fleet, devices=devices), "even").prediction.notes
    assert any("cpu AVX2, torch 2.13.0, 1 thread; cpu AVX2, torch 2.13.0, 2 threads" in n for n in mixed)
    alike = tuple(replace(d, device_class=classes[0]) for d in fleet.devices)
    same = plan_for(chain_dag(3, 12), replace(fleet, devices=alike), "even").prediction.notes
    assert not any("classes of devices" in note for note in same)
