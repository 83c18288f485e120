"""Exchanges that average with a few or wait for nobody, beside those of all ranks: accuracy, bytes, time.

In process, on simulated time, through the real rules and rounds. Accuracy is on handwritten digits (a fifth
held out), of the average model; `local` is the mean of the ranks' own. Plain SGD, equal numbers of gradients.

  saps    32 peers, seeded random pairs each step, one element in c; bytes counted from packets
  swarm   32 peers, published copies read every few steps in 8 bits
  eager   one of four ranks three times slower; gradients a second and accuracy
  wagma   spread after log_S P rounds; gradients a second of 64 ranks under two kinds of skew, accuracy of 16

  python -m benchmarks.gossip --seed 0 --json
  python -m benchmarks.gossip --only eager,wagma
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.errors import UsageError
from atoll.exchange import Exchange, ExchangeRound
from benchmarks.harness import execute, parser
from experiments.exchanges import make_rule
from strategies.exchanges.base import Flat
from tests.inprocess.exchange import run_round
from tests.inprocess.peers import default_groups
from tests.inprocess.skew import (
    GradientRounds,
    ModelRounds,
    Outcome,
    Seconds,
    Skewed,
    by_owners_s,
    drawn_delays,
    heavy_tailed,
    slower,
)

LAYERS = ((64, 64), (64, 10))  # inputs, outputs
ELEMENTS = sum(fan_in * fan_out + fan_out for fan_in, fan_out in LAYERS)
LR, BATCH, HELD_OUT = 0.2, 16, 359
PEERS, STEPS = 32, 1000
BURST = 5  # steps between two reads of swarm
SKEWED = 64  # ranks
ROUNDS = 200  # of the skewed ranks
STEP_S, DELAY_S, DELAYED = 0.3, 0.32, 2  # (gk) the delay and the number of delayed ranks a step; step: ours
SIGMA = 0.5  # of log-normal seconds: a few steps take three times the median
MODEL_BYTES, RATE, LATENCY_S = 102e6, 10e9, 20e-6  # ResNet-50 over links of 80 Gbit/s
QUORUM, DEADLINE = 0.5, 0.1  # deadline as a share of a step


@dataclass(frozen=True)
class Digits:
    """Digits dealt out to ``ranks``, and a net of two layers on them as one row of parameters [n].

    Alike at all ranks, or by label in shares drawn from a Dirichlet distribution of ``alpha``.
    """

    images: Tensor  # [rank, sample, 64]; samples repeat where a rank has fewer than others
    labels: Tensor  # [rank, sample]
    held_images: Tensor
    held_labels: Tensor
    seed: int

    @property
    def ranks(self) -> int:
        return len(self.images)

    def begin(self) -> Tensor:
        """Parameters before training."""
        generator = torch.Generator().manual_seed(self.seed)
        parts = []
        for fan_in, fan_out in LAYERS:
            parts += [torch.randn(fan_in * fan_out, generator=generator) / fan_in**0.5, torch.zeros(fan_out)]
        return torch.cat(parts)

    def gradients(self, step: int, models: Tensor) -> Tensor:
        """Of every rank's next batch at its model, [rank, n]."""
        return self._gradients(range(self.ranks), step, models)

    def gradient(self, rank: int, step: int, model: Tensor) -> Tensor:
        """Of one rank's batch of ``step``, [n]."""
        return self._gradients([rank], step, model[None])[0]

    def accuracy(self, models: Tensor) -> float:
        """Mean accuracy of ``models`` [m, n] on held-out digits."""
        scores = _scores(models, self.held_images.expand(len(models), -1, -1))
        return float((scores.argmax(-1) == self.held_labels).float().mean())

    def _gradients(self, ranks: range | list[int], step: int, models: Tensor) -> Tensor:
        size = self.labels.shape[1]
        drawn = [
            torch.from_numpy(np.random.default_rng((self.seed, rank, step)).integers(0, size, BATCH))
            for rank in ranks
        ]
        images = torch.stack([self.images[rank][at] for rank, at in zip(ranks, drawn, strict=True)])
        labels = torch.stack([self.labels[rank][at] for rank, at in zip(ranks, drawn, strict=True)])
        models = models.detach().requires_grad_()
        scores = _scores(models, images)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        (found,) = torch.autograd.grad(loss / BATCH, models)
        return found


def digits(ranks: int, seed: int, alpha: float | None = None) -> Digits:
    """Deal the digits out."""
    data = load_digits()
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(data.target))
    images = torch.from_numpy(data.data[order] / 16.0).float()
    labels = torch.from_numpy(data.target[order]).long()
    train = np.arange(HELD_OUT, len(order))
    if alpha is None:
        shares = [train[rank::ranks] for rank in range(ranks)]
    else:
        owner = np.empty(len(train), np.int64)
        for label in range(10):
            here = np.flatnonzero(labels[train].numpy() == label)
            owner[here] = generator.choice(ranks, len(here), p=generator.dirichlet([alpha] * ranks))
        shares = [train[owner == rank] for rank in range(ranks)]
        shares = [share if len(share) else train[:1] for share in shares]
    longest = max(len(share) for share in shares)
    dealt = torch.from_numpy(np.stack([np.resize(share, longest) for share in shares]))
    return Digits(images[dealt], labels[dealt], images[:HELD_OUT], labels[:HELD_OUT], seed)


