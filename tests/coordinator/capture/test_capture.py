"""Capture: unmodified models become op-DAGs, every trap of these graphs is met, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import CaptureError, UnsupportedOp
from atoll.job import Optimizer, ParamGroup, Precision, TrainingSpec
from atoll.opdag import Kind, LeafRef, OpDag, OpRef, Source, TorchLiteral, leaf_refs, op_refs
from atoll.ops import GETITEM
from coordinator.capture.capture import Captured, capture, op_uses
from coordinator.capture.self_check import self_check
from tests.captured_models import captured_model
from tests.models import MODELS, Example

X = {"x": torch.linspace(-2, 2, 24).reshape(4, 6)}
MORE = {"x": torch.linspace(3, -1, 24).reshape(4, 6)}


class Model(nn.Module):
    """Wraps a function of (module, x) around a few layers; the loss is the mean square."""

    def __init__(self, compute: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x).square().mean()


def captured(compute: Callable[[Model, Tensor], Tensor], training: TrainingSpec | None = None) -> Captured:
    """Captured and proven against the module on another batch."""
    module = Model(compute)
    found = capture(module, X, training)
    self_check(module, found, MORE)
    return found


def positions(dag: OpDag, target: str) -> list[int]:
    return [at for at, node in enumerate(dag.ops) if node.target.startswith(target)]


def whole(dag: OpDag, *ops: int) -> bool:
    """Whether no cut can part ``ops``."""
    return any(begin <= min(ops) and max(ops) < end for begin, end in dag.unsplittable)


def check_invariants(dag: OpDag) -> None:
    assert len({node.name for node in dag.ops}) == len(dag.ops)
    for at, node in enumerate(dag.ops):
        assert all(ref < at for ref in op_refs(node))
        for leaf in leaf_refs(node):
            known: Mapping[str, object] = {
                Source.INPUT: dag.inputs,
                Source.PARAMETER: dag.parameters,
                Source.BUFFER: dag.buffers,
                Source.CONSTANT: dag.constants,
            }[leaf.source]
            assert leaf.name in known
        if node.target == GETITEM:
            assert whole(dag, op_refs(node)[0], at)
    ends = [0, *(end for _, end in dag.unsplittable)]
    assert all(begin >= end for (begin, _), end in zip(dag.unsplittable, ends, strict=False))
    crossing = {r for at, node in enumerate(dag.ops) for r in op_refs(node) if node.target != GETITEM}
    assert not any(dag.ops[r].is_tuple for r in crossing)
    for at in dag.constant_ops:
        assert all(r in dag.constant_ops for r in op_refs(dag.ops[at]))
        assert not dag.ops[at].random
    assert dag.ops[dag.loss].kind is Kind.LOSS
    assert dag.ops[dag.loss].requires_grad is dag.training


@pytest.mark.parametrize(
    ("name", "dropout", "precision"),
    [
        (name, 0.1, precision)
        if precision is Precision.FP32 or name in ("gpt2", "resnet")
        else pytest.param(name, 0.1, precision, marks=pytest.mark.slow)
        for name in MODELS
        for precision in Precision
    ]
    + [
        pytest.param(name, 0.0, precision, marks=pytest.mark.slow)
        for name in MODELS
        for precision in Precision
    ],
)
def test_unmodified_models_capture_and_prove_themselves(
    name: str, dropout: float, precision: Precision
) -> None:
    model = captured_model(name, dropout, precision)
    example, found = model.example, model.captured
    check_invariants(found.train)
    check_invariants(found.evaluation)
    assert self_check(example.module, found, example.make_batch(3)).compared > 20
    assert any(node.random for node in found.train.ops) is (dropout > 0 and name != "resnet")
    assert not any(node.random for node in found.evaluation.ops)
    assert set(example.module.state_dict()) <= set(found.state)


def test_capture_leaves_the_module_as_it_was() -> None:
    example = MODELS["branches"]()
    module = example.module
    module.eval()
    module.dropout.train()
    module.head.weight.requires_grad_(False)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    generator = torch.random.get_rng_state()
    found = capture(module, example.example_inputs, frozen_spec("middle.*"))
    self_check(module, found, example.make_batch(1))
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())
    assert not module.training
    assert module.dropout.training
    assert module.middle.weight.requires_grad
    assert not module.head.weight.requires_grad
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(generator, torch.random.get_rng_state())


def frozen_spec(pattern: str) -> TrainingSpec:
    groups = (ParamGroup((pattern,), frozen=True),)
    return TrainingSpec(steps=1, n_micro=1, optimizer=Optimizer(groups=groups))


def test_frozen_parameters_need_no_gradient() -> None:
    found = captured(lambda m, x: m.last(m.first(x)), frozen_spec("first.*"))
    assert not found.train.parameters["first.weight"].requires_grad
    assert found.train.parameters["last.weight"].requires_grad
    first, last = positions(found.train, "aten.linear")
    assert not found.train.ops[first].requires_grad
    assert found.train.ops[first].flops_backward == 0
    assert found.train.ops[last].flops_backward == found.train.ops[last].flops_forward


def test_all_parameters_frozen_is_refused() -> None:
    with pytest.raises(CaptureError, match="no trainable parameter"):
        captured(lambda m, x: m.first(x), frozen_spec("*"))


def test_tied_parameters_have_one_name_and_the_other_as_alias() -> None:
    found = capture(*_arguments(MODELS["gpt2"]()), tail=False).train
    assert found.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in found.parameters


def _arguments(example: Example) -> tuple[nn.Module, Mapping[str, Tensor]]:
    return example.module, example.example_inputs


# Random ops


@pytest.mark.parametrize(
    ("compute", "target"),
    [
        (lambda m, x: F.dropout(m.first(x), 0.3, m.training), "aten.dropout"),
        (lambda m, x: F.alpha_dropout(m.first(x), 0.3, m.training), "aten.alpha_dropout"),
        (lambda m, x: m.first(x) * torch.rand_like(x) if m.training else m.first(x), "aten.rand_like"),
        (lambda m, x: F.rrelu(m.first(x), training=m.training), "aten.rrelu"),
        (lambda m, x: torch.bernoulli(torch.sigmoid(x)) * m.first(x) if m.training else x, "aten.bernoulli"),
        (lambda m, x: m.first(x) + torch.randn(6) if m.training else m.first(x), "aten.randn"),
        (
            lambda m, x: F.scaled_dot_product_attention(
                m.first(x)[None], x[None], x[None], dropout_p=0.3 if m.training else 0.0
            ),
            "aten.scaled_dot_product_attention",
        ),
    ],
)
def test_random_ops_are_marked_where_they_draw(
    compute: Callable[[Model, Tensor], Tensor], target: str
) -> None:
    found = captured(compute)
    assert [found.train.ops[at].random for at in positions(found.train, target)] == [True]
    assert not any(node.random for node in found.evaluation.ops)
    assert not any(node.random for at, node in enumerate(found.train.ops) if at in found.train.constant_ops)


def test_ops_that_hide_no_dropout_are_not_random() -> None:
    def attend(m: Model, x: Tensor) -> Tensor:
        q = m.first(F.dropout(x, 0.0, True))
        return F.scaled_dot_product_attention(q[None], x[None], x[None])

    assert not any(node.random for node in captured(attend).train.ops)


class Recurrent(nn.Module):
    """Two layers of ``cell`` with dropout between them."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = cell(6, 5, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[0].square().mean()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_with_dropout_is_random_in_training_only(cell: type[nn.Module]) -> None:
    module = Recurrent(cell)
    found = capture(module, X)
    self_check(module, found, MORE)
    assert sum(node.random for node in found.train.ops) == 1
    assert not any(node.random for node in found.evaluation.ops)
    check_invariants(found.train)


