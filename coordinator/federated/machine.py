"""A federated job's machine: queued -> gathering -> training -> aggregating -> evaluating -> ... -> finished.

Pure: ``step(state, event, now_s)`` returns the new state and what is to be done. A round chooses
clients, sends each the model, and closes when each has answered, failed, or is lost, or when the
deadline has passed; it is summed from what arrived, where that is enough, and repeated where not.
RoundClosed is journalled with the server's state before anybody hears of it, so that a coordinator
killed at any moment goes on at the round in flight. What became of an update is sent again to a
client that may not have heard it. With too few clients while data owners were asked the job awaits their
consent, up to its deadline. A client's message that the phase does not know is dropped with its reason.
"""

from __future__ import annotations

import math
from dataclasses import replace

from atoll.federated import ConsentWord as Word
from atoll.transitions import Transitions, first
from coordinator.federated import population
from coordinator.federated.kinds.choice import round_of
from coordinator.federated.kinds.round import (
    MAX_FIGURE,
    Outcome,
    forgotten,
    holding,
    large,
    large_metric,
    strike,
    with_client,
)
from coordinator.federated.metrics import (
    CENTRAL,
    evaluation_points,
    unsaid,
)
from coordinator.federated.rounds import (
    aggregate,
    close,
    close_summed,
    deal,
    due_message,
    end,
    enough,
    evaluate_message,
    evaluated_if_complete,
    gather,
    go_on,
    not_loaded,
    repeat,
    waits_for_owner,
    without_consent,
)
from coordinator.federated.state import (
    Begin,
    Client,
    ClientBack,
    ClientLost,
    ConsentNews,
    Event,
    FederationState,
    Forget,
    FromClient,
    Interrupted,
    Invite,
    Invited,
    Let,
    Say,
    Tick,
    Todo,
    Without,
)
from coordinator.messages.events import (
    Aggregated,
    AggregatorBroke,
    AggregatorEvent,
    AggregatorOpened,
    CentrallyEvaluated,
    ClientEvaluated,
    ClientFailed,
    ClientMessage,
    ConsentSaid,
    Loaded,
    SecureAnswer,
    UpdateReady,
)
from coordinator.messages.facts import RoundEvaluated
from coordinator.messages.instructions import EvaluateModel, Model, RoundTaken
from coordinator.messages.jobs import (
    ENDED,
    FEDERATING,
    GATHERS,
    MAX_FAILURES,
    Broken,
    Cancelled,
    Dropped,
    Phase,
    Record,
    Waits,
)

STORAGE_RETRY_S = 5.0
GATHER_S = 60.0  # at most, for clients that still load, once there are enough others

_WAITING = (Phase.QUEUED, Phase.PAUSED)
_ALIVE = (*_WAITING, *sorted(FEDERATING))
TRANSITIONS: Transitions[FederationState, [float], Outcome] = Transitions(Phase, Event)


def step(state: FederationState, event: Event, now_s: float) -> Outcome:
    """The job after ``event``, and what is to be done.

    What a client or the aggregator says out of turn is dropped; an event of our own that the phase
    does not know raises LookupError.
    """
    kind = type(event.message) if isinstance(event, FromClient) else type(event)
    transition = TRANSITIONS.get((state.phase, kind))
    if isinstance(event, FromClient):
        client = state.clients.get(event.worker)
        heard = client is not None and (client.present or kind is ConsentSaid)
        if transition is None or not heard:
            return _unheard(state, event, kind.__name__)
    elif transition is None and isinstance(event, AggregatorEvent):
        return state, [Dropped(f"{kind.__name__} while {state.phase.value}")]
    if transition is None:
        raise LookupError(f"{state.job}: {kind.__name__} while {state.phase.value} ({state.reason})")
    return transition(state, event, now_s)


# ---------------------------------------------------------------- who is here


