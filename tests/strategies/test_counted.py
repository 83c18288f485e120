"""Few numbers leave beside an update: so many sums as samples have values give the samples back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UsageError
from atoll.federated import NO_FLOORS, Federated, Floors
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from coordinator.capture.capture import capture
from coordinator.client.prepare import check_graphs
from strategies import counted, make_strategy
from strategies.clipping import Clipping
from strategies.counted import check_measured, returned_numbers
from strategies.layout import Layout
from tests.inprocess.federation import LocalFederation, local_model
from tests.strategies.test_modules import batch, fedimpro
from tests.worker.federated.test_participation import KEY, Server, context
from worker.cancel import Cancel
from worker.federated.participation import Participation
from worker.federated.trainer import LocalTrainer

B, D = 8, 6
SPEC = TrainingSpec(steps=4, n_micro=1, optimizer=Optimizer(OptimizerName.SGD, lr=0.1))


class PowerSums(nn.Module):
    """Sums over a micro-batch in which every sample counts alike: B * D scalar buffers."""

    def __init__(self, scalars: int = B * D) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.names = [(k, j) for k in range(1, B + 1) for j in range(D)][:scalars]
        for k, j in self.names:
            self.register_buffer(f"p{k}_{j}", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        wide = x.double()
        key = wide[:, 0]
        for k, j in self.names:
            term = key**k if j == 0 else key ** (k - 1) * wide[:, j]
            getattr(self, f"p{k}_{j}").copy_(term.sum())
        return ((self.w - y.double().mean().float()) ** 2).sum()


class Binned(nn.Module):
    """Batch norm's running means of the rows whose first value falls into each of ``bins``."""

    def __init__(self, bins: int, momentum: float = 1.0) -> None:
        super().__init__()
        self.bins = bins
        self.w = nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(bins * D, momentum=momentum, affine=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        edges = torch.linspace(-3, 3, self.bins + 1)
        mask = ((x[:, :1] >= edges[:-1]) & (x[:, :1] < edges[1:])).to(x.dtype)
        wide = (mask.unsqueeze(2) * x.unsqueeze(1)).reshape(x.shape[0], self.bins * D)
        return ((self.w - y.float().mean()) ** 2).sum() + 0 * self.norm(wide).mean()


class Honest(nn.Module):
    """A small convolutional net with batch norm: 8 running statistics, samples of 64 values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
        logits = self.head(self.body(x))
        loss = F.cross_entropy(logits, y)
        return loss if self.training else {"loss": loss, "accuracy": (logits.argmax(1) == y).float().mean()}


def rows(n: int, seed: int, shape: tuple[int, ...] = (D,)) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"x": draw.normal(size=(n, *shape)).astype(np.float32), "y": draw.integers(0, 3, n)}


def example(shape: tuple[int, ...] = (D,)) -> dict[str, Tensor]:
    return {"x": torch.zeros(B, *shape), "y": torch.zeros(B, dtype=torch.int64)}


def federation(
    module: nn.Module,
    floors: Floors | None = None,
    n: int = 40,
    shape: tuple[int, ...] = (D,),
    spec: TrainingSpec = SPEC,
    **options: Any,
) -> LocalFederation:
    torch.manual_seed(0)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    captured = capture(module, example(shape), spec, ("accuracy",) if isinstance(module, Honest) else ())
    model = local_model(captured.train, captured.evaluation, state, spec)
    data = {name: rows(n, at, shape) for at, name in enumerate(("a", "b"))}
    return LocalFederation(model, Federated(local_epochs=2, **options), data, floors=floors)


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (PowerSums(), 48),
        (PowerSums(B), 8),
        (Binned(64), 768),
        (Binned(64, momentum=0.1), 768),
        (Binned(1), 12),
    ],
    ids=["power sums", "one column", "bins", "bins, honest momentum", "one bin"],
)
def test_sums_that_give_rows_back_are_refused_by_their_count(module: nn.Module, count: int) -> None:
    with pytest.raises(
        UsageError, match=rf"return {count} exact sums or means.*3 are allowed.*statistics {count}"
    ):
        federation(module)


def test_without_the_count_newtons_identities_return_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack itself: what it recovers where nobody counts."""
    caught: list[dict[str, Any]] = []
    train = LocalTrainer.train

    def spy(self: LocalTrainer, client: Any, *given: Any, **named: Any) -> Any:
        found = train(self, client, *given, **named)
        if client.name == "a":
            caught.append(
                {name: float(value) for name, value in found.update.delta.items() if value.ndim == 0}
            )
        return found

    monkeypatch.setattr(LocalTrainer, "train", spy)
    federation(PowerSums(), NO_FLOORS).run_round()
    sums = caught[0]
    power = [float(B)] + [sums[f"p{k}_0"] for k in range(1, B + 1)]
    symmetric = [1.0]
    for k in range(1, B + 1):
        terms = ((-1) ** (i - 1) * symmetric[k - i] * power[i] for i in range(1, k + 1))
        symmetric.append(sum(terms) / k)
    keys = np.sort(np.roots([(-1) ** k * symmetric[k] for k in range(B + 1)]).real)
    others = [
        np.linalg.solve(np.vander(keys, B, increasing=True).T, [sums[f"p{k}_{j}"] for k in range(1, B + 1)])
        for j in range(1, D)
    ]
    private = rows(40, 0)["x"]
    nearest = [np.abs(private - row).max(1).min() for row in np.stack([keys, *others], 1).astype(np.float32)]
    assert max(nearest) < 1e-4


def test_a_net_with_batch_norm_trains_by_default() -> None:
    ran = federation(Honest(), shape=(1, 8, 8))
    assert ran.run_round().participants == ("a", "b")
    assert ran.evaluate_clients()["a"].metrics.keys() == {"accuracy"}


def test_few_sums_over_many_rounds_are_refused_too() -> None:
    """The samples of each micro-batch are known: as many known sums as values are a linear system."""
    many = replace(SPEC, steps=200)
    with pytest.raises(
        UsageError, match=r"return 2 exact sums.*0 are allowed.*of 36 samples over 200 rounds"
    ):
        federation(PowerSums(2), spec=many).run_round()
    assert federation(PowerSums(2)).run_round().round == 0


def test_what_its_owner_allows_or_keeps_at_home_trains() -> None:
    assert federation(Binned(64), Floors(statistics=768)).run_round().round == 0
    local = ("*running_mean", "*running_var")
    assert federation(Binned(64), local=local).run_round().round == 0
    with pytest.raises(UsageError, match="return 768"):
        federation(Binned(64), Floors(statistics=767))


def test_a_worker_counts_for_itself_and_noise_hides_what_it_lies_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "SHARE", 3)  # its 32 running statistics are half of a sample's 65 values
    server = Server(tmp_path / "server")
    given = (server.joining(), context(server, tmp_path / "w"), Cancel(), KEY)
    with pytest.raises(UsageError, match=r"return 32 exact sums.*21 are allowed"):
        Participation(*given)
    with pytest.raises(UsageError, match="return 32 exact sums"):
        Participation(*given, Clipping(1.0))  # one known number tells by what all were scaled
    Participation(*given, statistics=32)
    Participation(*given, Clipping(1.0, 0.5))


