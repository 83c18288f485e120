"""Federated training on unlike uplinks: BCRS + OPWA against plain top-k and dense updates, to one accuracy.

    atoll data fetch mnist
    python -m benchmarks.federated_bandwidth --seeds 3 --jobs 2 --state runs.jsonl --plot bandwidth.png
    python -m benchmarks.federated_bandwidth --scenario federated_dsl --downlink delta --base 32
    python -m benchmarks.federated_bandwidth --lab --net 2nn-wide --rounds 14

Setting: 6,000 random MNIST images, 10 clients by NIID-Bench's Dirichlet(0.1), all of them in each round, one
local epoch, batch 64, SGD lr 0.02 momentum 0.9, McMahan's two-layer net (784-200-200-10, 199,210 weights),
accuracy on 4,000 test images. A seed decides images, split, initial weights and sample order, alike for
every variant. Training, rules, codecs, residuals, update files and the choice of ratios are the product's;
time is a model (``bandwidth_report``) of a lab scenario's lines and ``--step-s`` a local step. With ``--lab``
they are jobs of ten workers on those very lines (``bandwidth_lab``) and time is the clock's.

    dense       FedAvg, updates as they are
    topk        FedAvg, top-k at the mean of BCRS's ratios, no residual: OPWA is refused with one
    topk_bytes  ... at the ratio with which a round's uploads are as many bytes as BCRS's
    topk_base   ... at BCRS's base ratio, which its slowest client has
    topk_ef     top-k at the mean ratio with error feedback
    bcrs_ef     BCRS's ratios with error feedback
    bcrs_opwa   BCRS's ratios and OPWA

A ratio is dense over sent bytes; BCRS's mean is of what its clients really send. Finish times are those of
whole rounds, download to last byte up, and a spread is the latest over the earliest less 1: of all clients,
and of those that the plan has hold something back. Who sends all it has ends when its line lets it; by
default (``--base even``) the slowest's ratio is the least that has all of them end together, which a slow
downlink can make impossible.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, OptimizerName, TrainingSpec
from atoll.opdag import TensorMeta
from atoll.sampling import local_steps
from benchmarks import bandwidth_lab
from benchmarks import bandwidth_report as reporting
from benchmarks.bandwidth_report import Line
from benchmarks.federated_mnist import NETS, Digits, Plain, Setting, digits, stored, tested
from benchmarks.federated_report import best, plot
from benchmarks.harness import ROOT, execute, machine, need_lab, need_mnist, parser
from compressors.model_file import write_delta, write_model
from coordinator.capture.capture import capture
from coordinator.federated.selection import by_uplink, update_bytes
from lab.reader import read_scenario
from strategies import partition_data
from strategies.files import update_metas
from strategies.wrapped import owners
from tests.inprocess.federation import LocalFederation, local_model

if TYPE_CHECKING:
    from strategies.layout import Arrays

SCENARIO = "federated_homes"
STEP_S = 0.01  # of one local step on any client: an assumption, alike for all variants
TARGET = 0.9
DOWN_SHARE = {
    "off": 1.0,
    "lossless": 0.83,
    "delta": 0.65,
}  # of the dense bytes: what is expected before a round


@dataclass(frozen=True)
class Variant:
    """``ratio``: "" dense, "own" BCRS's by client, or which one ratio all have: "mean", "bytes", "base"."""

    name: str
    strategy: str = "fedavg"
    ratio: str = ""
    feedback: bool = False


VARIANTS = {
    v.name: v
    for v in (
        Variant(reporting.DENSE),
        Variant("topk", ratio="mean"),
        Variant("topk_bytes", ratio="bytes"),
        Variant("topk_base", ratio="base"),
        Variant("topk_ef", ratio="mean", feedback=True),
        Variant("bcrs_ef", ratio="own", feedback=True),
        Variant(reporting.PROPOSED, "opwa", ratio="own"),
    )
}
IN_LAB = (reporting.DENSE, "topk", reporting.PROPOSED)


