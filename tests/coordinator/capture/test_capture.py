"""Capture: unmodified models become op-DAGs, every trap of these graphs is met, the rest is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import CaptureError, UnsupportedOp
from atoll.job import Optimizer, ParamGroup, Precision, TrainingSpec
from atoll.opdag import Kind, LeafRef, OpDag, OpRef, Source, TorchLiteral, leaf_refs, op_refs
from atoll.ops import GETITEM
from coordinator.capture import outcome
from coordinator.capture.capture import Captured, capture, op_uses
from coordinator.capture.self_check import self_check
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
        (name, 0.2, precision)
        if precision is Precision.FP32 or name in ("gpt2", "resnet")
        else pytest.param(name, 0.2, precision, marks=pytest.mark.slow)
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
    example = MODELS[name](dropout=dropout)
    spec = TrainingSpec(steps=1, n_micro=1, precision=precision)
    found = capture(example.module, example.example_inputs, spec)
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
    found = capture(*_arguments(MODELS["gpt2"]())).train
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


def test_batch_norm_mutates_its_buffers_in_training() -> None:
    example = MODELS["branches"]()
    found = capture(*_arguments(example))
    mutated = {name for name, meta in found.train.buffers.items() if meta.mutated}
    assert mutated == {"left.1.running_mean", "left.1.running_var", "left.1.num_batches_tracked"}
    # The evaluation graph only reads them, but they change between its runs.
    assert all(meta.mutated for meta in found.evaluation.buffers.values())


def test_instance_norm_mutates_its_buffers() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x[None]).pow(3).mean()

    module = Normed()
    found = capture(module, X)
    self_check(module, found, MORE)
    assert {n for n, meta in found.train.buffers.items() if meta.mutated} >= {
        "norm.running_mean",
        "norm.running_var",
    }


def test_a_batch_norm_used_twice_keeps_its_users_together() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm = nn.BatchNorm1d(6)
            self.middle = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.tanh(self.middle(self.norm(x)))).pow(3).mean()

    module = Twice()
    found = capture(module, X)
    self_check(module, found, MORE)
    norms = positions(found.train, "aten.batch_norm")
    assert len(norms) == 2
    assert whole(found.train, *norms)
    assert whole(found.evaluation, *positions(found.evaluation, "aten.batch_norm"))


def test_a_buffer_written_in_place_keeps_readers_and_writer_together() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        y = m.first(x) + m.seen
        m.seen.mul_(0.9).add_(x.mean(0))
        return m.last(y) * m.seen

    found = captured(compute).train
    assert found.buffers["seen"].mutated
    users = [at for at, node in enumerate(found.ops) if LeafRef(Source.BUFFER, "seen") in leaf_refs(node)]
    assert whole(found, *users)


def test_what_reads_a_written_buffer_reads_a_copy() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        m.seen.add_(1)
        return m.first(x) * m.seen

    found = captured(compute)
    (product,) = positions(found.train, "aten.mul")
    assert [found.train.ops[r].target for r in op_refs(found.train.ops[product])][1] == "aten.clone.default"
    # Nothing is differentiated in evaluation, so nothing is kept.
    assert not positions(found.evaluation, "aten.clone")


def test_a_buffer_written_through_a_view_is_mutated() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.seen[:3].copy_(x[0, :3])
        return m.first(x) * m.seen

    found = captured(compute).train
    assert found.buffers["seen"].mutated
    assert not any(leaf.name == "seen" for at in found.constant_ops for leaf in leaf_refs(found.ops[at]))


def test_a_write_that_nothing_reads_is_kept() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        m.seen.add_(1)
        return m.first(x)

    assert len(positions(captured(compute).train, "aten.add_")) == 1


# In-place ops and views


def test_an_in_place_write_to_a_view_keeps_its_group_whole() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        y = m.first(x)
        y[:, 0] = x[:, 1]
        z = y.view(2, 12)
        z.mul_(2)
        return m.last(torch.relu(y))

    found = captured(compute).train
    first = positions(found, "aten.linear")[0]
    assert whole(found, first, *positions(found, "aten.copy_"), *positions(found, "aten.mul_"))


def test_residuals_added_in_place_can_still_be_cut() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        y = m.first(x)
        y += m.last(torch.tanh(y.clone()))
        y += 1
        return torch.relu_(y)

    found = captured(compute).train
    assert found.unsplittable == ()
    assert not any(node.target.split(".")[1].endswith("_") for node in found.ops)


def test_an_in_place_write_under_no_grad_stays_in_place() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        y = m.first(x)
        with torch.no_grad():
            y.add_(1)
        return y * m.last(x)

    found = captured(compute).train
    (write,) = positions(found, "aten.add_")
    assert not found.ops[write].grad_enabled
    assert whole(found, *positions(found, "aten.linear")[:1], write)


def test_an_input_written_in_place_keeps_its_users_together() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        x.masked_fill_(x > 1, 0.0)
        return m.last(y) + m.first(x)

    found = captured(compute).train
    users = [at for at, node in enumerate(found.ops) if LeafRef(Source.INPUT, "x") in leaf_refs(node)]
    assert whole(found, *users)


def test_a_parameter_written_in_place_is_refused() -> None:
    def compute(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.first.weight.clamp_(-1, 1)
        return m.first(x)

    with pytest.raises(
        CaptureError, match=r"aten.clamp_.*test_capture.py:\d+ writes the parameter 'first.weight'"
    ):
        captured(compute)


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


def test_an_input_may_bear_a_parameters_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.x * x).square().mean()

    found = capture(Named(), X).train
    assert found.inputs["x"].shape == (4, 6)
    assert found.parameters["x"].meta.shape == (6,)


# Costs


def test_costs_of_a_linear_layer() -> None:
    found = captured(lambda m, x: m.last(torch.relu(m.first(x)))).train
    first, last = (found.ops[at] for at in positions(found, "aten.linear"))
    assert first.flops_forward == 2 * 4 * 6 * 6
    assert first.flops_backward == first.flops_forward  # the input needs no gradient
    assert last.flops_backward == 2 * last.flops_forward
    assert first.bytes_moved == 4 * (4 * 6 + 6 * 6 + 6 + 4 * 6)
    (relu,) = positions(found, "aten.relu")
    # relu's result is what the second layer's weight gradient needs: counted once, for both.
    assert [found.ops[at].bytes_saved for at in (positions(found, "aten.linear")[0], relu)] == [96, 96]
    assert last.bytes_saved == 0


def test_views_cost_nothing_and_parameters_are_not_counted_as_saved() -> None:
    found = captured(lambda m, x: m.first(x).view(2, 12).t()).train
    view = found.ops[positions(found, "aten.view")[0]]
    assert (view.flops_forward, view.bytes_moved, view.bytes_saved) == (0, 0, 0)
    example = MODELS["gpt2"]()
    saved = sum(node.bytes_saved for node in capture(*_arguments(example)).train.ops)
    weights = sum(p.numel() * 4 for p in example.module.parameters())
    assert saved > 0
    assert saved != weights


class Classes(nn.Module):
    """Labels against logits of tokens: what only a kernel refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(x)), labels.roll(1))


