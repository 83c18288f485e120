"""The rounds of a federated job: who takes part, when a round closes, what is evaluated after it. Pure.

Steps that the transitions of ``coordinator.federated.machine`` share; each returns the next state and what is
to be done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from atoll.backoff import doubled_s
from atoll.federated import ConsentWord as Word
from atoll.secure import LEAST_MEMBERS
from atoll.transitions import first
from coordinator.federated import flow, population
from coordinator.federated.kinds.choice import round_of
from coordinator.federated.kinds.round import Outcome
from coordinator.federated.metrics import (
    CLIENTS,
    client_points,
    evaluation_points,
    mean_loss,
    over_clients,
    round_points,
    shown,
    spread_points,
)
from coordinator.federated.selection import (
    chosen,
    coding,
    learnt,
    seed_of,
    selector_to_json,
    strayed,
    to_ask,
)
from coordinator.federated.sites import gathering as sites
from coordinator.federated.state import (
    Client,
    Closed,
    FederationState,
    Forget,
    Let,
    Say,
    Todo,
    Without,
)
from coordinator.messages.events import (
    Aggregated,
)
from coordinator.messages.facts import JobEnded, NoisedAsked, RoundClosed
from coordinator.messages.instructions import (
    CloseAggregator,
    EvaluateModel,
    EvaluateRound,
    Model,
    RoundTaken,
    SecureOrder,
    TrainRound,
)
from coordinator.messages.jobs import RECENT, Phase, Record
from strategies.privacy.accountant import Spent
from strategies.privacy.private import strategy_of
from strategies.privacy.report import exhausted

SHOWN = 4  # names in a reason
MAX_REPEATS = 3  # of one round
BESIDE_BYTES = 32 * 2**20
"""Of a model that the owner's machine evaluates while clients train: with larger ones, whose rounds are long
anyway, it would hold the weights just when clients, perhaps on the same machine, need most."""
DROPPED = "not counted"
NONE_COUNTED = "the round was closed without its clients"
MAX_LOADS = 3  # failed ones in a row; a worker itself refuses a job that has cost it three processes
LOAD_AGAIN_S = 5.0  # after the first of them, twice as long after each further one


def least(state: FederationState) -> int:
    """Return how many clients a round needs to begin."""
    return max(_counted(state), 0 if state.federated.rule.secure is None else LEAST_MEMBERS)


def _counted(state: FederationState) -> int:
    rule = state.federated.rule
    return max(rule.min_clients, strategy_of(rule).min_updates)


def enough(state: FederationState) -> int:
    """Return how many good updates close a round: where the coordinator adds noise none, as that covers
    nobody's as well."""
    noised_here = state.private and state.federated.rule.secure is None
    return 0 if noised_here else _counted(state)


def is_last(state: FederationState) -> bool:
    """Whether no further round begins: all are done, or a private job's budget is."""
    return state.round >= state.rounds or bool(_exhausted(state))


def _exhausted(state: FederationState) -> str:
    """Why a private job has no further round; "" where it may."""
    rule = state.federated.rule
    if rule.privacy is not None and rule.secure is not None and state.spent.rounds >= state.rounds:
        return f"members send {state.rounds} noised updates each, those of repeated rounds with them"
    return exhausted(rule.privacy, state.spent)


def spent_with_this(state: FederationState) -> Spent | None:
    """What a private job has spent once the round in flight is published; a secure round's sum was counted
    before anybody could open it."""
    privacy, secure = state.federated.rule.privacy, state.federated.rule.secure
    if privacy is None or secure is not None:
        return None if privacy is None else state.spent
    return state.spent.after(privacy)


def shown_dropped(state: FederationState, dropped: Mapping[str, str]) -> dict[str, str]:
    """Clients that are not counted, and why; of a private job no reason, which their data are."""
    return dict(sorted((dict.fromkeys(dropped, DROPPED) if state.private else dropped).items()))


