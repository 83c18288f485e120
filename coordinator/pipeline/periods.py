"""Periods of local steps as their peers report them: who is in a round, and what a period came to. Pure.

A period is committed when every peer that is there has the same result of its round as the others of its
group (``strategies.exchanges.partners``). Who is lost is taken out of the plan, and the others exchange
without it; the receipt of the round names it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from atoll.exchange import Partners
from atoll.gateways import sites_of
from atoll.step_loss import StepLoss
from coordinator.messages.facts import RoundMet
from strategies.exchanges.catalogue import exchange_facts
from strategies.exchanges.partners import group_of, groups_of, joins

if TYPE_CHECKING:
    from atoll.exchange import Exchange
    from atoll.plan import Plan
    from coordinator.messages.events import RoundReceipt, StepReady
    from coordinator.messages.jobs import JobState
    from strategies.exchanges.partners import Group

Reports = Mapping[int, "StepReady"]
"""By rank; of every rank that is there."""
MOST_SHOWN = 8  # groups of a round


def round_groups(state: JobState) -> tuple[Group, ...]:
    """Return who exchanges with whom in the round that is committed next; of a plan without one everybody."""
    return groups_of(state.plan, state.spec.training, state.due) if state.plan else ()


def steps_reported(state: JobState) -> int:
    """Return how many steps the newest reports are of: peers with local steps report once a period."""
    last, exchange = state.step - 1, state.plan.exchange if state.plan else None
    first = exchange.first_step(last) if exchange is not None else last
    return max(1, state.step - max(first, state.run.first_step))


class Disagreement(NamedTuple):
    """What does not go together in the reports of a step or period; ``ranks``: of those with whom it began,
    none where as many say one thing as another. ``suspects``: of others who may have begun it."""

    words: str
    ranks: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()


def taken(state: JobState) -> tuple[int, ...]:
    """Return the steps that each peer brings to the round of the period, by its number."""
    steps, own = state.due + 1 - state.step, state.run.own
    count = len(state.adopted.replicas)
    short = {peer: at.taken for peer, at in own.items() if at.taken is not None}
    return tuple(short.get(peer, steps) for peer in range(count))


def disagreement(
    plan: Plan, ready: Reports, groups: Sequence[Group], steps: Sequence[int]
) -> Disagreement | None:
    """Return what does not go together in the reports of a period, of so many steps of each peer, None where
    all does.

    Peers of a group have the same sums of every slice of the model. That each makes its own model of them as
    the rule says is not seen.
    """
    places = plan.places
    without = [rank for rank, report in ready.items() if not report.receipts]
    if without:
        words = f"{places[without[0]].worker} reports a period without a receipt of its round"
        return Disagreement(words, tuple(without))
    wrong = {
        rank: words
        for rank, report in ready.items()
        if (words := _unexpected(plan, rank, report, groups, steps[places[rank].replica]))
    }
    if wrong:
        return Disagreement(next(iter(wrong.values())), tuple(wrong) if 2 * len(wrong) <= len(ready) else ())
    for number, held in sorted(_slices(plan, ready).items()):
        for group in groups:
            found = _differing(plan, number, held, group)
            if found is not None:
                return found
    return None


Held = Mapping[int, tuple[int, "RoundReceipt"]]
"""By peer: the rank that holds a slice, and its receipt."""


def _slices(plan: Plan, ready: Reports) -> dict[int, dict[int, tuple[int, RoundReceipt]]]:
    found: dict[int, dict[int, tuple[int, RoundReceipt]]] = {}
    for rank, report in ready.items():
        for receipt in report.receipts:
            found.setdefault(receipt.slice, {})[plan.places[rank].replica] = rank, receipt
    return found


def _differing(plan: Plan, number: int, held: Held, group: Group) -> Disagreement | None:
    """Return who of a group has another result of a slice than the others, None where nobody has."""
    places = plan.places
    missing = [peer for peer in group if peer not in held]
    if missing:
        names = ", ".join(place.worker for place in places if place.replica == missing[0])
        alone = tuple(rank for rank, _ in held.values()) if 2 * len(held) < len(group) else ()
        return Disagreement(f"{names} report nothing of the part of the model at op {number}", alone)
    said = {peer: held[peer][1] for peer in group}
    if (misled := _misled(plan, said, held)) is not None:
        return misled
    first = said[group[0]].digest
    others = ", ".join(places[held[peer][0]].worker for peer in group if said[peer].digest != first)
    false, unclear = _false_totals(said)
    if others and not false and len(unclear) == 2 < len(held):
        false = unclear
    if false:
        ranks = _ranks(held, false)
        names = ", ".join(places[rank].worker for rank in ranks)
        words = f"peers have different results of a round: {names} with totals that do not make theirs"
        return Disagreement(words, ranks)
    if others:
        words = f"peers have different results of a round: {others} and {places[held[group[0]][0]].worker}"
        blamed, suspects = _unequal(said, len(held))
        return Disagreement(words, _ranks(held, blamed), _ranks(held, (*suspects, *unclear)))
    return None


def _misled(plan: Plan, said: Mapping[int, RoundReceipt], held: Held) -> Disagreement | None:
    """Return who has another result than the others of its site, where results are passed on within one:
    itself or one of those brought it, and no owner elsewhere."""
    if plan.exchange is None:
        return None
    for site in sites_of(plan.exchange, {peer: held[peer][0] for peer in said}):
        digests = {peer: said[peer].digest for peer in site}
        if len(set(digests.values())) > 1:
            odd = odd_ones(digests) or list(site)
            names = ", ".join(plan.places[held[peer][0]].worker for peer in odd)
            words = f"peers of one site have different results of a round: {names} beside others"
            return Disagreement(words, _ranks(held, odd), _ranks(held, site))
    return None


def _ranks(held: Held, peers: Sequence[int]) -> tuple[int, ...]:
    return tuple(held[peer][0] for peer in peers)


def _false_totals(said: Mapping[int, RoundReceipt]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return who has the result of others with another total of an owner, which cannot be: those that differ
    from most of them, and those of whom it is not clear which."""
    by_digest: dict[str, dict[int, RoundReceipt]] = {}
    for rank, receipt in said.items():
        by_digest.setdefault(receipt.digest, {})[rank] = receipt
    false: list[int] = []
    unclear: list[int] = []
    for same in by_digest.values():
        known = {rank: receipt for rank, receipt in same.items() if receipt.totals}
        against = [r for r, one in known.items() if any(_others(one, other) for other in known.values())]
        alike = Counter(map(_totals, known.values())).most_common(1)
        if not against or 2 * alike[0][1] <= len(known):
            unclear += against
            continue
        right = next(receipt for receipt in known.values() if _totals(receipt) == alike[0][0])
        false += [rank for rank in against if _others(known[rank], right)]
    return tuple(false), tuple(unclear)


