"""The books of a secure round: an exchange, stage by stage. Pure.

    keys -> shares -> vectors -> signatures -> answers

Who does not answer a stage is out of all later ones. Up to the vectors that is a drop-out like any other; the
masks of who is lost afterwards are taken off by the shares that its neighbours hold. What does not come to a
quorum is repeated from the first stage, with other keys; no stage is ever asked twice with other words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.messages.to_worker import SecureOrder
from atoll.secure import LEAST_MEMBERS, MemberKeys, Stage
from strategies.secure.exchange import Exchange
from strategies.secure.opening import closed_for

if TYPE_CHECKING:
    from atoll.messages.from_worker import SecureAnswer
    from atoll.secure import Secure

SHOWN = 2  # refusals in a reason
EXCHANGE_S = 30.0
"""At most for a stage that takes a round trip: a member that is slower is taken for lost."""


@dataclass(frozen=True)
class Books:
    """``members``: who was asked for keys; the mappings are by who has answered. ``void``: why the sum that
    was opened is none."""

    job: str
    round: int
    name: str
    secure: Secure
    members: tuple[str, ...]
    stage: Stage = Stage.KEYS
    keys: Mapping[str, MemberKeys] = field(default_factory=dict)
    parcels: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    survivors: tuple[str, ...] = ()
    signatures: Mapping[str, str] = field(default_factory=dict, repr=False)
    shares: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    refused: Mapping[str, str] = field(default_factory=dict)  # who gives no signature or share, and why
    void: str = ""

    @property
    def of(self) -> Exchange:
        """The exchange; from the second stage on."""
        return Exchange(self.job, self.round, self.name, self.secure, self.keys)

    @property
    def shared(self) -> tuple[str, ...]:
        """Members whose secrets are shared, so whose masks are in the sum."""
        return tuple(sorted(self.parcels))

    @property
    def asked(self) -> tuple[str, ...]:
        """Members who are asked in this stage."""
        match self.stage:
            case Stage.KEYS:
                return self.members
            case Stage.SHARES:
                return tuple(sorted(self.keys))
            case Stage.VECTORS:
                return self.shared
            case Stage.SIGNATURES:
                return self.survivors
            case Stage.ANSWERS:
                return tuple(sorted(self.signatures))

    @property
    def answered(self) -> frozenset[str]:
        """Those of them who have; vectors are not in these books."""
        by_stage = {
            Stage.KEYS: self.keys,
            Stage.SHARES: self.parcels,
            Stage.SIGNATURES: self.signatures,
            Stage.ANSWERS: self.shares,
        }
        return frozenset({*by_stage.get(self.stage, ()), *self.refused})

    @property
    def closed(self) -> str:
        """Why the sum cannot be opened by the answers that came; "" where it can."""
        return closed_for(self.of, self.shared, self.shares)

    def order(self, member: str) -> SecureOrder:
        """What a member is asked for in this stage."""
        head = (self.job, self.round, self.name, self.stage)
        match self.stage:
            case Stage.SHARES:
                return SecureOrder(*head, roster=dict(self.keys))
            case Stage.SIGNATURES:
                return SecureOrder(*head, survivors=self.survivors)
            case Stage.ANSWERS:
                return SecureOrder(*head, signatures=dict(self.signatures))
        return SecureOrder(*head)

    def parcels_for(self, member: str) -> dict[str, str]:
        """What its neighbours sealed for a member."""
        return {sender: held[member] for sender, held in sorted(self.parcels.items()) if member in held}


def opened(job: str, at_round: int, secure: Secure, members: tuple[str, ...], secret: str) -> Books:
    """Open an exchange. ``secret``: no other attempt's, so nothing of another one can be taken for this."""
    name = hashlib.sha256(f"{secret}/{job}/{at_round}".encode()).hexdigest()[:32]
    return Books(job, at_round, name, secure, members)


def heard(books: Books, member: str, answer: SecureAnswer) -> tuple[Books, str]:
    """Take a member's answer, or return why not; the same again changes nothing."""
    if (answer.round, answer.exchange) != (books.round, books.name) or answer.stage is not books.stage:
        return books, f"{answer.stage} of another exchange or stage"
    if member not in books.asked:
        return books, f"{answer.stage} of {member}, which was not asked"
    if member in books.answered:
        return books, f"{answer.stage} of {member} twice"
    if answer.refused:
        return replace(books, refused={**books.refused, member: answer.refused}), ""
    match books.stage:
        case Stage.KEYS if answer.keys is not None:
            return replace(books, keys={**books.keys, member: answer.keys}), ""
        case Stage.SHARES if answer.parcels.keys() == books.of.neighbours(member):
            return replace(books, parcels={**books.parcels, member: answer.parcels}), ""
        case Stage.SIGNATURES if answer.signature:
            return replace(books, signatures={**books.signatures, member: answer.signature}), ""
        case Stage.ANSWERS if answer.shares.keys() == books.of.holders(member) & {*books.shared}:
            return replace(books, shares={**books.shares, member: answer.shares}), ""
    wrong = f"{member} answered {answer.stage} with something else"
    return replace(books, refused={**books.refused, member: wrong}), ""


def next_stage(
    books: Books, there: frozenset[str], vectors: tuple[str, ...], least: int
) -> tuple[Books, str]:
    """The books at the next stage, or why the round is to be repeated. ``there``: workers that are connected;
    ``vectors``: members whose masked updates came; ``least``: members that a sum needs at least."""
    match books.stage:
        case Stage.KEYS:
            keys = {member: books.keys[member] for member in sorted(books.keys.keys() & there)}
            if len(keys) < max(LEAST_MEMBERS, least):
                return books, f"{len(keys)} of {len(books.members)} clients sent keys"
            return replace(books, stage=Stage.SHARES, keys=keys), ""
        case Stage.SHARES:
            quorum, came = books.of.quorum, books.parcels
            if len(came) < quorum:
                return books, f"{len(came)} of {len(books.keys)} members shared their secrets, {quorum} must"
            return replace(books, stage=Stage.VECTORS), ""
        case Stage.VECTORS:
            survivors, quorum = tuple(sorted(vectors)), books.of.quorum
            if len(survivors) < quorum:
                return books, f"{len(survivors)} of {len(books.keys)} masked updates came, {quorum} must"
            return replace(books, stage=Stage.SIGNATURES, survivors=survivors), ""
        case Stage.SIGNATURES:
            quorum, signed = books.of.quorum, len(books.signatures)
            if signed < quorum:
                return books, f"{signed} of {len(books.keys)} members signed, {quorum} must{_refusals(books)}"
            return replace(books, stage=Stage.ANSWERS, refused={}), ""
        case Stage.ANSWERS:
            return books, f"{books.closed}{_refusals(books)}"


def _refusals(books: Books) -> str:
    return "".join(f"; {member}: {why}" for member, why in sorted(books.refused.items())[:SHOWN])
