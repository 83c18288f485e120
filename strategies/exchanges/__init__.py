"""How replicas and peers join what they have: one rule a file, named as in its paper.

A new rule: its file, one entry in ``catalogue.py``, one row in docs/data-parallel.md; the conformance tests
find it. Importing this package alone does not load torch.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from strategies.exchanges.catalogue import EXCHANGES, exchange_facts

if TYPE_CHECKING:
    from atoll.exchange import Exchange
    from strategies.exchanges.base import ExchangeRule

__all__ = ["EXCHANGES", "exchange_facts", "make_rule"]


def make_rule(exchange: Exchange) -> ExchangeRule:
    """The rule that an Exchange names. Raises UsageError for an unknown one, PlanError for settings that it
    does not have."""
    facts = exchange_facts(exchange.rule)
    facts.check(exchange)
    rule: ExchangeRule = resolve_name(facts.rule)(exchange)
    return rule
