"""What a committed step teaches about devices and links, held against what the plan predicted. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from atoll.plan import LinkPrediction, Prediction
from coordinator.membership.roster import Roster
from coordinator.messages.jobs import JobState
from coordinator.pipeline.tuning import memory

TELLING_SHARE = 0.25  # of the mean stage's compute: less does not tell a worker's speed


def learn(roster: Roster, state: JobState, *, follows: bool) -> None:
    """Refine devices' scales and links' drags, and what the job takes of memory.

    ``follows``: the job's links are believed as training measures them, so a drag on top of that
    would count the same slowness twice; and other codecs than predicted may be in use by now.
    """
    memory.learn(roster, state)
    stages, prediction = state.predicted, state.prediction
    if not stages or prediction is None or len(state.run.step_times_s) < 2:
        return  # the first step of a plan loads caches, and knows no optimizer step before it
    usual_s = sum(told.compute_s for told in stages) / state.n_ranks
    # Of who has taken over a place nothing was predicted: the figures are those of the worker before.
    others = {told.worker for told in stages if told.figures_of}
    for rank, report in state.run.reports.items():
        told = stages[rank]
        if told.worker in others or told.worker not in roster.workers:
            continue
        # What a stage of a few views takes is all overhead and says nothing of larger ones.
        if told.compute_s >= TELLING_SHARE * usual_s:
            roster.computed(state.job, told.worker, told.compute_s, report.computed_s)
        coding_s = sum(carried.encode_s + carried.decode_s for carried in report.links)
        # After a change of the links the plan's seconds are those of other codecs.
        if len(state.run.lineage) > 1:
            continue
        if told.codec_s > 0:
            roster.coded(state.job, told.worker, told.codec_s, coding_s)
        if told.handling_s > 0:
            roster.handled(state.job, told.worker, told.handling_s, report.handling_s)
    if follows:
        return
    predicted = _with_ends(prediction)
    for rank, report in state.run.reports.items():
        for carried in report.links:
            link = predicted.get((prediction.stages[rank].worker, carried.peer))
            if link is not None and not others.intersection((link.source, link.target)):
                roster.transferred(state.job, link, carried)


def _with_ends(prediction: Prediction) -> dict[tuple[str, str], LinkPrediction]:
    """Each link with the time that both ends take to handle its messages: as measured, they are under way
    until then, and around the ends' actions it is counted already."""
    links = Counter(end for link in prediction.links for end in (link.source, link.target))
    each_s: dict[str, float] = defaultdict(float)  # of a link's end at a worker
    for told in prediction.stages:
        each_s[told.worker] += told.handling_s / max(1, links[told.worker])
    return {
        (link.source, link.target): replace(
            link, under_way_s=link.under_way_s + each_s[link.source] + each_s[link.target]
        )
        for link in prediction.links
    }
