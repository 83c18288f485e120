"""A federated job's machine: queued -> gathering -> training -> aggregating -> evaluating -> ... -> finished.

Pure: ``step(state, event, now_s)`` returns the new state and what is to be done. A round chooses
clients, sends each the model, and closes when each has answered, failed, or is lost, or when the
deadline has passed; it is summed from what arrived, where that is enough, and repeated where not.
RoundClosed is journalled with the server's state before anybody hears of it, so that a coordinator
killed at any moment goes on at the round in flight; what became of an update is said again to a
client that may not have heard it. A client's message that the phase does not know is dropped with its
reason.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from coordinator.events import (
    Aggregated,
    AggregatorBroke,
    AggregatorOpened,
    CentrallyEvaluated,
    ClientEvaluated,
    ClientFailed,
    Loaded,
    UpdateReady,
)
from coordinator.facts import JobEnded, RoundClosed
from coordinator.federation_figures import (
    CENTRAL,
    CLIENTS,
    client_points,
    evaluation_points,
    fact_of,
    mean_loss,
    measured,
    outcomes,
    over_clients,
    round_points,
    shown,
)
from coordinator.federation_state import (
    Aggregate,
    Begin,
    Client,
    ClientBack,
    ClientLost,
    Close,
    Closed,
    EvaluateCentrally,
    Evaluation,
    Event,
    FederationState,
    Forget,
    FromClient,
    Interrupted,
    Invite,
    Invited,
    Let,
    Open,
    Say,
    Tick,
    Todo,
    Without,
)
from coordinator.instructions import EvaluateRound, Model, RoundTaken, TrainRound
from coordinator.job_state import ENDED, FEDERATING, Broken, Cancelled, Dropped, Phase, Record, Waits
from coordinator.selecting import chosen, codecs, learnt, selector_to_json, to_ask
from strategies import make_strategy

RECENT = 21  # round times kept for medians
MAX_REPEATS = 3  # of one round
MAX_FAILURES = 3  # of the aggregator, without a closed round in between
MAX_STRIKES = 3  # rounds in a row in which a client failed or sent what cannot be counted
GATHER_S = 60.0  # at most, for clients that still load, once there are enough others

Outcome = tuple[FederationState, list[Todo]]


def step(state: FederationState, event: Event, now_s: float) -> Outcome:
    """The job after ``event``, and what is to be done.

    What a client or the aggregator says out of turn is dropped; an event of our own that the phase
    does not know raises LookupError.
    """
    kind = type(event.message) if isinstance(event, FromClient) else type(event)
    transition = TRANSITIONS.get((state.phase, kind))
    if isinstance(event, FromClient):
        client = state.clients.get(event.worker)
        if transition is None or client is None or not client.present:
            return _unheard(state, event, kind.__name__)
    elif transition is None and isinstance(event, _ANSWERS):
        return state, [Dropped(f"{kind.__name__} while {state.phase.value}")]
    if transition is None:
        raise LookupError(f"{state.job}: {kind.__name__} while {state.phase.value} ({state.reason})")
    return transition(state, event, now_s)


def least(state: FederationState) -> int:
    """With fewer good updates a round is not aggregated."""
    rule = state.federated.rule
    return max(rule.min_clients, make_strategy(rule.strategy, rule.options).min_updates)


def seed_of(seed: int, client: str, at_round: int) -> int:
    """What codec and rule draw by on one client in one round: 64 bits of sha256."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{client}/{at_round}".encode()).digest()[:8], "big")


# ---------------------------------------------------------------- who is here


def _begin(state: FederationState, event: Event, now_s: float) -> Outcome:
    gathering = replace(state, phase=Phase.GATHERING, reason="starting the aggregator")
    return gathering, [Open(state.round, state.state)]


def _opened(state: FederationState, event: Event, now_s: float) -> Outcome:
    """The aggregator is there, perhaps anew: what it was about to do it is asked again."""
    assert isinstance(event, AggregatorOpened)  # noqa: S101 - the table says so
    if event.round != state.round:
        return state, [Dropped(f"the aggregator opened at round {event.round}, this is {state.round}")]
    model = state.model if state.model and state.model.full == event.model else Model(event.model)
    here = replace(state, opened=True, model=model, inputs=event.inputs, up=event.up)
    if state.phase is Phase.AGGREGATING:
        return _aggregate(here)
    if state.phase is Phase.EVALUATING and state.central:
        return here, [EvaluateCentrally(here.round)]
    if state.phase is Phase.GATHERING:
        held = max(here.hold_until_s, now_s + min(GATHER_S, here.federated.rule.deadline_s))
        return _gather(replace(here, hold_until_s=held), now_s)
    return here, []


