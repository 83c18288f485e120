"""The attack on a cut's activations: it finds what it must, and noise is in its way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.reconstruction import (
    ATTACKS,
    KNOWN,
    Attacker,
    Setup,
    front,
    loss_behind,
    noisy,
    plot,
    shares_found,
    texts,
    trained,
    windows,
)
from examples.gpt import GPT

TINY = Setup(
    width=32, layers=2, heads=2, length=12, batch=8, steps=30, attacked=24, searched=8, depths=(0, 2)
)


@pytest.fixture(scope="module")
def models() -> dict[str, GPT]:
    """A tiny model before, in and after training."""
    return trained(TINY, texts(TINY, 0)[0], seed=0)


@pytest.fixture(scope="module")
def found(models: dict[str, GPT]) -> dict[tuple[int, float], dict[str, float]]:
    """Shares of bytes by depth and noise."""
    public, private = texts(TINY, 0)
    draw = np.random.default_rng(1)
    attacker = Attacker(models["current"], windows(public, 200, TINY.length, draw))
    secret = windows(private, TINY.attacked, TINY.length, draw)
    shares = {}
    with torch.no_grad():
        for depth in TINY.depths:
            for noise in (0.0, 1.0, 30.0):
                seen = front(models["current"], secret, depth)
                seen = noisy(seen, noise, torch.Generator().manual_seed(0))
                shares[depth, noise] = shares_found(TINY, attacker, seen, secret, depth, noise)
    return shares


def test_embeddings_without_noise_are_the_text(found: dict[tuple[int, float], dict[str, float]]) -> None:
    assert found[0, 0.0]["embedding"] == 1.0
    assert found[0, 0.0]["search"] == 1.0


def test_a_search_with_the_front_parts_weights_reads_everything_at_any_depth(
    found: dict[tuple[int, float], dict[str, float]],
) -> None:
    assert found[2, 0.0]["search"] == 1.0


@pytest.mark.parametrize("attack", ATTACKS)
def test_each_attack_finds_much_without_noise_and_next_to_nothing_with_much(
    attack: str, found: dict[tuple[int, float], dict[str, float]]
) -> None:
    for depth in TINY.depths[:1] if attack == "embedding" else TINY.depths:
        without, some, much = (found[depth, noise][attack] for noise in (0.0, 1.0, 30.0))
        assert without > 0.5, depth
        assert without >= some > much, depth
        assert much < 0.4, depth  # the commonest byte, a space, is a third of such text


def test_the_front_and_what_is_behind_are_the_model(models: dict[str, GPT]) -> None:
    secret = windows(texts(TINY, 0)[1], 4, TINY.length, np.random.default_rng(2))
    module = models["current"]
    with torch.no_grad():
        for depth in range(TINY.layers + 1):
            loss = loss_behind(module, front(module, secret, depth), secret, depth)
            assert loss == pytest.approx(float(module(secret)), rel=1e-6)


def test_noise_is_relative_to_the_activations_and_repeats() -> None:
    values = torch.randn(200, 10, 8, generator=torch.Generator().manual_seed(0)) * 5.0

    def added() -> Tensor:
        return noisy(values, 0.3, torch.Generator().manual_seed(1)) - values

    assert torch.equal(added(), added())
    assert float(added().std()) == pytest.approx(0.3 * float(values.std()), rel=0.05)
    assert torch.equal(noisy(values, 0.0, torch.Generator()), values)


def test_the_picture_has_every_depth(tmp_path: Path) -> None:
    shares = dict.fromkeys(ATTACKS, 0.5)
    rows = [
        {"depth": depth, "noise": noise, "known": KNOWN[0], **shares}
        for depth in TINY.depths
        for noise in TINY.noises
    ]
    plot(TINY, {"rows": rows, "guess": 0.2}, tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000