@TRANSITIONS.on(*_WAITING)
def _begin(state: FederationState, event: Begin, now_s: float) -> Outcome:
    gathering = replace(state, phase=Phase.GATHERING, reason="starting the aggregator")
    return gathering, [state.opening]


@TRANSITIONS.on(*FEDERATING)
def _opened(state: FederationState, event: AggregatorOpened, now_s: float) -> Outcome:
    """The aggregator is there, perhaps anew: what it was about to do it is asked again."""
    if event.round != state.round:
        return state, [Dropped(f"the aggregator opened at round {event.round}, this is {state.round}")]
    model = state.model if state.model and state.model.full == event.model else Model(event.model)
    here = replace(state, opened=True, model=model, inputs=event.inputs, up=event.up, secret=event.secret)
    before: list[Todo] = [EvaluateModel(here.job, here.round)] if here.central else []
    after: Outcome = here, []
    if state.phase is Phase.AGGREGATING:
        after = aggregate(here)
    elif state.phase in GATHERS:
        held = max(here.hold_until_s, now_s + min(GATHER_S, here.federated.rule.deadline_s))
        after = gather(replace(here, hold_until_s=held), now_s)
    return after[0], [*before, *after[1]]


@TRANSITIONS.on(*FEDERATING)
def _broke(state: FederationState, event: AggregatorBroke, now_s: float) -> Outcome:
    if event.storage:
        paused, todo = _interrupt(state, Interrupted(event.reason), now_s)
        return replace(paused, not_before_s=now_s + STORAGE_RETRY_S), todo
    if state.phase is Phase.AGGREGATING and round_of(state).blob(state, event.client):
        return _blame(state, event.client, event.reason)
    failures = state.failures + 1
    if event.hopeless or failures > MAX_FAILURES:
        more = "" if event.hopeless else f"; gave up after {failures} failures without a closed round"
        return end(state, Phase.FAILED, f"the aggregator failed: {event.reason}{more}")
    # What nobody waits for is tried once more, then left: each new aggregator would begin with it.
    left = state.central and failures > 1 and state.phase is not Phase.EVALUATING
    why = [Without(state.round, "the owner's data", f"evaluation: {event.reason}")] if left else []
    after = replace(state, opened=False, failures=failures, central=state.central and not left)
    return after, [*why, state.opening]


def _blame(state: FederationState, name: str, reason: str) -> Outcome:
    """The aggregator broke over one client's update: nobody is given that one again."""
    why = f"its update broke the aggregator: {reason}"
    found = round_of(state)
    blob = found.blob(state, name)
    worker = found.sender(state, name)
    struck, todo = strike(state, worker, why)
    less, said = found.refused(struck, name, why)
    todo += said
    if not found.covers_late and name in state.clients:
        todo.append(Say(worker, RoundTaken(state.job, state.round, False, why)))
    todo.append(Forget((blob,)))
    after = replace(less, opened=False)
    if (left := found.arrived(after)) < enough(after):
        after, more = repeat(after, f"{left} updates can be counted")
        todo += more
    return after, todo if after.ended else [*todo, after.opening]


@TRANSITIONS.on(*FEDERATING)
def _invite(state: FederationState, event: Invited, now_s: float) -> Outcome:
    """What it registered decides how much it weighs: more than the owner lets count is turned down."""
    known = state.clients.get(event.worker) or Client(
        event.worker, event.n_samples, _free_name(state, event.name)
    )
    # Its strikes stay: a client is who its certificate says, however often its process starts anew.
    client = replace(
        known,
        n_samples=event.n_samples,
        latency_s=event.latency_s,
        site=event.site,
        present=True,
        loaded=False,
        out=known.out if known.barred else "",
        again_s=math.inf,
        consent=None,
        model="",
    )
    most = state.federated.rule.max_samples
    if client.n_samples > most:
        why = (
            f"registered {client.n_samples} samples of {state.federated.data!r}, at most {most} may count; "
            "register fewer, or let the job's owner raise Federated(max_samples=...)"
        )
        turned_down = with_client(state, replace(client, out=client.out or why))
        return turned_down, [Without(state.round, event.worker, why), Let(event.worker, why)]
    return with_client(state, client), [Invite(event.worker)]


