"""A member's side of an exchange: new keys, sealed shares, one masked vector, one signature, one answer.

    y_u = v_u + PRG(b_u) + sum over neighbours v of +-PRG(s_uv)   mod 2^m        (Bonawitz 2017, Bell 2020)

Neighbours' masks cancel in the sum. Of a member whose vector is summed its neighbours give their shares of
b_u, of one that was lost those of the secret behind s_uv, never both: with both, y_u would be open. A
coordinator that names different survivors to different members could collect both; so every member signs what
it was sent, and answers only to a quorum's signatures of the same. All that is here is secret, and is gone
with the object.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from atoll.errors import BadFrame
from atoll.secure import LEAST_MEMBERS, SHARE_BYTES, Secure
from strategies.secure.exchange import Exchange
from strategies.secure.keys import PrivateKeys, opened, own_key, sealed, signed
from strategies.secure.masks import add_mask, keystream
from strategies.secure.sharing import shared as shared_out

if TYPE_CHECKING:
    from atoll.secure import MemberKeys
    from strategies.secure.keys import Random
    from strategies.secure.masks import Words


class Member:
    """One member of one attempt of a round; asked the same again it answers with the same bytes.

    ``least``: members that its owner demands in every sum. Every method raises BadFrame for what an honest
    coordinator does not ask.
    """

    def __init__(
        self,
        who: str,
        job: str,
        at_round: int,
        exchange: str,
        secure: Secure,
        least: int = 2,
        random: Random = os.urandom,
    ) -> None:
        self.exchange = exchange
        self._who, self._job, self._round, self._secure = who, job, at_round, secure
        self._least, self._random = least, random
        self._pairs = PrivateKeys(random)
        self._own_secret = random(32)
        self._noise_secret = random(32)  # never leaves this object
        self._of: Exchange | None = None
        self._parcels: dict[str, str] = {}
        self._held: dict[str, tuple[bytes, bytes]] = {}  # by peer: shares of its own mask, of its mask secret
        self._shared: frozenset[str] = frozenset()
        self._masked = b""  # digest of the vector that was masked
        self._survivors: frozenset[str] = frozenset()
        self._signature = ""
        self._answer: dict[str, str] = {}

    @property
    def keys(self) -> MemberKeys:
        """This exchange's public keys."""
        return self._pairs.public

    def shares(self, roster: Mapping[str, MemberKeys]) -> dict[str, str]:
        """Shares of this member's secrets, sealed for each neighbour; of one roster alone."""
        of = Exchange(self._job, self._round, self.exchange, self._secure, dict(roster))
        if self._of is not None:
            self._refuse_if(self._of.digest != of.digest, "a second roster for the same keys")
            return self._parcels
        self._refuse_if(roster.get(self._who) != self.keys, "a roster with other keys than this member's")
        least = max(LEAST_MEMBERS, self._least)
        self._refuse_if(len(roster) < least, f"{len(roster)} members; at least {least} are needed here")
        known = {key for keys in roster.values() for key in (keys.sealing, keys.masking, keys.signing)}
        self._refuse_if(len(known) < 3 * len(roster), "a roster in which two members have the same key")
        numbers = {of.number[peer]: peer for peer in of.holders(self._who)}
        pairs = (
            shared_out(secret, numbers, of.share_threshold, self._random)
            for secret in (self._own_secret, self._pairs.mask_secret)
        )
        own, mask = pairs
        for number, peer in numbers.items():
            if peer == self._who:
                self._held[peer] = own[number], mask[number]
                continue
            key = self._pairs.seal_key(roster[peer], _way(of, self._who, peer))
            self._parcels[peer] = sealed(key, own[number] + mask[number])
        self._of = of
        return self._parcels

    def receive(self, shared: Collection[str], parcels: Mapping[str, str]) -> None:
        """Take the neighbours' shares; ``shared``: all members who sent theirs, whose masks are in use."""
        of, found = self._in_exchange, frozenset(shared)
        if self._shared:
            self._refuse_if(self._shared != found, "two lists of members who shared")
            return
        self._refuse_if(not found <= of.roster.keys(), "a member who is not on the roster")
        self._refuse_if(self._who not in found or len(found) < of.quorum, f"shares of {len(found)} members")
        due = of.neighbours(self._who) & found
        self._refuse_if(due != parcels.keys(), f"{len(parcels)} neighbours' shares; {len(due)} have shared")
        for peer, parcel in parcels.items():
            both = opened(self._pairs.seal_key(of.roster[peer], _way(of, peer, self._who)), parcel)
            self._refuse_if(len(both) != 2 * SHARE_BYTES, "a parcel that holds no two shares")
            self._held[peer] = both[:SHARE_BYTES], both[SHARE_BYTES:]
        self._shared = found

    @property
    def quorum(self) -> int:
        """Members that every sum of this exchange has at least."""
        return self._in_exchange.quorum

    def noise_source(self) -> Random:
        """Return random bytes that only this member knows: the same from the start for the one vector that it
        may mask."""
        return keystream(self._noise_secret)

    def mask(self, words: Words) -> None:
        """Mask the one vector of this exchange, in place."""
        of = self._in_exchange
        self._refuse_if(not self._shared, "a vector before the neighbours' shares")
        digest = sha256(b"".join(sha256(array.tobytes()).digest() for array in words)).digest()
        # Two vectors under one mask would show their difference.
        self._refuse_if(self._masked not in (b"", digest), "a second vector under the same masks")
        self._masked = digest
        add_mask(words, own_key(self._own_secret, of.digest))
        for peer in sorted(of.neighbours(self._who) & self._shared):
            add_mask(words, self._pairs.mask_key(of.roster[peer], of.digest), subtract=self._who > peer)

    def sign(self, survivors: Collection[str]) -> str:
        """The signature under the members whose vectors are summed; under one such set alone."""
        of, found = self._in_exchange, frozenset(survivors)
        if self._signature:
            self._refuse_if(self._survivors != found, "two lists of survivors")
            return self._signature
        self._refuse_if(not self._masked or self._who not in found, "a sum without this member's vector")
        self._refuse_if(not found <= self._shared, "a survivor who has not shared")
        least = max(of.quorum, self._least)
        self._refuse_if(len(found) < least, f"{len(found)} survivors; at least {least} are needed here")
        self._refuse_if(of.parts(found) > 1, "survivors whose masks fall apart: a part could be opened alone")
        self._survivors = found
        self._signature = self._pairs.sign(of.verdict(self._shared, found))
        return self._signature

    def unmask(self, signatures: Mapping[str, str]) -> dict[str, str]:
        """By neighbour who shared, and of itself: the share of the own mask of a survivor, of the mask secret
        of one that was lost. Given once, to a quorum's signatures of what this member has signed."""
        of = self._in_exchange
        if self._answer:
            return self._answer
        self._refuse_if(not self._signature, "signatures before this member's own")
        message = of.verdict(self._shared, self._survivors)
        good = {
            peer
            for peer, signature in signatures.items()
            if peer in self._survivors and signed(of.roster[peer], signature, message)
        }
        self._refuse_if(
            len(good) < of.quorum,
            f"{len(good)} members signed the survivors that this one has signed; {of.quorum} are needed",
        )
        self._answer = {
            peer: (own if peer in self._survivors else mask).hex()
            for peer, (own, mask) in sorted(self._held.items())
            if peer in self._shared
        }
        return self._answer

    @property
    def _in_exchange(self) -> Exchange:
        if self._of is None:
            raise BadFrame("secure aggregation: nothing was shared in this exchange yet")
        return self._of

    def _refuse_if(self, wrong: bool, what: str) -> None:
        if wrong:
            raise BadFrame(f"secure aggregation of round {self._round + 1} refused: {what}")


def _way(of: Exchange, sender: str, receiver: str) -> bytes:
    return of.digest + f"{sender}>{receiver}".encode()
