"""Schedules in closed form: equal stages, links that take time only by their delay.

Each schedule is written as the list of every device's turns, and a step of it is timed by the planner's own
timeline. Devices D, micro-batches N; a device has 1/D of the model, in one stage or in two pieces. Times are
those of one micro-batch on 1/D of the model, whatever the number of pieces.

- ``gpipe``, ``1f1b``, ``zero-bubble``: one stage a device, as the product runs them.
- ``v``, ``v-zero-bubble``: device d has the pieces d and 2D-1-d, in the order of
  ``atoll.microbatch.in_turn``.
- ``replicas``: two pipelines of D/2 devices, each for half of the micro-batches; weights are held twice.
- ``interleaved``: device d has the pieces d and D+d. Source: Narayanan 2021, "Efficient Large-Scale Language
  Model Training on GPU Clusters Using Megatron-LM", section 2.2.
- ``zb-v``: the V with a list of its own. Source: Qi 2024, "Pipeline Parallelism with Controllable Memory",
  section 3; each device holds at most the activations of D micro-batches.
- ``chimera``: two pipelines through the same devices in opposite order, each for half of the micro-batches;
  weights are held twice, and gradients of the two holders are summed. Source: Li 2021, "Chimera: Efficiently
  Training Large-Scale Neural Networks with Bidirectional Pipelines", section 3.1 and 3.5 (units of D
  micro-batches, concatenated). ``chimera-zero-bubble`` is the same with weight gradients deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from operator import itemgetter
from typing import Any, NamedTuple

from atoll.errors import UsageError
from atoll.microbatch import Action, Work, merged, one_f_one_b
from coordinator.planning.costs.timeline import simulate
from coordinator.planning.costs.traffic import Hop
from coordinator.planning.costs.workload import Route, StageLoad, Wire, Workload

FREE = Wire(per_message_s=0.0, header_bytes=0, commit_s=0.0)
DEPTHS = (0.5, 0.75, 0.875, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Warm-ups that are tried, in those of a pipeline whose stages each wait for all behind them. Deeper ones are
for links with delay, shallower ones for a V, in which a micro-batch passes two pieces of a device."""


class Turn(NamedTuple):
    """Work of a device: micro-batches are numbered in each pipeline, stages through all of them."""

    work: Work
    stage: int
    micro: int


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one micro-batch on 1/D of the model; whole numbers, so that sums are exact."""

    forward_ms: float
    backward_ms: float  # whole
    weights_ms: float  # the part of it that can come later
    hop_ms: float = 0.0  # one way between two devices

    def __str__(self) -> str:
        return f"F {self.forward_ms:g} ms, B {self.backward_ms:g} ms, of it W {self.weights_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Turns of every device in one step."""

    devices: tuple[int, ...]  # by stage; the stages of one pipeline are numbered after those of another
    pipelines: int
    turns: tuple[tuple[Turn, ...], ...]  # by device

    @property
    def n_stages(self) -> int:
        """Return the stages of one pipeline."""
        return len(self.devices) // self.pipelines

    @property
    def size(self) -> float:
        """Return the part of 1/D of the model that a stage is."""
        return len(self.turns) / self.n_stages

    @property
    def weights(self) -> float:
        """Return how often the weights are held."""
        return float(self.pipelines)

    def most_held(self) -> tuple[float, ...]:
        """Return by device the most activations that it holds: 1 is a micro-batch on 1/D of the model.

        A micro-batch is held from its forward to the end of its backward, both parts.
        """
        return tuple(self.size * _most(turns) for turns in self.turns)

    def actions(self, stage: int) -> tuple[Action, ...]:
        """Return a stage's own actions."""
        turns = self.turns[self.devices[stage]]
        return tuple(Action(turn.work, turn.micro) for turn in turns if turn.stage == stage)

    def workload(self, times: Times) -> Workload:
        """Return what the timeline simulates, with milliseconds for its seconds: nothing else takes time."""
        n = self.n_stages
        pairs = [(s, s + 1) for s in range(len(self.devices) - 1) if (s + 1) % n]
        apart = [(a, b) for a, b in pairs if self.devices[a] != self.devices[b]]
        routes = {way: Route(((f"{way}", inf),), times.hop_ms) for a, b in apart for way in ((a, b), (b, a))}
        first_of = {device: stage for stage, device in reversed(list(enumerate(self.devices)))}
        order = sorted(range(len(self.turns)), key=first_of.__getitem__)  # as in Workload.together
        return Workload(
            stages=tuple(self._load(stage, times) for stage in range(len(self.devices))),
            n_micro=max(turn.micro for turns in self.turns for turn in turns) + 1,
            forward=tuple(Hop(a, b, 1, 1) for a, b in pairs),
            backward=tuple(Hop(b, a, 1, 1) for a, b in pairs),
            tied=(),
            routes=routes,
            wire=FREE,
            turns=tuple(tuple(turn.stage for turn in self.turns[device]) for device in order),
        )

    def _load(self, stage: int, times: Times) -> StageLoad:
        parts = (times.forward_ms, times.backward_ms, times.weights_ms)
        forward_ms, backward_ms, weights_ms = (self.size * part for part in parts)
        return StageLoad(
            self.devices[stage],
            forward_ms,
            backward_ms,
            0.0,
            0.0,
            self.actions(stage),
            weights_s=weights_ms,
        )

    def step_ms(self, times: Times) -> float:
        """Return what a step takes by the timeline. ValueError where the turns wait for each other."""
        return simulate(self.workload(times)).step_s


