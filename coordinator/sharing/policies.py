"""Orders in which jobs get workers, by name.

srsf: the default. Least remaining service first (remaining time x workers), owners in turn. Ahead of all go
those who would otherwise end later than their owners need them, or than was promised (``forecast``).

shares: the owner with the fewest workers for its weight first, within an owner as ``srsf``.

priorities: by priority alone, then as they came.

fifo: as they came. Nobody overtakes.

All but ``fifo`` put jobs of a higher priority first. Source of SRSF: Ada-SRSF (arXiv 2002.10105).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.job import Priority
from coordinator.sharing.claims import NO_QUOTA, Claim, Quota

HASTE = 1.5  # times what a job takes: when less is left until it is due, it goes ahead
RANK = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}

Taken = Mapping[str, float]
Key = Callable[[Claim, float, Taken], tuple[float, ...]]


def urgent(claim: Claim, now_s: float) -> bool:
    """Return whether a job is late unless it gets workers soon."""
    return claim.due_s - now_s < HASTE * claim.left_s(claim.size)


def _srsf(claim: Claim, now_s: float, taken: Taken) -> tuple[float, ...]:
    rank = RANK[claim.priority]
    if urgent(claim, now_s):
        return rank, 0.0, claim.due_s, 0.0
    return rank, 1.0, taken.get(claim.owner, 0.0), claim.service_s


def _shares(claim: Claim, now_s: float, taken: Taken) -> tuple[float, ...]:
    return RANK[claim.priority], taken.get(claim.owner, 0.0), *_srsf(claim, now_s, {})


def _priorities(claim: Claim, now_s: float, taken: Taken) -> tuple[float, ...]:
    return (RANK[claim.priority],)


def _fifo(claim: Claim, now_s: float, taken: Taken) -> tuple[float, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of jobs. ``strict``: nobody overtakes a job that cannot begin. ``moves``: running jobs give
    workers to those before them where that is worth it; ``yields``: and to those of a higher priority always.
    ``by_workers``: an owner's turn counts its workers, not its jobs."""

    name: str
    key: Key
    strict: bool = False
    moves: bool = False
    yields: bool = True
    by_workers: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("srsf", _srsf, moves=True),
        Policy("shares", _shares, moves=True, by_workers=True),
        Policy("priorities", _priorities),
        Policy("fifo", _fifo, strict=True, yields=False),
    )
}


def policy_of(name: str) -> Policy:
    """Return the policy of this name. Raises UsageError."""
    if name not in POLICIES:
        raise UsageError(f"policy {name[:60]!r}; choose {', '.join(POLICIES)}")
    return POLICIES[name]


def ordered(
    claims: Iterable[Claim], policy: Policy, now_s: float, quotas: Mapping[str, Quota] | None = None
) -> list[Claim]:
    """Return the claims, who is to have workers first; where several are equal, who came first."""
    waiting = sorted(claims, key=lambda claim: (claim.submitted_s, claim.job))
    owners = {claim.owner for claim in waiting}
    if len(owners) < 2:
        return sorted(waiting, key=lambda claim: policy.key(claim, now_s, {}))
    return _in_turn(waiting, policy, now_s, quotas or {})


def _in_turn(
    claims: Sequence[Claim], policy: Policy, now_s: float, quotas: Mapping[str, Quota]
) -> list[Claim]:
    taken: Counter[str] = Counter()
    found: list[Claim] = []
    rest = list(claims)
    while rest:
        shares = {owner: n / quotas.get(owner, NO_QUOTA).weight for owner, n in taken.items()}
        first = min(rest, key=lambda claim: policy.key(claim, now_s, shares))
        rest.remove(first)
        found.append(first)
        taken[first.owner] += first.size if policy.by_workers else 1
    return found