def _scores(models: Tensor, images: Tensor) -> Tensor:
    """Class scores [m, sample, 10] of models [m, n] on images [m, sample, 64]."""
    at, value = 0, images
    for layer, (fan_in, fan_out) in enumerate(LAYERS):
        weight = models[:, at : at + fan_in * fan_out].view(-1, fan_in, fan_out)
        at += fan_in * fan_out
        bias = models[:, None, at : at + fan_out]
        at += fan_out
        value = torch.baddbmm(bias, value.relu() if layer else value, weight)
    return value


# ---------------------------------------------------------------- peers in step


@dataclass(frozen=True)
class Trained:
    """``accuracy`` of the average model, ``local`` of the ranks' own; bytes sent by the busiest rank."""

    accuracy: float
    local: float
    sent_bytes: float


def full_average(problem: Digits, steps: int) -> Trained:
    """All ranks' gradients averaged each step; its bytes from one real round, times the steps."""
    model = problem.begin()
    for step in range(steps):
        model = model - LR * problem.gradients(step, model.expand(problem.ranks, -1)).mean(0)
    ranks = tuple(range(problem.ranks))
    rule = make_rule(Exchange("mean"))
    at = ExchangeRound(0, ranks)
    answers = run_round(rule, dict.fromkeys(ranks, model), dict.fromkeys(ranks), at, [ranks])
    sent = max(receipt.sent_bytes for answer in answers.values() for receipt in answer.receipts)
    accuracy = problem.accuracy(model[None])
    return Trained(accuracy, accuracy, float(sent * steps))


def gossip(problem: Digits, exchange: Exchange, steps: int) -> tuple[Trained, int]:
    """Peers that exchange their models with seeded partners; and how many published copies went dense."""
    ranks, rule = tuple(range(problem.ranks)), make_rule(exchange)
    models = problem.begin().repeat(problem.ranks, 1)
    states = dict.fromkeys(ranks, rule.init(Flat(((ELEMENTS,),)), models[0]))
    sent, dense = dict.fromkeys(ranks, 0), 0
    for step in range(steps):
        models = models - LR * problem.gradients(step, models)
        if (step + 1) % exchange.every:
            continue
        number = step // exchange.every
        at = ExchangeRound(number, ranks, problem.seed)
        groups = default_groups(exchange, ranks, problem.seed, number)
        answers = run_round(rule, dict(zip(ranks, models, strict=True)), states, at, groups)
        models = torch.stack([answers[rank].result for rank in ranks])
        states = {rank: answers[rank].state for rank in ranks}
        for rank in ranks:
            sent[rank] += sum(receipt.sent_bytes for receipt in answers[rank].receipts)
            dense += getattr(states[rank], "whole", False)
    average = models.mean(0, keepdim=True)
    found = Trained(problem.accuracy(average), problem.accuracy(models), float(max(sent.values())))
    return found, dense


def saps(seed: int) -> dict[str, Any]:
    """SAPS beside full averaging, on data dealt alike and by label."""
    figures: dict[str, Any] = {}
    for name, alpha in (("alike", None), ("dirichlet_0.5", 0.5)):
        problem = digits(PEERS, seed, alpha)
        whole = full_average(problem, STEPS)
        figures[name] = {"full": {"accuracy": whole.accuracy, "bytes": whole.sent_bytes}}
        for ratio in (32.0, 100.0):
            found, _ = gossip(problem, Exchange("saps", ratio=ratio), STEPS)
            figures[name][f"c={ratio:g}"] = _beside(found, whole)
    return figures


