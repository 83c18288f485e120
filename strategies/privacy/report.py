"""Privacy of a job in a sentence: what is proven, of what unit, and what is not. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strategies.privacy.accountant import Spent, planned

if TYPE_CHECKING:
    from atoll.federated import Federated
    from atoll.privacy import Privacy

_REST = (
    "that a client has joined, times and traffic, the owner's choice of settings and held-out figures, other "
    "jobs on the same data"
)
UNCOVERED = f"not covered: the coordinator itself, {_REST}"
UNCOVERED_SHARED = (
    f"not covered: members whom the coordinator makes up, or who leave out their noise, {_REST}"
)
SHARED = (
    "each member clips, and adds its part of the noise before it masks. It holds against a coordinator that "
    "lies about who dropped out, and one member that helps it; with h helpers among q members left, (q - h) "
    "/ (q - 1) of the noise's variance remain"
)


def plan_words(rule: Federated, rounds: int) -> str:
    """What a job will have spent when all its rounds are done, or its budget is."""
    privacy = rule.privacy
    if privacy is None:
        return ""
    epsilon = planned(privacy, rounds)
    ends = f"ends before it would exceed {privacy.epsilon:g}; " if epsilon > privacy.epsilon > 0.0 else ""
    least = min(epsilon, privacy.epsilon or epsilon)
    setting = _setting(rule, privacy)
    bound = f"({least:.3g}, {privacy.delta:g})-DP at most for {rounds} rounds"
    return f"{bound}: {ends}{setting}; {_uncovered(rule)}"


def spent_words(rule: Federated, spent: Spent) -> str:
    """What a job has spent so far."""
    privacy = rule.privacy
    if privacy is None:
        return ""
    if not spent.rounds:
        return f"nothing released yet; {_setting(rule, privacy)}"
    epsilon, order = spent.epsilon(privacy.delta)
    budget = f" of a budget of {privacy.epsilon:g}" if privacy.epsilon else ""
    sums = "rounds" if rule.secure is None else "sums that could be opened"
    return (
        f"({epsilon:.3g}, {privacy.delta:g})-DP{budget} after {spent.rounds} {sums}: "
        f"{_setting(rule, privacy)}, RDP order {order}; {_uncovered(rule)}"
    )


def exhausted(privacy: Privacy | None, spent: Spent) -> str:
    """Return why no further round may begin; empty where one may."""
    if privacy is None or not privacy.epsilon:
        return ""
    epsilon, _ = spent.after(privacy).epsilon(privacy.delta)
    if epsilon <= privacy.epsilon:
        return ""
    now = spent.epsilon(privacy.delta)[0]
    return (
        f"the privacy budget is spent: epsilon {now:.3g} after {spent.rounds} rounds, one more would come to "
        f"{epsilon:.3g} of {privacy.epsilon:g}"
    )


def _uncovered(rule: Federated) -> str:
    return UNCOVERED if rule.secure is None else f"{SHARED}; {UNCOVERED_SHARED}"


def _setting(rule: Federated, privacy: Privacy) -> str:
    if privacy.tree:
        drawn = (
            f"by name, with or without its contribution to one round of each tree of {privacy.tree} "
            f"({rule.clients} expected a round), without amplification"
        )
    elif privacy.sampling:
        drawn = (
            f"with or without its contribution, Poisson q = {privacy.sampling:g} ({rule.clients} expected)"
        )
    else:
        drawn = f"any contribution replaced, {rule.clients} clients a round without amplification"
    clip = f"clip {privacy.clip:g}" if privacy.adaptive is None else f"clip adaptive to {privacy.adaptive:g}"
    node = " a node" if privacy.tree else ""
    return f"unit one client, {drawn}, noise {privacy.noise:.4g}{node}, {clip}"
