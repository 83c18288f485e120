"""Rules that change the local loss: against hand-written references, and captured as op-DAGs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import UsageError
from coordinator.capture.capture import capture
from coordinator.capture.self_check import self_check
from strategies import make_strategy
from strategies.base import Strategy
from strategies.fedimpro import COUNTS, PAIRS
from strategies.fedimpro_module import FedImpro, class_statistics
from strategies.layout import Layout, Role
from strategies.moon_module import Moon, moon_loss
from strategies.style_module import StyleSpec, _orthogonal, styled_set
from strategies.supcon_module import supcon
from strategies.values import Broadcast, Done, Phase
from strategies.vhl_module import Vhl, VhlLoss, shifted, vhl_loss
from strategies.virtual_data import VirtualSpec, fingerprint, virtual_set
from strategies.wrapped import owners

C = 3
SPEC = VirtualSpec(seed=7, classes=C, per_class=4, shape=(1, 8, 8), base=4)


class Net(nn.Module):
    """A tiny convolutional classifier with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.BatchNorm2d(2), nn.ReLU())
        self.mid = nn.Linear(18, 5)
        self.head = nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mid(self.low(x).flatten(1))))


class Net3(nn.Module):
    """A linear classifier of four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 12 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def batch(seed: int = 0, size: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, 8, 8, generator=draw)
    return {"x": x, "y": torch.randint(0, C, (size,), generator=draw)}


def plain_supcon(features: Tensor, labels: Tensor, temperature: float) -> float:
    """Row by row, pair by pair, in Python floats."""
    rows = [[float(v) / math.sqrt(float((row**2).sum())) for v in row] for row in features]
    dots = [[sum(a * b for a, b in zip(p, q, strict=True)) / temperature for q in rows] for p in rows]
    total = 0.0
    for i, mine in enumerate(dots):
        others = [j for j in range(len(rows)) if j != i]
        alike = [j for j in others if labels[j] == labels[i]]
        bottom = math.log(sum(math.exp(mine[j]) for j in others))
        if alike:
            total -= sum(mine[j] - bottom for j in alike) / len(alike)
    return total / len(rows)


def test_supcon_is_its_formula_and_a_lonely_row_adds_nothing() -> None:
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(7, 4, generator=draw, dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 2, 1, 1, 3])
    assert supcon(features, labels, 0.3).item() == pytest.approx(
        plain_supcon(features, labels, 0.3), rel=1e-9
    )
    assert supcon(features[:3], torch.tensor([0, 1, 2])).item() == 0.0


def test_the_vhl_loss_is_its_four_terms_and_virtual_features_are_held_in_the_first() -> None:
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 2 * C, generator=draw, dtype=torch.float64)
    features = torch.randn(9, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    y, virtual = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 1, 2, 2])
    weights = VhlLoss(virtual=0.7, match=0.4, cohere=0.2, temperature=0.5)
    found = vhl_loss(logits, features, y, virtual, weights)
    shares = torch.log_softmax(logits, 1)
    real = -sum(shares[i, k].item() for i, k in enumerate(y)) / 4
    made = -sum(shares[4 + i, C + k].item() for i, k in enumerate(virtual)) / 5
    between = plain_supcon(features.detach(), torch.cat([y, virtual]), 0.5)
    among = plain_supcon(features.detach()[4:], virtual, 0.5)
    assert found.item() == pytest.approx(real + 0.7 * made + 0.4 * between + 0.2 * among, rel=1e-9)
    only_between = VhlLoss(match=1.0, cohere=0.0, temperature=0.5)
    vhl_loss(logits, features, y, virtual, only_between).backward()
    assert features.grad is not None
    assert features.grad[4:].abs().max() == 0.0
    assert features.grad[:4].abs().max() > 0.0


def test_the_match_buffer_switches_both_contrastive_terms_off() -> None:
    logits, features = torch.randn(6, 2 * C), torch.randn(6, 4)
    y = torch.tensor([0, 1, 2])
    off = vhl_loss(logits, features, y, y, VhlLoss(), torch.zeros(()))
    assert off.item() == pytest.approx(F.cross_entropy(logits, torch.cat([y, y + C])).item() * 2, rel=1e-6)


def test_shifted_images_are_windows_of_the_padded_ones_mirrored_or_not() -> None:
    torch.manual_seed(3)
    images = torch.randn(6, 2, 4, 5)
    padded = F.pad(images, (1, 1, 1, 1))
    for at, image in enumerate(shifted(images, 1, flip=True)):
        windows = [padded[at, :, i : i + 4, j : j + 5] for i in range(3) for j in range(3)]
        assert any(torch.equal(image, w) or torch.equal(image, w.flip(2)) for w in windows)


def test_a_virtual_set_follows_from_its_seed_alone() -> None:
    images, labels = virtual_set(SPEC)
    assert images.shape == (12, 1, 8, 8)
    assert images.dtype == np.uint8
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    again = fingerprint(*virtual_set(SPEC))
    assert fingerprint(images, labels) == again
    assert fingerprint(*virtual_set(VirtualSpec(8, C, 4, (1, 8, 8), 4))) != again
    # Fixed once and for all: another machine or release must find the same bytes.
    assert again.startswith("c53c243e830ef27c")


def test_virtual_images_of_a_class_are_alike() -> None:
    images, labels = virtual_set(VirtualSpec(1, 4, 30, (1, 16, 16), 8))
    flat = images.reshape(len(images), -1).astype(float)
    means = np.stack([flat[labels == c].mean(0) for c in range(4)])
    nearest = ((flat[:, None] - means[None]) ** 2).sum(2).argmin(1)
    assert (nearest == labels).mean() > 0.99


def test_styled_images_of_a_class_are_alike_and_their_noise_means_orthogonal() -> None:
    spec = StyleSpec(seed=1, classes=4, per_class=12, shape=(3, 12, 16), style=16, width=8)
    images, labels = styled_set(spec)
    assert images.shape == (48, 3, 12, 16)
    assert images.dtype == np.uint8
    assert np.array_equal(styled_set(spec)[0], images)
    flat = images.reshape(48, -1).astype(float)
    means = np.stack([flat[labels == c].mean(0) for c in range(4)])
    nearest = ((flat[:, None] - means[None]) ** 2).sum(2).argmin(1)
    assert (nearest == labels).mean() > 0.9
    rows = torch.cat(_orthogonal(4, [16, 64], torch.Generator()), dim=1)
    assert torch.allclose(rows @ rows.T, 80.0 * torch.eye(4), atol=1e-3)
    module = Vhl(Net3(), "head", (images, labels))
    assert module.vhl_images.shape == (48, 3, 12, 16)


def test_vhl_is_captured_and_the_owners_weights_keep_their_names() -> None:
    module = Vhl(Net(), "head", SPEC, VhlLoss(batch=4, pad=1))
    found = capture(module, batch())
    self_check(module, found, batch(1))
    assert {*owners(dict(module.state_dict()))} == {*Net().state_dict()}
    assert not any(node.random for node in found.evaluation.ops)
    module.eval()
    plain = F.cross_entropy(module.net(batch()["x"]), batch()["y"])
    assert module(**batch()).item() == plain.item()


def test_virtual_images_are_normalised_as_the_loss_says() -> None:
    torch.manual_seed(0)
    plain, _ = Vhl(Net(), "head", SPEC, VhlLoss(pad=0, flip=False, mean=0.0, std=1.0))._virtual(torch.float32)
    torch.manual_seed(0)
    found, _ = Vhl(Net(), "head", SPEC, VhlLoss(pad=0, flip=False, mean=0.1, std=0.5))._virtual(torch.float32)
    assert torch.allclose(found, (plain - 0.1) / 0.5)
    with pytest.raises(UsageError, match="std 0 > 0"):
        VhlLoss(std=0.0)


def test_vhl_refuses_another_virtual_set_and_a_head_of_another_width() -> None:
    with pytest.raises(UsageError, match="SHA-256"):
        Vhl(Net(), "head", SPEC, sha256="0" * 64)
    with pytest.raises(UsageError, match="3 outputs"):
        Vhl(Net(), "mid", SPEC)
    with pytest.raises(UsageError, match="no module 'tail'"):
        Vhl(Net(), "tail", SPEC)


def test_class_statistics_are_means_and_deviations_by_class() -> None:
    features = torch.randn(6, 2, dtype=torch.float64)
    labels = torch.tensor([0, 0, 2, 2, 2, 0])
    means, stds, counts = class_statistics(features, labels, C)
    assert counts.tolist() == [3, 0, 3]
    for c in (0, 2):
        mine = features[labels == c]
        assert torch.allclose(means[c], mine.mean(0))
        assert torch.allclose(stds[c], mine.std(0, correction=0))


def fedimpro(**options: float) -> FedImpro:
    return FedImpro(Net(), "low", C, batch()["x"], **options)  # type: ignore[arg-type]


def test_fedimpro_is_captured() -> None:
    module = fedimpro()
    found = capture(module, batch())
    self_check(module, found, batch(1))
    written = {name for name, meta in found.train.buffers.items() if meta.mutated}
    assert {"fedimpro_means", "fedimpro_stds", "fedimpro_counts"} <= written
    assert not any(node.random for node in found.evaluation.ops)


def test_fedimpro_is_ce_of_real_plus_weighted_ce_of_drawn_features() -> None:
    module, data = fedimpro(), batch()
    module.fedimpro_shared_stds.zero_()  # so that what is drawn is known
    module.fedimpro_weight.fill_(0.5)
    reference = Net()
    drawn_y = torch.arange(C).repeat(len(data["y"]) // C + 1)

    def high(features: Tensor) -> Tensor:
        return reference.head(torch.relu(reference.mid(features)))

    real = F.cross_entropy(high(reference.low(data["x"]).flatten(1)), data["y"])
    drawn = F.cross_entropy(high(module.fedimpro_shared_means[drawn_y]), drawn_y)
    assert module(**data).item() == pytest.approx((real + 0.5 * drawn).item(), rel=1e-5)


def test_drawn_features_give_no_gradient_below_the_split() -> None:
    module, plain, data = fedimpro(), Net(), batch()
    module.fedimpro_weight.fill_(3.0)
    module(**data).backward()
    F.cross_entropy(plain(data["x"]), data["y"]).backward()
    below, above = module.net.get_submodule("low.0"), module.net.get_submodule("mid")
    assert torch.allclose(below.weight.grad, plain.low[0].weight.grad, atol=1e-6)  # type: ignore[arg-type]
    assert not torch.allclose(above.weight.grad, plain.mid.weight.grad, atol=1e-4)  # type: ignore[arg-type]


def test_fedimpro_moves_the_estimates_of_the_classes_it_saw_and_bounds_the_deviation() -> None:
    module = fedimpro(beta=0.75, max_std=0.2)
    before = module.fedimpro_means.clone()
    x, y = batch(size=5)["x"], torch.tensor([0, 0, 0, 2, 0])
    module(x, y)
    features = Net().low(x).flatten(1).detach()
    means, _, counts = class_statistics(features, y, C)
    assert counts.tolist() == [4, 0, 1]
    assert module.fedimpro_counts.tolist() == [4, 0, 0]  # one sample of a class is that sample: not told
    assert torch.allclose(module.fedimpro_means[0], 0.75 * before[0] + 0.25 * means[0], atol=1e-6)
    assert torch.equal(module.fedimpro_means[1:], before[1:])
    assert module.fedimpro_stds.max() <= 0.2
    assert torch.equal(module.fedimpro_stds[2], module.fedimpro_shared_stds[2])


def test_moon_is_its_formula_and_is_captured_with_frozen_copies() -> None:
    draw = torch.Generator().manual_seed(4)
    z, g, p = (torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    near = torch.exp(F.cosine_similarity(z, g) / 0.5)
    far = torch.exp(F.cosine_similarity(z, p) / 0.5)
    assert moon_loss(z, g, p, 0.5).item() == pytest.approx(-torch.log(near / (near + far)).mean().item())
    module = Moon(Net(), "head")
    found = capture(module, batch())
    self_check(module, found, batch(1))
    trained = {name for name, meta in found.train.parameters.items() if meta.requires_grad}
    assert trained == {f"net.{name}" for name, _ in Net().named_parameters()}


def test_a_captured_wrapper_gives_the_layout_its_rule_expects() -> None:
    from strategies import make_strategy

    for name, module in (
        ("fedimpro", fedimpro()),
        ("moon", Moon(Net(), "head")),
        ("vhl", Vhl(Net(), "head", SPEC)),
    ):
        found = capture(module, batch(), tail=False)
        arrays = {n: t.numpy() for n, t in found.state.items()}
        trained = [n for n, meta in found.train.parameters.items() if meta.requires_grad]
        written = [n for n, meta in found.train.buffers.items() if meta.mutated]
        layout = make_strategy(name).adapt(Layout.of(arrays, trained, written))
        assert set(layout.names(Role.TRAINED)) == set(trained)
        averaged = {"net.low.1.running_mean", "net.low.1.running_var"}
        assert set(layout.names(Role.AVERAGED)) == averaged


def trained(
    rule: Strategy, module: nn.Module, layout: Layout, broadcast: Broadcast, phase: Phase, seed: int
) -> Done:
    """Two epochs of two steps of SGD, as a trainer runs them: start, buffers by epoch, corrections."""
    state, lr = module.state_dict(), 0.05

    def put(arrays: Mapping[str, Any]) -> None:
        for name, array in arrays.items():
            state[name].copy_(torch.from_numpy(np.array(array)))

    put(phase.start)
    correction = phase.correction.mapped(torch.from_numpy)
    module.train()
    for epoch in range(2):
        put(rule.at_epoch(layout, broadcast, epoch))
        for step in range(2):
            module.zero_grad()
            module(**batch(10 * seed + step)).backward()
            with torch.no_grad():
                for name, p in module.named_parameters():
                    if p.grad is not None:
                        p -= lr * correction.gradient(name, p.grad, p)
    return Done({name: tensor.numpy().copy() for name, tensor in state.items()}, 8, 4, lr)


@pytest.mark.parametrize("name", ["vhl", "vhl on scaffold", "fedimpro", "moon"])
def test_wrapped_nets_train_in_a_federation(name: str) -> None:
    rule = make_strategy(name.split()[0], {"base": "scaffold"} if "scaffold" in name else {})
    torch.manual_seed(0)
    wrapped = {"vhl": Vhl(Net(), "head", SPEC), "fedimpro": fedimpro(), "moon": Moon(Net(), "head")}
    module = wrapped[name.split()[0]]
    arrays = {n: t.numpy().copy() for n, t in module.state_dict().items()}
    learnt = [n for n, p in module.named_parameters() if p.requires_grad]
    written = [n for n, _ in module.named_buffers() if "running" in n or n in (*PAIRS.values(), COUNTS)]
    state = rule.init(Layout.of(arrays, learnt, written), arrays, 3)
    first, clients = state, [rule.client_init(state.layout) for _ in range(3)]
    for _ in range(2):
        broadcast, updates = rule.configure(state), []
        for at in range(3):
            [phase] = rule.begin(state.layout, broadcast, clients[at])
            done = trained(rule, module, state.layout, broadcast, phase, at)
            update, clients[at] = rule.end(state.layout, broadcast, [done], clients[at])
            updates.append(replace(update, client=str(at)))
        state = rule.aggregate(state, updates)
    still = [n for n in state.weights if np.array_equal(state.weights[n], first.weights[n])]
    assert set(still) <= {"fedimpro_weight", "net.low.0.bias"}  # a bias before BatchNorm has no gradient
    Net().load_state_dict({n: torch.from_numpy(a) for n, a in owners({**arrays, **state.weights}).items()})