@pytest.mark.parametrize(
    ("x", "labels", "says"),
    [
        (
            torch.zeros(4, dtype=torch.long),
            torch.full((4,), 5),
            r"cross_entropy_loss.*Target 5 is out of bounds",
        ),
        (torch.full((4,), 7), torch.zeros(4, dtype=torch.long), r"embedding.*index out of range"),
        (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.int32), r"cross_entropy_loss.*Long"),
    ],
)
def test_numbers_that_a_kernel_refuses_are_found_though_costs_are_of_shapes(
    x: Tensor, labels: Tensor, says: str
) -> None:
    capture(Classes(), {"x": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)})
    with pytest.raises(CaptureError, match=says):
        capture(Classes(), {"x": x, "labels": labels})


def test_costs_read_no_weight() -> None:
    def graph(fill: float) -> OpDag:
        module = Classes()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(fill)
        tokens = torch.zeros(4, dtype=torch.long)
        return capture(module, {"x": tokens, "labels": tokens}).train

    assert graph(float("nan")) == graph(1.0)


def test_the_work_space_of_an_lstm_is_counted() -> None:
    """Its kernel keeps more than the op's results, which shapes alone do not say."""
    found = capture(Recurrent(nn.LSTM), X).train
    (lstm,) = positions(found, "aten.lstm")
    results = sum(meta.nbytes for meta in found.ops[lstm].outputs)
    assert found.ops[lstm].bytes_saved > 3 * results


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "resnet"])
def test_whether_a_loss_is_a_sum_is_found_from_shapes_as_from_the_inputs(name: str) -> None:
    example = MODELS[name]()
    module, inputs = _arguments(example)[:2]
    trials = [trial(module, inputs) for trial in (outcome._on_shapes, outcome._on_inputs)]
    assert trials[0] == trials[1] == (name in ("gpt2", "llama"))


def test_metas_follow_the_precision() -> None:
    example = MODELS["gpt2"]()
    spec = TrainingSpec(steps=1, n_micro=1, precision=Precision.BF16)
    found = capture(*_arguments(example), spec).train
    assert {found.ops[at].outputs[0].dtype for at in positions(found, "aten.addmm")} == {"bfloat16"}


@pytest.mark.slow
def test_work_grows_linearly_with_the_number_of_ops() -> None:
    def compute(n: int) -> Callable[[Model, Tensor], Tensor]:
        def many(m: Model, x: Tensor) -> Tensor:
            y = m.first(x)
            for _ in range(n // 4):
                y = y + m.table
                y.mul_(0.99)
                z = y.view(2, 12)
                z[0] = 1.0
            return y

        return many

    def lines_run(n: int) -> int:
        count = 0

        def line(frame: FrameType, event: str, _: object) -> object:
            nonlocal count
            count += event == "line"
            return line

        def call(frame: FrameType, event: str, _: object) -> object:
            ours = frame.f_code.co_filename.endswith(("regions.py", "costs.py", "capture.py", "exported.py"))
            return line if ours and "coordinator" in frame.f_code.co_filename else None

        module = Model(compute(n))
        sys.settrace(call)
        try:
            capture(module, X)
        finally:
            sys.settrace(None)
        return count

    assert lines_run(160) / lines_run(40) < 6  # quadratic work would give 16


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
    found = capture(*_arguments(MODELS["llama"]())).train
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