def _at(state: FederationState, what: str) -> str:
    """The round in flight, for people; of a private job without ``what``, which tells who takes part."""
    return f"round {state.round + 1} of {state.rounds}" + ("" if state.private else f": {what}")


def not_loaded(client: Client, reason: str, now_s: float) -> Client:
    """The client without its job: what ended its process once need not do so again."""
    failed, out = client.failed_loads + 1, f"cannot load the job: {reason}"
    again_s = math.inf
    if failed < MAX_LOADS:
        within_s = doubled_s(LOAD_AGAIN_S, failed)
        out, again_s = f"{out}; it is asked again after {within_s:g} s", now_s + within_s
    return replace(client, loaded=False, out=out, failed_loads=failed, again_s=again_s)


def gather(state: FederationState, now_s: float) -> Outcome:
    """Begin the round once there are enough clients, and those that still load were waited for."""
    need, ready = least(state), state.members
    loading = [c.worker for c in state.clients.values() if c.present and not c.loaded and not c.out]
    absent = state.awaited - {c.worker for c in state.clients.values() if c.present or c.consent}
    waits = bool(loading or absent) and now_s < state.hold_until_s
    summed = is_last(state)  # and interrupted before it had ended: what is left is to evaluate
    if not state.opened or (len(ready) < need and not summed) or waits:
        what = f"{len(ready)} clients are ready, {need} are needed"
        if state.opened and len(ready) < need and not loading and state.of_consent(Word.AWAITED):
            due_s = state.consent_due_s or now_s + state.federated.rule.consent_s
            reason = f"{what}; {_consent_words(state, due_s)}"
            return replace(state, phase=Phase.CONSENTING, reason=reason, consent_due_s=due_s), []
        if len(ready) >= need:
            names = sorted({*loading, *absent})
            what = f"{len(ready)} clients are ready; waits for {', '.join(names[:4])}"
        elif not loading:
            what += f"; more must register data set {state.federated.data!r} and join{_refusal_words(state)}"
        reason = what if state.opened else "starting the aggregator"
        return replace(state, phase=Phase.GATHERING, reason=reason), []
    return evaluate(state, now_s) if summed else begin_round(state, now_s)


def without_consent(state: FederationState) -> Outcome:
    """End a job to which too few data owners agreed in time."""
    silent = ", ".join(state.of_consent(Word.AWAITED)[:SHOWN])
    within = words_of_seconds(state.federated.rule.consent_s)
    reason = (
        f"{len(state.ready)} clients take part, {least(state)} are needed; within {within} no consent came "
        f"from the data owners of {silent}{_refusal_words(state)}"
    )
    return end(state, Phase.FAILED, reason)


def _consent_words(state: FederationState, due_s: float) -> str:
    asked = ", ".join(state.of_consent(Word.AWAITED)[:SHOWN])
    until = f"{datetime.fromtimestamp(due_s, UTC):%Y-%m-%d %H:%M} UTC"
    return (
        f"waits until {until} for the consent of the data owners of {asked}, who see it by "
        f"`atoll-worker jobs`{_refusal_words(state)}"
    )


def _refusal_words(state: FederationState) -> str:
    refused = state.of_consent(Word.REFUSED)
    told = [f"{name}: {state.clients[name].out}" for name in refused[:SHOWN]]
    others = sorted(c.worker for c in state.clients.values() if c.present and c.out and c.consent is None)
    out = [f"{name} takes no part: {state.clients[name].out}" for name in others[:SHOWN]]
    return "".join(f"; {words}" for words in ([f"refused by {'; '.join(told)}"] if told else []) + out)


