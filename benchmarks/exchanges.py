"""Exchanges of gradients beside exact data parallelism: final accuracy and bytes, eight workers, a small net.

Every rule of the catalogue that exchanges gradients each step, and the mean through codecs, in process,
through the real rules and rounds. Plain SGD on handwritten digits, a fifth held out; all rules see the same
batches. DeMo's steps are signs and have a learning rate of their own. Bytes are those of the packets that
the busiest rank sends, ratio dense bytes over them; regions the largest share of the parts' bytes at an owner
over the mean one, averaged over steps.

  python -m benchmarks.exchanges --json
  python -m benchmarks.exchanges --rule gtopk --rule mean:topk --seeds 1
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.collective import TOTAL
from atoll.errors import UsageError
from atoll.exchange import Content, Exchange, ExchangeRound, Pattern
from benchmarks.gossip import LAYERS, LR, Digits, digits
from benchmarks.harness import execute, parser
from experiments.exchanges import EXCHANGES, make_rule
from strategies.exchanges.base import ExchangeRule, Flat
from tests.inprocess.exchange import Faults, run_round
from worker.exchange.round import Message

WORKERS, STEPS, SEEDS = 8, 400, 3
SHAPES = tuple(shape for fan_in, fan_out in LAYERS for shape in ((fan_in, fan_out), (fan_out,)))
RATIO = 50.0  # of rules that keep some elements: about 1.6 % with their positions
RATIOS = {"sum": 1.0, "mean": 1.0, "eager": 1.0, "powersgd": 8.0, "acp_sgd": 8.0}
RATES = {"demo": 0.002}  # learning rates other than gossip's
MARGIN = 0.02  # of accuracy, below exact data parallelism


@dataclass(frozen=True)
class Figures:
    """One rule, averaged over seeds."""

    rule: str
    accuracy: float
    dense_accuracy: float
    bytes_per_step: float  # of the busiest rank
    ratio: float
    regions: float | None  # None: no segment owners

    @property
    def below_dense(self) -> float:
        return self.dense_accuracy - self.accuracy


@dataclass(frozen=True)
class Trained:
    """One training, or the mean of several."""

    accuracy: float
    bytes_per_step: float
    regions: float | None


def settings() -> dict[str, Exchange]:
    """Exchanges to compare, by name: a rule's, or rule:codec."""
    found = {
        name: Exchange(name, ratio=RATIOS.get(name, RATIO))
        for name, facts in EXCHANGES.items()
        if facts.content is Content.GRADIENT
    }
    found["mean:topk"] = Exchange("mean", codec="topk", ratio=RATIO)
    found["mean:int8_block"] = Exchange("mean", codec="int8_block")
    return found


@dataclass
class Traffic:
    """Bytes of the messages of one training."""

    sent: Counter[int] = field(default_factory=Counter)
    parts: Counter[int] = field(default_factory=Counter)  # by owner, of the step under way
    regions: list[float] = field(default_factory=list)

    def passes(self, message: Message) -> Message:
        """Count a message, which arrives as it is."""
        self.sent[message.source] += message.wire_bytes
        if message.label != TOTAL:
            self.parts[message.target] += message.wire_bytes
        return message

    def end_step(self, ranks: int) -> None:
        if self.parts:
            self.regions.append(max(self.parts.values()) * ranks / self.parts.total())
        self.parts.clear()


def train(problem: Digits, exchange: Exchange, steps: int) -> Trained:
    """Train one net with the gradients of all ranks. Raises RuntimeError where ranks' results differ."""
    rule, facts = make_rule(exchange), EXCHANGES[exchange.rule]
    ranks, lr = tuple(range(problem.ranks)), RATES.get(exchange.rule, LR)
    model, traffic = problem.begin(), Traffic()
    states = {rank: rule.init(Flat(SHAPES), torch.zeros_like(model)) for rank in ranks}
    for step in range(steps):
        gradients = problem.gradients(step, model.expand(len(ranks), -1))
        if facts.exact:  # it adds gradients that are divided already
            gradients = gradients / len(ranks)
        result, states = _round(rule, gradients, states, ExchangeRound(step, ranks, problem.seed), traffic)
        model = model - lr * result
        traffic.end_step(len(ranks))
    owned = facts.pattern is Pattern.OWNERS
    return Trained(
        problem.accuracy(model[None]),
        max(traffic.sent.values()) / steps,
        mean(traffic.regions) if owned else None,
    )


def _round(
    rule: ExchangeRule, gradients: Tensor, states: dict[int, object], at: ExchangeRound, traffic: Traffic
) -> tuple[Tensor, dict[int, object]]:
    own = dict(zip(at.ranks, gradients, strict=True))
    answers = run_round(rule, own, states, at, [at.ranks], faults=Faults(alter=traffic.passes))
    result = answers[0].result
    if not all(torch.equal(result, answer.result) for answer in answers.values()):
        raise RuntimeError(f"{rule.exchange.rule}: ranks hold different results of step {at.number}")
    return result, {rank: answer.state for rank, answer in answers.items()}


def compare(names: Sequence[str], seeds: Sequence[int], steps: int = STEPS) -> list[Figures]:
    """Figures of these exchanges, in order; exact data parallelism is trained besides where it is not among
    them."""
    problems = [digits(WORKERS, seed) for seed in seeds]
    exchanges = settings()

    def average(name: str) -> Trained:
        runs = [train(problem, exchanges[name], steps) for problem in problems]
        regions = [run.regions for run in runs if run.regions is not None]
        return Trained(
            mean(run.accuracy for run in runs),
            mean(run.bytes_per_step for run in runs),
            mean(regions) if regions else None,
        )

    dense = average("sum")
    found = []
    for name in names:
        run = dense if name == "sum" else average(name)
        ratio = dense.bytes_per_step / run.bytes_per_step
        found.append(Figures(name, run.accuracy, dense.accuracy, run.bytes_per_step, ratio, run.regions))
    return found


def show(figures: Sequence[Figures]) -> None:
    """Print the table."""
    print(f"{'rule':<16} {'accuracy':>8} {'dense':>8} {'bytes/step':>10} {'ratio':>6} {'regions':>7}")
    for row in figures:
        regions = "-" if row.regions is None else f"{row.regions:.2f}"
        late = "" if row.below_dense <= MARGIN else f"  more than {MARGIN} below dense"
        print(
            f"{row.rule:<16} {row.accuracy:8.4f} {row.dense_accuracy:8.4f} {row.bytes_per_step:10.0f} "
            f"{row.ratio:6.1f} {regions:>7}{late}"
        )


def main() -> int:
    """Compare the exchanges; 1 where one is not within the margin."""
    made = parser(__doc__ or "")
    made.add_argument("--rule", action="append", help=f"one of {', '.join(settings())}; may be repeated")
    made.add_argument("--seeds", type=int, default=SEEDS, help="how many, from --seed on")
    made.add_argument("--steps", type=int, default=STEPS)
    options = made.parse_args()
    names = options.rule or list(settings())
    if unknown := [name for name in names if name not in settings()]:
        raise UsageError(f"--rule {unknown[0]}: not one of {', '.join(settings())}")
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.seeds)
    figures = compare(names, seeds, options.steps)
    show(figures)
    if options.json:
        rows = [asdict(row) for row in figures]
        print(json.dumps({"seeds": list(seeds), "workers": WORKERS, "steps": options.steps, "rules": rows}))
    return int(any(row.below_dense > MARGIN for row in figures))


if __name__ == "__main__":
    execute(main)
