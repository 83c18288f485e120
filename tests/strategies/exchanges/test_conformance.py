"""Every rule of the catalogue: the facts that it declares, and that nothing of a contribution is lost."""

from __future__ import annotations

import pytest
import torch

from atoll.errors import UsageError
from atoll.exchange import Exchange, ExchangeRound, Partners, Pattern
from experiments.exchanges import EXCHANGES, make_rule
from strategies.exchanges.base import Flat
from tests.inprocess.exchange import Faults, run_round
from tests.strategies.exchanges.butterfly import butterfly_groups

SHAPES = ((64, 48), (48,), (16, 64), (7,))
FLAT = Flat(SHAPES)
RANKS = (0, 1, 2, 3)
SETTINGS = {name: Exchange(name, ratio=10.0) for name in EXCHANGES}


def groups_of(name: str, number: int = 0) -> list[tuple[int, ...]]:
    facts = EXCHANGES[name]
    if facts.partners is Partners.ALL:
        return [RANKS]
    if facts.partners is Partners.GROUPS:
        return list(butterfly_groups(RANKS, 2, number))
    if facts.pattern is Pattern.PUBLISHED:
        return [(0, 1), (1, 2), (2, 3), (3, 0)]
    return [(0, 1), (2, 3)] if number % 2 == 0 else [(0, 2), (1, 3)]


def start(name: str) -> tuple[dict[int, torch.Tensor], dict[int, object]]:
    rule = make_rule(SETTINGS[name])
    common = torch.randn(FLAT.size, generator=torch.Generator().manual_seed(9))
    states = {rank: rule.init(FLAT, common) for rank in RANKS}
    own = {}
    for rank in RANKS:
        own[rank] = common + 0.01 * torch.randn(FLAT.size, generator=torch.Generator().manual_seed(rank))
    return own, states


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_round_is_a_function_of_its_inputs(name: str) -> None:
    rule = make_rule(SETTINGS[name])
    outcomes = []
    for order in ((lambda n: 0), (lambda n: n - 1)):
        own, states = start(name)
        for number in range(3):
            at = ExchangeRound(number, RANKS, seed=5)
            answers = run_round(rule, own, states, at, groups_of(name, number), faults=Faults(pick=order))
            own = {rank: answers[rank].result for rank in RANKS}
            states = {rank: answers[rank].state for rank in RANKS}
        outcomes.append(own)
    assert all(torch.equal(outcomes[0][rank], outcomes[1][rank]) for rank in RANKS)
    assert all(outcomes[0][rank].shape == (FLAT.size,) for rank in RANKS)
    assert all(bool(torch.isfinite(outcomes[0][rank]).all()) for rank in RANKS)


@pytest.mark.parametrize("name", EXCHANGES)
def test_declared_facts_hold(name: str) -> None:
    facts, rule = EXCHANGES[name], make_rule(SETTINGS[name])
    own, states = start(name)
    answers = run_round(rule, own, states, ExchangeRound(0, RANKS, seed=5), groups_of(name))
    for group in groups_of(name):
        results = [answers[rank].result for rank in group]
        if facts.alike and facts.pattern is not Pattern.PUBLISHED:
            assert all(torch.equal(results[0], other) for other in results)
    assert all(len(answer.receipts) <= facts.phases for answer in answers.values())
    assert all(r.complete for answer in answers.values() for r in answer.receipts)
    sent = max(sum(r.sent_bytes for r in answer.receipts) for answer in answers.values())
    members = len(groups_of(name)[0])
    expected = facts.volume(SHAPES, SETTINGS[name], members)
    overhead = 400 * members * facts.phases  # headers, labels and digests of a small model's messages
    assert expected * 0.7 - overhead <= sent <= expected * 1.3 + overhead, (sent, expected)


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_round_in_which_somebody_died_is_never_called_complete(name: str) -> None:
    rule = make_rule(SETTINGS[name])
    own, states = start(name)
    answers = run_round(
        rule,
        own,
        states,
        ExchangeRound(0, RANKS, seed=5),
        groups_of(name),
        faults=Faults(dead=frozenset({1})),
    )
    assert 1 not in answers
    assert any(not r.complete for answer in answers.values() for r in answer.receipts)
    assert all(bool(torch.isfinite(answer.result).all()) for answer in answers.values())


def test_unknown_rules_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'gossip' is not known; there are: .*mean"):
        make_rule(Exchange("gossip"))