def words_of_seconds(seconds: float) -> str:
    """A deadline for people: in days, hours, minutes or seconds, the largest that it is whole in."""
    for name, unit in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def begin_round(state: FederationState, now_s: float) -> Outcome:
    """Choose who takes part, after asking for losses where the selector wants them."""
    fresh = replace(
        state,
        awaited=frozenset(),
        consent_due_s=0.0,
        begun_s=now_s,
        due_s=now_s + state.federated.rule.deadline_s,
        attempt=state.attempt + 1,
    )
    if round_of(state).flows:
        return go_on(replace(fresh, phase=Phase.TRAINING), now_s)
    fresh = replace(fresh, updates={}, dropped={}, chosen=())
    if len(state.members) < least(state):
        return gather(replace(fresh, hold_until_s=now_s), now_s)
    wanted = frozenset(to_ask(fresh)) - population.losses(fresh).keys()
    if not wanted:
        return choose(fresh, now_s)
    reason = f"round {state.round + 1} of {state.rounds}: {len(wanted)} clients tell their loss"
    assessing = population.assess(fresh, wanted)
    asked = frozenset(assessing)
    asking = replace(
        fresh,
        phase=Phase.EVALUATING,
        reason=reason,
        asking=True,
        asked=asked,
        asked_round=fresh.round,
        assessing=assessing,
    )
    return asking, [Say(worker, evaluate_message(asking, worker, now_s)) for worker in sorted(asked)]


def choose(state: FederationState, now_s: float) -> Outcome:
    """Fix the participants and their codecs, and send each the model."""
    names, selector = chosen(state, population.losses(state))
    reason = _at(state, f"{len(names)} clients train")
    if population.is_population(state):
        parted = population.opened(replace(state, selector=selector, reason=reason), names)
        due_s = now_s + state.federated.rule.deadline_s
        begun = replace(parted, phase=Phase.TRAINING, asking=False, begun_s=now_s, due_s=due_s)
        return go_on(replace(begun, asked=frozenset()), now_s)
    how = coding(state, names)
    ratios = how.by_client
    clients = {
        name: replace(client, codec=ratios[name][0], ratio=ratios[name][1], dropped="")
        if name in ratios
        else client
        for name, client in state.clients.items()
    }
    training = replace(
        state,
        phase=Phase.TRAINING,
        reason=reason,
        cohort=None,
        chosen=names,
        ratios=ratios,
        pace=how.reason,
        spread=how.spread,
        selector=selector,
        clients=clients,
        asking=False,
        asked=frozenset(),
        begun_s=now_s,
        due_s=now_s + state.federated.rule.deadline_s,
    )
    if not names:  # a private round of nobody is closed, and its noise published, like every other
        return go_on(training, now_s)
    training = round_of(training).opened(training, now_s)
    return training, [Say(worker, due_message(training, worker, now_s)) for worker in names]


def deal(state: FederationState, now_s: float) -> Outcome:
    """Give a population's waiting clients to hosts."""
    dealt, hosts = round_of(state).dealt(state, now_s)
    return dealt, [Say(host, train_message(dealt, host, now_s)) for host in hosts]


def go_on(state: FederationState, now_s: float) -> Outcome:
    """Deal what waits, and close the round where there is nothing left to do."""
    dealt, todo = deal(state, now_s)
    found, busy = round_of(dealt), bool(dealt.flights or dealt.asked) or dealt.phase is Phase.AGGREGATING
    few = found.flows and not busy and len(dealt.members) < least(dealt)
    if few and found.left(dealt):  # nobody is here who could send what is missing
        after, more = gather(replace(dealt, hold_until_s=now_s), now_s)
    else:
        after, more = close_if_complete(dealt, now_s)
    return after, [*todo, *more]


def due_message(state: FederationState, worker: str, now_s: float) -> TrainRound | SecureOrder:
    """What a participant is asked for now."""
    return round_of(state).order(state, worker) or train_message(state, worker, now_s)


def train_message(state: FederationState, worker: str, now_s: float) -> TrainRound:
    """What a participant is sent."""
    codec, ratio = state.ratios[worker]
    found = round_of(state)
    flight = found.flight(state, worker)
    message = TrainRound(
        state.job,
        flight.round,
        model_for(state, worker, flight.model),
        codec,
        ratio,
        max(0.001, flight.due_s - now_s),
        seed_of(state.spec.training.seed, state.called(worker), flight.round),
    )
    return found.message(state, worker, message)