def swarm(seed: int) -> dict[str, Any]:
    """SwarmSGD beside full averaging."""
    problem = digits(PEERS, seed)
    whole = full_average(problem, STEPS)
    found, dense = gossip(problem, Exchange("swarm", every=BURST), STEPS)
    return {
        "full": {"accuracy": whole.accuracy, "bytes": whole.sent_bytes},
        f"H={BURST}": _beside(found, whole) | {"dense_copies": dense, "copies": PEERS * (STEPS // BURST)},
    }


def _beside(found: Trained, whole: Trained) -> dict[str, float]:
    return {
        "accuracy": found.accuracy,
        "local": found.local,
        "below_full": whole.accuracy - found.accuracy,
        "bytes": found.sent_bytes,
        "share_of_bytes": found.sent_bytes / whole.sent_bytes,
    }


# ---------------------------------------------------------------- stragglers


def eager(seed: int) -> dict[str, Any]:
    """Four ranks, the last three times slower, in the same number of gradients as when all wait for it."""
    problem = digits(4, seed)
    peers = _skewed(problem, slower(STEP_S, {3: 3.0}, 0.02, seed))
    exchange_s = by_owners_s(MODEL_BYTES, RATE, LATENCY_S)(4)
    gradients = 4 * STEPS // 2
    waiting = GradientRounds(peers, Exchange("mean"), exchange_s, seed).run(gradients)
    figures: dict[str, Any] = {"waiting": _outcome(problem, waiting)}
    for name, quorum in (("solo", 0.25), ("majority", 0.5)):
        exchange = Exchange("eager", quorum=quorum, deadline_s=DEADLINE * STEP_S)
        found = GradientRounds(peers, exchange, exchange_s, seed).run(gradients)
        figures[name] = _outcome(problem, found) | {
            "speedup": found.used_per_s / waiting.used_per_s,
            "below_waiting": problem.accuracy(waiting.average()[None])
            - problem.accuracy(found.average()[None]),
        }
    return figures


def wagma(seed: int) -> dict[str, Any]:
    """Speed of 64 skewed ranks, without a model; spread without skew, and accuracy of 16 with."""
    exchange_s = by_owners_s(MODEL_BYTES, RATE, LATENCY_S)
    patient = Exchange("wagma", quorum=QUORUM, deadline_s=DEADLINE * STEP_S)
    figures: dict[str, Any] = {"spread": _spread(seed)}
    skews: dict[str, Callable[[int], Seconds]] = {
        "delays": lambda ranks: drawn_delays(STEP_S, DELAY_S, ranks, DELAYED, seed),
        "heavy_tailed": lambda ranks: heavy_tailed(STEP_S, SIGMA, seed),
    }
    for name, skew in skews.items():
        bare = Skewed(SKEWED, torch.zeros(1), lambda rank, step, model: torch.zeros(1), LR, skew(SKEWED))
        waiting = GradientRounds(bare, Exchange("mean"), exchange_s(SKEWED), seed).run(SKEWED * ROUNDS)
        found = ModelRounds(bare, patient, exchange_s, seed).run(ROUNDS)
        figures[name] = {"speedup": found.used_per_s / waiting.used_per_s, "late": found.late / found.used}
    problem = digits(16, seed)
    peers = _skewed(problem, skews["heavy_tailed"](16))
    waiting = GradientRounds(peers, Exchange("mean"), exchange_s(16), seed).run(16 * STEPS // 2)
    found = ModelRounds(peers, patient, exchange_s, seed).run(STEPS // 2)
    figures["waiting"], figures["16_ranks"] = _outcome(problem, waiting), _outcome(problem, found)
    figures["16_ranks"] |= {
        "speedup": found.used_per_s / waiting.used_per_s,
        "below_waiting": figures["waiting"]["accuracy"] - figures["16_ranks"]["accuracy"],
    }
    return figures


def _spread(seed: int) -> float:
    """Largest difference between 64 models after as many rounds as log_8 64, nobody late."""
    generator = torch.Generator().manual_seed(seed)
    ranks, rule, exchange = tuple(range(SKEWED)), make_rule(Exchange("wagma")), Exchange("wagma")
    models = {rank: torch.randn(ELEMENTS, generator=generator) for rank in ranks}
    for number in range(2):
        groups = default_groups(exchange, ranks, seed, number)
        at = ExchangeRound(number, ranks, seed)
        answers = run_round(rule, models, dict.fromkeys(ranks), at, groups)
        models = {rank: answer.result for rank, answer in answers.items()}
    return max(float((model - models[0]).abs().max()) for model in models.values())


def _skewed(problem: Digits, seconds: Seconds) -> Skewed:
    return Skewed(problem.ranks, problem.begin(), problem.gradient, LR, seconds)


def _outcome(problem: Digits, found: Outcome) -> dict[str, float]:
    return {
        "accuracy": problem.accuracy(found.average()[None]),
        "gradients_per_s": found.used_per_s,
        "late": found.late / found.used,
    }


METHODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "saps": saps,
    "swarm": swarm,
    "eager": eager,
    "wagma": wagma,
}


def show(figures: dict[str, Any], indent: str = "") -> None:
    """Print nested figures, one row each."""
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        elif isinstance(value, dict):
            print(f"{indent}{name:<14}" + "  ".join(f"{key} {one:.4g}" for key, one in value.items()))
        else:
            print(f"{indent}{name:<14}{value:.4g}")


def main() -> None:
    """Run the methods and print their figures."""
    made = parser(__doc__ or "")
    made.add_argument("--only", help=f"some of {','.join(METHODS)}")
    options = made.parse_args()
    names = options.only.split(",") if options.only else list(METHODS)
    if unknown := [name for name in names if name not in METHODS]:
        raise UsageError(f"--only {options.only}: {unknown[0]!r} is none of {','.join(METHODS)}")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in names:
        begun_s = time.perf_counter()
        figures[name] = METHODS[name](options.seed)
        print(f"{name} ({time.perf_counter() - begun_s:.0f} s)")
        show(figures[name], "  ")
    if options.json:
        print(json.dumps({"seed": options.seed, "peers": PEERS, "steps": STEPS, **figures}))


if __name__ == "__main__":
    execute(main)
