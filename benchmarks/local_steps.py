"""Held-out loss of every exchange against tokens, bytes and simulated time, on the demo's text.

Four ranks in one process train a small GPT, each on its own quarter of the text, through the real stages,
rules and rounds; links of 10 Mbit/s and 20 ms are simulated, and a local step takes 50 ms of that time. All
methods see the same windows in the same steps. `one machine` does the four ranks' steps by itself.

`efficiency`: tokens after which the exact mean stays at a held-out loss, over those after which the method
does; the median of several losses. The loss is that of the average of the ranks' models.

  python -m benchmarks.local_steps --seeds 3 --state runs.jsonl --plot docs/img/local-steps.png --json
  python -m benchmarks.local_steps --small --methods mean,diloco_50
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.data import standard_library_text
from atoll.errors import UsageError
from atoll.exchange import Exchange
from atoll.job import Optimizer, OptimizerName, ParamGroup, Schedule, ScheduleKind, TrainingSpec
from atoll.program import stage_programs
from benchmarks.harness import conclude, execute, machine, parser
from coordinator.capture.capture import capture
from examples.gpt import GPT
from experiments.exchanges import EXCHANGES
from tests.inprocess.network import uniform_network
from tests.inprocess.peers import LocalPeers, WholeModel

RANKS = 4
WIDTH, LAYERS, HEADS, LENGTH = 32, 2, 4, 32
WINDOWS = 16  # of a rank a step
TOKENS = RANKS * WINDOWS * LENGTH  # a step of all ranks
TEXT_BYTES, HELD_OUT = 8_000_000, 0.05  # as the demo's
EVAL_BATCHES = 16
STEPS, EVALUATIONS = 250, 25
LEARNING_RATE, WARMUP = 3e-3, 0.05  # warm-up as a share of the steps
MUON_RATE = 1.6e-2  # the best of 3e-3, 8e-3 and 1.6e-2 for DiLoCo at H = 50, seed 0
STEP_S, RATE, DELAY_S = 0.05, 10e6 / 8, 0.02  # seconds a local step; bytes/s and seconds of every link
LEVELS = 8  # losses at which tokens are compared
BEGIN = 0.25  # share of the exact mean's tokens at which the highest of them is reached
EXACT = "mean"
SHOWN = 1.2  # nats above the least loss that the picture shows
SMALL = {"steps": 12, "evaluations": 4, "eval_batches": 2}

ADAMW = Optimizer(
    lr=LEARNING_RATE,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    clip_norm=1.0,
    groups=(ParamGroup(patterns=("*.bias", "*norm*", "positions.*"), weight_decay=0.0),),
)
MUON = replace(ADAMW, name=OptimizerName.MUON, lr=MUON_RATE)
SIGNS = Optimizer(OptimizerName.SGD, lr=LEARNING_RATE)  # of results that are signs: DeMo's own step

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """An exchange with its settings; none: one machine. ``exact``: share of the steps before it, in which the
    exact mean is exchanged."""

    exchange: Exchange | None
    text: str
    exact: float = 0.0
    optimizer: Optimizer = ADAMW


def _few_bits(name: str, text: str, optimizer: Optimizer) -> dict[str, Method]:
    """DiLoCo whose changes travel in 32, 4 and 2 bits an element; what the codec loses is sent next time."""
    widths = {"": Exchange("diloco", every=50)}
    widths |= {f"_{32 // n}bit": Exchange("diloco", every=50, codec="eden", ratio=float(n)) for n in (8, 16)}
    return {
        name + word: Method(exchange, text + (word and f", {word[1]} bits"), optimizer=optimizer)
        for word, exchange in widths.items()
    }


def _known() -> dict[str, Method]:
    """Methods whose rule is in the catalogue; of a rule without an entry here its own defaults."""
    found = {
        "one_machine": Method(None, "one machine, all tokens; `sum` on any number of peers"),
        "mean": Method(Exchange("mean"), "exact mean every step"),
        "mean_int8": Method(Exchange("mean", codec="int8_block"), "mean, int8_block"),
        "mean_topk100": Method(Exchange("mean", codec="topk", ratio=100.0), "mean, topk:100"),
        "mean_topk10": Method(Exchange("mean", codec="topk", ratio=10.0), "mean, topk:10"),
        "powersgd": Method(Exchange("powersgd", ratio=16.0), "powersgd, ratio 16"),
        "acp_sgd": Method(Exchange("acp_sgd", ratio=16.0), "acp_sgd, ratio 16"),
        "never": Method(Exchange("diloco", every=10**9), "no exchange; averaged when evaluated"),
        "diloco_10": Method(Exchange("diloco", every=10), "diloco, H = 10"),
        "diloco_100": Method(Exchange("diloco", every=100), "diloco, H = 100"),
        "diloco_50_warm": Method(
            Exchange("diloco", every=50), "diloco, H = 50, after a quarter with the exact mean", exact=0.25
        ),
        **_few_bits("diloco_50", "diloco, H = 50", ADAMW),
        **_few_bits("diloco_50_muon", "diloco with Muon inside, H = 50", MUON),
        "streaming": Method(
            Exchange("streaming_diloco", every=12, fragments=4, delay=5),
            "streaming_diloco, 4 fragments, H = 48, delay 5",
        ),
        "sparseloco_50": Method(
            Exchange("sparseloco", every=50, ratio=200.0), "sparseloco, H = 50, ratio 200"
        ),
        "sparseloco_10": Method(
            Exchange("sparseloco", every=10, ratio=200.0), "sparseloco, H = 10, ratio 200"
        ),
        "demo": Method(Exchange("demo", ratio=100.0), "demo, ratio 100, plain SGD", optimizer=SIGNS),
        "random_k": Method(Exchange("random_k", ratio=100.0), "random_k, ratio 100"),
        "gtopk": Method(Exchange("gtopk", ratio=100.0), "gtopk, ratio 100"),
        "ok_topk": Method(Exchange("ok_topk", ratio=100.0), "ok_topk, ratio 100"),
        "saps_100": Method(Exchange("saps", ratio=100.0), "saps, c = 100"),
        "swarm_5": Method(Exchange("swarm", every=5), "swarm, bursts of 5"),
        "wagma": Method(Exchange("wagma"), "wagma, groups of 2"),
    }
    # With nobody late `eager` is the mean, and `sum` is one machine.
    named = {"sum", "eager"} | {m.exchange.rule for m in found.values() if m.exchange}
    for rule in EXCHANGES.keys() - named:
        found[rule] = Method(Exchange(rule, ratio=100.0), f"{rule}, ratio 100")
    return {n: m for n, m in found.items() if m.exchange is None or m.exchange.rule in EXCHANGES}


METHODS = _known()


@dataclass(frozen=True)
class Point:
    """State after ``step`` steps: tokens of all ranks, bytes sent by the busiest, simulated seconds."""

    step: int
    tokens: int
    loss: float
    sent_bytes: int
    time_s: float


@dataclass(frozen=True)
class Size:
    """Length of a run."""

    steps: int = STEPS
    evaluations: int = EVALUATIONS
    eval_batches: int = EVAL_BATCHES


@dataclass(frozen=True)
class Text:
    """Shares of the ranks and the part kept for evaluation, bytes."""

    shares: Sequence[np.ndarray]
    held_out: np.ndarray
    seed: int

    @classmethod
    def of(cls, seed: int) -> Text:
        text = np.frombuffer(_text(), dtype=np.uint8)
        train, held_out = np.split(text, [int(len(text) * (1.0 - HELD_OUT))])
        return cls(np.array_split(train, RANKS), held_out, seed)

    def batch(self, rank: int, step: int) -> Inputs:
        """The rank's windows of a step."""
        share = self.shares[rank]
        starts = np.random.default_rng((self.seed, rank, step)).integers(0, len(share) - LENGTH, WINDOWS)
        return _windows(share, starts)

    def evaluation(self, batches: int) -> list[Inputs]:
        """Windows spread evenly over the held-out text."""
        starts = np.linspace(0, len(self.held_out) - LENGTH, batches * WINDOWS).astype(np.int64)
        return [_windows(self.held_out, some) for some in np.split(starts, batches)]


