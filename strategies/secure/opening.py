"""The coordinator's side of an exchange: whether a sum can be opened, and opening it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from atoll.errors import BadUpdate
from strategies.secure.keys import is_secret_of, mask_key, own_key
from strategies.secure.masks import add_mask
from strategies.secure.sharing import joined

if TYPE_CHECKING:
    from strategies.secure.exchange import Exchange
    from strategies.secure.masks import Words

Shares = Mapping[str, Mapping[str, str]]
"""By member who answered: its share of each neighbour's secret."""


def closed_for(of: Exchange, shared: Collection[str], answered: Collection[str]) -> str:
    """Return why the sum cannot be opened by the shares of those who ``answered``; "" where it can."""
    there = frozenset(answered)
    for member in sorted(shared):
        if (left := len(of.holders(member) & there)) < of.share_threshold:
            return (
                f"{left} of {of.degree + 1} members answered who hold shares of {member}, "
                f"{of.share_threshold} are needed"
            )
    return ""


def add_vector(total: Words, words: Words) -> None:
    """Add a member's masked vector. BadUpdate for one of another size."""
    if [len(array) for array in total] != [len(array) for array in words]:
        raise BadUpdate("a masked vector of another size")
    for held, array in zip(total, words, strict=True):
        held += array


def unmask(
    total: Words, of: Exchange, shared: Collection[str], survivors: Collection[str], shares: Shares
) -> None:
    """Take all masks off the survivors' sum, in place. BadUpdate where shares are too few or wrong."""
    alive = frozenset(survivors)
    for member in sorted(shared):
        secret = joined(_of_member(of, member, shares), of.share_threshold)
        if member in alive:
            add_mask(total, own_key(secret, of.digest), subtract=True)
            continue
        if not is_secret_of(secret, of.roster[member]):
            raise BadUpdate(f"shares of {member} give another secret than its own: some member's is wrong")
        for peer in sorted(of.neighbours(member) & alive):
            # The survivor ``peer`` added this mask where its name comes first.
            key = mask_key(secret, of.roster[peer], of.digest)
            add_mask(total, key, subtract=peer < member)


def _of_member(of: Exchange, member: str, shares: Shares) -> dict[int, bytes]:
    found: Iterable[tuple[str, Mapping[str, str]]] = shares.items()
    return {
        of.number[holder]: bytes.fromhex(held[member])
        for holder, held in found
        if holder in of.holders(member) and member in held
    }