def _broke(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, AggregatorBroke)  # noqa: S101 - the table says so
    failures = state.failures + 1
    if event.hopeless or failures > MAX_FAILURES:
        more = "" if event.hopeless else f"; gave up after {failures} failures without a closed round"
        return _end(state, Phase.FAILED, f"the aggregator failed: {event.reason}{more}")
    return replace(state, opened=False, failures=failures), [Open(state.round, state.state)]


def _invite(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, Invited)  # noqa: S101 - the table says so
    known = state.clients.get(event.worker) or Client(event.worker, event.n_samples)
    client = replace(
        known,
        n_samples=event.n_samples,
        latency_s=event.latency_s,
        present=True,
        loaded=False,
        out="",
        strikes=0,
        model="",
    )
    return _with(state, client), [Invite(event.worker)]


def _back(state: FederationState, event: Event, now_s: float) -> Outcome:
    """It answers Loaded at once where it still holds the job; then the rest is said again."""
    assert isinstance(event, ClientBack)  # noqa: S101 - the table says so
    client = state.clients.get(event.worker)
    if client is None or not client.present:
        return state, []
    return _with(state, replace(client, loaded=False)), [Invite(event.worker)]


def _loaded(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, FromClient)  # noqa: S101 - the table says so
    worker = event.worker
    here = _with(state, replace(state.clients[worker], loaded=True))
    todo: list[Todo] = []
    if worker in here.verdicts:
        why = here.verdicts[worker]
        todo.append(Say(worker, RoundTaken(here.job, here.round - 1, not why, why)))
    if here.phase is Phase.TRAINING and worker in here.chosen:
        if worker not in here.updates and worker not in here.dropped:
            todo.append(Say(worker, _training(here, worker, now_s)))
    elif here.phase is Phase.EVALUATING and worker in here.asked:
        todo.append(Say(worker, _evaluating(here, worker, now_s)))
    elif here.phase is Phase.GATHERING:
        gathered, more = _gather(here, now_s)
        return gathered, [*todo, *more]
    return here, todo


def _lose(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, ClientLost)  # noqa: S101 - the table says so
    client = state.clients.get(event.worker)
    if client is None or not client.present:
        return state, []
    gone = _with(state, replace(client, present=False, loaded=False, model=""))
    return _without(gone, event.worker, f"lost: {event.reason}", now_s)


def _fail_client(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, FromClient)  # noqa: S101 - the table says so
    report = event.message
    assert isinstance(report, ClientFailed)  # noqa: S101 - the table says so
    client = state.clients[event.worker]
    reason = f"failed: {report.reason}"
    if report.during == "load":
        out = _with(state, replace(client, loaded=False, out=f"cannot load the job: {report.reason}"))
        after, todo = _without(out, event.worker, reason, now_s)
        return after, [Let(event.worker, out.clients[event.worker].out), *todo]
    if report.round != state.round or state.phase not in (Phase.TRAINING, Phase.EVALUATING):
        return state, [Dropped(f"{event.worker} failed in round {report.round}, this is {state.round}")]
    if state.phase is Phase.EVALUATING:
        return _without(state, event.worker, reason, now_s)
    if event.worker not in state.chosen or event.worker in state.updates or event.worker in state.dropped:
        return state, [Dropped(f"{event.worker} failed, but no update of it is awaited")]
    struck, let = _strike(state, event.worker, reason)
    after, todo = _without(struck, event.worker, reason, now_s)
    return after, [*let, *todo]


def _strike(state: FederationState, worker: str, reason: str) -> Outcome:
    """Count against a client that it failed or sent what cannot be counted."""
    client = state.clients[worker]
    strikes = client.strikes + 1
    if strikes < MAX_STRIKES:
        return _with(state, replace(client, strikes=strikes)), []
    out = f"set aside after {strikes} rounds in a row without a usable update, the last: {reason}"
    return _with(state, replace(client, strikes=strikes, out=out)), [Let(worker, out)]