@dataclass(frozen=True)
class Conditions:
    """What all variants of one comparison share beside the training's ``Setting``."""

    lines: Mapping[str, Line]
    net: str = "2nn"
    base: float = 0.0  # BCRS's ratio of the slowest; 0: the least with which all end together
    gamma: float = 5.0
    step_s: float = STEP_S
    downlink: str = "off"
    setting: Setting = field(default_factory=lambda: Setting(chosen=10))

    def key(self, variant: Variant) -> str:
        """What a stored line must agree in to be used again."""
        return hashlib.sha256(json.dumps([asdict(self), asdict(variant)]).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- one training


def ratios_of(
    conditions: Conditions, ratio: str, steps: Mapping[str, int], up: Sequence[TensorMeta]
) -> dict[str, float]:
    """Each client's ratio; none for dense updates. BCRS's are the coordinator's for lines it knows well."""
    if not ratio:
        return {}
    dense = float(sum(meta.nbytes for meta in up))
    down = DOWN_SHARE[conditions.downlink] * dense
    uplinks = {n: line.uplink(down, steps[n] * conditions.step_s) for n, line in conditions.lines.items()}
    own = by_uplink(up, uplinks, conditions.base or None).ratios
    if ratio == "own":
        return dict(own)
    sent = [update_bytes(up, own[name]) for name in own]
    one = {
        "mean": reporting.mean_ratio(sent, dense),
        "bytes": reporting.ratio_for(lambda r: update_bytes(up, r), sum(sent) / len(sent)),
        "base": max(own.values()),
    }
    return dict.fromkeys(own, one[ratio])


def federation_of(
    conditions: Conditions, variant: Variant, data: Digits, parts: Sequence[Any], seed: int
) -> tuple[LocalFederation, nn.Module]:
    """The clients, named as the scenario's hosts, and the owner's net for testing."""
    setting = conditions.setting
    clients = {
        name: {"x": data.x[part], "y": data.y[part]}
        for name, part in zip(conditions.lines, parts, strict=True)
    }
    torch.manual_seed(seed)
    net = NETS[conditions.net]()
    batch = slice(0, setting.batch)
    example = {"x": torch.from_numpy(data.x[batch]), "y": torch.from_numpy(data.y[batch])}
    training = TrainingSpec(
        steps=setting.rounds,
        n_micro=1,
        seed=seed,
        optimizer=Optimizer(OptimizerName.SGD, lr=setting.lr, momentum=setting.momentum),
    )
    found = capture(Plain(net), example, training)
    rule = Federated(
        variant.strategy,
        {"gamma": conditions.gamma} if variant.strategy == "opwa" else {},
        local_epochs=setting.epochs,
        held_out=0.0,
        evaluate_every=0,
        uplink="bcrs" if variant.ratio else "off",  # each round says its own ratios
        error_feedback=variant.feedback,
    )
    model = local_model(found.train, found.evaluation, found.state, training)
    return LocalFederation(model, rule, clients, floors=NO_FLOORS), net


def train(conditions: Conditions, variant: Variant, seed: int) -> dict[str, Any]:
    """One variant on one seed: by round its accuracy and the bytes of every file that travelled."""
    setting = conditions.setting
    data = digits(setting, seed)
    parts = partition_data.dirichlet_niid_bench(data.y, len(conditions.lines), setting.beta, seed)
    federation, net = federation_of(conditions, variant, data, parts, seed)
    up = list(update_metas(federation.strategy, federation.trainer.layout).values())
    steps = {
        name: local_steps(len(part), setting.batch, setting.epochs)
        for name, part in zip(conditions.lines, parts, strict=True)
    }
    ratios = ratios_of(conditions, variant.ratio, steps, up)
    curve, before = [], None
    for _ in range(setting.rounds):
        broadcast = dict(federation.strategy.configure(federation.state).weights)
        run = federation.run_round(ratios)
        assert run.steps == steps
        curve.append(
            {
                "accuracy": tested(net, owners(federation.weights), data),
                "loss": run.loss,
                "up": dict(run.uploaded_bytes),
                "down": down_bytes(broadcast, before),
            }
        )
        before = broadcast
    dense = sum(meta.nbytes for meta in up)
    return {
        "curve": curve,
        "steps": steps,
        "ratios": ratios,
        "dense_bytes": dense,
        "full_bytes": update_bytes(up, 1.0) if variant.ratio else dense,
        "split": partition_data.fingerprint(parts),
    }


def down_bytes(broadcast: Arrays, before: Arrays | None) -> dict[str, int]:
    """The broadcast's file by kind of downlink; a delta needs the round before."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        path = Path(folder) / "broadcast"
        off = write_model(path, broadcast).size
        lossless = write_model(path, broadcast, lossless=True).size
        delta = lossless if before is None else write_delta(path, broadcast, before, "00" * 32).size
    return {"off": off, "lossless": lossless, "delta": min(delta, lossless)}


# ---------------------------------------------------------------- all of them


def run_all(
    conditions: Conditions, chosen: Sequence[Variant], seeds: Sequence[int], jobs: int, path: Path
) -> list[dict[str, Any]]:
    """Every (seed, variant) that the state file does not hold yet, ``jobs`` processes at a time."""
    keys = {v.name: conditions.key(v) for v in chosen}
    done = {(r["seed"], r["variant"]): r for r in stored(path) if keys.get(r["variant"]) == r["key"]}
    done = {at: run for at, run in done.items() if at[0] in seeds}
    left = [(seed, v) for seed in seeds for v in chosen if (seed, v.name) not in done]
    with ThreadPoolExecutor(jobs) as pool, path.open("a", encoding="utf-8") as file:
        for future in as_completed([pool.submit(_child, conditions, v, seed) for seed, v in left]):
            run = future.result()
            run["key"] = keys[run["variant"]]
            file.write(json.dumps(run) + "\n")
            file.flush()
            done[run["seed"], run["variant"]] = run
            print(f"seed {run['seed']} {run['variant']:<12} best {best(run):.2f}", flush=True)
    order = {v.name: at for at, v in enumerate(chosen)}
    return [done[at] for at in sorted(done, key=lambda at: (order[at[1]], at[0]))]


def _child(conditions: Conditions, variant: Variant, seed: int) -> dict[str, Any]:
    """One training in a process of its own: torch's threads and seed are a process's."""
    asked = json.dumps({"conditions": asdict(conditions), "variant": variant.name, "seed": seed})
    command = [sys.executable, "-m", "benchmarks.federated_bandwidth", "--one"]
    ended = subprocess.run(command, cwd=ROOT, input=asked, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"seed {seed} {variant.name} failed: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return {"seed": seed, "variant": variant.name, **found}


def _one(asked: Mapping[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    facts = dict(asked["conditions"])
    facts["lines"] = {name: Line(**line) for name, line in facts["lines"].items()}
    facts["setting"] = Setting(**facts["setting"])
    return train(Conditions(**facts), VARIANTS[asked["variant"]], asked["seed"])


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__ or "")
    made.add_argument("--scenario", default=SCENARIO, help=f"name or path of the lines (default {SCENARIO})")
    made.add_argument(
        "--lab", action="store_true", help=f"real jobs in the lab; by default {','.join(IN_LAB)}"
    )
    made.add_argument("--down-mbit", type=float, help="every downlink at this rate, not the scenario's")
    made.add_argument("--seeds", type=int, default=3, help="paired seeds, from --seed on")
    made.add_argument("--rounds", type=int, default=40)
    made.add_argument("--beta", type=float, default=0.1, help="of the Dirichlet split")
    made.add_argument("--net", choices=sorted(NETS), default="2nn")
    made.add_argument(
        "--base", type=_base, default="even", help="BCRS's ratio of the slowest, or even (default)"
    )
    made.add_argument("--gamma", type=float, default=Conditions.gamma, help="OPWA's")
    made.add_argument("--step-s", type=float, default=STEP_S, help="seconds of a local step")
    made.add_argument(
        "--downlink", choices=("off", "lossless", "delta"), default="off", help="of all variants"
    )
    made.add_argument("--target", type=float, default=TARGET, help="share of the dense run's best accuracy")
    made.add_argument("--only", help=f"variants, by commas (default {','.join(VARIANTS)})")
    made.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    made.add_argument("--state", help="JSON lines of finished trainings; goes on from there")
    made.add_argument("--plot", help="picture of accuracy against rounds, bytes and lab time")
    made.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return made


def _base(text: str) -> float:
    return 0.0 if text == "even" else float(text)


def conditions_of(args: argparse.Namespace) -> Conditions:
    """What the options ask for."""
    known = reporting.lines(read_scenario(args.scenario))
    if args.down_mbit:
        known = {n: Line(line.up_bps, args.down_mbit * 1e6, line.latency_s) for n, line in known.items()}
    setting = Setting(clients=len(known), chosen=len(known), beta=args.beta, rounds=args.rounds)
    return Conditions(known, args.net, args.base, args.gamma, args.step_s, args.downlink, setting)


def main() -> None:
    """Run what is missing, then print the table and, with --json, one object."""
    args = options().parse_args()
    if args.one:
        print(json.dumps(_one(json.load(sys.stdin))))
        return
    wanted = args.only.split(",") if args.only else list(IN_LAB if args.lab else VARIANTS)
    if unknown := set(wanted) - set(VARIANTS):
        raise SystemExit(f"--only: no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    need_mnist(args.json)
    conditions = conditions_of(args)
    path = Path(args.state) if args.state else Path(tempfile.mkdtemp(prefix="atoll-bench-")) / "state.jsonl"
    seeds = range(args.seed, args.seed + args.seeds)
    chosen = [VARIANTS[name] for name in wanted]
    if args.lab:
        if args.down_mbit:
            raise SystemExit("--down-mbit is for modelled lines; with --lab give a --scenario that has them")
        bandwidth_lab.refuse(chosen)
        need_lab(args.json)
        runs = bandwidth_lab.run_all(args.scenario, conditions, chosen, seeds)
    else:
        results = run_all(conditions, chosen, seeds, args.jobs, path)
        runs = [
            reporting.timed(run, conditions.lines, conditions.step_s, conditions.downlink) for run in results
        ]
    found = reporting.report(runs, args.target)
    reporting.show(found)
    base = f"base {conditions.base or 'even'}"
    print(f"machine {machine()}, seeds {seeds}, {args.scenario}, {base}, {conditions.setting}")
    if args.plot:
        plot(runs, Path(args.plot))
        print(f"drawn in {args.plot}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    execute(main)
