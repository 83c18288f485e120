"""Rules against each other on unlike clients: MNIST with few labels a client, paired seeds, intervals.

    atoll data fetch mnist
    python -m benchmarks.federated_mnist --seeds 5 --jobs 2 --state runs.jsonl --plot accuracy.png
    python -m benchmarks.federated_mnist --full --only fedavg,fedimpro,feddyn --state full.jsonl

Setting (papers/federated.md 0): 6,000 random training images (``--full``: all 60,000), 10 clients by
NIID-Bench's Dirichlet(0.1), 5 of them a round, 40 rounds, one local epoch, batch 64, SGD lr 0.02 momentum
0.9, a LeNet-size net of 44,426 weights, accuracy on 4,000 test images (``--full``: 10,000) after each round.
A seed decides images, split, initial weights, participants and sample order, alike for every rule.
Training is the product's: captured op-DAGs, the worker's trainer and ``strategies``; only the network is left
out. Lab time is a model, told by ``Links``: participants train and send at once, the slowest one counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from benchmarks.federated_report import best, plot, report, show
from benchmarks.harness import ROOT, execute, machine, need_mnist, parser
from coordinator.capture.capture import capture
from experiments.datasets import corpora, download
from experiments.datasets.split import taken
from strategies import partition_data
from strategies.fedimpro_module import FedImpro
from strategies.vhl_module import Vhl, VhlLoss
from strategies.virtual_data import VirtualSpec
from strategies.wrapped import owners
from tests.inprocess.federation import LocalFederation, RoundMetrics, local_model

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels
CLASSES = 10
# Found on seeds 10 to 21 and other test images (docs/federated.md): a small net has little room for images
# that it need not know, so they are few, alike within a class, and count half.
VIRTUAL = VirtualSpec(seed=7, classes=CLASSES, per_class=200, shape=(1, 28, 28), base=8, spread=0.2)
VHL = VhlLoss(virtual=0.5, batch=16, pad=0, flip=False)
FEDIMPRO: dict[str, float] = {"beta": 0.9, "max_std": 0.1}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all compared rules share."""

    images: int = 6_000  # of 60,000, at random
    test_images: int = 4_000
    clients: int = 10
    chosen: int = 5  # a round
    beta: float = 0.1
    rounds: int = 40
    epochs: int = 1
    batch: int = 64
    lr: float = 0.02  # unless the variant has its own
    momentum: float = 0.9


@dataclass(frozen=True, slots=True)
class Links:
    """A model of clients' lines and machines: uplinks evenly spaced in ratio from slowest to fastest,
    downlinks ``down`` times as fast, every machine ``flops`` a second."""

    slowest_up_bps: float = 1e6
    fastest_up_bps: float = 20e6
    down: float = 5.0
    latency_s: float = 0.03
    flops: float = 2e9

    def round_s(self, run: RoundMetrics, clients: Sequence[str], step_flops: float) -> float:
        """Seconds until the slowest participant's update is in."""
        rates = np.geomspace(self.slowest_up_bps, self.fastest_up_bps, len(clients))
        up = dict(zip(sorted(clients), rates.tolist(), strict=True))
        each: list[float] = []
        for name in run.participants:
            sent_s = (
                8 * run.downloaded_bytes / (self.down * up[name]) + 8 * run.uploaded_bytes[name] / up[name]
            )
            each.append(2 * self.latency_s + sent_s + run.steps[name] * step_flops / self.flops)
        return max(each)


class LeNet(nn.Module):
    """Images [B, 1, 28, 28] -> logits [B, 10]; 44,426 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.mid = nn.Sequential(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.head = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.mid(self.low(x).flatten(1)))
        return out


class TwoLayers(nn.Module):
    """Images [B, 1, 28, 28] -> logits [B, 10]: two hidden layers of 200, as McMahan 2017's "2NN", or more."""

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


NETS: dict[str, Callable[[], nn.Module]] = {
    "2nn": TwoLayers,
    "2nn-wide": partial(TwoLayers, 600),
    "lenet": LeNet,
}


