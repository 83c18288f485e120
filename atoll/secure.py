"""Secure aggregation of a federated job, as its owner declares it, and what its members say to each other.

    Federated(clients=20, evaluate_every=0, secure=Secure(threshold=0.66))

What the coordinator can learn and what not: docs/secure-aggregation.md; how: ``strategies.secure``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from atoll.bounded import Hex
from atoll.errors import UsageError
from atoll.fields import check_fields
from atoll.privacy import Privacy

LEAST_MEMBERS = 3
"""Of two members each knows the other's update, by subtracting its own from the sum."""
KEY_BYTES, SIGNATURE_BYTES = 32, 64
SHARE_BYTES = 66  # of a number below 2^521 - 1
PARCEL_BYTES = 2 * SHARE_BYTES + 16  # two shares, and the tag of AES-GCM
RANDOM_K = "random_k"
ALLOWED_SELECTORS = ("random", "bandwidth_aware")
"""They look at no figure that depends on the data."""

Key = Annotated[str, Hex(KEY_BYTES)]
SecretShare = Annotated[str, Hex(SHARE_BYTES)]
Parcel = Annotated[str, Hex(PARCEL_BYTES)]
Signature = Annotated[str, Hex(SIGNATURE_BYTES)]


class Stage(StrEnum):
    """Stages of a secure round, by what the members send."""

    KEYS = "keys"
    SHARES = "shares"  # of their secrets, sealed for their neighbours
    VECTORS = "vectors"  # their masked updates: they train
    SIGNATURES = "signatures"  # under whose vectors are summed
    ANSWERS = "answers"  # the shares that take the masks off


@dataclass(frozen=True, slots=True)
class MemberKeys:
    """Public keys of a member of one exchange, made for it alone: of the shares sealed for it, of masks, and
    of its signature."""

    sealing: Key
    masking: Key
    signing: Key


@dataclass(frozen=True, slots=True)
class Secure:
    """Secure aggregation: each round's coordinator learns the members' sum and nothing of a single update.

    ``threshold``: share of a round's members who must be left at its end, else it is repeated.
    ``neighbours``: members that share masks with each and keep its shares, an even number; 0: all of up to
    113 members, then 16 times the binary logarithm of their number. ``bits``: resolution of a mean; up to
    24 an element travels in 32 bits and is at most 64, with more in 64. UsageError for a figure out of its
    range."""

    threshold: float = 0.66
    neighbours: int = 0
    bits: int = 24

    def __post_init__(self) -> None:
        check_fields(self)
        if not math.isfinite(self.threshold) or not 0.5 < self.threshold <= 1.0:
            raise UsageError(f"Secure: threshold = {self.threshold:g}; give a share above 0.5, at most 1")
        if type(self.neighbours) is not int or self.neighbours % 2 or not self.neighbours < 4096:
            raise UsageError(f"Secure: neighbours = {self.neighbours!r}; give an even number from 4, or 0")
        if self.neighbours and self.neighbours < 4:
            raise UsageError(f"Secure: {self.neighbours} neighbours keep nothing secret; give 4 or more")
        if type(self.bits) is not int or not 8 <= self.bits <= 48:
            raise UsageError(f"Secure: bits = {self.bits!r}; give a whole number from 8 to 48")


def check_secure(
    clients: int, selector: str, evaluate_every: int, uplink: str, buffer: int, privacy: Privacy | None
) -> None:
    """UsageError for settings of ``Federated`` beside which a coordinator would see more than sums."""
    if buffer:
        raise UsageError(
            "secure aggregation masks the updates of one round's members against each other, and an "
            "asynchronous job has no rounds; leave out buffer= or secure="
        )
    if clients and clients < LEAST_MEMBERS:
        raise UsageError(
            f"secure aggregation of {clients} clients hides nothing: of two each knows the other's update by "
            f"subtracting its own; take {LEAST_MEMBERS} or more"
        )
    if selector not in ALLOWED_SELECTORS:
        raise UsageError(
            f"selector {selector} looks at single clients' losses, which a secure job does not show; take "
            f"{' or '.join(ALLOWED_SELECTORS)}"
        )
    if evaluate_every:
        raise UsageError(
            "clients' own evaluations are single clients' figures; set evaluate_every=0 and evaluate on your "
            "own data, Registered(..., held_out=...)"
        )
    if uplink not in ("off", RANDOM_K):
        raise UsageError(
            f"uplink {uplink} does not add up: its scales, positions or signs depend on each update, and "
            "masked updates are only ever summed; take off, or random_k:R, drawn by one seed for all"
        )
    if privacy is not None and privacy.sampling:
        raise UsageError(
            "beside secure= privacy holds against the coordinator, which draws who takes part: sampling "
            "amplifies nothing for who knows the draw; leave sampling= out"
        )
    if privacy is not None and privacy.tree:
        raise UsageError(
            "the noise of a tree is kept over rounds by the coordinator, and beside secure= members add it; "
            "leave out tree= or secure="
        )
    if privacy is not None and privacy.adaptive is not None:
        raise UsageError(
            "adaptive clipping beside secure= is not built: the count of unclipped updates would need noise "
            "of its own at every member; give clip= alone"
        )