def test_metrics_of_an_evaluation_are_few_as_well() -> None:
    check_measured(1, Floors(), values=2)
    check_measured(16, Floors(), values=64)
    with pytest.raises(UsageError, match=r"return 17 means.*3 are allowed.*--allow-statistics 17"):
        check_measured(16, Floors(), values=7)
    check_measured(16, Floors(statistics=17), values=7)
    check_measured(16, NO_FLOORS, values=7)


def test_a_strategys_own_statistics_are_counted() -> None:
    captured = capture(fedimpro(), batch(), tail=False)
    states = {**captured.train.parameters, **captured.train.buffers}
    rule = make_strategy("fedimpro", {})
    layout = rule.adapt(Layout.of_state(states))
    own = sum(meta.elements for slot in rule.extra_up(layout).values() for meta in slot.values())
    running = sum(meta.elements for name, meta in layout.metas.items() if "running" in name)
    assert returned_numbers(layout, captured.train.buffers, rule) == own + running > running


def test_submit_says_what_data_owners_would_have_to_allow() -> None:
    captured = capture(Binned(64), example(), SPEC, tail=False)
    words = check_graphs(Federated(), captured)
    assert "data owners will refuse this job unless they allow it" in words
    assert "--allow-statistics 768" in words
    assert not check_graphs(Federated(local=("*running*",)), captured)