class Plain(nn.Module):
    """Mean cross-entropy of ``net``, which keeps its names under "net." as in a rule's wrapper."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        if self.training:
            return loss
        return {"loss": loss, "accuracy": (logits.argmax(1) == y).float().mean()}


Wrap = Callable[[nn.Module, Tensor], nn.Module]


def _plain(net: nn.Module, images: Tensor) -> nn.Module:
    return Plain(net)


def _vhl(net: nn.Module, images: Tensor) -> nn.Module:
    return Vhl(net, "head", VIRTUAL, VHL)


def _fedimpro(net: nn.Module, images: Tensor) -> nn.Module:
    return FedImpro(net, "low", CLASSES, images, beta=FEDIMPRO["beta"], max_std=FEDIMPRO["max_std"])


@dataclass(frozen=True)
class Variant:
    """One rule to compare. ``wrap`` puts its loss around the net."""

    name: str
    strategy: str
    options: Mapping[str, float] = field(default_factory=dict)
    wrap: Wrap = _plain
    lr: float | None = None  # its own local rate, where tuning on other seeds has found one


WRAPPERS: dict[str, Wrap] = {"vhl": _vhl, "fedimpro": _fedimpro}
WRAPPED: dict[str, list[Any]] = {"vhl": [asdict(VIRTUAL), asdict(VHL)], "fedimpro": [FEDIMPRO]}
VARIANTS = {
    v.name: v
    for v in (
        Variant("fedavg", "fedavg"),
        Variant("fedimpro", "fedimpro", wrap=_fedimpro),
        Variant("vhl", "vhl", wrap=_vhl),
        Variant("feddyn", "feddyn", {"alpha": 0.1}),
        # A lasting direction is followed server_lr / (1 - beta) far; at 3.3 it overshoots here.
        Variant("fedavgm", "fedavgm", {"beta": 0.7, "server_lr": 0.5}),
        Variant("fedprox", "fedprox", {"mu": 0.01}),
        Variant("fednova", "fednova"),
        Variant("scaffold", "scaffold"),
    )
}
DEFAULT = ("fedavg", "fedimpro", "vhl", "feddyn", "fedavgm")

# ---------------------------------------------------------------- one training


@dataclass(frozen=True)
class Digits:
    """Training images of all clients and the test set, as nets take them."""

    x: Any
    y: Any
    test_x: Tensor
    test_y: Tensor


def digits(setting: Setting, seed: int) -> Digits:
    """Images drawn by the seed, normalised by MNIST's mean and deviation."""
    data = corpora.mnist(download.read("mnist"))
    images, labels = taken(data, setting.images if setting.images < len(data.labels) else 0, seed)
    test = slice(0, setting.test_images)
    return Digits(
        _scaled(images),
        labels.astype(np.int64),
        torch.from_numpy(_scaled(data.test_images[test])),
        torch.from_numpy(data.test_labels[test].astype(np.int64)),
    )


def _scaled(images: Any) -> Any:
    return ((images.astype(np.float32) / np.float32(255.0) - MEAN) / STD)[:, None].astype(np.float32)


def train(setting: Setting, links: Links, variant: Variant, seed: int) -> dict[str, Any]:
    """One rule on one seed: its curve by round, with bytes and modelled seconds up to it."""
    data = digits(setting, seed)
    parts = partition_data.dirichlet_niid_bench(data.y, setting.clients, setting.beta, seed)
    clients = {f"c{at:02d}": {"x": data.x[part], "y": data.y[part]} for at, part in enumerate(parts)}
    torch.manual_seed(seed)
    net = LeNet()
    example = {
        "x": torch.from_numpy(data.x[: setting.batch]),
        "y": torch.from_numpy(data.y[: setting.batch]),
    }
    module = variant.wrap(net, example["x"])
    training = TrainingSpec(
        steps=setting.rounds,
        n_micro=1,
        seed=seed,
        optimizer=Optimizer(OptimizerName.SGD, lr=variant.lr or setting.lr, momentum=setting.momentum),
    )
    found = capture(module, example, training)
    step_flops = sum(op.flops_forward + op.flops_backward for op in found.train.ops)
    rule = Federated(
        variant.strategy,
        dict(variant.options),
        local_epochs=setting.epochs,
        clients=setting.chosen,
        held_out=0.0,
        evaluate_every=0,
    )
    model = local_model(found.train, found.evaluation, found.state, training)
    federation = LocalFederation(model, rule, clients, floors=NO_FLOORS)
    begun_s = time.perf_counter()
    curve, total_bytes, lab_s = [], 0, 0.0
    for _ in range(setting.rounds):
        run = federation.run_round()
        total_bytes += sum(run.uploaded_bytes.values()) + run.downloaded_bytes * len(run.participants)
        lab_s += links.round_s(run, list(clients), step_flops)
        accuracy = tested(net, owners(federation.weights), data)
        curve.append({"accuracy": accuracy, "loss": run.loss, "bytes": total_bytes, "lab_s": lab_s})
    return {
        "curve": curve,
        "split": partition_data.fingerprint(parts),
        "sizes": [len(part) for part in parts],
        "step_mflops": step_flops / 1e6,
        "took_s": time.perf_counter() - begun_s,
    }


@torch.no_grad()
def tested(net: nn.Module, weights: Mapping[str, Any], data: Digits) -> float:
    """Share of test images that the owner's plain net gets right with the common weights."""
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
    net.train(False)
    batches = zip(torch.split(data.test_x, 1000), torch.split(data.test_y, 1000), strict=True)
    right = [int((net(x).argmax(1) == y).sum()) for x, y in batches]
    return sum(right) / len(data.test_y)


# ---------------------------------------------------------------- all of them


