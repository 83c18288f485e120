"""Anomalies: whose figures are no longer what they were while its peers' still are.

TRANSOM names and replaces whoever's figures stand out (papers/decentralized.md 7, TEE). How it judges could
not be read, so the rule is the proposal that stands there: a robust score, |x - median of the peers| > 5 MAD
for three windows. Two things are ours. Stages differ, so a figure counts as a multiple of what the same
worker had under the same plan before; and of a handful of peers a MAD may be 0. So it is at least a share of
the median. Only what grew is odd. A NaN is not scored but done again (``doubt``), silence is ``stuck``'s.
Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING

from atoll.step_loss import step_loss
from coordinator.membership.links.table import MIN_GOODPUT_BYTES

if TYPE_CHECKING:
    from coordinator.messages.events import StepReady
    from coordinator.messages.jobs import JobState

LIMIT = 5.0  # MADs
WINDOW_STEPS = 5
WINDOWS = 3  # in a row, before a worker is replaced
FIRST_STEPS = 2  # of a plan: caches fill, kernels are chosen
USUAL_WINDOWS = 12  # that tell what is usual
REPLAN_S = 60.0  # what a new plan costs beside the steps since the last checkpoint


class Kind(StrEnum):
    """Figure of a worker's reports that is scored."""

    COMPUTE = "compute"  # seconds of a step
    LINK = "link"  # seconds that a byte to a peer takes
    LOSS = "loss"
    NORM = "norm"  # of the stage's gradient, where it is reported: where gradients are clipped


LEAST_SPREAD = {Kind.COMPUTE: 0.2, Kind.LINK: 0.4, Kind.LOSS: 2.0, Kind.NORM: 2.0}
"""The least MAD, as a share of the median: below 2, 3 or 11 times what its peers show nothing is odd. Norms
and losses of an honest run move by far more than its times."""

REPLACED = frozenset({Kind.COMPUTE, Kind.LINK, Kind.NORM})
"""A loss is the whole model's: who reports it has only added it up, so it is named and stays."""


@dataclass(frozen=True, slots=True)
class Key:
    """A figure that is followed; ``peer``: the other end of a link."""

    kind: Kind
    worker: str
    peer: str = ""

    @property
    def ends(self) -> frozenset[str]:
        return frozenset(filter(None, (self.worker, self.peer)))


@dataclass(frozen=True, slots=True)
class Alarm:
    """A figure that stands out: what it is and was, ``windows`` in a row, since the step ``first_step``."""

    key: Key
    value: float
    usual: float
    windows: int
    first_step: int

    @property
    def persists(self) -> bool:
        return self.windows >= WINDOWS

    def words(self, label: Callable[[str], str] = str) -> str:
        """Return the alarm in words."""
        times = f"{self.value / self.usual:.1f} times the usual"
        match self.key.kind:
            case Kind.COMPUTE:
                what = f"slow: computes {self.value:.3g} s a step, {times} {self.usual:.3g} s"
            case Kind.LINK:
                ends = f"{label(self.key.worker)} to {label(self.key.peer)}"
                rate, usual = 8e-6 / self.value, 8e-6 / self.usual
                what = f"slow link from {ends}: {rate:.3g} Mbit/s, usual are {usual:.3g}"
            case Kind.LOSS:
                what = f"odd loss: reports {self.value:.3g}, {times} {self.usual:.3g}"
            case Kind.NORM:
                what = f"odd gradient: its norm is {self.value:.3g}, {times} {self.usual:.3g}"
        return f"{what}, since step {self.first_step + 1}"


def score(value: float, peers: Sequence[float], spread: float) -> float:
    """Return by how many MADs ``value`` lies above the median of ``peers``, or above 1, the usual, where that
    is more: peers that become quicker make nobody slow.

    ``spread``: the least MAD, as a share of that, > 0.
    """
    middle = median(peers) if peers else 1.0
    mad = median(abs(peer - middle) for peer in peers) if peers else 0.0
    middle = max(middle, 1.0)
    return (value - middle) / max(mad, spread * middle)


def odd(values: Mapping[Key, float], noise: Mapping[Key, float]) -> set[Key]:
    """Return the figures that stand out, each as a multiple of what is usual for it, > 0.

    A figure's peers are those of its kind that share no worker with it. ``noise``: the MAD of a figure's own
    past, as a share of the usual.
    """
    found = set()
    for key, value in values.items():
        spread = max(LEAST_SPREAD[key.kind], noise.get(key, 0.0))
        if score(value, (), spread) <= LIMIT:  # no peers make it odder: most need not be held against them
            continue
        peers = [
            v for other, v in values.items() if other.kind is key.kind and key.ends.isdisjoint(other.ends)
        ]
        if score(value, peers, spread) > LIMIT:
            found.add(key)
    return found


