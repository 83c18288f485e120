"""ACP-SGD among ranks: one factor a round, half of PowerSGD's bytes, and nothing lost."""

from __future__ import annotations

import pytest
import torch

from atoll.exchange import Exchange
from atoll.opdag import TensorMeta
from compressors.contrib.low_rank.ranks import acp_rank, powersgd_rank
from strategies.exchanges import make_rule
from strategies.exchanges.base import ExchangeRule, Flat
from tests.strategies.exchanges.low_rank.factored import RANKS, begin, gradients, play


def sent_of(rule: ExchangeRule, flat: Flat, rounds: int) -> int:
    """Bytes that all ranks sent, counted from packets."""
    states = begin(rule, flat)
    sent = 0
    for number in range(rounds):
        answers = play(rule, states, gradients(number, size=flat.size), number)
        states = {rank: answer.state for rank, answer in answers.items()}
        sent += sum(receipt.sent_bytes for answer in answers.values() for receipt in answer.receipts)
    return sent


def test_bytes_are_half_of_powersgds_on_matrices() -> None:
    flat = Flat(((1200, 900), (512, 1400)))
    rank = powersgd_rank(TensorMeta(flat.shapes[0], "float32"), 32.0)
    assert rank == acp_rank(TensorMeta(flat.shapes[0], "float32"), 64.0) > 1
    power = sent_of(make_rule(Exchange("powersgd", ratio=32.0)), flat, 2)
    alternating = sent_of(make_rule(Exchange("acp_sgd", ratio=64.0)), flat, 2)
    assert alternating == pytest.approx(power / 2, rel=0.01)
    layout = make_rule(Exchange("acp_sgd", ratio=64.0)).init(flat, torch.zeros(flat.size)).layout
    floats = sum(rank * (rows + columns) / 2 for rows, columns, rank in layout.factored)
    assert alternating / 2 == pytest.approx(2 * (len(RANKS) - 1) * 4 * floats, rel=0.01)
