"""Noised gradients of single samples: each sample's own, clipped, drawn by itself, and noised as declared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import UnsupportedOp
from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.privacy import SamplePrivacy
from coordinator.capture.capture import capture
from strategies.privacy.private import UNIT
from tests.inprocess.federation import LocalFederation, local_model
from worker.federated.samples import noised
from worker.federated.samples.noised import NoisedGradients
from worker.federated.trainer import LOSS

BATCH, SAMPLES = 4, 24
CLIP = 0.3


class Net(nn.Module):
    """A convolution with GroupNorm, and tied weights beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(2, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.head = nn.Linear(16, 3)

    def logits(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.conv(x))).flatten(1)
        out: Tensor = self.head(F.relu(self.two(F.relu(self.one(hidden)))))
        return out

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(self.logits(x), y)
        return loss


def arrays(seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"x": draw.normal(size=(SAMPLES, 2, 6)).astype(np.float32), "y": draw.integers(0, 3, SAMPLES)}


def federation(module: nn.Module, noise: float = 1.0, data: dict[str, Any] | None = None) -> LocalFederation:
    training = TrainingSpec(steps=4, n_micro=1, seed=3, optimizer=Optimizer(OptimizerName.SGD, lr=0.1))
    held = data or arrays()
    example = {name: torch.from_numpy(array[:BATCH]) for name, array in held.items()}
    found = capture(module, example, training)
    model = local_model(found.train, found.evaluation, found.state, training)
    privacy = SamplePrivacy(noise, clip=CLIP)
    rule = Federated(held_out=0.0, evaluate_every=0, local_steps=2, sample_privacy=privacy)
    return LocalFederation(model, rule, {"c0": held, "c1": arrays(1)}, floors=NO_FLOORS)


def gradients(made: LocalFederation, drawn: list[int], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Sums of the clipped gradients of these samples, without noise."""
    monkeypatch.setattr(noised, "discrete_gaussian", lambda sigma, size, source: np.zeros(size, np.int64))
    of = made.trainer._noised
    assert of is not None
    monkeypatch.setattr(of, "drawn", lambda samples, batch: np.array(drawn))
    made.trainer._begin(made.strategy.configure(made.state).weights)
    found = of.gradients(0, 0, made.clients["c0"], made.trainer._parameters)
    return {name: value.double().numpy() * BATCH for name, value in found.items()}


def own(sample: int) -> dict[str, Any]:
    """A sample's clipped gradient, by plain torch."""
    net, data = Net(), arrays()
    net(torch.from_numpy(data["x"][[sample]]), torch.from_numpy(data["y"][[sample]])).backward()
    found = {n: p.grad.double().numpy() for n, p in net.named_parameters() if p.grad is not None}
    norm = np.sqrt(sum(float(np.sum(g**2)) for g in found.values()))
    return {name: g * min(1.0, CLIP / norm) for name, g in found.items()}


def test_the_sum_is_of_each_drawn_samples_own_clipped_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [3, 7, 7, 20, 21]
    found = gradients(federation(Net()), drawn, monkeypatch)
    plain = [own(sample) for sample in drawn]
    assert set(found) == set(plain[0])
    for name, array in found.items():
        np.testing.assert_allclose(array, sum(each[name] for each in plain), atol=2e-6)


def test_one_sample_more_moves_the_sum_by_at_most_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    data = arrays()
    data["x"][5] *= 1e6
    made = federation(Net(), data=data)
    with_it, without = gradients(made, [1, 5], monkeypatch), gradients(made, [1], monkeypatch)
    moved = np.sqrt(sum(float(np.sum((with_it[n] - without[n]) ** 2)) for n in with_it))
    assert 0.99 * CLIP < moved <= CLIP * (1 + 1e-6)


def test_a_sample_that_is_not_finite_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    data = arrays()
    data["x"][5] = np.nan
    made = federation(Net(), data=data)
    with_it, without = gradients(made, [1, 5], monkeypatch), gradients(made, [1], monkeypatch)
    assert all(np.array_equal(with_it[name], without[name]) for name in with_it)


def test_a_round_of_a_client_ends_finite_without_a_loss_and_is_another_release_each_time() -> None:
    data = arrays()
    data["x"][5] = np.nan
    made = federation(Net(), data=data)
    broadcast = made.strategy.configure(made.state)
    found = [
        made.trainer.train(made.clients["c0"], broadcast, made.client_states["c0"]).update for _ in range(2)
    ]
    first, second = ({n: np.array(a) for n, a in update.delta.items()} for update in found)
    assert dict(found[0].metrics) == {LOSS: 0.0}
    assert all(np.isfinite(array).all() for array in first.values())
    assert found[0].steps == 2
    again = made.trainer.train(made.clients["c0"], broadcast, made.client_states["c0"]).update.delta
    assert not np.array_equal(again["head.weight"], second["head.weight"])
    made.run_round()
    assert made.state.round == 1


def test_noise_of_a_step_is_as_declared_within_three_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.zeros(40_000))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) + 0.0 * self.extra.sum()

    made = federation(Wide(), noise=1.7)
    of = made.trainer._noised
    assert of is not None
    monkeypatch.setattr(of, "drawn", lambda samples, batch: np.array([], np.int64))
    found = of.gradients(0, 0, made.clients["c0"], made.trainer._parameters)["extra"].double().numpy()
    assert float(np.std(found)) == pytest.approx(1.7 * CLIP / BATCH, rel=0.03)


def test_each_sample_is_drawn_by_itself_with_the_chance_that_is_accounted() -> None:
    of = NoisedGradients(object(), SamplePrivacy(1.0), torch.device("cpu"))  # type: ignore[arg-type]
    samples = np.arange(100, 160)
    sizes, seen = [], np.zeros(160)
    for _ in range(2000):
        drawn = of.drawn(samples, 15)
        sizes.append(len(drawn))
        seen[drawn] += 1
    assert len(set(sizes)) > 10
    assert np.mean(sizes) == pytest.approx(15.0, rel=0.03)
    assert np.var(sizes) == pytest.approx(15.0 * 0.75, rel=0.2)  # binomial: nobody's draw is another's
    assert seen[100:].min() > 2000 * 0.25 * 0.7
    assert np.array_equal(of.drawn(samples, 60), samples)
    assert np.array_equal(of.drawn(samples, 90), samples)
    assert sorted(set(of.drawn(samples, 15)) - set(samples)) == []


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)  # type: ignore[assignment]


class Centred(Net):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x - x.mean(0))


class Paired(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(self.logits(x), dim=1)
        return (z @ z.T).logsumexp(1).mean() + super().forward(x, y)


@pytest.mark.parametrize(
    ("module", "op"),
    [(Normed, r"batch_norm.*mixes the samples"), (Centred, "sub"), (Paired, "matmul|mm")],
)
def test_ops_that_mix_samples_are_refused_by_name(module: type[nn.Module], op: str) -> None:
    with pytest.raises(UnsupportedOp, match=op) as refused:
        federation(module())
    assert "GroupNorm" in str(refused.value)


def test_without_running_statistics_batch_norm_is_refused_as_well() -> None:
    net = Net()
    net.norm = nn.BatchNorm1d(4, track_running_stats=False)  # type: ignore[assignment]
    with pytest.raises(UnsupportedOp, match=r"batch_norm.*mixes the samples"):
        federation(net)


def test_the_unit_of_a_gradient_is_that_of_a_private_sum() -> None:
    assert UNIT == 2**24
    assert replace(SamplePrivacy(1.0), clip=2.0).clip == 2.0
