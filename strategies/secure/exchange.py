"""What all members and the coordinator derive alike from an exchange: its digest, neighbours and thresholds.

Members in the order of a hash of the exchange stand on a ring; each has the k / 2 next ones on both sides as
neighbours (SecAgg+, Bell 2020), or everybody where that is no more. Neighbours have a mask in common and,
with the member itself, hold the shares of its two secrets. Every key is new, so the hash, and with it the
ring, is new in every exchange, and chosen by all members together.

Two sets of survivors cannot both be signed by a quorum q of n members, while fewer than 2 q - n of them sign
both. The survivors of the one that is signed must be connected by masks that nobody can take off: so the sum
over all of them is all that can be opened.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from atoll.secure import MemberKeys, Secure

RING = 16
"""Neighbours over the binary logarithm of the members. With a third of 100 to 4,096 lost at random, less than
one exchange in 500 loses half of the holders of some member's shares (tests/strategies/secure)."""


@dataclass(frozen=True)
class Exchange:
    """One attempt of a round. ``name``: no other attempt's of any round or job has it; ``roster``: its
    members' public keys."""

    job: str
    round: int
    name: str
    secure: Secure
    roster: Mapping[str, MemberKeys]

    @cached_property
    def digest(self) -> bytes:
        """What every key and signature of the exchange is bound to."""
        rule = self.secure
        parts = [self.job, str(self.round), self.name, repr(rule.threshold), str(rule.neighbours)]
        for member in self.members:
            keys = self.roster[member]
            parts += [member, keys.sealing, keys.masking, keys.signing]
        return digest_of(parts)

    @cached_property
    def members(self) -> tuple[str, ...]:
        return tuple(sorted(self.roster))

    @cached_property
    def number(self) -> dict[str, int]:
        """Numbers of members as holders of shares."""
        return {member: at for at, member in enumerate(self.members, 1)}

    @property
    def quorum(self) -> int:
        """Members who must be left at the end."""
        return quorum(len(self.roster), self.secure.threshold)

    @property
    def degree(self) -> int:
        """Neighbours of each member."""
        return degree(len(self.roster), self.secure.neighbours)

    @property
    def share_threshold(self) -> int:
        """Shares that give a secret: with neighbours for all a quorum, else more than half of the holders."""
        holders = self.degree + 1
        return self.quorum if holders == len(self.roster) else holders // 2 + 1

    @cached_property
    def _ring(self) -> tuple[str, ...]:
        return tuple(sorted(self.members, key=lambda m: sha256(self.digest + m.encode()).digest()))

    @cached_property
    def _place(self) -> dict[str, int]:
        return {member: at for at, member in enumerate(self._ring)}

    def neighbours(self, member: str) -> frozenset[str]:
        """Members who have a mask with this one."""
        n, at = len(self._ring), self._place[member]
        if self.degree >= n - 1:
            return frozenset(self._ring) - {member}
        sides = range(1, self.degree // 2 + 1)
        return frozenset(self._ring[(at + side * way) % n] for side in sides for way in (1, -1))

    def holders(self, member: str) -> frozenset[str]:
        """Members who hold shares of this one's secrets."""
        return self.neighbours(member) | {member}

    def parts(self, survivors: Collection[str]) -> int:
        """Number of sets into which the survivors fall that no mask connects: each could be opened alone."""
        left, found = set(survivors), 0
        while left:
            found += 1
            reached = [left.pop()]
            while reached:
                near = self.neighbours(reached.pop()) & left
                left -= near
                reached += near
        return found

    def verdict(self, shared: Collection[str], survivors: Collection[str]) -> bytes:
        """What members sign: whose shares are out, and whose vectors are summed."""
        return digest_of(["survivors", self.digest.hex(), *sorted(shared), "", *sorted(survivors)])


def quorum(members: int, threshold: float) -> int:
    """Return how many of so many members must be left: the threshold, and more than half."""
    # A share as it is written: 0.66 of 50 is 33, though the double is a little more.
    return max(members // 2 + 1, math.ceil(round(threshold * members, 9)))


def degree(members: int, neighbours: int) -> int:
    """Return the neighbours of each of so many members, as a job declares them (0: found)."""
    wanted = neighbours or RING * (members - 1).bit_length()
    return min(members - 1, wanted)


def digest_of(parts: Collection[str]) -> bytes:
    """SHA-256 of texts, so that no text's end can pass for another's beginning."""
    return sha256(b"".join(sha256(part.encode()).digest() for part in parts)).digest()
