"""Running jobs whose links follow what training measures: from reports to a wish for other codecs.

``adapt`` decides, the planner chooses (``ChooseLinks``, in a thread), ``rounds`` carries it out;
this keeps one state a job between them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.compression import LOSSLESS
from atoll.job import JobSpec
from coordinator.config import Adaptation
from coordinator.membership.effects import Effects
from coordinator.messages import instructions as do
from coordinator.messages.events import LinksChosen, LinksFailed
from coordinator.messages.jobs import JobState, LinksDue, Relinked
from coordinator.pipeline.tuning import link_policy, relink
from coordinator.pipeline.tuning.link_rates import Sample
from coordinator.planning.codecs.ratios import label
from coordinator.planning.costs.fleet import Fleet, Pair
from protos.telemetry import Event as Name


@dataclass(frozen=True, slots=True)
class _Asked:
    """A choice under way."""

    attempt: int
    decision: link_policy.Decision
    workers: tuple[str, ...]  # of the pieces, so that another plan's answer is recognised


@dataclass(slots=True)
class Adapting:
    """``of``: the state of every job that adapts; ``watched``: what the guard has seen of the others."""

    effects: Effects
    settings: Adaptation
    of: dict[str, link_policy.State] = field(default_factory=dict)
    watched: dict[str, link_policy.Watch] = field(default_factory=dict)
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _attempts: int = 0

    def adopted(self, state: JobState, cap: float | None = None) -> None:
        """A plan begins. ``cap``: what the guard has set for this job; it stays, the model is the same."""
        self.of.pop(state.job, None)
        self._asked.pop(state.job, None)
        if state.plan is None or not relink.adapts(state.spec.training):
            return
        if len(state.plan.replicas) > 1 or len(state.plan.stages) < 2:  # the links of replicas stay
            return
        rates = {pair: self._known_bps(pair) for pair in _pairs(state)}
        self.of[state.job] = link_policy.begin(rates, state.step, cap)

    def due(self, state: JobState, due: LinksDue) -> None:
        """Log once for each link that changes: from what, to what, from which step on, and why."""
        workers = state.plan.only.workers if state.plan else ()
        for (source, target), (was, new) in relink.changes(due.before, due.relink.links).items():
            self.effects.log(
                Name.LINK_CHANGED,
                job=state.job,
                source=workers[source],
                target=workers[target],
                before=label(was),
                after=label(new),
                first_step=due.relink.first_step,
                version=due.relink.version,
                reason=new.reason,
            )

    def over(self, job: str) -> None:
        """The job has ended."""
        self.of.pop(job, None)
        self.watched.pop(job, None)
        self._asked.pop(job, None)

    def committed(self, state: JobState) -> None:
        """A step is committed: its reports may change what the links should do."""
        known = self.of.get(state.job)
        if known is None or state.plan is None or not state.run.step_times_s:
            return
        after, decision = link_policy.observe(
            known, state.step, state.run.step_times_s[-1], _samples(state), self.settings
        )
        self.of[state.job] = after
        self._remember(after)
        self._decided(state, decision)

    def _remember(self, state: link_policy.State) -> None:
        """Plans to come, of this job or another, start from what training shows."""
        table = self.effects.roster.links.table
        for pair, bps in link_policy.proven(state).items():
            if pair in table.estimates:
                table.believe(pair, bps)

    def evaluated(self, state: JobState, at_end: bool = False) -> float | None:
        """Both held-out losses are there: the guard looks at what lies between them; returns a new cap.

        ``at_end``: the last step is over, so that it can only say what it sees.
        """
        if state.eval_loss is None or state.coded_loss is None:
            return None
        known = self.of.get(state.job)
        if known is None or at_end:
            self._warn(state, state.eval_loss, state.coded_loss, at_end)
            return None
        after, decision = link_policy.evaluated(
            known,
            state.step,
            state.eval_loss,
            state.coded_loss,
            relink.largest_ratio(state),
            self.settings,
            link_policy.CAPS.get(state.spec.training.compression.mode, (1.0,)),
        )
        self.of[state.job] = after
        self._decided(state, decision)
        return after.cap if after.cap != known.cap else None

    def _warn(self, state: JobState, loss: float, coded_loss: float, at_end: bool) -> None:
        """No codec will change any more, or none may, as the owner named it: what it costs is reported."""
        before = self.watched.get(state.job, link_policy.Watch())
        self.watched[state.job], wrong = link_policy.watched(before, loss, coded_loss, self.settings)
        if not wrong:
            return
        asked = state.spec.training.compress
        told = "the last step is over" if at_end else f"{asked} is what the job asks for and stays; cancel it"
        reason = (
            f"{wrong}; {told}. To lose less, submit it with --resume {state.job} and more --steps, under "
            f"--compress auto or a milder codec than {asked}"
        )
        fields = {"step": state.step, "reason": reason}
        self.effects.log(Name.LINKS_JUDGED, "warning", state.job, **fields)

    def _decided(self, state: JobState, decision: link_policy.Decision | None) -> None:
        if decision is None or state.plan is None:
            return
        self.effects.emit(
            do.Log(
                Name.LINKS_JUDGED.value, "info", state.job, {"step": state.step, "reason": decision.reason}
            )
        )
        workers = state.plan.only.workers
        if any(worker not in self.effects.roster.workers for worker in workers):
            return  # it is being lost; the next plan is made with the newest figures anyway
        self._attempts += 1
        self._asked[state.job] = _Asked(self._attempts, decision, workers)
        training = capped(state.spec, decision.cap).training
        fleet = self.effects.roster.fleet(list(workers), training.precision.value)
        fleet = believing(fleet, decision.rates_bps)
        self.effects.emit(do.ChooseLinks(state.job, self._attempts, state.plan, training, fleet))

    def chosen(self, state: JobState, event: LinksChosen) -> Relinked | None:
        """What the job's machine shall hear; None when nothing that matters is another."""
        asked = self._asked.get(state.job)
        if asked is None or asked.attempt != event.attempt or state.plan is None:
            return None
        del self._asked[state.job]
        if asked.workers != state.plan.only.workers:
            return None
        changed = relink.changes(state.plan.links, event.links)
        if state.job in self.of:
            self.of[state.job] = link_policy.answered(self.of[state.job], bool(changed), self.settings)
        if not changed:
            return None
        why = {}
        for source, target in changed:
            pair = (asked.workers[source], asked.workers[target])
            why[source, target] = asked.decision.reasons.get(pair, asked.decision.reason)
        links = relink.explained(state.plan.links, event.links, why)
        return Relinked(links, asked.decision.reason)

    def failed(self, event: LinksFailed) -> None:
        """The links stay as they are."""
        asked = self._asked.get(event.job)
        if asked is not None and asked.attempt == event.attempt:
            del self._asked[event.job]
            self.effects.emit(do.Log(Name.PLAN_FAILED.value, "warning", event.job, {"reason": event.reason}))

    def measured_bps(self, job: str, pair: Pair) -> float:
        """What training shows of a link, else what was probed; 0 where nothing is known."""
        known = self.of.get(job)
        link = known.links.get(pair) if known is not None else None
        if link is not None and link.rate_bps is not None:
            return link.rate_bps
        estimate = self.effects.roster.links.table.get(*pair)
        return estimate.bandwidth_bps if estimate is not None else 0.0

    def _known_bps(self, pair: Pair) -> float:
        """What a plan was made with: the pair's own rate or a shared uplink's, whichever is less."""
        fleet = self.effects.roster.fleet(list(pair), "fp32")
        return float(fleet.effective_bps[0, 1])