def _free_name(state: FederationState, name: str) -> str:
    """The name, numbered where another client of the job has it; "" where none was given."""
    taken = {client.called for client in state.clients.values()}
    numbered = (f"{name} #{number}" for number in range(2, len(taken) + 2))
    return next(free for free in (name, *numbered) if free not in taken) if name else ""


@TRANSITIONS.on(*FEDERATING)
def _back(state: FederationState, event: ClientBack, now_s: float) -> Outcome:
    """It answers Loaded at once where it still holds the job; then the rest is sent again."""
    client = state.clients.get(event.worker)
    if client is None or not client.present:
        return state, []
    return with_client(state, replace(client, loaded=False)), [Invite(event.worker)]


@TRANSITIONS.on(*FEDERATING)
def _loaded(state: FederationState, event: FromClient[Loaded], now_s: float) -> Outcome:
    worker, message = event.worker, event.message
    client = replace(
        state.clients[worker],
        loaded=True,
        failed_loads=0,
        population=message.population,
        roster=message.clients,
        gateways=message.gateways,
    )
    if client.roster and (wrong := population.misfit(state, client)) is not None:
        unfit = with_client(state, replace(client, loaded=False, out=wrong))
        return first([Let(worker, wrong)], _without(unfit, worker, wrong, now_s))
    here = with_client(state, client)
    found = round_of(here)
    word = found.verdict(here, worker)
    todo: list[Todo] = [] if word is None else [Say(worker, word)]
    if here.phase is Phase.TRAINING or (found.flows and here.phase is Phase.AGGREGATING):
        if found.awaits(here, worker):
            todo.append(Say(worker, due_message(here, worker, now_s)))
        here, more = deal(here, now_s)
        todo += more
    elif here.phase is Phase.EVALUATING and worker in here.asked:
        todo.append(Say(worker, evaluate_message(here, worker, now_s)))
    elif here.phase in GATHERS:
        return first(todo, gather(here, now_s))
    return here, todo


@TRANSITIONS.on(*FEDERATING)
def _lose(state: FederationState, event: ClientLost, now_s: float) -> Outcome:
    client = state.clients.get(event.worker)
    if client is None or not client.present:
        return state, []
    gone = with_client(state, replace(client, present=False, loaded=False, model="", gone_s=now_s))
    return _without(gone, event.worker, f"lost: {event.reason}", now_s)


@TRANSITIONS.on(*FEDERATING)
def _fail_client(state: FederationState, event: FromClient[ClientFailed], now_s: float) -> Outcome:
    report = event.message
    client = state.clients[event.worker]
    reason = f"failed: {report.reason}"
    if report.during == "load":
        client = not_loaded(client, report.reason, now_s)
        gone = with_client(state, client)
        return first([Let(event.worker, client.out)], _without(gone, event.worker, reason, now_s))
    found = round_of(state)
    due = found.flight(state, event.worker).round if found.awaits(state, event.worker) else state.round
    evaluates = event.worker in state.asked and report.round == state.asked_round
    trains = state.phase is Phase.TRAINING or (found.flows and state.phase is Phase.AGGREGATING)
    if not evaluates and not (trains and report.round == due):
        return state, [Dropped(f"{event.worker} failed in round {report.round}, this is {state.round}")]
    if evaluates:
        return _without(state, event.worker, reason, now_s)
    if not found.awaits(state, event.worker):
        return state, [Dropped(f"{event.worker} failed, but no update of it is awaited")]
    struck, let = strike(state, event.worker, reason)
    return first(let, _without(struck, event.worker, reason, now_s))