def evaluate_message(state: FederationState, worker: str, now_s: float) -> EvaluateRound:
    """What a client that shall evaluate is sent."""
    within_s = max(0.001, state.due_s - now_s)
    clients = state.assessing.get(worker, ())
    assert state.model is not None  # noqa: S101 - the aggregator wrote it
    return EvaluateRound(state.job, state.round, model_for(state, worker, state.model), within_s, clients)


def model_for(state: FederationState, worker: str, model: Model) -> Model:
    """A broadcast; with its delta only for a client that holds what that is against."""
    holds = bool(model.base) and state.clients[worker].model == model.base
    found = model if holds else Model(model.full)
    return sites.with_holder(state, worker, found) if state.federated.rule.gateways else found


def close_if_complete(state: FederationState, now_s: float) -> Outcome:
    """Close the round once everybody chosen has answered or is out."""
    if state.phase is Phase.AGGREGATING:  # what comes meanwhile is of the next one
        return state, []
    found = round_of(state)
    if not found.left(state):
        return close(state, now_s)
    return replace(state, reason=_at(state, found.words(state))), []


def close(state: FederationState, now_s: float) -> Outcome:
    """Go on to the round's next stage, or sum what came, or repeat the round."""
    found = round_of(state)
    if (staged := found.staged(state, now_s)) is not None:
        after, why = staged
        if why:
            return repeat(after, why)
        gone: list[Todo] = [
            Without(after.round, name, why)
            for name, why in after.dropped.items()
            if name not in state.dropped
        ]
        asked = [name for name in after.chosen if found.awaits(after, name)]
        said = [Say(name, due_message(after, name, now_s)) for name in asked]
        spends: list[Todo] = []
        if after.spent is not state.spent:
            spends.append(Record(NoisedAsked(after.job, after.round, after.spent)))
        after, dealt = deal(after, now_s)
        reason = _at(after, found.words(after))
        return replace(after, reason=reason), [*spends, *gone, *said, *dealt]
    if (came := found.arrived(state)) < enough(state):
        return repeat(state, f"{came} of {found.drawn(state)} updates came")
    if found.flows:
        state = replace(state, chosen=flow.due(state))
    reason = _at(state, f"summing {len(found.good(state))} updates")
    return aggregate(replace(state, phase=Phase.AGGREGATING, reason=reason, strayed=strayed(state)))


def aggregate(state: FederationState) -> Outcome:
    """Ask for the sum of the updates at hand."""
    asked = replace(state, attempt=state.attempt + 1)
    if not state.opened:  # it is being started, and will be asked then
        return asked, []
    found = round_of(state)
    return asked, [found.summed(state, asked.attempt, max(1, found.size(state)), enough(state))]


def repeat(state: FederationState, reason: str) -> Outcome:
    """Too little came: the same round once more, with whoever is here then."""
    need = enough(state)
    if state.private:  # who failed, how and how many depends on data
        reason, state = "too few of its members were left", replace(state, dropped={})
    if round_of(state).flows:  # what is good waits for more
        reason = f"round {state.round + 1} of {state.rounds}: {reason}, {need} are needed"
        return replace(state, phase=Phase.TRAINING, chosen=(), reason=reason), []
    why = f"round {state.round + 1} is repeated: {reason}, {need} are needed"
    told = "; ".join(f"{name}: {reason}" for name, reason in sorted(state.dropped.items())[:4])
    todo: list[Todo] = [
        Say(name, RoundTaken(state.job, state.round, False, why))
        for name in sorted({round_of(state).sender(state, name) for name in state.updates})
    ]
    if state.updates:
        todo.append(Forget((*(u.update for u in state.updates.values()), *sorted(sites.blobs(state)))))
    again = replace(state.between_rounds, updates={}, repeats=state.repeats + 1)
    if again.repeats > MAX_REPEATS and len(again.members) >= least(state):
        failed = f"round {state.round + 1} failed {again.repeats} times ({told}): {reason}"
        return first(todo, end(again, Phase.FAILED, failed))
    waiting = replace(again, phase=Phase.GATHERING, reason=f"{why} ({told})" if told else why)
    # The next tick begins it, so that a failure cannot turn in circles within one event.
    return replace(waiting, hold_until_s=0.0), todo