def _without(state: FederationState, worker: str, reason: str, now_s: float) -> Outcome:
    """Whatever is under way goes on without this client."""
    if state.phase is Phase.TRAINING and worker in state.chosen:
        if worker in state.updates or worker in state.dropped:
            return state, []
        less, todo = _drop(state, worker, reason)
        after, more = _close_if_complete(less)
        return after, [*todo, *more]
    if state.phase is Phase.EVALUATING and worker in state.asked:
        less = replace(state, asked=state.asked - {worker})
        after, more = _evaluated_if_complete(less, now_s)
        return after, [Without(state.round, worker, f"evaluation: {reason}"), *more]
    if state.phase is Phase.GATHERING:
        return _gather(state, now_s)
    return state, []


def _drop(state: FederationState, worker: str, reason: str) -> Outcome:
    client = replace(state.clients[worker], dropped=reason)
    less = replace(_with(state, client), dropped={**state.dropped, worker: reason})
    return less, [Without(state.round, worker, reason)]


def _with(state: FederationState, client: Client) -> FederationState:
    return replace(state, clients={**state.clients, client.worker: client})


# ---------------------------------------------------------------- a round


def _gather(state: FederationState, now_s: float) -> Outcome:
    """Begin the round once there are enough clients, and those that still load were waited for."""
    need, ready = least(state), state.ready
    loading = [c.worker for c in state.clients.values() if c.present and not c.loaded and not c.out]
    absent = state.awaited - {c.worker for c in state.clients.values() if c.present}
    waits = bool(loading or absent) and now_s < state.hold_until_s
    if not state.opened or len(ready) < need or waits:
        what = f"{len(ready)} clients are ready, {need} are needed"
        if len(ready) >= need:
            names = sorted({*loading, *absent})
            what = f"{len(ready)} clients are ready; waits for {', '.join(names[:4])}"
        elif not loading:
            what += f"; more must register data set {state.federated.data!r} and join"
        reason = what if state.opened else "starting the aggregator"
        return replace(state, phase=Phase.GATHERING, reason=reason), []
    return _begin_round(state, now_s)


def _begin_round(state: FederationState, now_s: float) -> Outcome:
    fresh = replace(
        state,
        updates={},
        dropped={},
        chosen=(),
        awaited=frozenset(),
        begun_s=now_s,
        due_s=now_s + state.federated.rule.deadline_s,
        attempt=state.attempt + 1,
    )
    if len(state.ready) < least(state):
        return _gather(replace(fresh, hold_until_s=now_s), now_s)
    asked = frozenset(to_ask(fresh)) - fresh.told.keys()
    if not asked:
        return _choose(fresh, now_s)
    reason = f"round {state.round + 1} of {state.rounds}: {len(asked)} clients tell their loss"
    asking = replace(fresh, phase=Phase.EVALUATING, reason=reason, asking=True, asked=asked)
    return asking, [Say(worker, _evaluating(asking, worker, now_s)) for worker in sorted(asked)]


def _choose(state: FederationState, now_s: float) -> Outcome:
    names, selector = chosen(state, {name: told.loss for name, told in state.told.items()})
    ratios, pace = codecs(state, names)
    clients = {
        name: replace(client, codec=ratios[name][0], ratio=ratios[name][1], dropped="")
        if name in ratios
        else client
        for name, client in state.clients.items()
    }
    training = replace(
        state,
        phase=Phase.TRAINING,
        reason=f"round {state.round + 1} of {state.rounds}: {len(names)} clients train",
        chosen=names,
        ratios=ratios,
        pace=pace,
        selector=selector,
        clients=clients,
        asking=False,
        asked=frozenset(),
        begun_s=now_s,
        due_s=now_s + state.federated.rule.deadline_s,
    )
    return training, [Say(worker, _training(training, worker, now_s)) for worker in names]


def _training(state: FederationState, worker: str, now_s: float) -> TrainRound:
    codec, ratio = state.ratios[worker]
    return TrainRound(
        state.job,
        state.round,
        _model_for(state, worker),
        codec,
        ratio,
        max(0.001, state.due_s - now_s),
        seed_of(state.spec.training.seed, worker, state.round),
    )


def _evaluating(state: FederationState, worker: str, now_s: float) -> EvaluateRound:
    within_s = max(0.001, state.due_s - now_s)
    return EvaluateRound(state.job, state.round, _model_for(state, worker), within_s)


