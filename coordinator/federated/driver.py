"""The driver of federated jobs: workers for them, and what their machines want as instructions.

Beside the pipeline's path: no profiling, no plan. A worker that takes part is reserved (a member
that is assigned), so no plan uses it; a worker takes part in one job at a time. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from atoll.federated import ConsentWord
from coordinator.federated import flow, machine
from coordinator.federated import state as fed
from coordinator.federated.checks import misfit
from coordinator.federated.metrics import CENTRAL, CLIENTS
from coordinator.federated.selection import selector_from_json
from coordinator.federated.sites import gathering as sites
from coordinator.federated.state import VERSION, FederationState
from coordinator.membership import member as members
from coordinator.messages import events as ev
from coordinator.messages import instructions as do
from coordinator.messages.facts import OWNER, STATE, JobRecord, RoundClosed
from coordinator.messages.jobs import (
    PREPARING,
    RESTART_GRACE_S,
    Broken,
    Cancelled,
    Dropped,
    Phase,
    Point,
    Record,
    Waits,
)
from protos.telemetry import Event as Name

if TYPE_CHECKING:
    from atoll.job import JobSpec
    from coordinator.config import CoordinatorConfig
    from coordinator.membership.effects import Effects
    from coordinator.membership.measuring import Measuring


@dataclass(slots=True)
class FederatedDriver:
    """All federated jobs; beyond ``config.concurrent_federations`` they wait in the queue."""

    config: CoordinatorConfig
    effects: Effects
    measuring: Measuring
    jobs: dict[str, FederationState] = field(default_factory=dict)
    unfit: dict[str, dict[str, str]] = field(default_factory=dict)  # job -> worker -> why not
    _let: dict[tuple[str, str], int] = field(default_factory=dict)  # (job, worker) -> incarnation let go

    # ------------------------------------------------------------ jobs

    def takes(self, spec: JobSpec) -> bool:
        """Whether the job is of this kind."""
        return spec.federated is not None

    def not_resumable(self, before: JobSpec, spec: JobSpec) -> str | None:
        """Why ``spec`` cannot go on with what ``before`` left; both are of this kind.

        Its clients' optimizers begin anew in every round: only the strategy has a state.
        """
        if any(s.federated is not None and s.federated.rule.privacy for s in (before, spec)):
            return (
                "what a private job has spent is its own; a job that goes on with its state would begin at 0"
            )
        held, wanted = (_state_words(spec) for spec in (before, spec))
        if held == wanted:
            return None
        return f"{spec.resume_of} holds the state of {held}, this one {wanted}; take the same strategy"

    def restore(self, record: JobRecord) -> None:
        """Make a job's machine from what the ledger knows."""
        submitted, closed = record.submitted, record.closed[-1] if record.closed else None
        state = FederationState(
            submitted.job,
            submitted.spec,
            submitted.created_s,
            round=submitted.start_step,
            state=submitted.start_tensors.get(STATE, ""),
            loss=record.loss,
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down,
            spent=record.spent,
        )
        on_clients, on_own = record.evaluated.get(CLIENTS), record.evaluated.get(CENTRAL)
        state = replace(state, evaluation=on_clients, central_evaluation=on_own)
        if closed is not None:
            counted = {
                host: tuple(entry["clients"])
                for host, entry in closed.participants.items()
                if "clients" in entry
            }
            dropped = {} if counted else closed.dropped  # of a population these are no workers
            took_part = frozenset((*closed.participants, *dropped))
            state = replace(
                state,
                round=closed.round + 1,
                state=closed.state,
                last=closed,
                selector=selector_from_json(closed.selector),
                verdicts={**dict.fromkeys(closed.participants, ""), **dropped},
                counted=counted,
                homes={client: host for host, clients in closed.homes.items() for client in clients},
                clients={name: _remembered(name, closed.participants) for name in took_part},
                awaited=frozenset(closed.participants),
                hold_until_s=self.effects.now_s + RESTART_GRACE_S,
            )
        if record.waiting:
            state = self._with_waiting(state, record)
        if record.outcome:
            state = replace(state, phase=Phase(record.outcome), reason=record.reason)
        elif closed is not None or record.waiting:
            reason = f"the coordinator was restarted; continues at round {state.round + 1}"
            state = replace(state, phase=Phase.PAUSED, reason=reason)
        self.jobs[state.job] = state
        self.effects.jobs[state.job] = state.face()

    def _with_waiting(self, state: FederationState, record: JobRecord) -> FederationState:
        """The state of an asynchronous job with the updates that wait to be summed."""
        absent = {
            taken.worker: fed.Client(taken.worker, taken.registered, present=False)
            for taken in record.waiting.values()
        }
        state = flow.waiting(replace(state, clients={**absent, **state.clients}), record.waiting.values())
        return replace(
            state, awaited=state.awaited | absent.keys(), hold_until_s=self.effects.now_s + RESTART_GRACE_S
        )

    def submitted(self, job: str, ops: Mapping[str, int], needs: ev.Needs) -> None:
        """Take in the ops of a new job: nothing is planned by them."""
        self.effects.roster.ops.flops.update(ops)

    def forget(self, job: str) -> None:
        """Let go of a job that has ended."""
        del self.jobs[job]
        self.unfit.pop(job, None)
        self._let = {key: incarnation for key, incarnation in self._let.items() if key[0] != job}

    def on(self, event: ev.JobEvent) -> None:
        """Handle an event about one of these jobs."""
        match event:
            case ev.CancelAsked(job, reason):
                self.step(job, Cancelled(reason))
            case ev.JobUnreadable(job, reason):
                self.step(job, Broken(reason))
            case ev.AggregatorOpened() | ev.AggregatorBroke():
                self.step(event.job, event)
                self.effects.advance = True
            case ev.Aggregated() | ev.CentrallyEvaluated():
                self.step(event.job, event)
            case _:
                self.effects.drop(type(event).__name__, f"{event.job} is federated", event.job)

    def inquired(self, event: ev.PlanAsked) -> None:
        """Refuse to plan: nobody can ask, as clients check before."""
        raise LookupError(f"{event.inquiry}: every client runs the whole model; there is nothing to plan")

    def step(self, job: str, event: fed.Event) -> None:
        """Step a job's machine and carry over what it wants."""
        before = self.jobs[job]
        state, todo = machine.step(before, event, self.effects.now_s)
        self.jobs[job] = state
        changed = (before.phase, before.reason) != (state.phase, state.reason)
        for item in todo:
            self._obey(state, item)
        if before.phase is not state.phase:
            level = "warning" if state.phase in (Phase.PAUSED, Phase.FAILED) else "info"
            busy = {Phase.TRAINING, Phase.AGGREGATING, Phase.EVALUATING}
            quiet = {before.phase, state.phase} <= busy
            self.effects.log(
                Name.JOB_STATE, "debug" if quiet else level, job=job, state=state.phase, reason=state.reason
            )
        told = (before.round, before.evaluation, before.central_evaluation)
        if changed or told != (state.round, state.evaluation, state.central_evaluation):
            self._show(state)

    def before_event(self) -> None:
        """Learn from nothing: a round's figures are taken in with it."""

    def tick(self) -> None:
        """Let time pass: deadlines, and paused jobs that may go on."""
        for job, state in list(self.jobs.items()):
            if not state.ended:
                self.step(job, fed.Tick())
        waiting = (s for s in self.jobs.values() if s.phase is Phase.PAUSED and s.not_before_s)
        if any(self.effects.now_s >= state.not_before_s for state in waiting):
            self.effects.advance = True
        clients = (c for s in self.jobs.values() if not s.ended for c in s.clients.values())
        if any(self.effects.now_s >= client.again_s for client in clients):
            self.effects.advance = True

    def storage_failed(self, reason: str) -> None:
        """Stop every job where it is: nothing can be made durable."""
        for job, state in list(self.jobs.items()):
            if not state.ended:
                self.step(job, fed.Interrupted(reason))

    def storage_recovered(self) -> None:
        """Go on: paused jobs do by themselves."""

    def _show(self, state: FederationState) -> None:
        """Tell those who watch the job; where its phase is another, its next part may be due."""
        face = state.face()
        if self.effects.jobs[face.job].phase is not face.phase:
            self.effects.advance = True
        self.effects.show(face)

    # ------------------------------------------------------------ clients

    def heard(self, worker: str, message: ev.JobMessage) -> None:
        """Handle a message of a worker about one of these jobs."""
        member = self.effects.roster.workers[worker].member
        if member.job != message.job and not isinstance(message, ev.UpdateReady | ev.ConsentSaid):
            self.effects.drop(type(message).__name__, f"of {worker}, which takes no part in it", message.job)
            return
        if isinstance(message, ev.Loaded) and message.version != VERSION:
            self.effects.drop("Loaded", f"version {message.version} of {message.job}", message.job)
            return
        if not isinstance(message, ev.ClientMessage | ev.Loaded):
            self.effects.drop(
                type(message).__name__, f"of {worker}: {message.job} has no stages", message.job
            )
            return
        self.step(message.job, fed.FromClient(worker, message))

    def admitted(self, worker: str) -> None:
        """Hear of a worker that was away: it is recruited anew."""

    def reconnected(self, job: str, worker: str) -> None:
        """Repeat what was under way to a client."""
        self.step(job, fed.ClientBack(worker))

    def lost(self, job: str, worker: str, reason: str) -> None:
        """Go on without a client that is gone, or must not be used any more."""
        self.step(job, fed.ClientLost(worker, reason))
        if self.effects.roster.workers[worker].member.job == job:  # it leaves, or is quarantined
            self._free(self.jobs[job], worker, reason)

    def slowed(self, worker: str, factor: float) -> None:
        """Expect a client's next round to take as much longer, before one was measured so."""
        for job, state in self.jobs.items():
            client = state.clients.get(worker)
            if client is not None and not state.ended:
                seconds = {n: getattr(client, n) * factor for n in ("train_s", "download_s", "round_s")}
                later = replace(client, uplink_bps=client.uplink_bps / factor, **seconds)
                self.jobs[job] = replace(state, clients={**state.clients, worker: later})

    def current(self, job: str, version: int) -> bool:
        """Whether clients take part under that version."""
        return version == VERSION

    def keeps(self, job: str) -> bool:
        """Whether a worker may go on holding the job: after our restart, until that invites it again."""
        return not self.jobs[job].ended

    def uses(self, job: str, worker: str) -> bool:
        """Whether the worker is a client of the job now."""
        clients = self.jobs[job].clients
        return worker in clients and clients[worker].present

    # ------------------------------------------------------------ what runs next

    def advance(self) -> None:
        """Begin jobs whose turn it is, and give each the idle workers that hold its data."""
        alive = sorted((s for s in self.jobs.values() if not s.ended), key=lambda s: s.created_s)
        for at, state in enumerate(alive):
            if state.phase not in (Phase.QUEUED, Phase.PAUSED):
                continue
            if at < self.config.concurrent_federations:
                if self.effects.now_s >= state.not_before_s:
                    self._begin(state)
            elif state.phase is Phase.QUEUED and not state.reason.startswith("waits for "):
                self.step(state.job, Waits(f"waits for {alive[0].job}"))
        # A plan in the making counts on the workers that were idle when it was begun.
        if any(s.phase in PREPARING for s in self.effects.jobs.values()):
            return
        for state in alive:
            self._recruit(state.job)

    def _begin(self, state: FederationState) -> None:
        """Its clients may still be here, after a pause; those answer at once."""
        self.step(state.job, fed.Begin())
        for worker, client in state.clients.items():
            if client.present and not client.out:
                self.step(state.job, fed.ClientBack(worker))

    def _recruit(self, job: str) -> None:
        for worker in self.effects.roster.idle_holders(self.jobs[job].federated.data):
            state = self.jobs[job]
            if state.ended or not state.opened:
                return
            who = self.effects.roster.workers[worker].introduction
            if self._let_go(state, worker) or state.bars(worker):
                continue
            facts = next(d for d in who.datasets if d.name == state.federated.data)
            wrong = misfit(facts, state.federated.inputs, state.inputs, state.spec.data.batch)
            if wrong is not None:
                self._turn_down(job, worker, wrong)
                continue
            self.effects.move(worker, members.AssignedTo(job, members.NO_RANK))
            trip = self.effects.roster.ops.rtt_s.get(worker)
            latency_s = min(trip) / 2 if trip else 0.0
            self.step(job, fed.Invited(worker, facts.n_samples, latency_s, who.name, who.site))

    def _let_go(self, state: FederationState, worker: str) -> bool:
        """Whether the job has let this process of the worker go, and it is not yet time to ask it again."""
        client, member = state.clients.get(worker), self.effects.roster.workers[worker].member
        if self._let.get((state.job, worker)) != member.incarnation:
            return False
        return client is None or self.effects.now_s < client.again_s

    def _turn_down(self, job: str, worker: str, why: str) -> None:
        known = self.unfit.setdefault(job, {})
        if known.get(worker) != why:
            known[worker] = why
            self.effects.log(Name.CLIENT_UNFIT, "warning", job=job, worker=worker, reason=why)

    # ------------------------------------------------------------ what a machine wants

    def _obey(self, state: FederationState, todo: fed.Todo) -> None:
        effects, job = self.effects, state.job
        match todo:
            case Record(fact):
                effects.record(fact)
            case fed.Say(worker, message):
                _introduce(effects, worker, sites.met(state, worker, message))
                effects.send(worker, message)
            case fed.Invite(worker):
                tensors = dict(state.spec.tensors)
                owner, called = state.spec.owner or OWNER, state.called(worker)
                effects.send(worker, do.Participate(job, VERSION, state.spec, tensors, owner, called))
            case fed.Let(worker, reason):
                self._release(state, worker, reason)
            case fed.ConsentNews():
                self._consent_news(state, todo)
            case do.OpenAggregator() | do.AggregateRound() | do.EvaluateModel() | do.CloseAggregator():
                effects.emit(todo)
            case fed.Forget(blobs):
                # A client may name any blob as its update; what a job still needs is not its to delete.
                if unneeded := tuple(blob for blob in blobs if blob not in self.blobs_in_flight()):
                    effects.emit(do.DropBlobs(unneeded))
            case fed.Without(_, worker, _) if state.private and worker in state.clients:
                pass  # who drops out, why and how many: all can read logs and counts
            case Dropped() if state.private:
                pass
            case fed.Without(at_round, worker, reason):
                effects.log(
                    Name.CLIENT_DROPPED, "warning", job=job, round=at_round, worker=worker, reason=reason
                )
            case fed.Closed(fact):
                self._say_closed(state, fact)
            case Point(step, name, value):
                effects.emit(do.Measured(job, step, name, value))
            case Dropped(why):
                effects.drop("client message", why, job)

    def blobs_in_flight(self) -> set[str]:
        """Return the blobs that rounds under way rest on; those of closed rounds the ledger knows."""
        alive = [state for state in self.jobs.values() if not state.ended]
        found = {state.state for state in alive}
        for state in alive:
            found |= {u.update for u in state.updates.values()} | flow.blobs(state) | sites.blobs(state)
            if state.model is not None:
                model = state.model
                found |= {model.full.hash, model.base, *([model.delta.hash] if model.delta else [])}
        return found

    def _say_closed(self, state: FederationState, fact: RoundClosed) -> None:
        told = fact.participants
        self.effects.emit(do.SweepBlobs())
        if state.private:
            self.effects.log(Name.ROUND_CLOSED, job=fact.job, round=fact.round)
            return
        self.effects.log(
            Name.ROUND_CLOSED,
            job=fact.job,
            round=fact.round,
            arrived=sum(len(t.get("clients", [t])) for t in told.values()),
            lost=len(fact.dropped),
            loss=fact.loss,
            took_s=round(fact.took_s, 4),
            bytes_up=sum(t["bytes_up"] for t in told.values()),
            bytes_down=sum(t["bytes_down"] for t in told.values()),
            pace=state.pace or None,
        )

    def _release(self, state: FederationState, worker: str, reason: str) -> None:
        for name in [worker] if worker else list(state.clients):
            known = self.effects.roster.workers.get(name)
            if known is None or known.member.job != state.job:
                continue
            if worker:
                self._let[state.job, name] = known.member.incarnation
            self._free(state, name, reason)

    def _consent_news(self, state: FederationState, news: fed.ConsentNews) -> None:
        """Give back a worker whose data owner has not agreed, invite one whose owner has."""
        job, worker, log = state.job, news.worker, self.effects.log
        said = {"job": job, "worker": worker, "reason": news.reason, "graph": news.graph}
        match news.word:
            case ConsentWord.AWAITED:
                log(Name.CONSENT_AWAITED, **said)
            case ConsentWord.GIVEN:
                log(Name.CONSENT_GIVEN, **said)
            case ConsentWord.REFUSED:
                log(Name.CONSENT_REFUSED, "warning", **said)
        known = self.effects.roster.workers[worker]
        if news.word is ConsentWord.GIVEN:
            self._let.pop((job, worker), None)
            self.effects.advance = True
            return
        self._let[job, worker] = known.member.incarnation
        if known.member.job == job:
            self.effects.move(worker, members.Released(f"{job} has no consent there"))

    def _free(self, state: FederationState, worker: str, reason: str) -> None:
        self.effects.send(worker, do.Release(state.job, VERSION, reason))
        self.effects.move(worker, members.Released(f"released by {state.job}"))


