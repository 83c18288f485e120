"""What a federated round showed, as facts, metric points and a client's newest figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import fsum, isfinite, nan
from typing import Any

from coordinator.federated.state import Client, FederationState
from coordinator.messages.events import ClientEvaluated, UpdateReady
from coordinator.messages.facts import RoundClosed, RoundEvaluated
from coordinator.messages.jobs import Point
from strategies.checking import MAX_METRICS
from strategies.fairness import FIGURES, fairness
from strategies.privacy.accountant import Spent
from strategies.selection import Outcome, smoothed

LOSS = "loss"
CLIENTS, CENTRAL = "clients", "central"
RATE_FROM_BYTES = 4096  # smaller uploads tell the round trip, not the rate
MOST_WAITED = 0.8  # of an upload, which was for the answer
REMEMBERED = 0.7  # of the uploads before, a round later
LEAST_S = 1e-6
RATES_BPS = (1e3, 1e13)
OF_A_CLIENT = ("took_s", "download_s", "train_s", "upload_s", "bytes_up", "ratio")


def shown(client: Client, update: UpdateReady, codec: str, ratio: float) -> dict[str, Any]:
    """One participant's entry in RoundClosed."""
    energy = {"energy_j": update.energy_j} if update.energy_j else {}
    return energy | {
        "n_samples": update.n_samples,
        "steps": update.steps,
        "metrics": {name: value for name, value in update.metrics.items() if isfinite(value)},
        "took_s": client.took_s,
        "download_s": update.download_s,
        "train_s": update.train_s,
        "upload_s": update.upload_s,
        "bytes_up": update.upload_bytes,
        "bytes_down": update.download_bytes,
        "codec": codec,
        "ratio": ratio,
        "uplink_bps": client.uplink_bps,
    }


def measured(client: Client, update: UpdateReady, took_s: float) -> Client:
    """The client with what its update showed of its line and its speed.

    ``took_s`` since it was sent the order, by the coordinator's clock: whatever was neither download nor
    upload counts as training, or who claims to need no time would have all others hold back more.
    """
    rest_s = took_s - update.download_s - update.upload_s - 2.0 * client.latency_s
    uplink_bps, uplink_s = _uplink(client, update, took_s)
    download_s = client.download_s
    if update.download_bytes > 0:  # not a model that it held
        download_s = smoothed(download_s, update.download_s)
    return replace(
        client,
        uplink_bps=uplink_bps,
        uplink_s=uplink_s,
        download_s=download_s,
        train_s=smoothed(client.train_s, max(update.train_s, rest_s, LEAST_S)),
        round_s=smoothed(client.round_s, max(took_s, LEAST_S)),
        took_s=took_s,
        bytes_up=update.upload_bytes,
        bytes_down=update.download_bytes,
    )


def _uplink(client: Client, update: UpdateReady, took_s: float) -> tuple[float, float]:
    """The line's bits per second over its uploads' seconds, the older the less, and those seconds.

    By seconds, not by uploads: a first small one shows how TCP starts, and the next, ten times as long,
    must not wait for rounds to be believed.
    """
    if update.upload_bytes < RATE_FROM_BYTES or update.upload_s <= 0.0:
        return client.uplink_bps, client.uplink_s
    # The answer's round trip is no time in which the line carried anything: with it, a smaller update
    # would make the line look slower, and the next one smaller still.
    carried_s = update.upload_s - min(2.0 * client.latency_s, MOST_WAITED * update.upload_s)
    rate_bps = 8.0 * update.upload_bytes / carried_s
    if not RATES_BPS[0] <= rate_bps <= RATES_BPS[1]:
        return client.uplink_bps, client.uplink_s
    # No claim outweighs what the coordinator saw, or it would be remembered for ever.
    new_s, old_s = max(min(carried_s, took_s), LEAST_S), REMEMBERED * client.uplink_s
    return (old_s * client.uplink_bps + new_s * rate_bps) / (old_s + new_s), old_s + new_s


def unsaid(state: FederationState, update: UpdateReady) -> UpdateReady:
    """The update without figures of a client's data, where no noise or mask covers them."""
    if state.federated.rule.shows_losses:
        return update
    host = update.host
    if host is not None:
        rows = {who: replace(row, loss=0.0, square_loss=0.0) for who, row in host.rows.items()}
        host = replace(host, rows=rows)
    return replace(update, metrics={}, square_loss=0.0, host=host)


def outcomes(updates: Mapping[str, UpdateReady], clients: Mapping[str, Client]) -> dict[str, Outcome]:
    """What a selector learns of a round's participants."""
    return {
        name: Outcome(update.square_loss, update.n_samples, clients[name].round_s)
        for name, update in updates.items()
    }