def _without(state: FederationState, worker: str, reason: str, now_s: float) -> Outcome:
    """Whatever is under way goes on without this client."""
    found = round_of(state)
    if state.phase is Phase.TRAINING or (found.flows and state.phase is Phase.AGGREGATING):
        return _went_on(state, found.without(state, worker, reason), now_s)
    if state.phase is Phase.EVALUATING and worker in state.asked:
        less = replace(state, asked=state.asked - {worker})
        said = Without(state.round, worker, f"evaluation: {reason}")
        return first([said], evaluated_if_complete(less, now_s))
    if state.phase in GATHERS:
        return gather(state, now_s)
    return state, []


def _went_on(before: FederationState, after: Outcome, now_s: float) -> Outcome:
    """Go on with the round where something of it has changed."""
    state, todo = after
    if state is before:
        return after
    return first(todo, go_on(state, now_s))


# ---------------------------------------------------------------- consent


@TRANSITIONS.on(*_ALIVE)
def _consent(state: FederationState, event: FromClient[ConsentSaid], now_s: float) -> Outcome:
    """Go on without a client whose data owner has not agreed: it is not available, and not lost."""
    worker, said = event.worker, event.message
    client = state.clients[worker]
    news = ConsentNews(worker, said.word, said.reason, said.graph)
    if said.word is Word.GIVEN:
        if client.consent is None:
            return state, []
        return with_client(state, replace(client, consent=None, out="")), [news]
    told = replace(
        client,
        present=False,
        loaded=False,
        model="",
        consent=said.word,
        out=client.out if client.barred else said.reason,
    )
    if not client.present and client.consent is said.word:  # said again, after a reconnection
        return with_client(state, told), []
    why = "its data owner was asked" if said.word is Word.AWAITED else said.reason
    return first([news], _without(with_client(state, told), worker, why, now_s))


# ---------------------------------------------------------------- updates


@TRANSITIONS.on(Phase.TRAINING, Phase.AGGREGATING)
def _updated(state: FederationState, event: FromClient[UpdateReady], now_s: float) -> Outcome:
    worker, update = event.worker, unsaid(state, event.message)
    found = round_of(state)
    if found.flows:
        if not found.answers(state, worker, update):
            return _refuse(state, worker, update)
        return _went_on(state, found.taken(state, worker, update, now_s), now_s)
    if state.phase is not Phase.TRAINING:
        return _unheard(state, event, UpdateReady.__name__)
    if not found.covers_late or update.round != state.round:
        if worker in state.updates:
            return state, [Dropped(f"{worker} says round {update.round} twice")]
        if not found.answers(state, worker, update):
            return _refuse(state, worker, update)
    return _went_on(state, found.taken(state, worker, update, now_s), now_s)


@TRANSITIONS.on(Phase.TRAINING)
def _answered(state: FederationState, event: FromClient[SecureAnswer], now_s: float) -> Outcome:
    """Take what a member of a secure round answers beside its update."""
    return _went_on(state, round_of(state).heard(state, event.worker, event.message), now_s)


def _refuse(state: FederationState, worker: str, update: UpdateReady) -> Outcome:
    """An update that is late, of another round, or of nobody who was asked."""
    if round_of(state).covers_late and update.round == state.round:
        return state, [Dropped(f"sum of {worker}: late"), *forgotten(state, update)]
    word, flows = round_of(state).verdict(state, worker), round_of(state).flows
    order = update.order if flows and update.host is not None else ""
    if word is not None and (word.round, word.order) == (update.round, order):
        # Said before; perhaps the verdict did not reach it.
        return state, [Dropped(f"{worker} repeats round {update.round}"), Say(worker, word)]
    why = state.dropped.get(worker, f"an update of round {update.round}; this is round {state.round}")
    if update.round == state.round and worker not in state.chosen and not flows:
        why = f"not chosen in round {state.round}"
    todo: list[Todo] = [
        Dropped(f"update of {worker}: {why}"),
        Say(worker, RoundTaken(state.job, update.round, False, why, order=order)),
    ]
    return state, [*todo, *forgotten(state, update)]


