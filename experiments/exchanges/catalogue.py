"""Facts of the gradient rules, as ``strategies.exchanges.catalogue`` has those of the rules of workers."""

from __future__ import annotations

from atoll.exchange import Content, Partners, Pattern
from strategies.exchanges.catalogue import ExchangeFacts, dense_volume

GRADIENT_RULES = (
    ExchangeFacts(
        name="eager",
        summary="mean of the gradients that are ready at a quorum; late ones join the next round",
        module="experiments.exchanges.eager",
        builder="Eager",
        source="papers/compression.md 7 (eager-SGD)",
        content=Content.GRADIENT,
        partners=Partners.ALL,
        pattern=Pattern.OWNERS,
        volume=dense_volume,
    ),
)
