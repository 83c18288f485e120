"""Private federated training: its cost in accuracy, what an attack on membership still finds, and the noise.

    atoll data fetch mnist
    python -m benchmarks.privacy --json                  # one seed
    python -m benchmarks.privacy --only attack --at 2 --seeds 3 --json
    nice python -m benchmarks.privacy --seeds 3 --json

  utility   1,000 clients of 60 of MNIST's images with two labels, 100 a round by Poisson sampling (without
            privacy: 100 at random), 30 rounds, a net of 2,202 weights; test accuracy without privacy and at
            epsilon 8 and 2, delta 1e-5
  attack    64 clients of 8 images, of which a random half trains; models with 44,426 weights that fit their
            clients closely, and models at epsilon 2. Who trained? By the loss of a client's images: one
            threshold for all (Yeom 2018), and for each client the likelihood ratio under other models,
            half of which trained with it (Carlini 2022, LiRA; light: few shadow models, one variance).
            Balanced accuracy, 0.5 is chance, and its 95 % interval over clients. The threshold is tried on
            the utility runs as well, against clients of test images
  samples   5 clients of 1,000 images whose every image is private (sample_privacy=): test accuracy after 10
            rounds of 30 steps of 16 images expected, and the threshold on losses of 2,000 that trained
            against 2,000 that did not
  noise     standard deviation of the released noise on 100,000 words over what was declared

Training is the product's: captured graphs, the worker's trainer, ``strategies.privacy``; only the network is
left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.privacy import Privacy, SamplePrivacy
from benchmarks.federated_mnist import CLASSES, LeNet, Plain, Setting, digits, tested
from benchmarks.harness import execute, machine, need_mnist, parser
from coordinator.capture.capture import capture
from strategies import partition_data
from strategies.layout import Layout
from strategies.privacy.private import settled, strategy_of
from strategies.privacy.samples import Charge
from strategies.privacy.samples import epsilon as spent
from strategies.wrapped import owners
from tests.inprocess.federation import LocalFederation, local_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLIENTS, DRAWN, ROUNDS, LABELS, BATCH, STEPS = 1000, 100, 30, 2, 20, 3
DELTA, CLIP, ATTACK_CLIP, LR = 1e-5, 0.8, 0.05, 0.15
EPSILONS = (None, 8.0, 2.0)
POOL, IMAGES, MODELS, ATTACK_ROUNDS, ATTACK_EPOCHS, ATTACK_DRAWN = 64, 8, 12, 30, 6, 16
ATTACKED = 2.0
OWNERS, OWNED, LOT, SAMPLE_STEPS, SAMPLE_ROUNDS, SAMPLE_CLIP = 5, 1000, 16, 30, 10, 1.0
WORDS = 100_000


class SmallNet(nn.Module):
    """Images [B, 1, 28, 28] -> logits [B, 10]; 2,202 weights: noise grows with the root of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, CLASSES)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def federation(
    net: nn.Module, rule: Federated, clients: dict[str, Any], rounds: int, seed: int, batch: int = BATCH
) -> LocalFederation:
    """These clients under a rule, whose noise is found for so many rounds."""
    first = next(iter(clients.values()))
    example = {name: torch.from_numpy(array[: min(batch, len(array))]) for name, array in first.items()}
    training = TrainingSpec(steps=rounds, n_micro=1, seed=seed, optimizer=Optimizer(OptimizerName.SGD, lr=LR))
    found = capture(Plain(net), example, training)
    model = local_model(found.train, found.evaluation, found.state, training)
    return LocalFederation(model, settled(rule, rounds), clients, floors=NO_FLOORS)


def private(epsilon: float | None, sampling: float, clip: float) -> Privacy | None:
    """The privacy of a budget, none without one."""
    return None if epsilon is None else Privacy(epsilon=epsilon, delta=DELTA, clip=clip, sampling=sampling)


# ---------------------------------------------------------------- utility