def key_of(setting: Setting, links: Links, variant: Variant) -> str:
    """What a stored line must agree in to be used again."""
    facts = [asdict(setting), asdict(links), variant.name, variant.strategy, dict(variant.options)]
    facts += WRAPPED.get(variant.strategy, []) + ([variant.lr] if variant.lr is not None else [])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def stored(path: Path) -> list[dict[str, Any]]:
    """The lines of the state file; one torn by a kill is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(run, dict) and {"key", "seed", "variant", "curve"} <= set(run):
            found.append(run)
    return found


def run_all(args: argparse.Namespace, chosen: Sequence[Variant]) -> list[dict[str, Any]]:
    """Every (seed, rule) that the state file does not hold yet, ``--jobs`` at a time, seed by seed."""
    setting = setting_of(args)
    path = Path(args.state) if args.state else Path(tempfile.mkdtemp(prefix="atoll-bench-")) / "state.jsonl"
    keys = {v.name: key_of(setting, Links(), v) for v in chosen}
    done = {(r["seed"], r["variant"]): r for r in stored(path) if keys.get(r["variant"]) == r["key"]}
    seeds = range(args.seed, args.seed + args.seeds)
    done = {at: run for at, run in done.items() if at[0] in seeds}
    left = [(s, v) for s in seeds for v in chosen if (s, v.name) not in done]
    running: list[tuple[int, Variant, subprocess.Popen[str], IO[str]]] = []
    try:
        while left or running:
            while left and len(running) < args.jobs:
                running.append(_start(args, *left.pop(0)))
            time.sleep(0.2)
            for entry in [r for r in running if r[2].poll() is not None]:
                running.remove(entry)
                result = {"key": keys[entry[1].name], **_result(*entry)}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
                done[result["seed"], result["variant"]] = result
                name, took_s = result["variant"], result["took_s"]
                print(
                    f"seed {result['seed']} {name:<12} best {best(result):.2f} ({took_s:.0f} s)", flush=True
                )
    finally:
        for entry in running:
            entry[2].kill()
    return [done[at] for at in sorted(done)]


def _start(
    args: argparse.Namespace, seed: int, variant: Variant
) -> tuple[int, Variant, subprocess.Popen[str], IO[str]]:
    command = [sys.executable, "-m", "benchmarks.federated_mnist", "--one", f"{seed}:{variant.name}"]
    command += ["--rounds", str(args.rounds), *(["--full"] if args.full else [])]
    command += [part for value in args.also for part in ("--also", value)]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the child has ended
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True)
    return seed, variant, process, log


def _result(seed: int, variant: Variant, process: subprocess.Popen[str], log: IO[str]) -> dict[str, Any]:
    log.seek(0)
    said = log.read()
    log.close()
    if process.returncode:
        raise SystemExit(f"seed {seed} {variant.name} failed: {said[-2000:]}")
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return {"seed": seed, "variant": variant.name, **found}


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting that the options ask for."""
    if args.full:
        return Setting(images=60_000, test_images=10_000, rounds=args.rounds)
    return Setting(rounds=args.rounds)


def variants(also: Sequence[str]) -> dict[str, Variant]:
    """Those that are built in and each "NAME=STRATEGY[:OPTION=NUMBER,...]" of ``also``; ``lr`` is the
    clients' rate."""
    found = dict(VARIANTS)
    for text in also:
        name, _, rest = text.partition("=")
        strategy, _, options = rest.partition(":")
        pairs = (item.partition("=") for item in options.split(",") if item)
        numbers = {key: float(value) for key, _, value in pairs}
        rate = numbers.pop("lr", None)
        found[name] = Variant(name, strategy, numbers, WRAPPERS.get(strategy, _plain), rate)
    return found


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=5, help="paired seeds, from --seed on")
    made.add_argument("--rounds", type=int, default=40)
    made.add_argument("--full", action="store_true", help="all 60,000 images, 10,000 test images")
    made.add_argument("--only", help=f"strategies, by commas (default {','.join(DEFAULT)})")
    made.add_argument("--also", action="append", default=[], help="NAME=STRATEGY[:OPTION=NUMBER,...]")
    made.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    made.add_argument("--state", help="JSON lines of finished trainings; goes on from there")
    made.add_argument("--plot", help="picture of accuracy against rounds, bytes and lab time")
    made.add_argument("--one", help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Run what is missing, then print the table and, with --json, one object."""
    args = options().parse_args()
    known = variants(args.also)
    if args.one:
        torch.set_num_threads(1)
        seed, _, name = args.one.partition(":")
        print(json.dumps(train(setting_of(args), Links(), known[name], int(seed))))
        return
    own = [text.partition("=")[0] for text in args.also]
    wanted = args.only.split(",") if args.only else [*DEFAULT, *own]
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"--only: no strategy {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    need_mnist(args.json)
    results = run_all(args, [known[name] for name in wanted])
    found = report(results)
    show(found)
    print(f"machine {machine()}, seeds {args.seed} to {args.seed + args.seeds - 1}, {setting_of(args)}")
    if args.plot:
        plot(results, Path(args.plot))
        print(f"drawn in {args.plot}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    execute(main)