def _model_for(state: FederationState, worker: str) -> Model:
    """The broadcast; with its delta only for a client that holds what that is against."""
    assert state.model is not None  # noqa: S101 - the aggregator wrote it
    holds = bool(state.model.base) and state.clients[worker].model == state.model.base
    return state.model if holds else Model(state.model.full)


def _updated(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, FromClient)  # noqa: S101 - the table says so
    worker, update = event.worker, event.message
    assert isinstance(update, UpdateReady)  # noqa: S101 - the table says so
    if worker in state.updates:
        return state, [Dropped(f"{worker} says round {update.round} twice")]
    if update.round != state.round or worker not in state.chosen or worker in state.dropped:
        return _refuse(state, worker, update)
    wrong = _impossible(state.clients[worker], update)
    if wrong is not None:
        struck, let = _strike(state, worker, wrong)
        less, todo = _drop(struck, worker, wrong)
        refused = Say(worker, RoundTaken(state.job, state.round, False, wrong))
        after, more = _close_if_complete(less)
        return after, [*let, *todo, refused, Forget((update.update,)), *more]
    assert state.model is not None  # noqa: S101 - a round is in flight
    took_s = now_s - (now_s if state.begun_s is None else state.begun_s)
    client = measured(state.clients[worker], update, took_s)
    heard = _with(state, replace(client, model=state.model.full.hash))
    return _close_if_complete(replace(heard, updates={**state.updates, worker: update}))


def _impossible(client: Client, update: UpdateReady) -> str | None:
    """What shows without a look at the update; the rest the aggregator judges."""
    if not 1 <= update.n_samples <= client.n_samples:
        return f"trained on {update.n_samples} samples, it registered {client.n_samples}"
    if update.steps < 1:
        return f"{update.steps} local steps; at least one"
    if not math.isfinite(update.square_loss):
        return f"a squared loss of {update.square_loss}"
    return None


def _refuse(state: FederationState, worker: str, update: UpdateReady) -> Outcome:
    """An update that is late, of another round, or of nobody who was asked."""
    if update.round == state.round - 1 and worker in state.verdicts:
        # Said before; perhaps the verdict did not reach it.
        why = state.verdicts[worker]
        said = RoundTaken(state.job, update.round, not why, why)
        return state, [Dropped(f"{worker} repeats round {update.round}"), Say(worker, said)]
    why = state.dropped.get(worker, f"an update of round {update.round}; this is round {state.round}")
    if update.round == state.round and worker not in state.chosen:
        why = f"not chosen in round {state.round}"
    todo: list[Todo] = [
        Dropped(f"update of {worker}: {why}"),
        Say(worker, RoundTaken(state.job, update.round, False, why)),
    ]
    # A replayed update may name a blob that somebody's good one names too.
    if update.update not in {u.update for u in state.updates.values()}:
        todo.append(Forget((update.update,)))
    return state, todo


def _unheard(state: FederationState, event: FromClient, kind: str) -> Outcome:
    """What came while nobody listens for it; an update still gets its answer."""
    if isinstance(event.message, UpdateReady) and not state.ended and event.worker in state.clients:
        if event.message.update in {u.update for u in state.updates.values()}:
            return state, [Dropped(f"{event.worker} says round {event.message.round} twice")]
        return _refuse(state, event.worker, event.message)
    return state, [Dropped(f"{kind} of {event.worker} while {state.phase.value}")]


def _close_if_complete(state: FederationState) -> Outcome:
    if len(state.updates) + len(state.dropped) < len(state.chosen):
        waiting = len(state.chosen) - len(state.updates) - len(state.dropped)
        reason = f"round {state.round + 1} of {state.rounds}: {waiting} of {len(state.chosen)} clients train"
        return replace(state, reason=reason), []
    return _close(state)


def _close(state: FederationState) -> Outcome:
    if len(state.updates) < least(state):
        return _repeat(state, f"{len(state.updates)} of {len(state.chosen)} updates came")
    reason = f"round {state.round + 1} of {state.rounds}: summing {len(state.updates)} updates"
    return _aggregate(replace(state, phase=Phase.AGGREGATING, reason=reason))


def _aggregate(state: FederationState) -> Outcome:
    asked = replace(state, attempt=state.attempt + 1)
    if not state.opened:  # it is being started, and will be asked then
        return asked, []
    registered = {name: state.clients[name].n_samples for name in state.updates}
    ask = Aggregate(
        state.round, asked.attempt, state.updates, registered, max(1, len(state.clients)), least(state)
    )
    return asked, [ask]


