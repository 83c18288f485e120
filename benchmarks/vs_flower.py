"""Federated rounds against stock Flower's, alternating in one lab with the same app.

Two clients and a server in the lab's scenario ``two_clients``. Stock Flower: SuperLink, two SuperNodes,
``flwr run``, as shipped (no TLS, state in memory). Ours, with TLS, certificates and a journal on disk:
the same unmodified app by ``atoll flower run``, and the same model as a native job without any app.

  digits   9,610 parameters, lines of 1,000 Mbit/s: seconds a round, accuracies
  lines    a 10 MB model, lines of 100 and 20 Mbit/s, paired seeds: seconds a round, accuracies
  memory   a 100 MB payload, lines of 1,000 Mbit/s: peak PSS of all processes
  downlink a 1 MB model, 20 rounds of training and evaluation: bytes from the server on the wire

Accuracy is the last round's; ``accuracy_gap`` is ours less stock Flower's, seed by seed. In ``lines`` the
app, in stock Flower too, takes the native job's samples in the native job's order. Ours reports
``downlink_saved`` against stock Flower's bytes.

  python -m benchmarks.vs_flower --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.harness import execute, machine, need_lab, parser
from benchmarks.registered_fleet import RegisteredFleet, Row
from benchmarks.rivals.flower_stock import Memory, StockFlower
from benchmarks.vs_flower_job import HELD_OUT_SHARE, write_clients
from lab.reader import read_scenario
from protos.app_bundle import make_bundle

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = "two_clients"
DIGITS = ROOT / "examples" / "flower_digits"
PAYLOAD = ROOT / "benchmarks" / "rivals" / "flower_payload"
JOB = "benchmarks/vs_flower_job.py"
WIDE = 33_333  # hidden units of a model of 10 MB
HUGE = 333_333  # of 100 MB
FAST_MBIT = 1000.0
LINES_MBIT = {"fast": 100.0, "slow": 20.0}
MODEST = 3_333  # of 1 MB
DOWNLINK_ROUNDS = 20
PARTS = ("digits", "lines", "memory", "downlink")
SIDES = ("stock", "app", "native")
OWNERS = ("coordinator.cli submit", "coordinator.cli watch")
"""The owner's own commands, on a machine of his: no part of coordinator and workers."""


class AppFleet(RegisteredFleet):
    """The coordinator and two workers that hold digits, split by every seed, and accept the two apps."""

    def _worker(self, host: str) -> list[str]:
        found = [*super()._worker(host), "--allow-apps"]
        for app in (DIGITS, PAYLOAD):
            found += ["--accept-app", make_bundle(app).hash]
        return found

    def set_lines(self, mbit: dict[str, float] | None) -> None:
        """Both clients' lines; None: fast ones."""
        for host in self.scenario.join_order:
            self.lab.set_link(self.home, host, mbit=(mbit or {}).get(host, FAST_MBIT))

    def app(self, app: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """``atoll flower run``, and what the app wrote."""
        out = self.folder / "found.json"
        out.unlink(missing_ok=True)
        every = {**settings, "min-nodes": 2, "out": str(out)}
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in every.items())
        self._output("flower", "run", str(app), "--nodes", "2", "--run-config", config, "--json")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _rounds(rows: Sequence[Row]) -> dict[str, Any]:
    """What the native job's metrics say: the time from each round's closing to the next one's, accuracies."""
    closed = [float(row["time_s"]) for row in rows if row["name"] == "round_s"]
    accuracy = [float(row["value"]) for row in rows if row["name"] == "eval_accuracy"]
    sums = {
        n: sum(float(row["value"]) for row in rows if row["name"] == n) for n in ("bytes_up", "bytes_down")
    }
    return {"round_s": [b - a for a, b in pairwise(closed)], "acc": accuracy, **sums}


def family() -> list[psutil.Process]:
    """Every process below this one, but the lab's own."""
    found = []
    for member in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any(word.startswith("lab") for word in member.cmdline()[1:3]):
                found.append(member)
    return found


def once(fleet: AppFleet, side: str, app: Path, settings: dict[str, Any], job: dict[str, Any]) -> Any:
    """One run of one side: what it wrote, its peak memory, and what the server sent its clients."""
    before = sent_down(fleet)
    if side == "stock":
        hosts = fleet.scenario.join_order
        with (
            StockFlower(len(hosts), lab=fleet.lab, hub=fleet.home, hosts=hosts) as stock,
            Memory(stock.processes) as memory,
        ):
            found = stock.run(app, {**settings, "min-nodes": len(hosts)})
    else:
        with Memory(family, without=OWNERS) as memory:
            found = fleet.app(app, settings) if side == "app" else _rounds(fleet.federate(JOB, job))
    down_mb = (sent_down(fleet) - before) / 1e6
    return {**found, "peak_mb": memory.peak_bytes / 1e6, "at_peak": memory.at_peak, "down_mb": down_mb}


def sent_down(fleet: AppFleet) -> int:
    """Bytes of all packets from the server to the clients so far."""
    stats = fleet.lab.stats()
    return sum(stats.flow(fleet.home, host).bytes for host in fleet.scenario.join_order)


def paired(fleet: AppFleet) -> dict[str, Any]:
    """The app's settings with which clients train on the native job's batches."""
    workers = {worker["name"]: worker["worker"] for worker in fleet.status()["workers"]}
    names = " ".join(workers[host] for host in fleet.scenario.join_order)
    return {"paired-with": names, "held-out": HELD_OUT_SHARE}


