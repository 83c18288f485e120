"""One stage's step: gradients, optimizer, rollback, evaluation, snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll.errors import PlanError, UsageError
from atoll.job import (
    Optimizer,
    OptimizerName,
    ParamGroup,
    Precision,
    Recompute,
    Schedule,
    ScheduleKind,
    TrainingSpec,
)
from atoll.opdag import Arg, Kind, LeafRef, OpDag, OpNode, OpRef, Source, StateMeta, TensorMeta
from atoll.program import PiecePrograms, stage_programs
from tests.inprocess.pipeline import LocalPipeline
from worker.stage.reports import StageReport
from worker.stage.stage import Stage

SHAPE = (3, 4)
META = TensorMeta(SHAPE, "float32")
SQUARE = TensorMeta((4, 4), "float32")
EMPTY = TensorMeta((0, 4), "float32")
X = LeafRef(Source.INPUT, "x")
COUNT = LeafRef(Source.BUFFER, "count")


def op(target: str, *args: Arg, meta: TensorMeta = META, grad: bool = True) -> OpNode:
    return OpNode(target, Kind.PARAMETRIC, target, args, (), (meta,), requires_grad=grad)


def parameter(name: str) -> LeafRef:
    return LeafRef(Source.PARAMETER, name)


def net(training: bool = True) -> OpDag:
    """x W1 -> tanh -> W2 -> W1 again (tied), a counter in a buffer, an empty parameter."""
    tail = (op("aten.add_.Tensor", COUNT, 1.0, grad=False),) if training else ()
    ops = (
        op("aten.matmul.default", X, parameter("w1")),
        op("aten.tanh.default", OpRef(0)),
        op("aten.matmul.default", OpRef(1), parameter("w2")),
        op("aten.cat.default", (OpRef(2), parameter("empty"))),
        op("aten.matmul.default", OpRef(3), parameter("w1")),
        op("aten.mean.default", OpRef(4)),
        *tail,
    )
    return OpDag(
        ops=ops,
        inputs={"x": META},
        parameters={
            "w1": StateMeta(SQUARE, True),
            "w2": StateMeta(SQUARE, True),
            "empty": StateMeta(EMPTY, True),
        },
        buffers={"count": StateMeta(TensorMeta((), "float32"), mutated=True)} if training else {},
        constants={},
        loss=5,
        training=training,
    )


def tensors() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return {
        "w1": {"value": torch.randn(4, 4, generator=generator).t()},  # not contiguous
        "w2": {"value": torch.randn(4, 4, generator=generator)},
        "empty": {"value": torch.zeros(0, 4)},
        "count": {"value": torch.zeros(())},
    }


def batches(step: int, n: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{"x": torch.randn(SHAPE, generator=generator)} for _ in range(n)]


def spec(**options: object) -> TrainingSpec:
    return replace(TrainingSpec(steps=4, n_micro=2, seed=1), **options)  # type: ignore[arg-type]


def pipeline(
    training: TrainingSpec, starts: tuple[int, ...] = (0,), evaluate: bool = False, **options: object
):
    return LocalPipeline(
        stage_programs(net(), starts),
        training,
        options.pop("tensors", tensors()),  # type: ignore[arg-type]
        eval_programs=stage_programs(net(False), starts) if evaluate else (),
        **options,  # type: ignore[arg-type]
    )


def same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].keys() == b[n].keys() and all(torch.equal(a[n][k], b[n][k]) for k in a[n]) for n in a
    )


def by_hand(
    training: TrainingSpec, optimizer: torch.optim.Optimizer, w: dict[str, torch.nn.Parameter]
) -> list[float]:
    losses = []
    for step in range(training.steps):
        total = 0.0
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate(step)
        for batch in batches(step):
            loss = ((batch["x"] @ w["w1"]).tanh() @ w["w2"] @ w["w1"]).mean() / training.n_micro
            loss.backward()
            total += float(loss.detach())
        if training.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(w.values(), training.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(lr=0.1, weight_decay=0.1),
        Optimizer(OptimizerName.SGD, lr=0.5, momentum=0.9, nesterov=True, clip_norm=0.05),
        Optimizer(OptimizerName.SGD, lr=0.5, weight_decay=0.01),
    ],
)
def test_a_stage_trains_as_torch_does_with_schedule_clipping_and_decay(optimizer: Optimizer):
    training = spec(optimizer=optimizer, schedule=Schedule(ScheduleKind.COSINE, warmup_steps=2))
    w = {n: torch.nn.Parameter(tensors()[n]["value"].clone()) for n in ("w1", "w2")}
    torch_optimizer: torch.optim.Optimizer
    if optimizer.name is OptimizerName.ADAMW:
        torch_optimizer = torch.optim.AdamW(w.values(), lr=0.1, weight_decay=0.1)
    else:
        torch_optimizer = torch.optim.SGD(
            w.values(), 0.5, optimizer.momentum, 0.0, optimizer.weight_decay, optimizer.nesterov
        )
    ours = pipeline(training, (0, 3))
    results = [ours.step(step, batches(step)) for step in range(training.steps)]
    assert [r.loss for r in results] == pytest.approx(by_hand(training, torch_optimizer, w), abs=1e-6)
    for name, value in w.items():
        assert torch.allclose(ours.snapshot()[name]["value"], value, atol=1e-6)
    if optimizer.clip_norm is not None:
        assert results[0].gradient_scale < 1.0


def test_groups_scale_rates_override_decay_and_freeze():
    groups = (ParamGroup(("w2",), frozen=True), ParamGroup(("w1",), lr_scale=0.0, weight_decay=0.5))
    ours = pipeline(spec(optimizer=Optimizer(lr=0.1, groups=groups)))
    before = ours.snapshot()
    ours.step(0, batches(0))
    after = ours.snapshot()
    assert torch.equal(before["w2"]["value"], after["w2"]["value"])
    assert torch.equal(before["w1"]["value"], after["w1"]["value"])
    assert set(after["w2"]) == {"value"}
    assert ours.stages[0].norm_names == ("w1", "empty")
    decays = [g.weight_decay for g in ours.stages[0]._optimizer._groups]  # type: ignore[union-attr]
    assert decays == [0.5, 0.0]


def test_parameters_frozen_in_the_model_stay_as_they_are():
    states = {**net().parameters, "w1": StateMeta(SQUARE, requires_grad=False)}
    ours = pipeline(spec(), states=states)
    ours.step(0, batches(0))
    assert torch.equal(ours.snapshot()["w1"]["value"], tensors()["w1"]["value"])
    assert ours.stages[0].norm_names == ("w2", "empty")


def test_a_stage_without_trainable_parameters_trains_nothing_and_reports_no_norms():
    everything = Optimizer(groups=(ParamGroup(("*",), frozen=True),))
    ours = pipeline(spec(optimizer=everything), (0, 2, 5))
    result = ours.step(0, batches(0))
    assert result.square_norms == ()
    assert result.finite


def test_discard_leaves_no_trace_even_half_way():
    ours, undisturbed = pipeline(spec(), (0, 2)), pipeline(spec(), (0, 2))
    before = ours.snapshot()
    ours.compute(0, batches(7))
    ours.discard()
    assert same(ours.snapshot(), before)
    for stage in ours.stages:
        stage.begin_step(0)
    ours.stages[0].forward(0, batches(7)[0], {})
    ours.discard()
    for step in range(3):
        assert ours.step(step, batches(step)) == undisturbed.step(step, batches(step))
    assert same(ours.snapshot(), undisturbed.snapshot())


def test_a_step_begun_again_starts_from_the_same_buffers():
    ours = pipeline(spec())
    ours.compute(0, batches(0))
    ours.step(0, batches(0))
    assert float(ours.snapshot()["count"]["value"]) == 2.0


def test_a_gradient_that_never_came_is_not_taken_for_zero():
    first = pipeline(spec(), (0, 2)).stages[0]
    first.begin_step(0)
    first.forward(0, batches(0)[0], {})
    with pytest.raises(KeyError):
        first.backward(0, {})


def test_buffers_advance_once_a_forward_with_and_without_recomputation():
    for recompute in (Recompute.OFF, Recompute.FULL):
        ours = pipeline(spec(recompute=recompute))
        for step in range(3):
            ours.step(step, batches(step))
        assert float(ours.snapshot()["count"]["value"]) == 6.0


def test_evaluation_averages_and_changes_nothing():
    ours = pipeline(spec(), (0, 2), evaluate=True)
    before = ours.snapshot()
    loss = ours.evaluate(batches(9, 3))
    w1, w2 = (tensors()[n]["value"] for n in ("w1", "w2"))
    expected = sum(float(((b["x"] @ w1).tanh() @ w2 @ w1).mean()) for b in batches(9, 3)) / 3
    assert loss == pytest.approx(expected, abs=1e-6)
    assert same(ours.snapshot(), before)
    assert ours.stages[0].held_out_figures() is None


def test_an_evaluation_that_did_not_end_is_no_part_of_the_next():
    ours = pipeline(spec(), evaluate=True)
    before, expected = ours.snapshot(), ours.evaluate(batches(9, 3))
    ours.stages[0].evaluate_micro(0, batches(5)[0], {})
    ours.discard()
    assert same(ours.snapshot(), before)
    assert ours.evaluate(batches(9, 3)) == expected


def test_evaluation_with_state_of_another_stage_is_refused():
    with pytest.raises(PlanError, match="another stage trains"):
        LocalPipeline(
            stage_programs(net(), (0, 2)), spec(), tensors(), eval_programs=stage_programs(net(False), (0, 3))
        )


def test_a_stage_without_evaluation_says_so():
    with pytest.raises(UsageError, match="held-out"):
        pipeline(spec()).stages[0].evaluate_micro(0, batches(0)[0], {})


@pytest.mark.parametrize(
    "optimizer",
    [Optimizer(lr=0.1), Optimizer(OptimizerName.SGD, lr=0.5, momentum=0.9), Optimizer(OptimizerName.SGD)],
)
def test_a_snapshot_taken_up_elsewhere_goes_on_bit_for_bit(optimizer: Optimizer):
    training = spec(optimizer=optimizer)
    whole, first = pipeline(training, (0, 2)), pipeline(training, (0, 2))
    for step in range(4):
        whole.step(step, batches(step))
    for step in range(2):
        first.step(step, batches(step))
    second = pipeline(training, (0, 4), tensors=first.snapshot())
    for step in range(2, 4):
        second.step(step, batches(step))
    assert same(second.snapshot(), whole.snapshot())


def test_a_snapshot_before_any_step_has_values_only():
    assert all(set(keys) == {"value"} for keys in pipeline(spec()).snapshot().values())


def test_snapshots_are_copies():
    ours = pipeline(spec())
    before = ours.snapshot()
    kept = before["w2"]["value"].clone()
    ours.step(0, batches(0))
    assert torch.equal(before["w2"]["value"], kept)


def test_a_tied_parameter_is_reported_by_its_first_holder_only():
    first, second = pipeline(spec(), (0, 2)).stages
    assert first.norm_names == ("w1",)
    assert second.norm_names == ("w2", "empty")
    assert "w1" in first.snapshot()
    assert "w1" not in second.snapshot()


def test_a_loss_that_is_not_finite_is_reported():
    ours = pipeline(spec(), (0, 2))
    reports = ours.compute(0, [{"x": torch.full(SHAPE, float("nan"))}] * 2)
    assert [r.finite for r in reports] == [False, False]
    assert isinstance(reports[1], StageReport)


def test_missing_and_misshapen_tensors_are_refused():
    broken = tensors()
    del broken["w2"]
    with pytest.raises(UsageError, match="w2"):
        pipeline(spec(), tensors=broken)
    with pytest.raises(UsageError, match="shape"):
        pipeline(spec(), tensors={**tensors(), "w2": {"value": torch.zeros(2)}}, states=net().parameters)
    with pytest.raises(UsageError, match="does not fit"):
        pipeline(spec(), tensors={**tensors(), "w2": {**tensors()["w2"], "exp_avg": torch.zeros(4, 4)}})


def test_inputs_of_a_narrower_dtype_are_widened():
    states = {**net().parameters, **net().buffers, "x": StateMeta(META)}
    narrow = [{"x": torch.ones(SHAPE, dtype=torch.uint8)}] * 2
    wide = [{"x": torch.ones(SHAPE)}] * 2
    assert pipeline(spec(), states=states).step(0, narrow) == pipeline(spec(), states=states).step(0, wide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("devices", [("cuda",), ("cpu", "cuda"), ("cuda", "cpu")])
def test_cuda_alone_and_with_a_cpu_agrees_with_cpu(precision: Precision, devices: tuple[str, ...]):
    training = spec(precision=precision)
    tolerance = 1e-5 if precision is Precision.FP32 else 2e-2
    ours = pipeline(training, (0, 2), devices=devices, evaluate=True)
    reference = pipeline(training, (0, 2), evaluate=True)
    for step in range(4):
        got, expected = (p.step(step, batches(step)).loss for p in (ours, reference))
        assert got == pytest.approx(expected, abs=tolerance)
    assert ours.evaluate(batches(9)) == pytest.approx(reference.evaluate(batches(9)), abs=tolerance)


def test_the_stage_type_is_what_the_daemon_builds():
    program = stage_programs(net(), [0])[0]
    stage = Stage([PiecePrograms(program, None)], spec(), tensors(), torch.device("cpu"))
    stage.begin_step(0)
    for micro, batch in enumerate(batches(0)):
        assert stage.forward(micro, batch, {}) == {}
        assert stage.backward(micro, {}) == {}
    report = stage.finish_step()
    stage.apply(1.0)
    assert len(report.losses) == 2
    assert len(report.square_norms) == 3
