"""Other codecs between the same stages, under a new plan version at a step border. Pure.

What is wanted waits for a commit that can carry it; the commit of step s says it for step s + 2,
since a stage may begin s + 1 before a neighbour has heard of s. At most one is under way. Until it
begins every message carries the old version; whatever names a step names the version of that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from atoll.compression import ADATOPK, AUTO, LOSSLESS, Compression
from atoll.job import TrainingSpec
from atoll.plan import LinkSpec, Plan
from compressors.catalogue import CODECS
from coordinator.messages.facts import LINEAGE, LinksChanged
from coordinator.messages.instructions import Relink
from coordinator.messages.jobs import JobState, LinksDue, Record, Relinked, Todo
from coordinator.planning.codecs.ratios import assumed_ratio

AHEAD = 2  # steps from the commit that says it to the first step under it
MATERIAL = 0.1  # of a ratio: less is not worth a new version
ADAPTIVE = frozenset({AUTO, ADATOPK, LOSSLESS})
"""Modes whose codecs depend on the links; a codec by name is what the owner said, off is off."""
MAX_REASON_CHARS = 1000
SHOWN_GAP = 0.01  # of the loss through the codecs: less than this is noise

Pieces = tuple[int, int]


def adapts(training: TrainingSpec) -> bool:
    """Whether this job's links may change while it runs."""
    return training.compression.mode in ADAPTIVE


def lossy(plan: Plan | None) -> bool:
    """Whether values lose anything on their way forward, the only way that evaluation goes."""
    return plan is not None and any(
        link.source < link.target and _loses(link) for replica in plan.replicas for link in replica.links
    )


def gap_words(state: JobState) -> str:
    """Return what the newest evaluation shows of the codecs' cost, "" below what is worth a word."""
    if state.eval_loss is None or state.coded_loss is None or not state.coded_loss > 0:
        return ""
    gap = state.eval_loss / state.coded_loss - 1.0
    return f"; held-out loss without codecs {gap:.1%} above that through them" if gap > SHOWN_GAP else ""


def largest_ratio(state: JobState) -> float:
    """Dense bytes / wire bytes, the largest of the lossy links; 1 where there is none."""
    links = state.plan.links if state.plan is not None else ()
    return max((_ratio(state, link) for link in links if _loses(link)), default=1.0)


def _ratio(state: JobState, link: LinkSpec) -> float:
    """What the codec was asked for; of one of a fixed rate what the last committed step's bytes show,
    which is less than the codec's own rate where some tensors travel as they are."""
    known = CODECS.get(link.codec)
    if known is None or known.rated or state.plan is None:
        return link.ratio
    fixed = assumed_ratio(Compression(link.codec))
    (replica,) = state.plan.replicas
    peer = replica.workers[link.target]
    report = state.run.reports.get(replica.pieces[link.source].stage)
    for carried in report.links if report is not None else ():
        if carried.peer == peer and 0 < carried.n_bytes < carried.dense_bytes:
            return min(fixed, carried.dense_bytes / carried.n_bytes)
    return fixed


def _loses(link: LinkSpec) -> bool:
    known = CODECS.get(link.codec)
    return known is None or not known.exact


def changes(before: Iterable[LinkSpec], after: Iterable[LinkSpec]) -> dict[Pieces, tuple[LinkSpec, LinkSpec]]:
    """(old, new) of every link whose codec or mask is another, or whose ratio changes by 10 %."""
    old = _by_pair(before)
    found = {}
    for pair, new in _by_pair(after).items():
        was = old.pop(pair, LinkSpec(*pair))
        if _material(was, new):
            found[pair] = (was, new)
    for pair, was in old.items():
        if _material(was, LinkSpec(*pair)):
            found[pair] = (was, LinkSpec(*pair))
    return found


def _material(was: LinkSpec, new: LinkSpec) -> bool:
    if (was.codec, was.mask) != (new.codec, new.mask):
        return True
    return max(was.ratio, new.ratio) > (1.0 + MATERIAL) * min(was.ratio, new.ratio)


def _by_pair(links: Iterable[LinkSpec]) -> dict[Pieces, LinkSpec]:
    return {(link.source, link.target): link for link in links}


def explained(
    before: Iterable[LinkSpec], after: Iterable[LinkSpec], why: Mapping[Pieces, str]
) -> tuple[LinkSpec, ...]:
    """The new links: those in ``why`` change for that, then for the planner's reason; the others
    keep their codec, ratio and reason to the letter."""
    old = _by_pair(before)
    found = []
    for link in after:
        pair = (link.source, link.target)
        if pair in why:
            reason = "; ".join(part for part in (why[pair], link.reason) if part)
            found.append(replace(link, reason=reason[:MAX_REASON_CHARS]))
        else:
            found.append(old.get(pair, link))
    return tuple(found)


# ---------------------------------------------------------------- in a job's machine


def want(state: JobState, event: Relinked) -> JobState:
    """The newest wish counts; it waits while another change is under way."""
    return replace(state, run=replace(state.run, wanted=event))


def due(state: JobState) -> Relink | None:
    """What the commit of the step in flight shall say of the links."""
    first_step = state.step + AHEAD
    if state.run.wanted is None or state.run.relink is not None or first_step >= state.steps:
        return None
    return Relink(state.version + 1, first_step, state.run.wanted.links)


def begun(state: JobState) -> JobState:
    """``state.step`` is a new one: switch where the links change with it."""
    relink, plan = state.run.relink, state.plan
    if relink is None or plan is None or state.step < relink.first_step:
        return state
    return replace(
        state,
        version=relink.version,
        plan=plan.relinked(relink.version, relink.links),
        reason=f"training with plan {relink.version}",
        run=replace(
            state.run,
            relink=None,
            lineage=(*state.run.lineage, (relink.version, relink.first_step))[-LINEAGE:],
        ),
    )


def dropped(state: JobState) -> JobState:
    """The stages are given up. A version that was sent is used up: the next plan's is above it."""
    version = state.version if state.run.relink is None else state.run.relink.version
    return replace(state, version=version, run=replace(state.run, wanted=None, relink=None))


def changed(state: JobState, change: Relink | None) -> list[Todo]:
    """Return what follows from new links that a commit announces."""
    if change is None or state.run.wanted is None or state.plan is None:
        return []
    reason = state.run.wanted.reason
    fact = LinksChanged(state.job, change.version, change.first_step, change.links, reason)
    return [Record(fact), LinksDue(state.plan.links, change, reason)]
