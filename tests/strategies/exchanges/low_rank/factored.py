"""Rounds of the rules that send gradients as factors of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from atoll.exchange import ExchangeRound
from strategies.exchanges.base import ExchangeRule, Flat
from tests.inprocess.exchange import Answer, run_round

RATIO = 8.0
SHAPES = ((40, 30), (30,), (24, 5, 4), (3,))
FLAT = Flat(SHAPES)
RANKS = (0, 1, 2)


def gradients(number: int, ranks: tuple[int, ...] = RANKS, size: int = FLAT.size) -> dict[int, torch.Tensor]:
    return {
        rank: torch.randn(size, generator=torch.Generator().manual_seed(100 * number + rank))
        for rank in ranks
    }


def begin(rule: ExchangeRule, flat: Flat = FLAT) -> dict[int, Any]:
    return {rank: rule.init(flat, torch.zeros(flat.size)) for rank in RANKS}


def play(
    rule: ExchangeRule,
    states: Mapping[int, Any],
    own: Mapping[int, torch.Tensor],
    number: int = 0,
    weights: tuple[float, ...] = (),
) -> dict[int, Answer]:
    ranks = tuple(sorted(own))
    return run_round(rule, own, states, ExchangeRound(number, ranks, 1, weights), [ranks])


def views(flat: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in ``flat``."""
    parts = torch.split(flat, [torch.Size(shape).numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]
