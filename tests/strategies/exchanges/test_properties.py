"""Every rule of the catalogue, over drawn seeds, weights and failures: a round may be repeated, and what was
given up arrives with the next one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from atoll.exchange import Content, ExchangeRound
from experiments.exchanges import EXCHANGES, make_rule
from strategies.exchanges.base import Contribution, ExchangeRule
from tests.inprocess.exchange import Answer, Faults, run_round
from tests.strategies.exchanges.test_conformance import FLAT, RANKS, SETTINGS, groups_of, start

SEEDS = draw.integers(0, 2**32)
WEIGHTS = draw.one_of(
    draw.just(()), draw.tuples(*[draw.floats(0.5, 8.0).map(lambda weight: round(weight, 2))] * len(RANKS))
)


def bits(value: object) -> Hashable:
    """All that a state or contribution holds, comparable bit for bit."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), value.contiguous().numpy().tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(bits(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, Mapping):
        return tuple((key, bits(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(bits(item) for item in value)
    if not isinstance(value, Hashable):
        raise TypeError(f"a {type(value).__name__} in a rule's state cannot be compared")
    return value


def noise(seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {rank: 0.01 * torch.randn(FLAT.size, generator=generator) for rank in RANKS}


def play(
    name: str,
    own: Mapping[int, torch.Tensor],
    states: Mapping[int, object],
    at: ExchangeRound,
    faults: Faults | None = None,
) -> dict[int, Answer]:
    rule = make_rule(SETTINGS[name])
    return run_round(rule, own, states, at, groups_of(name, at.number), faults=faults)


def given_up(
    rule: ExchangeRule, own: Mapping[int, torch.Tensor], states: Mapping[int, object], at: ExchangeRound
) -> dict[int, object]:
    return {
        rank: rule.undelivered(rule.contribute(own[rank], states[rank], at, rank), states[rank])
        for rank in RANKS
    }


@pytest.mark.parametrize("name", EXCHANGES)
@settings(max_examples=12)
@given(SEEDS, WEIGHTS, draw.integers(0, 3), draw.sampled_from(RANKS))
def test_a_round_that_failed_may_be_repeated_with_the_same_bits(
    name: str, seed: int, weights: tuple[float, ...], rounds: int, dead: int
) -> None:
    rule = make_rule(SETTINGS[name])
    own, states = start(name)
    for number in range(rounds):
        answers = play(name, own, states, ExchangeRound(number, RANKS, seed, weights))
        states = {rank: answer.state for rank, answer in answers.items()}
        changes = noise(seed + number)
        own = {rank: answers[rank].result + changes[rank] for rank in RANKS}
    at = ExchangeRound(rounds, RANKS, seed, weights)
    before = bits((own, states))

    def contributions() -> dict[int, Contribution]:
        return {rank: rule.contribute(own[rank], states[rank], at, rank) for rank in RANKS}

    first = contributions()
    assert bits([c.vector for c in first.values()]) == bits([c.vector for c in contributions().values()])
    wanted = play(name, own, states, at)
    play(name, own, states, at, Faults(dead=frozenset({dead})))
    assert bits((own, states)) == before
    again = play(name, own, states, at)
    for rank in RANKS:
        assert bits((again[rank].result, again[rank].state)) == bits(
            (wanted[rank].result, wanted[rank].state)
        )
        assert again[rank].receipts == wanted[rank].receipts


@pytest.mark.parametrize("name", [name for name, facts in EXCHANGES.items() if not facts.exact])
@settings(max_examples=12)
@given(SEEDS, WEIGHTS, draw.integers(1, 3))
def test_what_was_given_up_arrives_with_the_next_round(
    name: str, seed: int, weights: tuple[float, ...], failures: int
) -> None:
    """Gradients of rounds that were given up count as if they were of the next; a model goes on as it is."""
    rule = make_rule(SETTINGS[name])
    _, states = start(name)
    at = ExchangeRound(failures, RANKS, seed, weights)
    gradients = EXCHANGES[name].content is Content.GRADIENT
    own, after = noise(seed), states
    together = own
    for number in range(failures):
        after = given_up(rule, own, after, ExchangeRound(number, RANKS, seed, weights))
        changes = noise(seed + 1 + number)
        own = changes if gradients else {rank: own[rank] + changes[rank] for rank in RANKS}
        together = {rank: together[rank] + changes[rank] for rank in RANKS}
    late = play(name, own, after, at)
    wanted = play(name, together, states, at)
    for rank in RANKS:
        assert torch.allclose(late[rank].result, wanted[rank].result, atol=1e-6), rank
