"""In-place writes and buffers in a captured graph: kept whole, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import CaptureError
from atoll.opdag import LeafRef, Source, leaf_refs, op_refs
from coordinator.capture.capture import capture
from coordinator.capture.self_check import self_check
from tests.coordinator.capture.test_capture import MORE, Model, X, _arguments, captured, positions, whole
from tests.models import MODELS


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