def utility(epsilon: float | None, seed: int) -> dict[str, float]:
    """Test accuracy after all rounds, and what a threshold on losses tells of who trained."""
    data = digits(Setting(images=60_000, test_images=10_000, batch=BATCH), seed)
    parts = partition_data.labels_per_client(data.y, CLIENTS, LABELS, seed)
    clients = {f"c{at:04d}": {"x": data.x[part], "y": data.y[part]} for at, part in enumerate(parts)}
    torch.manual_seed(seed)
    net = SmallNet()
    rule = Federated(
        local_steps=STEPS,
        clients=DRAWN,
        held_out=0.0,
        evaluate_every=0,
        privacy=private(epsilon, DRAWN / CLIENTS, CLIP),
    )
    made = federation(net, rule, clients, ROUNDS, seed)
    for _ in range(ROUNDS):
        made.run_round()
    accuracy = tested(net, owners(made.weights), data)  # which loads the weights
    strangers = partition_data.labels_per_client(data.test_y.numpy(), CLIENTS // 6, LABELS, seed)
    inside = losses(net, torch.from_numpy(data.x), torch.from_numpy(data.y), parts)
    outside = losses(net, data.test_x, data.test_y, strangers)
    return {"accuracy": accuracy, "threshold": by_threshold(inside, outside)}


def losses(net: nn.Module, x: Tensor, y: Tensor, parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Mean loss of each client's images, [clients]."""
    with torch.no_grad():
        each = torch.cat(
            [F.cross_entropy(net(x[at : at + 1000]), y[at : at + 1000], reduction="none")
             for at in range(0, len(x), 1000)]
        ).double().numpy()  # fmt: skip
    return np.array([each[part].mean() for part in parts])


def by_threshold(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> float:
    """Balanced accuracy of "trained, as its loss is below t", t the best on every other client."""
    scores = []
    for half in (0, 1):
        known, asked = (inside[half::2], outside[half::2]), (inside[1 - half :: 2], outside[1 - half :: 2])
        steps = np.quantile(np.concatenate(known), np.linspace(0.0, 1.0, 101))
        best = max(steps, key=lambda t: np.mean(known[0] <= t) + np.mean(known[1] > t))
        scores.append((np.mean(asked[0] <= best) + np.mean(asked[1] > best)) / 2.0)
    return float(np.mean(scores))


# ---------------------------------------------------------------- attack


def attack(epsilon: float | None, seed: int) -> dict[str, Any]:
    """Accuracy of the models, and of two attacks on them; of LiRA by client too."""
    data = digits(Setting(images=POOL * IMAGES, test_images=2_000, batch=IMAGES), seed)
    parts = np.arange(POOL * IMAGES).reshape(POOL, IMAGES)
    members = halves(MODELS, POOL, seed)
    lossy, confident, accuracies = [], [], []
    for model, inside in enumerate(members):
        torch.manual_seed(seed * 1000 + model)
        net = LeNet()
        clients = {
            f"c{at:03d}": {"x": data.x[parts[at]], "y": data.y[parts[at]]} for at in np.flatnonzero(inside)
        }
        rule = Federated(
            local_epochs=ATTACK_EPOCHS,
            clients=ATTACK_DRAWN,
            held_out=0.0,
            evaluate_every=0,
            privacy=private(epsilon, ATTACK_DRAWN / (POOL // 2), ATTACK_CLIP),
        )
        made = federation(net, rule, clients, ATTACK_ROUNDS, seed)
        for _ in range(ATTACK_ROUNDS):
            made.run_round()
        accuracies.append(tested(net, owners(made.weights), data))
        each = losses(net, torch.from_numpy(data.x), torch.from_numpy(data.y), list(parts.reshape(-1, 1)))
        lossy.append(each.reshape(POOL, IMAGES).mean(axis=1))
        # Of an image log(p / (1 - p)), p the chance of its label: nearly Gaussian over models.
        odds = -each - np.log(-np.expm1(-np.maximum(each, 1e-12)))
        confident.append(odds.reshape(POOL, IMAGES).mean(axis=1))
    thresholds = [by_threshold(s[m], s[~m]) for s, m in zip(np.array(lossy), members, strict=True)]
    by_client = likelihood_ratio(np.array(confident), members)
    return {
        "accuracy": float(np.mean(accuracies)),
        "threshold": float(np.mean(thresholds)),
        "lira": float(by_client.mean()),
        "by_client": by_client.tolist(),
    }


def halves(models: int, clients: int, seed: int) -> NDArray[np.bool_]:
    """Who trains which model, [models, clients]: half of all each, and the other half the model after it.

    So each client is in half of the models, and its base rate tells nothing.
    """
    chance = np.random.default_rng([seed, 3])
    made = []
    for _ in range(models // 2):
        inside = np.zeros(clients, bool)
        inside[chance.permutation(clients)[: clients // 2]] = True
        made += [inside, ~inside]
    return np.array(made)


def likelihood_ratio(confidence: NDArray[np.float64], members: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Share of the models in which LiRA is right about each client, [clients]; arrays [models, clients].

    Shadows are all models but the asked one and its complement (``halves``): a client is in as many of them
    as it is out of. With the complement among them the mean of fewer models errs more, in a direction that
    depends on the answer; where nothing leaks, such an attack finds other than one half.
    """
    right = []
    for target in range(len(confidence)):
        others = np.arange(len(confidence)) // 2 != target // 2
        seen, was = confidence[others], members[others]
        inside, outside = np.ma.array(seen, mask=~was), np.ma.array(seen, mask=was)
        asked = confidence[target]
        nearer = np.abs(asked - inside.mean(axis=0)) < np.abs(asked - outside.mean(axis=0))
        right.append(np.asarray(nearer) == members[target])
    shares: NDArray[np.float64] = np.array(right).mean(axis=0)
    return shares


def interval(shares: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean of independent shares, such as clients'; two at least."""
    found = np.array(shares)
    half = 1.96 * float(found.std(ddof=1)) / len(found) ** 0.5
    return float(found.mean()) - half, float(found.mean()) + half


# ---------------------------------------------------------------- samples


def samples(epsilon: float | None, seed: int) -> dict[str, float]:
    """Test accuracy where every image is private, what that took, and a threshold on losses."""
    data = digits(Setting(images=OWNERS * OWNED, test_images=10_000, batch=LOT), seed)
    parts = np.arange(OWNERS * OWNED).reshape(OWNERS, OWNED)
    clients = {f"c{at}": {"x": data.x[part], "y": data.y[part]} for at, part in enumerate(parts)}
    torch.manual_seed(seed)
    net = SmallNet()
    noise = None if epsilon is None else sample_noise(epsilon)
    rule = Federated(
        local_steps=SAMPLE_STEPS,
        held_out=0.0,
        evaluate_every=0,
        sample_privacy=None if noise is None else SamplePrivacy(noise, SAMPLE_CLIP, DELTA),
    )
    made = federation(net, rule, clients, SAMPLE_ROUNDS, seed, LOT)
    for _ in range(SAMPLE_ROUNDS):
        made.run_round()
    accuracy = tested(net, owners(made.weights), data)
    alone = np.arange(2_000).reshape(-1, 1)
    inside = losses(net, torch.from_numpy(data.x), torch.from_numpy(data.y), list(alone))
    outside = losses(net, data.test_x, data.test_y, list(alone))
    return {"accuracy": accuracy, "threshold": by_threshold(inside, outside), "noise": noise or 0.0}


def sample_noise(budget: float) -> float:
    """The least noise in steps of 0.02 with which the samples of one owner keep within a budget."""
    for step in range(25, 1000):
        charge = Charge(step * 0.02, LOT / OWNED, SAMPLE_STEPS * SAMPLE_ROUNDS)
        if spent([charge], DELTA) <= budget:
            return step * 0.02
    raise SystemExit(f"no noise keeps within epsilon {budget:g}")


# ---------------------------------------------------------------- noise


def noise_ratio() -> float:
    """Standard deviation of a released sum of nobody's over what was declared."""
    arrays = {"w": np.zeros(WORDS, np.float64)}
    rule = strategy_of(Federated(clients=DRAWN, evaluate_every=0, privacy=Privacy(noise=1.3, clip=CLIP)))
    state = rule.init(Layout.of(arrays, {"w"}), arrays, DRAWN)
    return float(np.std(rule.aggregate(state, []).weights["w"]) / (1.3 * CLIP / DRAWN))


def main() -> None:
    """Run all and print the figures."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=1, help="of training; default 1")
    made.add_argument("--only", choices=("utility", "attack", "samples", "noise"), help="one of the four")
    made.add_argument("--at", type=float, metavar="EPSILON", help="only at this one; 0: without privacy")
    options = made.parse_args()
    need_mnist(options.json)
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.seeds)
    figures: dict[str, Any] = {}
    if options.only in (None, "noise"):
        figures["noise_ratio"] = noise_ratio()
        print(f"noise over what was declared: {figures['noise_ratio']:.4f}", flush=True)
    runs = (
        ("utility", utility, EPSILONS),
        ("attack", attack, (None, ATTACKED)),
        ("samples", samples, EPSILONS),
    )
    for name, run, epsilons in runs:
        if options.only not in (None, name):
            continue
        for epsilon in epsilons if options.at is None else (options.at or None,):
            begun_s = time.perf_counter()
            found: list[dict[str, Any]] = [run(epsilon, seed) for seed in seeds]
            key = f"{name} at {'no privacy' if epsilon is None else f'epsilon {epsilon:g}'}"
            figures[key] = {what: float(np.mean([one[what] for one in found])) for what in found[0]}
            if shares := [share for one in found for share in one.get("by_client", ())]:
                figures[key]["low"], figures[key]["high"] = interval(shares)
                del figures[key]["by_client"]
            figures[key]["runs"] = found
            took_s = time.perf_counter() - begun_s
            shown = ", ".join(f"{what} {v:.4f}" for what, v in figures[key].items() if what != "runs")
            print(f"{key}: {shown} ({took_s:.0f} s)", flush=True)
    if options.json:
        print(json.dumps({"seeds": list(seeds), "machine": machine(), **figures}))


if __name__ == "__main__":
    execute(main)