def _unheard(state: FederationState, event: FromClient[Loaded | ClientMessage], kind: str) -> Outcome:
    """What came while nobody listens for it; an update still gets its answer."""
    if isinstance(event.message, UpdateReady) and not state.ended and event.worker in state.clients:
        if event.message.update in {u.update for u in state.updates.values()}:
            return state, [Dropped(f"{event.worker} says round {event.message.round} twice")]
        return _refuse(state, event.worker, event.message)
    return state, [Dropped(f"{kind} of {event.worker} while {state.phase.value}")]


@TRANSITIONS.on(Phase.AGGREGATING)
def _aggregated(state: FederationState, event: Aggregated, now_s: float) -> Outcome:
    if (event.round, event.attempt) != (state.round, state.attempt):
        return state, [Dropped(f"a sum of round {event.round}, attempt {event.attempt}")]
    todo: list[Todo] = []
    found = round_of(state)
    blobs = tuple(blob for name in event.dropped if (blob := found.blob(state, name)))
    for name in sorted(event.dropped):
        state, let = strike(state, found.sender(state, name), event.dropped[name])
        state, said = found.refused(state, name, event.dropped[name])
        todo += [*let, *said]
    if event.state is None or event.model is None:
        refused: list[Todo] = [
            Say(name, RoundTaken(state.job, state.round, False, wrong))
            for name, wrong in sorted(event.dropped.items())
            if name in state.clients
        ]
        why = event.void or f"{found.arrived(state)} updates can be counted"
        return first([*todo, *refused, Forget(blobs)], repeat(state, why))
    return first(todo, close_summed(state, event, blobs, now_s))


# ---------------------------------------------------------------- evaluation


@TRANSITIONS.on(Phase.TRAINING, Phase.AGGREGATING, Phase.EVALUATING)
def _client_evaluated(state: FederationState, event: FromClient[ClientEvaluated], now_s: float) -> Outcome:
    worker, report = event.worker, event.message
    if report.round != state.asked_round or worker not in state.asked:
        return state, [Dropped(f"evaluation of round {report.round} by {worker}, this is {state.round}")]
    client = state.clients[worker]
    if large(report.loss) or not 1 <= report.n_samples <= client.n_samples:
        wrong = f"a loss of {report.loss} on {report.n_samples} of {client.n_samples} samples"
        return _without(state, worker, wrong, now_s)
    strange = report.rows.keys() - {*state.assessing.get(worker, ())}
    if strange or any(large(row.loss) for row in report.rows.values()):
        wrong = f"rows of {sorted(strange)[:3]}, or a loss beyond {MAX_FIGURE:g}"
        return _without(state, worker, wrong, now_s)
    if (wrong_metric := large_metric(report.metrics)) is not None:
        return _without(state, worker, wrong_metric, now_s)
    client = holding(replace(client, loss=report.loss, metrics=report.metrics), state)
    heard = replace(
        with_client(state, client),
        told={**state.told, worker: report},
        asked=state.asked - {worker},
        bytes_down=state.bytes_down + report.download_bytes,
    )
    return evaluated_if_complete(heard, now_s)


@TRANSITIONS.on(*FEDERATING)
def _centrally_evaluated(state: FederationState, event: CentrallyEvaluated, now_s: float) -> Outcome:
    if not state.central or event.round != state.round:
        return state, [Dropped(f"a central evaluation of round {event.round}, this is {state.round}")]
    heard, told = replace(state, central=False), list[Todo]()
    if event.loss is None or not math.isfinite(event.loss):
        why = event.error or f"the loss is {event.loss}"
        told = [Without(state.round, "the owner's data", f"evaluation: {why}")]
    else:
        found = RoundEvaluated(
            state.job, event.round, CENTRAL, event.loss, event.metrics, event.n_samples, clients=0
        )
        heard = replace(heard, central_evaluation=found)
        told = [Record(found), *evaluation_points("eval", found)]
    if state.phase is not Phase.EVALUATING:
        return heard, told
    return first(told, evaluated_if_complete(heard, now_s))


