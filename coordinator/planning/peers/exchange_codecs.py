"""Codec of what peers with local steps exchange, where the job leaves it open (``diloco:auto``). Pure.

The mildest codec is taken with which a round lasts at most a share of its period's computing: below that a
stronger one would save next to nothing, and each costs some accuracy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.exchange import AUTO
from atoll.opdag import TensorMeta
from compressors.catalogue import codec
from coordinator.planning import TUNED
from coordinator.planning.peers.gossip_plans import round_of

if TYPE_CHECKING:
    from atoll.exchange import Exchange
    from coordinator.planning.costs.fleet import Fleet
    from coordinator.planning.peers.gossip_plans import Held

CODECS = ("none", "int8_block", "int4_block")
"""From the mildest on."""
MARGIN = (
    0.7  # of that share is what a milder codec than the present one has: a rate that wavers changes nothing
)
_MANY = TensorMeta((1 << 20,), "float32")


def fitting(present: str, carried_s: float, computed_s: float) -> str:
    """Return the codec for the next rounds: a round in the ``present`` one was carried for ``carried_s``, in
    a period whose steps computed for ``computed_s``."""
    for name in CODECS[:-1]:
        smaller = codec(name).size(_MANY, 1.0) / codec(present).size(_MANY, 1.0)
        share = TUNED.round_share if smaller <= 1.0 else TUNED.round_share * MARGIN
        if carried_s * smaller <= share * computed_s:
            return name
    return CODECS[-1]


def with_codec(fleet: Fleet, held: Held, exchange: Exchange, step_s: float) -> Exchange:
    """Return the exchange with a codec, where the planner is to choose it: for peers that hold ``held``, the
    slowest of whom computes a step's share in ``step_s``."""
    if exchange.codec != AUTO:
        return exchange
    plain = replace(exchange, codec=CODECS[0])
    _, carried_s = round_of(fleet, held, plain, 0)
    return replace(plain, codec=fitting(plain.codec, carried_s, exchange.every * step_s))