def figures(worker: str, report: StepReady) -> dict[Key, float]:
    """Return what a report tells of its worker; what is not above 0 tells nothing."""
    links = {
        Key(Kind.LINK, worker, link.peer): link.busy_s / link.n_bytes
        for link in report.links
        if link.n_bytes >= MIN_GOODPUT_BYTES
    }
    found = {
        Key(Kind.COMPUTE, worker): report.computed_s,
        Key(Kind.LOSS, worker): step_loss(report.losses, report.weights).mean,
        Key(Kind.NORM, worker): math.sqrt(sum(report.square_norms)),
        **links,
    }
    return {key: value for key, value in found.items() if 0.0 < value < math.inf}


def culprit(alarms: Iterable[Alarm]) -> Alarm | None:
    """Return the persisting alarm of the worker that is to go, None where none persists.

    Of a link's two ends the one goes that more of the odd figures have in common, else the one that sends.
    """
    alarms = [alarm for alarm in alarms if alarm.key.kind in REPLACED]
    persisting = [alarm for alarm in alarms if alarm.persists]
    if not persisting:
        return None
    return max(persisting, key=lambda alarm: _involved(alarms, blamed(alarm, alarms)))


def blamed(alarm: Alarm, alarms: Iterable[Alarm]) -> str:
    """Return the worker that an alarm is laid to, in the light of all of them."""
    key, known = alarm.key, list(alarms)
    return key.peer if key.peer and _involved(known, key.peer) > _involved(known, key.worker) else key.worker


def _involved(alarms: Iterable[Alarm], worker: str) -> int:
    return sum(worker in alarm.key.ends for alarm in alarms)


# ---------------------------------------------------------------- over time


@dataclass(slots=True)
class _Series:
    """A figure's values in the window under way, and the medians of earlier ones that were not odd."""

    window: list[float] = field(default_factory=list)
    past: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_WINDOWS))
    odd: int = 0  # windows in a row
    first_step: int = 0

    @property
    def usual(self) -> float:
        return median(self.past)

    @property
    def noise(self) -> float:
        """MAD of the past, as a share of its median."""
        return median(abs(value - self.usual) for value in self.past) / self.usual


@dataclass(slots=True)
class Watched:
    """A job under one plan; ``alarms``: of the newest window."""

    assigned: int  # version that the plan was assigned under
    alarms: tuple[Alarm, ...] = ()
    _steps: int = 0  # seen under this plan
    _series: defaultdict[Key, _Series] = field(default_factory=lambda: defaultdict(_Series))
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_WINDOWS))  # without alarms

    def committed(self, state: JobState) -> bool:
        """Take in the newest committed step's reports; True when a window has ended with it."""
        self._steps += 1
        if self._steps <= FIRST_STEPS or state.plan is None:
            return False
        for rank, report in state.run.reports.items():
            for key, value in figures(state.plan.places[rank].worker, report).items():
                self._series[key].window.append(value)
        if (self._steps - FIRST_STEPS) % WINDOW_STEPS:
            return False
        self._close(state.step - WINDOW_STEPS)
        if not self.alarms:
            self._step_s.append(_step_s(state))
        return True

    def _close(self, first_step: int) -> None:
        medians = {
            key: median(s.window) for key, s in self._series.items() if 2 * len(s.window) > WINDOW_STEPS
        }
        known = {key: self._series[key] for key in medians if self._series[key].past}
        outliers = odd(
            {key: medians[key] / series.usual for key, series in known.items()},
            {key: series.noise for key, series in known.items()},
        )
        alarms = []
        for key, series in self._series.items():
            series.window = []
            if key not in outliers:
                series.odd = 0
                series.past.extend([medians[key]] if key in medians else [])
                continue
            series.first_step = series.first_step if series.odd else first_step
            series.odd += 1
            alarms.append(Alarm(key, medians[key], series.usual, series.odd, series.first_step))
        self.alarms = tuple(alarms)

    def worth(self, alarm: Alarm, state: JobState) -> bool:
        """Whether going on without the worker gains more time than it costs; where its figures are not
        about time it always does."""
        if alarm.key.kind not in (Kind.COMPUTE, Kind.LINK):
            return True
        if not self._step_s:
            return False
        usual_s = median(self._step_s)
        gained_s = (state.steps - state.step) * (_step_s(state) - usual_s)
        return gained_s > REPLAN_S + (state.step - state.checkpoint.step) * usual_s


def _step_s(state: JobState) -> float:
    return median(state.run.step_times_s[-WINDOW_STEPS:] or (0.0,))