def _unequal(said: Mapping[int, RoundReceipt], n_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return who is to blame for different results in a group of ``n_ranks`` peers, and who else may be."""
    odd = tuple(odd_ones({rank: receipt.digest for rank, receipt in said.items()}))
    if not odd and len(said) == 2:
        return (tuple(said) if n_ranks > 2 else ()), tuple(said)
    alike = Counter((receipt.digest, _totals(receipt)) for receipt in said.values())
    rest = [receipt for rank, receipt in said.items() if rank not in odd]
    right = max(rest, key=lambda receipt: (alike[receipt.digest, _totals(receipt)], len(receipt.totals)))
    owners = {
        others[0] if len(others) == 1 else None
        for receipt in said.values()
        if receipt.digest != right.digest and receipt.totals  # else it accuses nobody
        for others in (_others(receipt, right),)
    }
    owner = owners.pop() if len(owners) == 1 else None
    if owner is None or owner not in said:  # the right one may be made up as well
        return odd, ()
    # One of them may have made it up. Several, or as many as say the other thing, are believed.
    return (odd, (owner,)) if len(odd) == 1 else ((owner,), odd or tuple(said))


def _others(receipt: RoundReceipt, right: RoundReceipt) -> list[int]:
    """Return the owners whose total is another in two receipts. Where all add for themselves, each receipt
    has a total of its own rank alone: nothing is compared."""
    return [owner for owner, total in right.totals.items() if receipt.totals.get(owner, total) != total]


def _totals(receipt: RoundReceipt) -> tuple[tuple[int, str], ...]:
    return tuple(sorted(receipt.totals.items()))


def _unexpected(plan: Plan, rank: int, report: StepReady, groups: Sequence[Group], steps: int) -> str:
    """Return how a report is another than is awaited of a rank, "" where it is not. Of a peer's stages the
    one that computes the loss reports it."""
    worker, said = plan.places[rank].worker, len(report.losses)
    group = group_of(plan.places[rank].replica, groups)
    number = plan.exchange.round_of(report.step) if plan.exchange is not None else 0
    silent = plan.in_pipe(rank) and not said
    for receipt in report.receipts:
        if (said, receipt.round) != (0 if silent else steps, number):
            return (
                f"{worker} reports {said} losses and round {receipt.round}, expected are those of {steps} "
                f"steps and round {number}"
            )
        if receipt.included != group or receipt.share != 1.0:
            return (
                f"{worker} has the contributions of peers {list(receipt.included)} in {receipt.share:.0%} "
                f"of what is exchanged, expected are those of {list(group)}"
            )
    return ""


def odd_ones(said: Mapping[int, Hashable]) -> list[int]:
    """Return those who say something else than more than half of all do; none where no such majority is."""
    most, count = Counter(said.values()).most_common(1)[0]
    return [who for who, what in said.items() if what != most] if 2 * count > len(said) else []


def step_losses(plan: Plan, ready: Reports) -> list[StepLoss]:
    """Return the loss of each step of the period: the mean over the peers whose own is finite, by their
    shares of the step, or by what each has counted. ``odd`` counts peers."""
    reports = [(_share(plan, rank), ready[rank]) for rank in sorted(ready) if ready[rank].losses]
    count = max((len(report.losses) for _, report in reports), default=0)  # who was late says fewer
    return [_mean(reports, at) for at in range(count)] or [StepLoss(math.nan)]


def _mean(reports: Sequence[tuple[int, StepReady]], at: int) -> StepLoss:
    found = [
        (report.losses[at], report.weights[at] if report.weights else float(share))
        for share, report in reports
        if at < len(report.losses)
    ]
    finite = [(loss, weight) for loss, weight in found if math.isfinite(loss) and weight > 0.0]
    whole = math.fsum(weight for _, weight in finite)  # exact sums: the figure has no order of peers in it
    mean = math.fsum(weight * loss for loss, weight in finite) / whole if finite else math.nan
    odd = sum(weight > 0.0 and not math.isfinite(loss) for loss, weight in found)
    return StepLoss(mean, sum(weight for _, weight in found), odd, len(found))


def round_met(state: JobState, ready: Reports, at_s: float) -> RoundMet:
    """Return who is in the round of the period that is committed, and who is not."""
    plan, places = state.adopted, state.adopted.places
    receipts = [receipt for _, report in sorted(ready.items()) for receipt in report.receipts]
    digests = list(dict.fromkeys(receipt.digest for receipt in receipts))
    groups = round_groups(state)
    return RoundMet(
        state.job,
        state.version,
        state.due,
        receipts[0].round,
        tuple(places[rank].worker for rank in plan.present),
        {places[rank].worker: state.run.lost.get(rank, "is lost") for rank in sorted(plan.absent)},
        sum(receipt.sent_bytes for receipt in receipts),
        digests[0] if len(digests) == 1 else blake2b(",".join(digests).encode(), digest_size=16).hexdigest(),
        at_s,
        groups if len(groups) > 1 else (),
        {
            plan.replicas[peer].stages[0].worker: own.taken
            for peer, own in sorted(state.run.own.items())
            if own.taken is not None
        },
    )


def met_fields(met: RoundMet, label: Callable[[str], str]) -> dict[str, object]:
    """Return what a log line says of a round: who is missing in it, or was late, is no secret."""
    missing = "; ".join(f"{label(worker)}: {why}" for worker, why in met.missing.items())
    figures = {"round": met.round, "included": len(met.included), "bytes": met.sent_bytes}
    return {**figures, "step": met.step, "missing": missing or None, "late": _late_words(met, label) or None}


def _late_words(met: RoundMet, label: Callable[[str], str]) -> str:
    """Say who brought fewer steps than the others."""
    return ", ".join(f"{label(worker)} with {steps} steps" for worker, steps in met.late.items())


def exchange_words(state: JobState, met: RoundMet | None, label: Callable[[str], str]) -> str:
    """Say who exchanges what with whom, "" where nobody does."""
    plan = state.plan
    if plan is None or plan.exchange is None:
        return ""
    exchange, places = plan.exchange, plan.places
    if not exchange.local:
        names = (" and ".join(label(stage.worker) for stage in replica.stages) for replica in plan.replicas)
        what = f"gradients by {exchange.rule} in {exchange.codec}" if exchange.keeps else "exact gradients"
        return f"{what} at every step, among {'; '.join(names)}"
    coded = "" if exchange.codec == "none" else f" in {exchange.codec}"
    steps = "step" if exchange.every == 1 else f"{exchange.every} steps"
    words = f"{exchange.rule}{coded} every {steps}, {_partners(state, plan, exchange, label)}"
    if exchange.early:
        awaited = exchange.awaited(len(plan.replicas))
        words += f", once {awaited} have theirs and {exchange.grace_s:g} s more"
    for rank in sorted(plan.absent):
        words += f"; without {label(places[rank].worker)}: {state.run.lost.get(rank, 'is lost')}"
    if met is not None and met.version:
        words += f"; round {met.round} after {met.step + 1} steps: {len(met.included)} of {len(places)}"
        late = _late_words(met, label)
        words += f", {late}" if late else ""
    return words


def _peer(plan: Plan, number: int, label: Callable[[str], str]) -> str:
    """Name a peer by its workers."""
    return " with ".join(label(stage.worker) for stage in plan.replicas[number].stages)


def _partners(state: JobState, plan: Plan, exchange: Exchange, label: Callable[[str], str]) -> str:
    """Say who exchanges with whom in the round that comes, and why with those."""
    names = [_peer(plan, number, label) for number in range(len(plan.replicas))]
    if not exchange.gossips:
        return f"among {', '.join(names[number] for number in plan.present_replicas)}"
    groups = round_groups(state)
    number = exchange.round_of(state.due)
    shown = [" and ".join(names[peer] for peer in g) + _speed(plan, exchange, g) for g in groups[:MOST_SHOWN]]
    more = f", and {len(groups) - MOST_SHOWN} more" if len(groups) > MOST_SHOWN else ""
    if joins(plan, state.spec.training, state.due):
        why = "all at the end"
    elif len(groups) == 1 and len(groups[0]) > 2:
        why = "all in this round"
    elif exchange_facts(exchange.rule).partners is Partners.GROUPS:
        why = "in groups that take turns"
    else:
        why = "in pairs by bandwidth" if exchange.pairs else "in random pairs"
    return f"{why}; next, round {number}: {', '.join(shown)}{more}"


def _speed(plan: Plan, exchange: Exchange, group: Group) -> str:
    """Say how fast a pair is that was drawn by its rate, and why a slow one was."""
    if len(group) == 1:
        return " alone"
    if len(group) != 2 or exchange.pairs is None:
        return ""
    bps = exchange.pairs.bps(*group, len(plan.replicas))
    slow = bps < 8.0 * exchange.pairs.threshold
    return f" ({bps / 1e6:.3g} Mbit/s{', to connect the others' if slow else ''})"


def _share(plan: Plan, rank: int) -> int:
    start, stop = plan.replicas[plan.places[rank].replica].micros
    return stop - start