def _repeat(state: FederationState, reason: str) -> Outcome:
    """Too little came: the same round once more, with whoever is here then."""
    need = least(state)
    why = f"round {state.round + 1} is repeated: {reason}, {need} are needed"
    told = "; ".join(f"{name}: {reason}" for name, reason in sorted(state.dropped.items())[:4])
    todo: list[Todo] = [
        Say(name, RoundTaken(state.job, state.round, False, why)) for name in sorted(state.updates)
    ]
    if state.updates:
        todo.append(Forget(tuple(u.update for u in state.updates.values())))
    again = replace(state, updates={}, dropped={}, chosen=(), repeats=state.repeats + 1)
    if again.repeats > MAX_REPEATS and len(again.ready) >= need:
        failed, more = _end(
            again, Phase.FAILED, f"round {state.round + 1} failed {again.repeats} times ({told}): {reason}"
        )
        return failed, [*todo, *more]
    waiting = replace(again, phase=Phase.GATHERING, reason=f"{why} ({told})" if told else why)
    # The next tick begins it, so that a failure cannot turn in circles within one event.
    return replace(waiting, hold_until_s=0.0), todo


def _aggregated(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, Aggregated)  # noqa: S101 - the table says so
    if (event.round, event.attempt) != (state.round, state.attempt):
        return state, [Dropped(f"a sum of round {event.round}, attempt {event.attempt}")]
    todo: list[Todo] = []
    for worker in sorted(event.dropped):
        state, let = _strike(state, worker, event.dropped[worker])
        state, said = _drop(state, worker, event.dropped[worker])
        todo += [*let, *said]
    good = {name: update for name, update in state.updates.items() if name not in event.dropped}
    if event.state is None or event.model is None:
        blobs = tuple(state.updates[w].update for w in event.dropped if w in state.updates)
        refused: list[Todo] = [
            Say(w, RoundTaken(state.job, state.round, False, why)) for w, why in sorted(event.dropped.items())
        ]
        after, more = _repeat(replace(state, updates=good), f"{len(good)} updates can be counted")
        return after, [*todo, *refused, Forget(blobs), *more]
    closed, more = _closed(state, event, good, now_s)
    return closed, [*todo, *more]


def _closed(
    state: FederationState, event: Aggregated, good: Mapping[str, UpdateReady], now_s: float
) -> Outcome:
    made, model, before = event.state, event.model, state.model
    if made is None or model is None or before is None:
        raise LookupError(f"{state.job}: a round cannot close without a state and a model")
    took_s = now_s - (now_s if state.begun_s is None else state.begun_s)
    selector = learnt(state, outcomes(good, state.clients))
    told = {name: shown(state.clients[name], good[name], *state.ratios[name]) for name in sorted(good)}
    fact = RoundClosed(
        state.job,
        state.round,
        made.hash,
        model.hash,
        model.size,
        mean_loss(good.values()),
        told,
        dict(sorted(state.dropped.items())),
        selector_to_json(selector),
        took_s,
        now_s,
    )
    clients = {
        name: replace(client, strikes=0, metrics=told[name]["metrics"]) if name in told else client
        for name, client in state.clients.items()
    }
    verdicts = {**dict.fromkeys(good, ""), **state.dropped}
    after = replace(
        state,
        round=state.round + 1,
        state=made.hash,
        model=Model(model, event.delta, before.full.hash if event.delta is not None else ""),
        selector=selector,
        clients=clients,
        verdicts=verdicts,
        told={},
        updates={},
        dropped={},
        chosen=(),
        repeats=0,
        failures=0,
        loss=fact.loss,
        last=fact,
        bytes_up=state.bytes_up + sum(u.upload_bytes for u in good.values()),
        bytes_down=state.bytes_down + sum(u.download_bytes for u in good.values()),
        round_times_s=(*state.round_times_s, took_s)[-RECENT:],
    )
    todo: list[Todo] = [Record(fact), Closed(fact)]
    todo += [
        Say(name, RoundTaken(state.job, state.round, not why, why))
        for name, why in sorted(verdicts.items())
        if after.clients[name].present
    ]
    todo.append(Forget(tuple(dict.fromkeys(u.update for u in state.updates.values()))))
    todo += round_points(state, fact)
    settled, more = _evaluate(after, now_s)
    return settled, [*todo, *more]


