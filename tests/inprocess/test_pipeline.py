"""Stages in one process that exchange through codecs: the masked net's gradients, and exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UsageError
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.plan import LinkSpec, Mask
from atoll.program import stage_programs
from benchmarks.oracle import Case, built_in, case_of, difference, every_link, run_local
from compressors import catalogue
from tests.inprocess.pipeline import LocalPipeline
from tests.worker.links import plain_codec

LR = 0.5
TRAINING = TrainingSpec(steps=1, n_micro=2, seed=3, optimizer=Optimizer(OptimizerName.SGD, lr=LR))
BATCH, WIDTH = 8, 24
RATIO = 4.0


@pytest.fixture(autouse=True)
def codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_codec.offer(monkeypatch)
    monkeypatch.setattr(catalogue, "MIN_BYTES", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Two layers with one value between them; ``mask`` keeps the largest of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.two(torch.tanh(self.one(x))), target)

    def masked(self, x: Tensor, target: Tensor, ratio: float) -> Tensor:
        hidden = torch.tanh(self.one(x))
        kept = hidden.detach().abs().reshape(-1).topk(int(hidden.numel() / ratio)).indices
        mask = torch.zeros(hidden.numel()).index_fill(0, kept, 1.0).reshape(hidden.shape)
        return F.mse_loss(self.two(hidden * mask), target)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(BATCH, WIDTH, generator=generator),
        "target": torch.randn(BATCH, WIDTH, generator=generator),
    }


def net_case() -> Case:
    def batches(step: int) -> list[dict[str, Tensor]]:
        return [batch(10 * step + micro) for micro in range(TRAINING.n_micro)]

    return case_of("net", Net(), batch(0), TRAINING, batches)


def after_tanh(case: Case) -> int:
    return next(op for op, node in enumerate(case.dag.ops) if "tanh" in node.target) + 1


def both_ways(codec: str, ratio: float = 1.0, mask: Mask = Mask.NONE, stages: int = 2) -> list[LinkSpec]:
    pairs = [(s, t) for s in range(stages) for t in range(stages) if s != t]
    return [LinkSpec(s, t, codec, ratio, mask if s > t else Mask.NONE) for s, t in pairs]


def gradients_of_masked_net() -> dict[str, Tensor]:
    net = Net()
    for micro in range(TRAINING.n_micro):
        (net.masked(**batch(micro), ratio=RATIO) / TRAINING.n_micro).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def gradients(mask: Mask) -> dict[str, Tensor]:
    case = net_case()
    run = run_local(case, (0, after_tanh(case)), links=both_ways("largest", RATIO, mask))
    return {name: (case.tensors[name]["value"] - t["value"]) / LR for name, t in run.state.items()}


def test_the_same_mask_both_ways_gives_the_true_gradient_of_the_masked_net():
    expected, found = gradients_of_masked_net(), gradients(Mask.SAME)
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_positions_of_the_gradients_own_are_another_gradient():
    expected, found = gradients_of_masked_net(), gradients(Mask.INDEPENDENT)
    assert not torch.allclose(found["one.weight"], expected["one.weight"], atol=1e-4)
    # What the second layer computes on is the same masked value either way.
    torch.testing.assert_close(found["two.weight"], expected["two.weight"], atol=1e-6, rtol=1e-4)


def test_a_gradient_at_the_values_positions_carries_no_indices():
    case = net_case()
    sizes = {}
    for mask in (Mask.SAME, Mask.INDEPENDENT):
        programs = stage_programs(case.dag, (0, after_tanh(case)))
        pipeline = LocalPipeline(programs, TRAINING, case.tensors, states=case.states)
        pipeline.relink(both_ways("largest", RATIO, mask))
        pipeline.step(0, case.batches(0))
        use = pipeline.codec_use()
        assert use[0, 1].dense_bytes == use[1, 0].dense_bytes == 2 * BATCH * WIDTH * 4
        assert use[0, 1].encode_s > 0
        sizes[mask] = use[1, 0].wire_bytes
    assert sizes[Mask.INDEPENDENT] - sizes[Mask.SAME] == 8 * int(BATCH * WIDTH / RATIO) * TRAINING.n_micro


@cache
def made(name: str) -> Case:
    return built_in(name, replace(TRAINING, steps=2), 0.1)


@pytest.mark.parametrize("name", ["gpt2", "branches", "resnet"])
def test_lossless_on_all_links_changes_no_bit(name: str):
    case = replace(made(name), training=replace(TRAINING, steps=3, optimizer=Optimizer(lr=3e-3)))
    positions = case.dag.cuttable()
    starts = (0, positions[len(positions) // 3], positions[2 * len(positions) // 3])
    coded = run_local(case, starts, links=both_ways("lossless", stages=3))
    assert difference(coded, run_local(case, (0,))) == 0.0


@pytest.mark.parametrize("mask", [Mask.SAME, Mask.INDEPENDENT])
@pytest.mark.parametrize("name", ["gpt2", "branches"])
def test_lossy_links_train_and_repeat_bit_for_bit(name: str, mask: Mask):
    """Values used in several stages, whose gradients fold, among them."""
    case = made(name)
    positions = case.dag.cuttable()
    starts = (0, positions[len(positions) // 3], positions[2 * len(positions) // 3])
    runs = [run_local(case, starts, links=both_ways("largest", 2.0, mask, 3)) for _ in range(2)]
    assert difference(*runs) == 0.0
    # Norms are of gradients of a loss that may be a sum over many targets: losses and state are bounded.
    assert 0.0 < difference(runs[0], run_local(case, (0,)), 1) < 1.0


def test_the_coded_evaluation_sees_the_masked_net_and_the_exact_one_does_not():
    case = net_case()
    starts = (0, after_tanh(case))
    programs = stage_programs(case.dag, starts)
    held_out = [batch(100), batch(101)]
    net = Net()
    pipeline = LocalPipeline(
        programs,
        TRAINING,
        case.tensors,
        eval_programs=programs,
        states=case.states,
    )
    pipeline.relink(both_ways("largest", RATIO))
    assert pipeline.lossy
    exact, masked = (
        [f(**b).item() for b in held_out] for f in (net, lambda **b: net.masked(**b, ratio=RATIO))
    )
    assert pipeline.evaluate(held_out) == pytest.approx(sum(exact) / 2, rel=1e-6)
    assert pipeline.evaluate(held_out, coded=True) == pytest.approx(sum(masked) / 2, rel=1e-6)
    pipeline.relink([])
    assert not pipeline.lossy
    assert pipeline.evaluate(held_out, coded=True) == pipeline.evaluate(held_out)


@pytest.mark.parametrize(
    ("text", "codec", "mask"), [("lossless", "lossless", Mask.NONE), ("topk:8", "topk", Mask.SAME)]
)
def test_the_oracle_compresses_every_link(text: str, codec: str, mask: Mask):
    links = every_link(text, 3)
    assert len(links) == 6
    assert {link.codec for link in links} == {codec}
    assert {link.mask for link in links if link.source > link.target} == {mask}
    assert every_link("off", 3) == ()
    with pytest.raises(UsageError, match="chooses by link"):
        every_link("auto:16", 3)
