"""What the owner is shown of a federated job: its round, its clients, what they showed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.federated import ConsentWord as Word
from coordinator.federated.kinds.choice import round_of
from coordinator.messages.jobs import Phase
from protos import atoll_control_pb2 as pb
from protos.coding import alike
from strategies.privacy.report import spent_words

if TYPE_CHECKING:
    from coordinator.federated.driver import FederatedDriver
    from coordinator.federated.state import Client, FederationState
    from coordinator.messages.facts import RoundEvaluated

GONE, OUT, LOADING, READY = "gone", "left out", "loading", "ready"
CONSENTING, REFUSED = "awaiting consent", "refused"
TRAINING, TRAINED, EVALUATING, DROPPED, UNFIT = "training", "trained", "evaluating", "dropped", "unfit"


def federated_status(driver: FederatedDriver, job: str) -> pb.FederatedStatus:
    """One federated job as `atoll watch` shows it."""
    state = driver.jobs[job]
    if state.private:
        return _private_status(driver, state)
    found = round_of(state)
    times = sorted(state.round_times_s)
    status = pb.FederatedStatus(
        strategy=state.federated.rule.strategy,
        data=state.federated.data,
        chosen=found.drawn(state),
        arrived=found.arrived(state),
        dropped=found.out(state),
        clients=[_client(state, state.clients[name]) for name in sorted(state.clients)],
        bytes_up=state.bytes_up,
        bytes_down=state.bytes_down,
        round_s=times[len(times) // 2] if times else None,
        pace=state.pace,
        assignment=state.assignment,
    )
    _add_unfit(status, driver, job)
    if state.evaluation is not None:
        status.clients_loss = state.evaluation.loss
        status.clients_metrics.extend(_metrics(state.evaluation))
    _add_central(status, state)
    return status


def _private_status(driver: FederatedDriver, state: FederationState) -> pb.FederatedStatus:
    """One private job: nothing that depends on who takes part in a round, or on their data."""
    rule = state.federated.rule
    status = pb.FederatedStatus(
        strategy=rule.strategy, data=state.federated.data, privacy=spent_words(rule, state.spent)
    )
    for name in sorted(state.clients):
        client = state.clients[name]
        here = standing(replace(state, chosen=(), asked=frozenset()), client)
        told = client.out if here in (OUT, REFUSED, CONSENTING) else ""
        status.clients.append(
            pb.ClientStatus(
                worker=name,
                state=here,
                reason=told,
                n_samples=client.n_samples,
                population=len(client.roster),
            )
        )
    _add_unfit(status, driver, state.job)
    _add_central(status, state)
    return status


def _add_unfit(status: pb.FederatedStatus, driver: FederatedDriver, job: str) -> None:
    unfit = driver.unfit.get(job, {})
    status.clients.extend(
        pb.ClientStatus(worker=worker, state=UNFIT, reason=why) for worker, why in sorted(unfit.items())
    )


def _add_central(status: pb.FederatedStatus, state: FederationState) -> None:
    if state.central_evaluation is not None:
        status.central_loss = state.central_evaluation.loss
        status.central_metrics.extend(_metrics(state.central_evaluation))


def _metrics(found: RoundEvaluated) -> Iterable[pb.Figure]:
    return _figures(found.metrics)


def _figures(values: Mapping[str, float]) -> Iterable[pb.Figure]:
    return [pb.Figure(name=name, value=values[name]) for name in sorted(values)]


def _client(state: FederationState, client: Client) -> pb.ClientStatus:
    reason = client.out or state.dropped.get(client.worker, client.dropped)
    shown: pb.ClientStatus = alike(
        client,
        pb.ClientStatus,
        state=standing(state, client),
        reason=reason,
        population=len(client.roster),
        metrics=_figures(client.metrics),
    )
    return shown


def standing(state: FederationState, client: Client) -> str:
    """What a client is doing, in a word."""
    name = client.worker
    if client.consent is not None:
        return CONSENTING if client.consent is Word.AWAITED else REFUSED
    if client.out:
        return OUT
    if not client.present:
        return GONE
    if name in state.flights:
        return TRAINING
    if name in state.asked:
        return EVALUATING
    if state.phase is Phase.TRAINING and name in state.chosen:
        trains = round_of(state).awaits(state, name)
        return DROPPED if name in state.dropped else TRAINING if trains else TRAINED
    return READY if client.loaded or state.ended else LOADING
