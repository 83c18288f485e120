"""Facts of the gradient rules, as ``strategies.exchanges.catalogue`` has those of the rules of workers."""

from __future__ import annotations

from strategies.exchanges.catalogue import ExchangeFacts, dense_volume

GRADIENT_RULES = (
    ExchangeFacts(
        name="eager",
        summary="mean of the gradients that are ready at a quorum; late ones join the next round",
        rule="experiments.exchanges.eager:Eager",
        source="papers/compression.md 7 (eager-SGD)",
        volume=dense_volume,
    ),
)