def close_summed(
    state: FederationState, event: Aggregated, refused: tuple[str, ...], now_s: float
) -> Outcome:
    """The round is summed: journal it, tell the participants, go on. ``refused``: blobs of other updates."""
    good = round_of(state).good(state)
    made, model, before = event.state, event.model, state.model
    if made is None or model is None or before is None:
        raise LookupError(f"{state.job}: a round cannot close without a state and a model")
    took_s = now_s - (now_s if state.begun_s is None else state.begun_s)
    senders = {name: round_of(state).sender(state, name) for name in good}
    told = {
        name: shown(state.clients[host], good[name], *state.ratios[host])
        for name, host in sorted(senders.items())
    }
    state, seen, told, dropped = round_of(state).learnt(state, good, told)
    selector = learnt(state, seen)
    homes, left_out = population.homes_by_host(state), shown_dropped(state, dropped)
    loss, choices, spent = mean_loss(good.values()), selector_to_json(selector), spent_with_this(state)
    made_of = (state.job, state.round, made.hash, model.hash, model.size)
    waits = tuple(n for n in state.updates if n not in state.chosen) if round_of(state).flows else None
    fact = RoundClosed(*made_of, loss, told, left_out, choices, took_s, now_s, homes, spent, waits)
    clients = {
        name: replace(client, strikes=0, metrics=told[name]["metrics"]) if name in told else client
        for name, client in state.clients.items()
    }
    none = dict.fromkeys(state.chosen, NONE_COUNTED)
    verdicts = {**none, **dict.fromkeys(told, ""), **state.dropped}
    if round_of(state).flows:
        state, verdicts = flow.without(state, state.chosen), {}  # each has its verdict since it was taken
    else:
        state = replace(state, updates={}, told={})
    after = replace(
        state.between_rounds,
        round=state.round + 1,
        state=made.hash,
        model=Model(model, event.delta, before.full.hash if event.delta is not None else ""),
        selector=selector,
        clients=clients,
        verdicts=verdicts,
        repeats=0,
        failures=0,
        loss=fact.loss,
        last=fact,
        spent=fact.privacy or state.spent,
        bytes_up=state.bytes_up + sum(u.upload_bytes for u in good.values()),
        bytes_down=state.bytes_down + sum(u.download_bytes for u in good.values()),
        round_times_s=(*state.round_times_s, took_s)[-RECENT:],
        begun_s=now_s,
    )
    todo: list[Todo] = [Record(fact), Closed(fact)]
    found = round_of(after)
    words = [(name, found.verdict(after, name)) for name in sorted(verdicts) if after.clients[name].present]
    todo += [Say(name, word) for name, word in words if word is not None]
    used = [*(update.update for update in good.values()), *sorted(sites.blobs(state)), *refused]
    if before.delta is not None:
        used.append(before.delta.hash)  # led to the model that this round began with
    used.append(before.full.hash)  # which stays while a fact names it: that of round 0 none does
    todo.append(Forget(tuple(dict.fromkeys(used))))
    todo += round_points(state, fact)
    return first(todo, evaluate(after, now_s))