def _most(turns: Sequence[Turn]) -> int:
    late = {turn.stage for turn in turns if turn.work is Work.WEIGHT}
    held = most = 0
    for turn in turns:
        if turn.work is Work.FORWARD:
            held += 1
            most = max(most, held)
        elif turn.work is Work.WEIGHT or turn.stage not in late:
            held -= 1
    return most


# ---------------------------------------------------------------- what the product runs


def gpipe(n_devices: int, n_micro: int) -> Schedule:
    """Return all forwards, then all backwards."""
    return _in_turn(range(n_devices), n_micro, [n_micro] * n_devices)


def one_stage(n_devices: int, n_micro: int, deep: float, held: int = 0) -> Schedule:
    """Return 1F1B with ``deep`` times the usual warm-up; with ``held``, zero-bubble."""
    return _in_turn(range(n_devices), n_micro, _warmups(n_devices, n_micro, deep), held)


def in_a_v(n_devices: int, n_micro: int, deep: float, held: int = 0) -> Schedule:
    """Return 1F1B of two pieces a device, the last device's beside each other."""
    devices = [*range(n_devices), *reversed(range(n_devices))]
    return _in_turn(devices, n_micro, _warmups(2 * n_devices, n_micro, deep), held)


def replicas(n_devices: int, n_micro: int, deep: float, held: int = 0) -> Schedule:
    """Return two pipelines of half of the devices, each for half of the micro-batches."""
    _even(n_devices, n_micro)
    half = n_devices // 2
    one = one_stage(half, n_micro // 2, deep, held)
    beside = tuple(tuple(turn._replace(stage=turn.stage + half) for turn in turns) for turns in one.turns)
    return Schedule(tuple(range(n_devices)), 2, (*one.turns, *beside))


def _warmups(n_stages: int, n_micro: int, deep: float) -> list[int]:
    return [min(n_micro - 1, ceil(deep * later)) for later in reversed(range(n_stages))]


def _in_turn(devices: Sequence[int], n_micro: int, warmups: Sequence[int], held: int = 0) -> Schedule:
    """Return one pipeline with warm-ups that never rise, and the product's order of a device's pieces."""
    own = [one_f_one_b(n_micro, warmup, held) for warmup in warmups]
    turns = []
    for device in range(max(devices) + 1):
        stages = [stage for stage, its in enumerate(devices) if its == device]
        order = merged([own[stage] for stage in stages])
        turns.append(tuple(Turn(action.work, stages[action.piece], action.micro) for action in order))
    return Schedule(tuple(devices), 1, tuple(turns))


# ---------------------------------------------------------------- what no policy chooses


def interleaved(n_devices: int, n_micro: int) -> Schedule:
    """Return interleaved 1F1B of two pieces a device. UsageError unless D divides N."""
    if n_micro % n_devices:
        raise UsageError(f"interleaved: {n_devices} devices do not divide {n_micro} micro-batches")
    total = 2 * n_micro

    def at(k: int, device: int, work: Work) -> Turn:
        group, within = divmod(k, 2 * n_devices)
        piece, micro = divmod(within, n_devices)
        piece = piece if work is Work.FORWARD else 1 - piece
        return Turn(work, piece * n_devices + device, group * n_devices + micro)

    def turns(device: int) -> Iterator[Turn]:
        warmup = min(total, 2 * (n_devices - 1 - device) + n_devices)
        for k in range(total + warmup):
            if k < total:
                yield at(k, device, Work.FORWARD)
            if k >= warmup:
                yield at(k - warmup, device, Work.BACKWARD)

    order = tuple(tuple(turns(device)) for device in range(n_devices))
    return Schedule((*range(n_devices), *range(n_devices)), 1, order)


def zb_v(n_devices: int, n_micro: int) -> Schedule:
    """Return zero-bubble V: at most 2 D pieces' activations a device, no waits between its first forward and
    its last gradient where F, I and W take as long as each other."""
    turns = tuple(
        tuple(turn for turn in _zb_v(n_devices, d, max(n_micro, 2 * n_devices - 1)) if turn.micro < n_micro)
        for d in range(n_devices)
    )
    return Schedule((*range(n_devices), *reversed(range(n_devices))), 1, turns)


def _zb_v(n_devices: int, device: int, n_micro: int) -> Iterator[Turn]:
    """Return the turns of a device; n_micro >= 2 D - 1, which fills the pipeline."""
    stages = device, 2 * n_devices - 1 - device
    done: dict[tuple[Work, int], int] = {}

    def next_of(piece: int, *works: Work) -> Iterator[Turn]:
        for work in works:
            micro = done.get((work, piece), 0)
            if micro < n_micro:
                done[work, piece] = micro + 1
                yield Turn(work, stages[piece], micro)

    ahead, back, late = Work.FORWARD, Work.INPUT, Work.WEIGHT
    for _ in range(2 * (n_devices - device) - 1):
        yield from next_of(0, ahead)
    for _ in range(device):
        yield from next_of(1, ahead)
        yield from next_of(0, ahead)
    for _ in range(n_devices - device):
        yield from next_of(1, ahead, back, late)
    while done.get((ahead, 1), 0) < n_micro:
        yield from next_of(0, ahead, back, late)
        yield from next_of(1, ahead, back, late)
    for _ in range(device):
        yield from next_of(0, back)
        yield from next_of(1, back)
    for _ in range(n_devices - device):
        yield from next_of(0, back, late)
    for piece in (1, 0):
        for _ in range(n_micro):
            yield from next_of(piece, late)


def chimera(n_devices: int, n_micro: int, *, deferred: bool = False) -> Schedule:
    """Return Chimera. UsageError unless D and N are even.

    In slots of one forward or backward, a unit of at most D micro-batches begins every 2 D slots. In each
    direction it injects its i-th micro-batch at slot 2 i; that advances one stage a slot, turns at the last
    one, and comes back one stage a slot. Where a unit has D, no device has two actions in a slot.
    """
    _even(n_devices, n_micro)
    down = [list(_slots(n_devices, n_micro // 2, stage)) for stage in range(n_devices)]
    turns = []
    for device in range(n_devices):
        here = (device, n_devices - 1 - device)  # stages of the two pipelines on this device
        both = sorted(
            (slot, Turn(work, stage + pipeline * n_devices, micro))
            for pipeline, stage in enumerate(here)
            for slot, work, micro in down[stage]
        )
        order = [turn for _, turn in both]
        turns.append(tuple(_deferring(order, n_devices) if deferred else order))
    return Schedule((*range(n_devices), *reversed(range(n_devices))), 2, tuple(turns))


def _slots(n_devices: int, n_micro: int, stage: int) -> Iterator[tuple[int, Work, int]]:
    """(slot, work, micro-batch) of a stage in one direction."""
    unit = n_devices // 2
    for micro in range(n_micro):
        begin = micro // unit * 2 * n_devices + 2 * (micro % unit)
        yield begin + stage, Work.FORWARD, micro
        yield begin + 2 * n_devices - 1 - stage, Work.BACKWARD, micro


def _deferring(order: Sequence[Turn], most: int) -> Iterator[Turn]:
    """Return the order with backwards in two parts, at most ``most`` + 1 micro-batches held."""
    pending: list[Turn] = []
    held = 0
    for turn in order:
        if turn.work is Work.FORWARD:
            if held > most and pending:
                held -= 1
                yield pending.pop(0)
            held += 1
            yield turn
        else:
            yield turn._replace(work=Work.INPUT)
            pending.append(turn._replace(work=Work.WEIGHT))
    yield from pending


def _even(n_devices: int, n_micro: int) -> None:
    if n_devices % 2 or n_micro % 2 or min(n_devices, n_micro) < 2:
        raise UsageError(f"{n_devices} devices, {n_micro} micro-batches: both halves need as many")


# ---------------------------------------------------------------- the table

Family = Callable[[int, int, float, int], Schedule]  # devices, micro-batches, depth, held

PRODUCT: dict[str, Family] = {
    "gpipe": lambda n_devices, n_micro, *_: gpipe(n_devices, n_micro),
    "1f1b": one_stage,
    "zero-bubble": one_stage,
    "v": in_a_v,
    "v-zero-bubble": in_a_v,
    "replicas": replicas,
    "replicas, zero-bubble": replicas,
}
BIDIRECTIONAL: dict[str, Callable[[int, int], Schedule]] = {
    "chimera": chimera,
    "chimera-zero-bubble": partial(chimera, deferred=True),
}
OTHERS: dict[str, Callable[[int, int], Schedule]] = {
    "interleaved": interleaved,
    "zb-v": zb_v,
    **BIDIRECTIONAL,
}


def plain(n_devices: int, n_micro: int) -> Schedule:
    """Return 1F1B with the warm-up of links without delay: what published figures compare with."""
    return one_stage(n_devices, n_micro, 1.0)


def built(name: str, n_devices: int, n_micro: int) -> list[Schedule]:
    """Return the schedules of that name: of the product's, one for each warm-up and number held."""
    if name in OTHERS:
        return [OTHERS[name](n_devices, n_micro)]
    held = [n_devices // 2, n_devices, n_devices + 1, 2 * n_devices] if "zero-bubble" in name else [0]
    depths = DEPTHS if name.startswith("v") else [deep for deep in DEPTHS if deep == int(deep)]
    return [PRODUCT[name](n_devices, n_micro, deep, most) for deep in depths for most in held]


def soonest(name: str, n_devices: int, n_micro: int, times: Times) -> tuple[float, Schedule]:
    """Return the milliseconds of the fastest step of that name and its schedule: of several the one that
    holds the least."""
    timed = [(schedule.step_ms(times), schedule) for schedule in built(name, n_devices, n_micro)]
    return min(timed, key=lambda found: (found[0], max(found[1].most_held())))


def rows(times: Times, n_devices: int, n_micro: int) -> list[dict[str, Any]]:
    """Return a row a schedule: its step, what it takes of 1f1b's, its memory."""
    base_ms = soonest("1f1b", n_devices, n_micro, times)[0]
    found = []
    for name in (*PRODUCT, *OTHERS):
        step_ms, schedule = soonest(name, n_devices, n_micro, times)
        found.append(
            {
                "schedule": name,
                "n_devices": n_devices,
                "n_micro": n_micro,
                "hop_ms": times.hop_ms,
                "step_ms": step_ms,
                "faster_than_1f1b": round(base_ms / step_ms, 4),
                "idle": round(1.0 - n_micro * (times.forward_ms + times.backward_ms) / step_ms, 4),
                "activations": max(schedule.most_held()),
                "weights": schedule.weights,
            }
        )
    return found


def lead(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by how much the better bidirectional schedule is ahead of the best other one of ``rows``.

    ``spare_ms`` is what remains for the sum of gradients that the bidirectional one needs in each step; it is
    negative where another one is ahead without that.
    """
    both = min((row for row in found if row["schedule"] in BIDIRECTIONAL), key=itemgetter("step_ms"))
    other = min((row for row in found if row["schedule"] not in BIDIRECTIONAL), key=itemgetter("step_ms"))
    return {
        **{name: both[name] for name in ("schedule", "n_devices", "n_micro", "hop_ms")},
        "other": other["schedule"],
        "ahead": round(other["step_ms"] / both["step_ms"], 4),
        "spare_ms": other["step_ms"] - both["step_ms"],
    }