def part_runs(
    fleet: AppFleet, args: argparse.Namespace, part: str
) -> list[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """(app, its settings, the native job's) of every repetition."""
    rounds = args.rounds
    if part == "digits":
        one: tuple[Path, dict[str, Any], dict[str, Any]] = (
            DIGITS,
            {"num-server-rounds": rounds, "seed": args.seed},
            {"ROUNDS": rounds, "SEED": args.seed},
        )
        return [one] * args.repeats
    if part == "memory":
        huge = {
            "ROUNDS": 3,
            "HIDDEN": HUGE,
            "LOCAL_EPOCHS": 1,
            "LOCAL_STEPS": 1,
            "EVALUATE_EVERY": 0,
            "SEED": args.seed,
        }
        return [(PAYLOAD, {"num-server-rounds": 3, "megabytes": 100}, huge)]
    if part == "downlink":
        modest = {
            "num-server-rounds": DOWNLINK_ROUNDS,
            "hidden": MODEST,
            "local-epochs": 1,
            "seed": args.seed,
        }
        ours = {"ROUNDS": DOWNLINK_ROUNDS, "HIDDEN": MODEST, "LOCAL_EPOCHS": 1, "SEED": args.seed}
        return [(DIGITS, modest, ours)]
    links = {"UPLINK": args.uplink, "DOWNLINK": args.downlink}
    same_batches = paired(fleet)
    return [
        (
            DIGITS,
            {
                "num-server-rounds": rounds,
                "hidden": WIDE,
                "local-epochs": 1,
                "lr": 0.02,
                "seed": seed,
                **same_batches,
            },
            {
                "ROUNDS": rounds,
                "HIDDEN": WIDE,
                "LOCAL_EPOCHS": 1,
                "LEARNING_RATE": 0.02,
                "SEED": seed,
                **links,
            },
        )
        for seed in range(args.seed, args.seed + args.repeats)
    ]


def compare(fleet: AppFleet, args: argparse.Namespace, part: str) -> dict[str, Any]:
    """Every side, alternating."""
    fleet.set_lines(LINES_MBIT if part == "lines" else None)
    runs: dict[str, list[Any]] = {side: [] for side in args.sides}
    for app, settings, job in part_runs(fleet, args, part):
        for side in args.sides:
            runs[side].append(once(fleet, side, app, settings, job))
            print(f"  {part} {side}: {_line(runs[side][-1])}", flush=True)
    figures = {side: summary(found) for side, found in runs.items()}
    for side in set(figures) - {"stock"} if "stock" in figures else ():
        against(figures[side], figures["stock"])
    return figures


def against(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """Add what our side has over stock Flower's: paired by seed, in the mean."""
    ends = [(a[-1], b[-1]) for a, b in zip(ours["accuracy"], stock["accuracy"], strict=True) if a and b]
    if ends:
        gaps = [round(a - b, 4) for a, b in ends]
        ours["accuracy_gap"] = {"mean": round(statistics.mean(gaps), 4), "by_seed": gaps}
    ours["round_over_stock"] = round(ours["round_s"] / stock["round_s"], 4)
    ours["downlink_saved"] = round(1.0 - ours["down_mb"] / stock["down_mb"], 4)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Over repetitions; a run's first round loads programs and opens connections, and is left out."""
    rounds = [seconds for run in runs for seconds in (run["round_s"][1:] or run["round_s"])]
    return {
        "round_s": round(statistics.median(rounds), 4),
        "round_s_all": [[round(s, 3) for s in run["round_s"]] for run in runs],
        "accuracy": [[round(a, 4) for a in run.get("acc", [])] for run in runs],
        "peak_mb": round(max(run["peak_mb"] for run in runs), 1),
        "down_mb": round(statistics.median(run["down_mb"] for run in runs), 3),
        "at_peak_mb": {name: round(size / 1e6, 1) for name, size in runs[-1]["at_peak"].items()},
    }


def _line(run: dict[str, Any]) -> str:
    seconds = " ".join(f"{s:.2f}" for s in run["round_s"])
    last = f", accuracy {run['acc'][-1]:.4f}" if run.get("acc") else ""
    return f"{seconds} s a round{last}, peak {run['peak_mb']:.0f} MB, {run['down_mb']:.2f} MB down"


def main() -> None:
    """Print a line a run, a table a part and, with --json, one object."""
    options = parser(__doc__)
    options.add_argument("--part", action="append", choices=PARTS, help="may repeat (default all)")
    options.add_argument("--side", action="append", choices=SIDES, help="may repeat (default all)")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--repeats", type=int, default=5, help="of digits; seeds of lines (5 are promised)")
    options.add_argument("--uplink", default="off", help="of the native job in lines")
    options.add_argument("--downlink", default="off", help="of the native job in lines")
    args = options.parse_args()
    need_lab(args.json)
    args.sides, args.parts = args.side or list(SIDES), args.part or list(PARTS)
    found: dict[str, Any] = {"machine": machine(), "seed": args.seed}
    seeds = range(args.seed, args.seed + args.repeats) if "lines" in args.parts else [args.seed]
    hosts = len(read_scenario(SCENARIO).join_order)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        parts = {f"digits-{seed}": write_clients(folder / str(seed), hosts, seed) for seed in seeds}
        fleet = stack.enter_context(AppFleet(SCENARIO, parts))
        for part in args.parts:
            found[part] = compare(fleet, args, part)
    for part in args.parts:
        print(f"{part}: median s a round, peak MB of all processes but the owner's submit and watch, MB down")
        for side, figures in found[part].items():
            told = f"{figures['round_s']:8.3f} s {figures['peak_mb']:8.0f} MB {figures['down_mb']:9.2f} MB"
            if "downlink_saved" in figures:
                told += f"   {figures['round_over_stock']:.3f} x, {figures['downlink_saved']:+.1%} saved"
            if "accuracy_gap" in figures:
                told += f", accuracy {100 * figures['accuracy_gap']['mean']:+.2f} points"
            print(f"  {side:<7} {told}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    execute(main)