def test_an_unused_random_op_stays_so_that_the_stream_is_the_modules() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        torch.rand(3)
        return F.dropout(m.first(x), 0.5, m.training)

    assert len(positions(captured(compute).train, "aten.rand")) == 1


# Buffers


# In-place ops and views


# Structure


def test_tuple_items_follow_their_op_and_stay_with_it() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        a, b, c = m.first(x).split(2, dim=1)
        left = torch.tanh(a)
        values, _ = torch.cat([left, b], 1).sort(dim=1)
        return torch.cat([values, c], 1)

    found = captured(compute).train
    check_invariants(found)
    (split,) = positions(found, "aten.split")
    assert [found.ops[split + i].target for i in (1, 2, 3)] == [GETITEM] * 3
    assert found.ops[split].is_tuple
    assert len(found.ops[split].outputs) == 3


def test_no_grad_and_autocast_blocks_are_inlined_with_their_flags() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.last(x)
            with torch.autocast("cpu", torch.bfloat16):
                fine = m.last(x)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            y = m.first(x)
        return y * scale + fine

    found = captured(compute).train
    scale, fine, y = (found.ops[at] for at in positions(found, "aten.linear"))
    assert (scale.grad_enabled, fine.grad_enabled, y.grad_enabled) == (False, False, True)
    assert scale.autocast is None
    assert fine.autocast is not None
    assert fine.autocast.enabled
    assert fine.autocast.dtype == fine.outputs[0].dtype == "bfloat16"
    assert y.autocast is not None
    assert not y.autocast.enabled
    assert not scale.requires_grad
    assert y.requires_grad
    assert not any("higher_order" in node.target for node in found.ops)