def evaluate(state: FederationState, now_s: float) -> Outcome:
    """On the clients and on the owner's data, where it is time; then the next round."""
    rule, training = state.federated.rule, state.spec.training
    last = is_last(state)
    on_clients = bool(
        rule.evaluate_every and state.spec.eval_dag_hash and (last or state.round % rule.evaluate_every == 0)
    )
    central = bool(
        training.eval_batches
        and state.spec.eval_data is not None
        and (last or (training.eval_every and state.round % training.eval_every == 0))
    )
    assessing = population.assess(state) if on_clients else {}
    todo: list[Todo] = []
    flows = round_of(state).flows
    if flows:  # those who train go on
        state, todo = assessed(state)
        state = replace(state, told={}, asked=frozenset())
        assessing = {name: assessing[name] for name in flow.idle(state) if name in assessing}
    asked = frozenset(assessing)
    evaluating = replace(
        state,
        phase=Phase.TRAINING if flows and not last else Phase.EVALUATING,
        reason=f"evaluating after round {state.round} of {state.rounds}",
        asking=False,
        asked=asked,
        asked_round=state.round,
        assessing=assessing,
        central=central,
        due_s=now_s + rule.deadline_s,
    )
    todo += [EvaluateModel(state.job, state.round)] if central else []
    todo += [Say(worker, evaluate_message(evaluating, worker, now_s)) for worker in sorted(asked)]
    if flows and not last:
        settled, more = go_on(evaluating, now_s)
    else:
        settled, more = evaluated_if_complete(evaluating, now_s)
    return settled, [*todo, *more]


def assessed(state: FederationState) -> Outcome:
    """Take in what clients answered about a broadcast; who has not answered yet is not waited for."""
    if not state.told:
        return state, []
    found = over_clients(state.job, state.asked_round, state.told)
    return replace(state, evaluation=found), [
        Record(found),
        *evaluation_points(CLIENTS, found),
        *client_points(found.round, state.told),
        *spread_points(found.round, state.told),
    ]


def waits_for_owner(state: FederationState) -> bool:
    """Whether what comes next waits for the evaluation on the owner's data. Otherwise the clients train
    meanwhile, and the aggregator evaluates the model before it sums the next one."""
    large = sum(meta.nbytes for meta in state.up) > BESIDE_BYTES
    return state.central and (large or is_last(state))


def evaluated_if_complete(state: FederationState, now_s: float) -> Outcome:
    """Go on once every evaluation is there that the next round must wait for."""
    if round_of(state).flows and state.phase is not Phase.EVALUATING:
        after, todo = (state, list[Todo]()) if state.asked else assessed(state)
        return first(todo, go_on(after if state.asked else replace(after, told={}), now_s))
    if state.asked or waits_for_owner(state):
        return state, []
    if state.asking and len(state.members) < least(state):  # those who were asked are gone
        return gather(replace(state, asking=False, hold_until_s=now_s), now_s)
    if state.asking:
        return choose(state, now_s)
    state, todo = assessed(state)
    if is_last(state):
        spent = _exhausted(state) if state.round < state.rounds else ""
        after, more = end(state, Phase.FINISHED, f"{state.round} rounds done{spent and f': {spent}'}")
    else:
        after, more = begin_round(state, now_s)
    return after, [*todo, *more]


def end(state: FederationState, phase: Phase, reason: str) -> Outcome:
    """The job is over: everybody may go."""
    ended = replace(
        state.between_rounds,
        phase=phase,
        reason=reason,
        opened=False,
        dropped=state.dropped,
        updates={},
        taken={},
        flights={},
        asked=frozenset(),
        central=False,
        clients={name: replace(client, loaded=False) for name, client in state.clients.items()},
    )
    left = {u.update for u in state.updates.values()} | sites.blobs(state)
    if state.model is not None:  # stays where a fact names it
        left |= {state.model.full.hash, *([state.model.delta.hash] if state.model.delta else [])}
    todo: list[Todo] = [Forget(tuple(sorted(left)))] if left else []
    closing = CloseAggregator(state.job)
    return ended, [Record(JobEnded(state.job, phase.value, reason)), *todo, Let("", reason), closing]
