"""Any valid cut trains the model that one stage trains, bit for bit; one stage, the plain module.

The sample is small in the default run and whole (at least 50 plans over the models, with each
optimizer) where `slow` tests run.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.job import Activations, Optimizer, OptimizerName, ParamGroup, Precision, Recompute, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.opdag import Arg, Kind, LeafRef, OpDag, OpNode, OpRef, Source, StateMeta, TensorMeta, TorchLiteral
from atoll.program import stage_programs
from benchmarks.oracle import (
    BUILT_IN,
    DROPOUT,
    Case,
    Run,
    built_in,
    difference,
    plain_training,
    random_starts,
    run_local,
    run_plain,
    without_dropout,
)
from tests.inprocess.pipeline import LocalPipeline
from tests.parameters import each_once, sampled

ADAMW = Optimizer(lr=3e-3, weight_decay=0.01)
SGD = Optimizer(OptimizerName.SGD, lr=0.05, momentum=0.9, clip_norm=0.5)
MUON = Optimizer(
    OptimizerName.MUON,
    lr=3e-3,
    weight_decay=0.01,
    groups=(ParamGroup(("*.h.1.*", "*layers.1*"), lr_scale=0.5, optimizer=OptimizerName.ADAMW),),
)
ADAFACTOR = Optimizer(OptimizerName.ADAFACTOR, lr=1e-2, clip_norm=0.5)
LION = Optimizer(OptimizerName.LION, lr=3e-4, weight_decay=0.1)
TRAINING = TrainingSpec(steps=5, n_micro=4, seed=11, optimizer=ADAMW)
SEEDED = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def case(name: str, dropout: float = DROPOUT) -> Case:
    return built_in(name, TRAINING, dropout)


@cache
def reference(name: str, optimizer: Optimizer) -> Run:
    return run_local(with_training(name, optimizer=optimizer), (0,))


def with_training(name: str, **changes: object) -> Case:
    found = case(name)
    return replace(found, training=replace(found.training, **changes))  # type: ignore[arg-type]


def cut(name: str, data: st.DataObject) -> tuple[int, ...]:
    positions = case(name).dag.cuttable()
    chosen = st.lists(st.sampled_from(positions), min_size=2, max_size=2, unique=True)
    return (0, *sorted(data.draw(chosen, label="cut")))


def check_cut(name: str, optimizer: Optimizer, data: st.DataObject) -> None:
    assert (
        difference(
            run_local(with_training(name, optimizer=optimizer), cut(name, data)), reference(name, optimizer)
        )
        == 0.0
    )


@pytest.mark.parametrize("name", BUILT_IN)
@settings(SEEDED, max_examples=1)
@given(data=st.data())
def test_three_stages_are_bit_equal_to_one_under_adamw(name: str, data: st.DataObject):
    check_cut(name, ADAMW, data)


@pytest.mark.parametrize("name", sampled(3, BUILT_IN))
@settings(SEEDED, max_examples=1)
@given(data=st.data())
def test_three_stages_are_bit_equal_to_one_under_muon(name: str, data: st.DataObject):
    check_cut(name, MUON, data)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_muon_keeps_one_buffer_of_hidden_matrices_and_trains_another_model(name: str):
    state = reference(name, MUON).state
    hidden = {n for n, meta in case(name).dag.parameters.items() if meta.hidden_matrix}
    assert {n for n in hidden if set(state[n]) == {"value", "momentum_buffer"}} >= {
        n for n in hidden if MUON.group_of(n) is None
    }
    assert all("exp_avg" in state[n] for n in case(name).dag.parameters if n not in hidden)
    assert difference(reference(name, MUON), reference(name, ADAMW)) > 0.0


@pytest.mark.parametrize("optimizer", [ADAFACTOR, LION], ids=["adafactor", "lion"])
@settings(SEEDED, max_examples=1)
@given(data=st.data())
def test_three_stages_are_bit_equal_to_one_under_other_optimizers(optimizer: Optimizer, data: st.DataObject):
    check_cut("gpt2", optimizer, data)


@pytest.mark.parametrize("optimizer", [MUON, ADAFACTOR, LION], ids=["muon", "adafactor", "lion"])
def test_a_checkpoint_goes_on_with_the_bits_of_the_whole_under_another_cut(optimizer: Optimizer):
    whole = with_training("gpt2", optimizer=optimizer, steps=4)
    first = run_local(with_training("gpt2", optimizer=optimizer, steps=2), (0,))
    starts, states = random_starts(whole.dag, 3, random.Random(9)), whole.states
    programs = stage_programs(whole.dag, starts)
    rest = LocalPipeline(programs, whole.training, {**whole.tensors, **first.state}, states=states)
    figures = [rest.step(step, whole.batches(step)) for step in (2, 3)]
    found = Run((*first.figures, *((r.loss, *r.square_norms) for r in figures)), rest.snapshot())
    assert difference(found, run_local(whole, (0,))) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAMW, SGD, MUON], ids=["adamw", "sgd", "muon"])
@pytest.mark.parametrize("name", BUILT_IN)
@settings(SEEDED, max_examples=12)
@given(data=st.data())
def test_many_cuts_are_bit_equal_to_one_stage(name: str, optimizer: Optimizer, data: st.DataObject):
    check_cut(name, optimizer, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
@settings(SEEDED, max_examples=3)
@given(data=st.data(), stages=st.integers(2, 8))
def test_any_number_of_stages_is_bit_equal_to_one(name: str, data: st.DataObject, stages: int):
    source = random.Random(data.draw(st.integers(0, 2**32), label="cut seed"))
    starts = random_starts(case(name).dag, stages, source)
    assert difference(run_local(case(name), starts), reference(name, ADAMW)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_cut_at_every_position_is_bit_equal_to_one_stage(name: str):
    short = with_training(name, steps=1, n_micro=2)
    whole = run_local(short, (0,))
    different = [p for p in short.dag.cuttable() if difference(run_local(short, (0, p)), whole) != 0.0]
    assert different == []


@pytest.mark.parametrize("name", ["gpt2", "resnet", "branches"])
@pytest.mark.parametrize("schedule", list(ScheduleName))
@pytest.mark.parametrize("recompute", [Recompute.OFF, Recompute.SELECTIVE, Recompute.FULL])
def test_schedule_and_recomputation_change_nothing(name: str, schedule: ScheduleName, recompute: Recompute):
    starts = random_starts(case(name).dag, 3, random.Random(5))
    run = run_local(with_training(name, recompute=recompute), starts, schedule=schedule)
    assert difference(run, reference(name, ADAMW)) == 0.0


@pytest.mark.parametrize(
    ("name", "activations"),
    each_once(["gpt2", "llama", "bert", "resnet"], [Activations.INT8, Activations.INT4]),
)
def test_cuts_with_activations_in_few_bits_are_bit_equal(name: str, activations: Activations):
    few = with_training(name, activations=activations, steps=2)
    whole = run_local(few, (0,))
    source = random.Random(8)
    for schedule, recompute in (
        (ScheduleName.ZERO_BUBBLE, Recompute.OFF),
        (ScheduleName.ONE_F_ONE_B, Recompute.SELECTIVE),
        (ScheduleName.GPIPE, Recompute.FULL),
    ):
        parts = replace(few, training=replace(few.training, recompute=recompute))
        starts = random_starts(parts.dag, 3, source)
        assert difference(run_local(parts, starts, schedule=schedule), whole) == 0.0
    assert difference(whole, run_local(with_training(name, steps=2), (0,))) > 0.0


@pytest.mark.parametrize("name", ["branches", "gpt2"])
def test_clipping_does_not_depend_on_the_cut(name: str):
    clipped = Optimizer(OptimizerName.SGD, lr=0.1, clip_norm=0.01)
    starts = random_starts(case(name).dag, 3, random.Random(6))
    run = run_local(with_training(name, optimizer=clipped), starts)
    assert difference(run, reference(name, clipped)) == 0.0


def test_bf16_is_bit_equal_across_cuts():
    name = "llama"
    whole, parts = (
        run_local(with_training(name, precision=Precision.BF16), starts)
        for starts in ((0,), random_starts(case(name).dag, 3, random.Random(7)))
    )
    assert difference(parts, whole) == 0.0


@pytest.mark.parametrize("name", sampled(3, BUILT_IN))
def test_one_stage_agrees_with_the_plain_module(name: str):
    plain = built_in(name, plain_training(TRAINING), 0.0)
    assert difference(run_local(plain, (0,)), run_plain(plain), figures=1) <= 1e-6


def test_dropout_is_taken_out_of_a_copy_only():
    module = case("gpt2").module
    assert difference_in_dropout(without_dropout(module)) == 0.0
    assert difference_in_dropout(module) > 0.0


def difference_in_dropout(module: torch.nn.Module) -> float:
    return max(part.p for part in module.modules() if isinstance(part, torch.nn.Dropout))


def test_a_difference_is_seen_in_losses_norms_state_and_missing_tensors():
    run = reference("branches", ADAMW)
    name = next(iter(run.state))
    changed = {**run.state, name: {**run.state[name], "value": run.state[name]["value"] + 0.5}}
    assert difference(Run(run.figures, changed), run) == pytest.approx(0.5)
    assert (
        difference(Run(((run.figures[0][0] + 1.0, *run.figures[0][1:]), *run.figures[1:]), run.state), run)
        == 1.0
    )
    assert difference(Run(run.figures, {n: k for n, k in run.state.items() if n != name}), run) == float(
        "inf"
    )


def test_values_that_are_one_tensor_under_two_names_fold_the_same_whatever_the_cut():
    """`to` that changes nothing returns its argument: both names may cross, each with its users."""
    meta = TensorMeta((64,), "float32")
    w = LeafRef(Source.PARAMETER, "w")

    def op(target: str, *args: Arg) -> OpNode:
        return OpNode(target, Kind.PARAMETRIC, target, args, (), (meta,), requires_grad=True)

    ops = (
        op("aten.mul.Tensor", LeafRef(Source.INPUT, "x"), w),
        op("aten.to.dtype", OpRef(0), TorchLiteral("dtype", "float32")),
        op("aten.sin.default", OpRef(1)),
        op("aten.mul.Tensor", OpRef(2), OpRef(0)),
        op("aten.exp.default", OpRef(1)),
        op("aten.add.Tensor", OpRef(3), OpRef(4)),
        op("aten.mul.Tensor", OpRef(5), OpRef(0)),
        op("aten.sum.default", OpRef(6)),
    )
    states = {"w": StateMeta(meta, True)}
    dag = OpDag(ops, {"x": meta}, states, {}, {}, loss=7)
    tensors = {"w": {"value": torch.linspace(0.1, 1.3, 64)}}

    def batches(step: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(step)
        return [{"x": torch.randn(64, generator=generator)} for _ in range(4)]

    found = Case("alias", torch.nn.Identity(), dag, states, tensors, TRAINING, batches)
    whole = run_local(found, (0,))
    for first in range(1, 7):
        for second in range(first + 1, 8):
            assert difference(run_local(found, (0, first, second)), whole) == 0.0, (first, second)


def test_cuts_between_a_split_and_its_users_are_bit_equal():
    """The parts have gaps between their rows; found where attention read them without."""
    dag = case("gpt2").dag
    parts = [op for op, node in enumerate(dag.ops) if node.target == "builtin.getitem"]
    position = next(p for p in dag.cuttable() if p > parts[0] + 3)
    for start in range(position, position + 5):
        run = run_local(case("gpt2"), (0, start))
        assert difference(run, reference("gpt2", ADAMW)) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("devices", [("cuda",), ("cpu", "cuda", "cuda")])
@pytest.mark.parametrize("name", BUILT_IN)
def test_cuda_agrees_with_cpu_within_its_tolerance(name: str, devices: tuple[str, ...]):
    """Dropout 0: the two devices draw different numbers. Kernels differ in their last bits."""
    plain = built_in(name, plain_training(TRAINING), 0.0)
    starts = random_starts(plain.dag, 3, random.Random(8))
    assert difference(run_local(plain, starts, devices=devices), run_local(plain, (0,)), figures=1) <= 2e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("precision", list(Precision))
def test_three_stages_on_one_gpu_are_close_to_one(precision: Precision):
    """Not bit-equal by promise: some CUDA kernels add in a varying order."""
    whole = run_local(with_training("gpt2", precision=precision), (0,), devices=("cuda",))
    starts = random_starts(case("gpt2").dag, 3, random.Random(9))
    parts = run_local(with_training("gpt2", precision=precision), starts, devices=("cuda",))
    assert difference(parts, whole, figures=1) <= (1e-4 if precision is Precision.FP32 else 2e-2)