def _introduce(effects: Effects, worker: str, peers: Iterable[str]) -> None:
    """Have a client and others of its site expect each other."""
    for peer in peers:
        way, back = effects.roster.ways(worker, peer)
        effects.send(peer, back)
        effects.send(worker, way)


def _state_words(spec: JobSpec) -> str:
    """Name of a job's strategy, with the arrays that its server keeps where it is the owner's own."""
    rule = spec.federated.rule if spec.federated else None
    if rule is None or rule.own is None:
        return rule.strategy if rule else ""
    return f"{rule.strategy} (arrays: {', '.join(rule.own.server) or 'none'})"


def _remembered(name: str, told: Mapping[str, Mapping[str, Any]]) -> fed.Client:
    figures = told.get(name, {})
    client = fed.Client(name, int(figures.get("n_samples", 1)), present=False)
    return replace(
        client,
        uplink_bps=float(figures.get("uplink_bps", 0.0)),
        uplink_s=float(figures.get("upload_s", 0.0)),
        download_s=float(figures.get("download_s", 0.0)),
        train_s=float(figures.get("train_s", 0.0)),
        round_s=sum(float(figures.get(name, 0.0)) for name in ("download_s", "train_s", "upload_s")),
        metrics=dict(figures.get("metrics", {})),
    )