def test_another_devices_autocast_block_changes_nothing() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=False):
            return m.first(x)

    assert captured(compute).train.ops[0].autocast is None


def test_assertions_and_dead_ops_go() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        torch._assert(x.shape[0] == 4, "four rows")
        m.last(x).exp()
        return m.first(x.to(torch.float32))

    found = captured(compute).train
    assert len(positions(found, "aten.linear")) == 1
    assert not any("assert" in node.target for node in found.ops)
    assert "last.weight" not in found.parameters


def test_constants_are_found_and_device_literals_lose_their_device() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        steps = torch.arange(6, device=x.device) + 1
        weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) * m.table
        scalar = torch.tensor(2.5)
        return m.first(x) * steps * weight * scalar * m.seen.add(1)

    found = captured(compute)
    dag = found.train
    check_invariants(dag)
    assert set(positions(dag, "aten.arange")) <= dag.constant_ops
    assert len(dag.constant_ops) >= 5  # arange, + 1, the lifted tensors, weight, seen + 1
    assert positions(dag, "aten.linear")[0] not in dag.constant_ops
    assert sorted(meta.shape for meta in dag.constants.values()) == [(), (6,)]
    # Both graphs lift the same tensors, kept once.
    assert dag.constants == found.evaluation.constants
    assert set(dag.constants) <= set(found.state)
    devices = [v for node in dag.ops for n, v in node.kwargs if n == "device"]
    assert TorchLiteral("device", "") in devices
    assert "table" in found.state


def test_a_group_written_with_an_input_is_not_constant() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        canvas = torch.zeros(4, 6)
        canvas[1:] = x[1:]
        return m.first(x) + canvas

    found = captured(compute).train
    assert not set(positions(found, "aten.zeros")) & found.constant_ops


def test_recomputed_masks_written_in_place_stay_constant() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        mask = torch.full((4, 6), -1.0)
        mask[:, :2] = 0.0
        return m.first(x) + mask

    found = captured(compute).train
    assert set(positions(found, "aten.full")) <= found.constant_ops
    assert set(positions(found, "aten.fill_")) | set(positions(found, "aten.copy_")) <= found.constant_ops