@lru_cache(maxsize=1)
def _text() -> bytes:
    return standard_library_text(TEXT_BYTES)


def _windows(text: np.ndarray, starts: np.ndarray) -> Inputs:
    return {"tokens": torch.from_numpy(text[starts[:, None] + np.arange(LENGTH)]).long()}


# ---------------------------------------------------------------- one run


@lru_cache(maxsize=4)
def whole_model(size: Size, seed: int, n_micro: int, optimizer: Optimizer = ADAMW) -> WholeModel:
    """The small GPT, trained as the demo trains its larger one."""
    torch.manual_seed(seed)
    module = GPT(WIDTH, LAYERS, HEADS, LENGTH)
    training = TrainingSpec(
        steps=size.steps,
        n_micro=n_micro,
        seed=seed,
        optimizer=optimizer,
        schedule=Schedule(ScheduleKind.COSINE, warmup_steps=int(WARMUP * size.steps), final=0.1),
    )
    example = {"tokens": torch.zeros(WINDOWS, LENGTH, dtype=torch.long)}
    captured = capture(module, example, training)
    (program,) = stage_programs(captured.train, (0,))
    (evaluation,) = stage_programs(captured.evaluation, (0,))
    tensors = {name: {"value": tensor} for name, tensor in captured.state.items()}
    states = {**captured.train.parameters, **captured.train.buffers}
    return WholeModel(program, training, tensors, evaluation, states)