# ---------------------------------------------------------------- evaluation


def _evaluate(state: FederationState, now_s: float) -> Outcome:
    """On the clients and on the owner's data, where it is time; then the next round."""
    rule, training = state.federated.rule, state.spec.training
    last = state.round >= state.rounds
    on_clients = bool(
        rule.evaluate_every and state.spec.eval_dag_hash and (last or state.round % rule.evaluate_every == 0)
    )
    central = bool(
        training.eval_batches
        and state.spec.eval_data is not None
        and (last or (training.eval_every and state.round % training.eval_every == 0))
    )
    asked = frozenset(state.ready) if on_clients else frozenset()
    evaluating = replace(
        state,
        phase=Phase.EVALUATING,
        reason=f"evaluating after round {state.round} of {state.rounds}",
        asking=False,
        asked=asked,
        central=central,
        due_s=now_s + rule.deadline_s,
    )
    todo: list[Todo] = [EvaluateCentrally(state.round)] if central else []
    todo += [Say(worker, _evaluating(evaluating, worker, now_s)) for worker in sorted(asked)]
    settled, more = _evaluated_if_complete(evaluating, now_s)
    return settled, [*todo, *more]


def _client_evaluated(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, FromClient)  # noqa: S101 - the table says so
    worker, report = event.worker, event.message
    assert isinstance(report, ClientEvaluated)  # noqa: S101 - the table says so
    if report.round != state.round or worker not in state.asked:
        return state, [Dropped(f"evaluation of round {report.round} by {worker}, this is {state.round}")]
    client = state.clients[worker]
    if not math.isfinite(report.loss) or not 1 <= report.n_samples <= client.n_samples:
        wrong = f"a loss of {report.loss} on {report.n_samples} of {client.n_samples} samples"
        return _without(state, worker, wrong, now_s)
    assert state.model is not None  # noqa: S101 - it was evaluated
    client = replace(client, loss=report.loss, metrics=report.metrics, model=state.model.full.hash)
    heard = replace(
        _with(state, client),
        told={**state.told, worker: report},
        asked=state.asked - {worker},
        bytes_down=state.bytes_down + report.download_bytes,
    )
    return _evaluated_if_complete(heard, now_s)


def _centrally_evaluated(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, CentrallyEvaluated)  # noqa: S101 - the table says so
    if not state.central or event.round != state.round:
        return state, [Dropped(f"a central evaluation of round {event.round}, this is {state.round}")]
    heard = replace(state, central=False)
    if event.loss is None or not math.isfinite(event.loss):
        why = event.error or f"the loss is {event.loss}"
        after, todo = _evaluated_if_complete(heard, now_s)
        return after, [Without(state.round, "the owner's data", f"evaluation: {why}"), *todo]
    found = Evaluation(event.round, event.loss, event.metrics, event.n_samples)
    after, todo = _evaluated_if_complete(replace(heard, central_evaluation=found), now_s)
    return after, [Record(fact_of(state.job, CENTRAL, found)), *evaluation_points("eval", found), *todo]


def _evaluated_if_complete(state: FederationState, now_s: float) -> Outcome:
    if state.asked or state.central:
        return state, []
    if state.asking:
        return _choose(state, now_s)
    todo: list[Todo] = []
    if state.told:
        found = over_clients(state.round, state.told)
        state = replace(state, evaluation=found)
        todo = [
            Record(fact_of(state.job, CLIENTS, found)),
            *evaluation_points(CLIENTS, found),
            *client_points(state.round, state.told),
        ]
    if state.round >= state.rounds:
        after, more = _end(state, Phase.FINISHED, f"{state.round} rounds done")
    else:
        after, more = _begin_round(state, now_s)
    return after, [*todo, *more]


# ---------------------------------------------------------------- time, interruptions and ends