# ---------------------------------------------------------------- time, interruptions and ends


@TRANSITIONS.on(*FEDERATING)
def _tick(state: FederationState, event: Tick, now_s: float) -> Outcome:
    if state.phase is Phase.CONSENTING and now_s >= state.consent_due_s:
        return without_consent(state)
    if state.phase in GATHERS:
        return gather(state, now_s) if state.opened else (state, [])
    if round_of(state).flows and state.phase is not Phase.EVALUATING:
        return _flow_tick(state, now_s)
    if now_s < state.due_s:
        waits = state.phase is Phase.TRAINING and round_of(state).waits(state)
        return deal(state, now_s) if waits else (state, [])
    if state.phase is Phase.TRAINING:
        late, said = round_of(state).expired(state, now_s)
        return first(said, close(late, now_s))
    if state.phase is Phase.EVALUATING:
        todo: list[Todo] = [Without(state.round, name, "evaluation: late") for name in sorted(state.asked)]
        central = state.central and not waits_for_owner(state)
        return first(todo, evaluated_if_complete(replace(state, asked=frozenset(), central=central), now_s))
    return state, []


def _flow_tick(state: FederationState, now_s: float) -> Outcome:
    """Go on without those of an asynchronous job that are late."""
    if state.phase is Phase.AGGREGATING and not state.opened:
        return state, []
    less, todo = round_of(state).expired(state, now_s)
    if state.asked and now_s >= state.due_s:
        todo += [Without(state.asked_round, name, "evaluation: late") for name in sorted(state.asked)]
        return first(todo, evaluated_if_complete(replace(less, asked=frozenset()), now_s))
    return first(todo, go_on(less, now_s))


@TRANSITIONS.on(*_WAITING, *sorted(GATHERS))
def _wait(state: FederationState, event: Waits, now_s: float) -> Outcome:
    return replace(state, reason=event.reason), []


@TRANSITIONS.on(*_ALIVE)
def _interrupt(state: FederationState, event: Interrupted, now_s: float) -> Outcome:
    """The round in flight begins again afterwards; clients that have their update answer with it."""
    paused = replace(
        state.between_rounds,
        phase=Phase.PAUSED,
        reason=f"{event.reason}; continues at round {state.round + 1}",
        opened=False,
        updates=state.updates if round_of(state).flows else {},  # what was taken is in the journal
        flights={},
        asked=frozenset(),
        central=False,
        clients={name: replace(client, loaded=False) for name, client in state.clients.items()},
    )
    return paused, []


@TRANSITIONS.on(*_ALIVE)
def _cancel(state: FederationState, event: Cancelled, now_s: float) -> Outcome:
    return end(state, Phase.CANCELLED, event.reason)


@TRANSITIONS.on(*_ALIVE)
def _break(state: FederationState, event: Broken, now_s: float) -> Outcome:
    return end(state, Phase.FAILED, event.reason)


@TRANSITIONS.on(*ENDED)
def _already_over(state: FederationState, event: Cancelled, now_s: float) -> Outcome:
    return state, []


@TRANSITIONS.on(*_WAITING, *ENDED)
def _nothing(state: FederationState, event: ClientBack | Tick, now_s: float) -> Outcome:
    return state, []


@TRANSITIONS.on(*_WAITING, *ENDED)
def _remember_lost(state: FederationState, event: ClientLost, now_s: float) -> Outcome:
    client = state.clients.get(event.worker)
    if client is None:
        return state, []
    return with_client(state, replace(client, present=False, loaded=False, model="", gone_s=now_s)), []