def test_an_input_that_bears_a_parameters_name_is_refused() -> None:
    """A stage's shapes and types go to its worker by name: it would take the parameter's for the input."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.x * x).square().mean()

    with pytest.raises(CaptureError, match=r"'x' is an argument of forward\(\) and a tensor of the module"):
        capture(Named(), X)


# Costs


# Refusals


def test_data_dependent_control_flow_is_refused_with_its_place() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return x * 2
            return x

    def compute(m: Model, x: Tensor) -> Tensor:
        return m.inner(m.first(x))

    module = Model(compute)
    module.inner = Inner()
    with pytest.raises(CaptureError, match=r"data-dependent.*in inner at test_capture.py:\d+ \(`if x.sum"):
        capture(module, X)


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda m, x: m.first(x) * x.max().item(), "number out of a tensor|data-dependent"),
        (lambda m, x: m.first(x)[x > 0], "shape depends on the data|data-dependent"),
        (lambda m, x: m.first(x[x.argmax().tolist() :]), "number out of a tensor|data-dependent"),
    ],
)
def test_numbers_and_shapes_out_of_data_are_refused(
    compute: Callable[[Model, Tensor], Tensor], says: str
) -> None:
    with pytest.raises(CaptureError, match=says) as refusal:
        capture(Model(compute), X)
    assert "test_capture.py:" in str(refusal.value)


def test_every_unsupported_op_is_listed_at_once() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        y = torch.as_strided(m.first(x), (2, 2), (1, 1))
        return torch.special.bessel_j0(y)

    with pytest.raises(UnsupportedOp, match="2 ops") as refusal:
        capture(Model(compute), X)
    for part in ("aten.as_strided.default x1", "aten.special_bessel_j0.default", "test_capture.py:"):
        assert part in str(refusal.value)
    uses = op_uses(Model(compute), X)
    assert [use.supported for use in uses][:3] == [False, False, True]
    assert {use.target for use in uses} >= {"aten.linear.default", "aten.as_strided.default"}


def test_a_module_without_a_loss_is_refused() -> None:
    class Headless(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x}

    class Many(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(CaptureError, match="a dict, not a loss"):
        capture(Headless(), X)
    with pytest.raises(CaptureError, match=r"a loss of shape \(4, 6\)"):
        capture(Many(), X)
    gpt2 = MODELS["gpt2"]()
    with pytest.raises(CaptureError, match="loss is None"):
        capture(gpt2.module, {"input_ids": gpt2.example_inputs["input_ids"]})


def test_inputs_that_are_not_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match="'x' is a list"):
        capture(Model(lambda m, x: x), {"x": [1.0]})  # type: ignore[dict-item]
    with pytest.raises(CaptureError, match="no example inputs"):
        capture(Model(lambda m, x: x), {})
    with pytest.raises(CaptureError, match=r"a str, not a torch\.nn\.Module"):
        capture("model", X)  # type: ignore[arg-type]


def test_an_error_of_the_module_itself_is_shown_with_its_place() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        raise ValueError("no such mode: blue")

    with pytest.raises(CaptureError, match=r"at test_capture.py:\d+ .*ValueError: no such mode: blue"):
        capture(Model(compute), X)


def test_different_tensors_on_one_memory_are_refused() -> None:
    module = Model(lambda m, x: m.first(x) * m.part)
    module.part = nn.Parameter(module.first.weight.data[0])
    with pytest.raises(CaptureError, match=r"'first\.weight' and 'part'|'part' and 'first\.weight'"):
        capture(module, X)


def test_captured_references_are_only_ours() -> None:
    found = capture(*_arguments(MODELS["llama"]()), tail=False).train
    plain = (OpRef, LeafRef, TorchLiteral, int, float, bool, str, type(None))

    def check(arg: object) -> None:
        if isinstance(arg, tuple):
            for item in arg:
                check(item)
        else:
            assert isinstance(arg, plain)

    for node in found.ops:
        check(node.args)
        check(tuple(value for _, value in node.kwargs))