def believing(fleet: Fleet, rates_bps: Mapping[Pair, float]) -> Fleet:
    """The fleet with these pair rates. An uplink or a relay through which one pair gets more than it was
    thought to carry carries at least that."""
    bandwidth = fleet.bandwidth_bps.copy()
    for (source, target), bps in rates_bps.items():
        if source in fleet.index and target in fleet.index:
            bandwidth[fleet.index[source], fleet.index[target]] = bps / fleet.payload_share
    uplinks = []
    for uplink in fleet.uplinks:
        inside = set(uplink.members)
        up = [bps for (a, b), bps in rates_bps.items() if a in inside and b not in inside]
        down = [bps for (a, b), bps in rates_bps.items() if a not in inside and b in inside]
        up_bps = max([uplink.up_bps, *(bps / fleet.payload_share for bps in up)])
        down_bps = max([uplink.down_bps, *(bps / fleet.payload_share for bps in down)])
        uplinks.append(replace(uplink, up_bps=up_bps, down_bps=down_bps))
    relays = []
    for relay in fleet.relays:
        through = [bps / fleet.payload_share for pair, bps in rates_bps.items() if pair in relay.pairs]
        relays.append(replace(relay, bps=max([relay.bps, *through])))
    assert np.all(bandwidth > 0)  # noqa: S101 - rates are judged before they are believed
    return replace(fleet, bandwidth_bps=bandwidth, uplinks=tuple(uplinks), relays=tuple(relays))


def capped(spec: JobSpec, cap: float | None) -> JobSpec:
    """The job with no ratio above ``cap`` on any link, exact at 1; as it is where it is exact anyway."""
    wanted = spec.training.compression
    if cap is None or wanted.exact:
        return spec
    ratio = round(cap if wanted.ratio is None else min(cap, wanted.ratio), 4)
    compress = str(replace(wanted, ratio=ratio)) if cap > 1.0 else LOSSLESS
    return replace(spec, training=replace(spec.training, compress=compress))


def _pairs(state: JobState) -> list[Pair]:
    if state.plan is None:
        return []
    workers = state.plan.only.workers
    return list(dict.fromkeys((workers[link.source], workers[link.target]) for link in state.plan.links))


def _samples(state: JobState) -> dict[Pair, Sample]:
    """What the committed step's reports say of the plan's links."""
    stages, workers = state.adopted.stages, state.adopted.only.workers
    coded = {
        (workers[link.source], workers[link.target]) for link in state.adopted.links if link.codec != "none"
    }
    found = {}
    for at, report in state.run.reports.items():
        for link in report.links:
            pair = (stages[at].worker, link.peer)
            if link.n_bytes > 0:
                messages = state.spec.training.n_micro
                found[pair] = Sample(
                    link.n_bytes, link.busy_s, link.rtt_s, messages, pair in coded, link.quickest_bps
                )
    return found