def mean_loss(updates: Iterable[UpdateReady]) -> float | None:
    """The training loss over all participants, by samples; None where nobody reported a finite one."""
    known = [(u.n_samples, u.metrics[LOSS]) for u in updates if isfinite(u.metrics.get(LOSS, float("nan")))]
    return weighted(known) if known else None


def weighted(values: Iterable[tuple[float, float]]) -> float:
    """sum(weight * value) / sum(weight); weights > 0."""
    pairs = list(values)
    return fsum(weight * value for weight, value in pairs) / fsum(weight for weight, _ in pairs)


def over_clients(job: str, at_round: int, told: Mapping[str, ClientEvaluated]) -> RoundEvaluated:
    """Means by samples; a metric counts those clients that reported a finite one."""
    reports = [told[name] for name in sorted(told)]
    names = sorted({name for report in reports for name in report.metrics})[:MAX_METRICS]
    metrics = {}
    for name in names:
        known = [(r.n_samples, r.metrics[name]) for r in reports if name in r.metrics]
        finite = [(n, value) for n, value in known if isfinite(value)]
        if finite:
            metrics[name] = weighted(finite)
    loss = weighted((r.n_samples, r.loss) for r in reports)
    clients = sum(len(r.rows) or 1 for r in reports)
    n_samples = sum(r.n_samples for r in reports)
    return RoundEvaluated(job, at_round, CLIENTS, loss, metrics, n_samples, clients)


def spread_points(at_round: int, told: Mapping[str, ClientEvaluated]) -> list[Point]:
    """Metric points of how evenly the model serves the clients, for each metric that two or more reported."""
    rows = [row for worker in sorted(told) for row in (told[worker].rows.values() or [told[worker]])]
    names = sorted({name for row in rows for name in row.metrics})[:MAX_METRICS]
    points = []
    for name in names:
        values = [row.metrics[name] for row in rows if isfinite(row.metrics.get(name, nan))]
        if len(values) > 1:
            figures = fairness(values)
            points += [Point(at_round, f"{CLIENTS}_{name}_{what}", figures[what]) for what in FIGURES]
    return points


def round_points(state: FederationState, fact: RoundClosed) -> list[Point]:
    """Metric points of a closed round."""
    done = fact.round + 1
    told = fact.participants
    if fact.privacy is not None:
        return _private_points(state, fact, fact.privacy)
    points = {
        "learning_rate": state.spec.training.learning_rate(fact.round),
        "round_s": fact.took_s,
        "participants": float(sum(len(t.get("clients", [t])) for t in told.values())),
        "dropped": float(len(fact.dropped)),
        "bytes_up": float(sum(t["bytes_up"] for t in told.values())),
        "bytes_down": float(sum(t["bytes_down"] for t in told.values())),
    }
    if fact.loss is not None:
        points = {LOSS: fact.loss, **points}
    for name in sorted(told):
        points |= {f"client/{name}/train_{metric}": value for metric, value in told[name]["metrics"].items()}
        points |= {f"client/{name}/{figure}": float(told[name][figure]) for figure in OF_A_CLIENT}
    return [Point(done, name, value) for name, value in points.items()]


def _private_points(state: FederationState, fact: RoundClosed, spent: Spent) -> list[Point]:
    """What may be shown of a private round: nothing that depends on who took part, or on their data."""
    privacy = state.federated.rule.privacy
    points = {"learning_rate": state.spec.training.learning_rate(fact.round)}
    if privacy is not None:
        points["epsilon"] = spent.epsilon(privacy.delta)[0]
    return [Point(fact.round + 1, name, value) for name, value in points.items()]


def evaluation_points(prefix: str, found: RoundEvaluated) -> list[Point]:
    """Metric points of an evaluation."""
    values = {LOSS: found.loss, **_others(found.metrics)}
    return [Point(found.round, f"{prefix}_{name}", value) for name, value in values.items()]


def client_points(at_round: int, told: Mapping[str, ClientEvaluated]) -> list[Point]:
    """Metric points of each client's evaluation."""
    return [
        Point(at_round, f"client/{worker}/{name}", value)
        for worker in sorted(told)
        for name, value in {LOSS: told[worker].loss, **_others(told[worker].metrics)}.items()
    ]


def _others(metrics: Mapping[str, float]) -> dict[str, float]:
    """A metric that is called as one of our own figures must not stand in its place."""
    return {name: value for name, value in metrics.items() if name != LOSS and name not in OF_A_CLIENT}