def _tick(state: FederationState, event: Event, now_s: float) -> Outcome:
    if state.phase is Phase.GATHERING:
        return _gather(state, now_s) if state.opened else (state, [])
    if now_s < state.due_s:
        return state, []
    if state.phase is Phase.TRAINING:
        late = [name for name in state.chosen if name not in state.updates and name not in state.dropped]
        todo: list[Todo] = []
        for name in late:
            state, said = _drop(state, name, f"late: no update within {state.federated.rule.deadline_s:g} s")
            todo += said
        after, more = _close(state)
        return after, [*todo, *more]
    if state.phase is Phase.EVALUATING:
        todo = [Without(state.round, name, "evaluation: late") for name in sorted(state.asked)]
        after, more = _evaluated_if_complete(replace(state, asked=frozenset(), central=False), now_s)
        return after, [*todo, *more]
    return state, []


def _wait(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, Waits)  # noqa: S101 - the table says so
    return replace(state, reason=event.reason), []


def _interrupt(state: FederationState, event: Event, now_s: float) -> Outcome:
    """The round in flight begins again afterwards; clients that have their update answer with it."""
    assert isinstance(event, Interrupted)  # noqa: S101 - the table says so
    paused = replace(
        state,
        phase=Phase.PAUSED,
        reason=f"{event.reason}; goes on at round {state.round + 1}",
        opened=False,
        chosen=(),
        updates={},
        dropped={},
        asked=frozenset(),
        central=False,
        clients={name: replace(client, loaded=False) for name, client in state.clients.items()},
    )
    return paused, []


def _end(state: FederationState, phase: Phase, reason: str) -> Outcome:
    ended = replace(
        state,
        phase=phase,
        reason=reason,
        opened=False,
        chosen=(),
        updates={},
        asked=frozenset(),
        central=False,
        clients={name: replace(client, loaded=False) for name, client in state.clients.items()},
    )
    blobs = tuple(u.update for u in state.updates.values())
    todo: list[Todo] = [Forget(blobs)] if blobs else []
    return ended, [Record(JobEnded(state.job, phase.value, reason)), *todo, Let("", reason), Close()]


def _cancel(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, Cancelled)  # noqa: S101 - the table says so
    return _end(state, Phase.CANCELLED, event.reason)


def _break(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, Broken)  # noqa: S101 - the table says so
    return _end(state, Phase.FAILED, event.reason)


def _nothing(state: FederationState, event: Event, now_s: float) -> Outcome:
    return state, []


def _remember_lost(state: FederationState, event: Event, now_s: float) -> Outcome:
    assert isinstance(event, ClientLost)  # noqa: S101 - the table says so
    client = state.clients.get(event.worker)
    if client is None:
        return state, []
    return _with(state, replace(client, present=False, loaded=False, model="")), []


Transition = Callable[[FederationState, Event, float], Outcome]
_ANSWERS = AggregatorOpened | AggregatorBroke | Aggregated | CentrallyEvaluated
_WAITING = (Phase.QUEUED, Phase.PAUSED)
_ALIVE = (*_WAITING, *sorted(FEDERATING))
TRANSITIONS: dict[tuple[Phase, type], Transition] = {
    **{(phase, Begin): _begin for phase in _WAITING},
    **{(phase, Waits): _wait for phase in (*_WAITING, Phase.GATHERING)},
    **{(phase, AggregatorOpened): _opened for phase in FEDERATING},
    **{(phase, AggregatorBroke): _broke for phase in FEDERATING},
    **{(phase, Invited): _invite for phase in FEDERATING},
    **{(phase, ClientBack): _back for phase in FEDERATING},
    **{(phase, ClientBack): _nothing for phase in (*_WAITING, *ENDED)},
    **{(phase, ClientLost): _lose for phase in FEDERATING},
    **{(phase, ClientLost): _remember_lost for phase in (*_WAITING, *ENDED)},
    **{(phase, Loaded): _loaded for phase in FEDERATING},
    **{(phase, ClientFailed): _fail_client for phase in FEDERATING},
    (Phase.TRAINING, UpdateReady): _updated,
    (Phase.AGGREGATING, Aggregated): _aggregated,
    (Phase.EVALUATING, ClientEvaluated): _client_evaluated,
    (Phase.EVALUATING, CentrallyEvaluated): _centrally_evaluated,
    **{(phase, Tick): _tick for phase in FEDERATING},
    **{(phase, Tick): _nothing for phase in (*_WAITING, *ENDED)},
    **{(phase, Interrupted): _interrupt for phase in _ALIVE},
    **{(phase, Cancelled): _cancel for phase in _ALIVE},
    **{(phase, Cancelled): _nothing for phase in ENDED},
    **{(phase, Broken): _break for phase in _ALIVE},
}