def train(method: Method, size: Size, seed: int) -> list[Point]:
    """Train by one method; its curve, from before the first step."""
    text = Text.of(seed)
    alone = method.exchange is None
    ranks = 1 if alone else RANKS
    network = uniform_network(ranks, RATE, DELAY_S)
    step_s = STEP_S * RANKS / ranks
    peers = LocalPeers(
        whole_model(size, seed, RANKS // ranks, method.optimizer),
        Exchange(EXACT),
        ranks,
        network=network,
        seconds=lambda rank, step: step_s,
    )

    def batches(rank: int, step: int) -> list[Inputs]:
        return [text.batch(one, step) for one in (range(RANKS) if alone else [rank])]

    held_out = text.evaluation(size.eval_batches)
    sent = [0] * ranks
    found = [Point(0, 0, peers.evaluate(held_out), 0, 0.0)]
    begin = round(method.exact * size.steps)
    for step in range(size.steps):
        if step == begin and method.exchange is not None:
            peers.begin(method.exchange)
        figures = peers.step(step, batches)
        sent = [before + more for before, more in zip(sent, figures.sent_bytes, strict=True)]
        if (step + 1) % (size.steps // size.evaluations) == 0:
            loss = peers.evaluate(held_out)
            found.append(Point(step + 1, (step + 1) * TOKENS, loss, max(sent), figures.time_s))
    return found


# ---------------------------------------------------------------- figures


def reached(curve: Sequence[Point], loss: float, of: Callable[[Point], float]) -> float | None:
    """Tokens, bytes or seconds from which on a curve stays at this loss or below, between its points by
    interpolation; None: never."""
    above = [at for at, point in enumerate(curve) if point.loss > loss]
    if not above:
        return of(curve[0])
    if above[-1] == len(curve) - 1:
        return None
    before, after = curve[above[-1]], curve[above[-1] + 1]
    share = (before.loss - loss) / (before.loss - after.loss)
    return of(before) + share * (of(after) - of(before))


def at_a_quarter(exact: Sequence[Point]) -> float:
    """Loss after a quarter of a curve's tokens."""
    return next(point.loss for point in exact if point.tokens >= BEGIN * exact[-1].tokens)


def efficiency(exact: Sequence[Point], other: Sequence[Point]) -> float:
    """Median over losses of the tokens that ``exact`` needs to them over those that ``other`` needs.

    The losses lie evenly from what ``exact`` has after a quarter of its tokens to the worse of both ends, or
    are the other's end alone where that is above the quarter's."""
    high = at_a_quarter(exact)
    low = max(exact[-1].loss, other[-1].loss)
    levels = np.linspace(high, low, LEVELS) if low < high else [low]
    ratios = []
    for level in levels:
        mine = reached(exact, float(level) + 1e-9, lambda point: point.tokens)
        its = reached(other, float(level) + 1e-9, lambda point: point.tokens)
        if mine is not None and its:
            ratios.append(mine / its)
    return statistics.median(ratios) if ratios else 0.0


Curves = Mapping[int, Sequence[Point]]  # by seed


def row(exact: Curves, curves: Curves) -> dict[str, Any]:
    """A method's figures, means over its seeds; ``low`` and ``high`` are their extremes."""
    last = [curve[-1] for curve in curves.values()]
    over = [curves[s][-1].loss / exact[s][-1].loss - 1.0 for s in curves]
    efficiencies = [efficiency(exact[s], curves[s]) for s in curves]
    times = [reached(curves[s], at_a_quarter(exact[s]), lambda point: point.time_s) for s in curves]
    known = [time_s for time_s in times if time_s is not None]
    return {
        "seeds": len(curves),
        "loss": statistics.mean(p.loss for p in last),
        "over_exact": statistics.mean(over),
        "over_exact_low": min(over),
        "over_exact_high": max(over),
        "efficiency": statistics.mean(efficiencies),
        "efficiency_low": min(efficiencies),
        "efficiency_high": max(efficiencies),
        "bytes_a_step": statistics.mean(p.sent_bytes / p.step for p in last),
        "time_s": statistics.mean(p.time_s for p in last),
        "time_to_quarter_s": statistics.mean(known) if len(known) == len(times) else None,
    }


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """The table, as docs/data-parallel.md has it."""
    print(
        "| method | loss | over the mean's | efficiency | KiB a step | s | s to the mean's quarter | seeds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, it in rows.items():
        quarter = "never" if it["time_to_quarter_s"] is None else f"{it['time_to_quarter_s']:.0f}"
        print(
            f"| {METHODS[name].text} | {it['loss']:.3f} | {it['over_exact']:+.1%} "
            f"| {it['efficiency']:.2f} ({it['efficiency_low']:.2f} to {it['efficiency_high']:.2f}) "
            f"| {it['bytes_a_step'] / 1024:.3g} | {it['time_s']:.0f} | {quarter} | {it['seeds']} |"
        )


def plot(results: Mapping[str, Curves], path: Path) -> None:
    """Loss against tokens, bytes and simulated time, means over the seeds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12.0, 5.0), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        for number, (name, curves) in enumerate(results.items()):
            points = [
                [
                    statistics.mean(getattr(p, key) for p in at)
                    for key in ("tokens", "sent_bytes", "time_s", "loss")
                ]
                for at in zip(*curves.values(), strict=True)
            ]
            tokens, sent, times, losses = ([p[i] for p in points[1:]] for i in range(4))
            style = "--" if number >= 10 else "-"
            for panel, xs in zip(
                panels, ([t / 1e3 for t in tokens], [b / 2**20 for b in sent], times), strict=True
            ):
                if xs[-1] > 0:  # one machine sends nothing
                    panel.plot(xs, losses, style, color=colours[number % 10], label=name, linewidth=1.1)
        least = min(point.loss for curves in results.values() for curve in curves.values() for point in curve)
        panels[0].set(xlabel="thousand tokens, all ranks", ylabel="held-out loss, nats a byte")
        panels[0].set_ylim(least - 0.05, least + SHOWN)
        panels[1].set(xlabel="MiB sent by the busiest rank", xscale="log")
        panels[2].set(xlabel="simulated seconds, 10 Mbit/s", xscale="log")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90)


# ---------------------------------------------------------------- command


def stored(path: Path | None) -> dict[str, list[Point]]:
    """Curves of the runs that a state file holds, by key."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["key"]: [Point(**point) for point in line["curve"]] for line in lines}


def key_of(method: Method, size: Size, seed: int) -> str:
    """What a run's curve depends on."""
    model = (WIDTH, LAYERS, HEADS, LENGTH, WINDOWS, WARMUP, STEP_S, RATE, DELAY_S)
    return f"{method.exchange} {method.exact:g} {method.optimizer!r} {model} {size} {seed}"


def run_all(
    names: Sequence[str], size: Size, seeds: Sequence[int], state: Path | None, *, only_stored: bool = False
) -> dict[str, Curves]:
    """Curves by method and seed; runs that ``state`` holds are not repeated, new ones are added to it."""
    known = stored(state)
    results: dict[str, dict[int, Sequence[Point]]] = {name: {} for name in names}
    for seed in seeds:
        for name in names:
            key = key_of(METHODS[name], size, seed)
            if key not in known and only_stored:
                continue
            if key not in known:
                known[key] = train(METHODS[name], size, seed)
                if state is not None:
                    with state.open("a") as file:
                        curve = [asdict(point) for point in known[key]]
                        file.write(json.dumps({"key": key, "curve": curve}) + "\n")
            results[name][seed] = known[key]
            print(f"seed {seed} {name:<14} {known[key][-1].loss:.4f}", flush=True)
    return {name: curves for name, curves in results.items() if curves}


def main() -> int:
    """Train by all methods, print the table."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=1, help="so many, from --seed on")
    made.add_argument("--methods", help=f"some of {','.join(METHODS)}")
    made.add_argument("--steps", type=int, help=f"of every rank (default {STEPS})")
    made.add_argument("--small", action="store_true", help="a few steps, for a look")
    made.add_argument("--state", type=Path, help="file that keeps finished runs")
    made.add_argument("--only-stored", action="store_true", help="train nothing: report what --state holds")
    made.add_argument("--plot", type=Path, help="picture of the curves")
    options = made.parse_args()
    names = options.methods.split(",") if options.methods else list(METHODS)
    if unknown := [name for name in names if name not in METHODS]:
        raise UsageError(f"--methods {options.methods}: {unknown[0]!r} is none of {','.join(METHODS)}")
    names = [EXACT, *(name for name in names if name != EXACT)]
    size = Size(**SMALL) if options.small else Size()
    if options.steps is not None:
        if options.steps < 1:
            raise UsageError(f"--steps {options.steps}; at least 1")
        size = replace(size, steps=options.steps, evaluations=min(size.evaluations, options.steps))
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.seeds)
    results = run_all(names, size, seeds, options.state, only_stored=options.only_stored)
    if not results.get(EXACT):
        raise UsageError(f"--only-stored: {options.state} holds no run of the exact mean of this size")
    rows = {name: row(results[EXACT], curves) for name, curves in results.items()}
    show(rows)
    if options.plot:
        plot(results, options.plot)
        print(f"drawn in {options.plot}")
    curves = {
        name: {seed: [asdict(point) for point in curve] for seed, curve in by_seed.items()}
        for name, by_seed in results.items()
    }
    figures = {"seed": options.seed, "seeds": options.seeds, "steps": size.steps, "machine": machine()}
    return conclude({**figures, "methods": rows, "curves": curves}, options.json)


if __name__ == "__main__":
    execute(main)
