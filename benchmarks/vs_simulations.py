"""Many clients on one machine: Atoll beside Flower's Ray simulation and pfl, in one run.

    atoll data fetch mnist
    python -m benchmarks.vs_simulations --json
    python -m benchmarks.vs_simulations --pfl-python PYTHON

  population   1,000 clients with two of MNIST's labels each, 100 of them a round, LeNet (44,426 weights), six
               local steps of ten images, FedAvg. Atoll: a coordinator and --hosts hosts, TLS and journal on,
               by the federated job; Flower: `flwr run` with as many SuperNodes, two actors; pfl: one process
  digits       examples/flower_digits, the same unmodified app, on 100 nodes: `atoll flower simulate` with two
               workers, and `flwr run` with its simulation

Figures: peak PSS of all processes of a system (what pages processes share counts once); clients a second from
the second round on, whose rounds' times are added; seconds from the command to the end of the first round;
accuracies. One compute thread a process everywhere. Orders and draws of clients are each system's own, the
amount of work is the same. pfl needs an environment of its own (``pip install pfl==0.6.0 torch==2.13.0``);
without --pfl-python its row is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.harness import ROOT, CommandFailed, execute, machine, need_mnist, parser
from benchmarks.population_fleet import BATCH, LABELS, STEPS, Size, digits_of, fleet_of, job, trained
from benchmarks.rivals.flower_population.flower_population import task
from benchmarks.rivals.flower_stock import Memory, StockFlower
from strategies import partition_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

POPULATION = ROOT / "benchmarks" / "rivals" / "flower_population"
PFL = ROOT / "benchmarks" / "rivals" / "pfl_population.py"
DIGITS = ROOT / "examples" / "flower_digits"
PARTS = ("population", "digits")
NODES, WORKERS = 100, 2
LEARNING_RATE = 0.05
HELD_OUT = 360  # images that the digits app tests on
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def row(round_s: list[float], drawn: int, memory: Memory) -> dict[str, Any]:
    """Figures of one system."""
    steady = round_s[1:]
    return {
        "peak_mb": memory.peak_bytes / 1e6,
        "clients_per_s": drawn * len(steady) / sum(steady),
        "round_s": round_s,
        "at_peak_mb": {name: size / 1e6 for name, size in memory.at_peak.items()},
    }


def population(args: argparse.Namespace) -> dict[str, Any]:
    """The same population in every system, one after the other."""
    size = Size(args.clients, args.drawn, args.rounds, args.images)
    data = digits_of(size, args.seed)
    with tempfile.TemporaryDirectory(prefix="atoll-population-") as folder:
        parts = partition_data.parts_of(f"labels:{LABELS}", data.y, (), size.clients, args.seed, least=0)
        task.write(Path(folder), data.x, data.y, parts)
        asked = {
            "clients": size.clients,
            "drawn": size.drawn,
            "steps": STEPS,
            "batch": BATCH,
            "lr": LEARNING_RATE,
            "seed": args.seed,
        }
        found = {"atoll": _atoll(size, args.seed, data, args.hosts)}
        _shown("population", "atoll", found["atoll"])
        found["flower"] = _flower({**asked, "num-server-rounds": size.rounds, "data": folder}, size)
        _shown("population", "flower", found["flower"])
        if args.pfl_python:
            found["pfl"] = _pfl(args.pfl_python, folder, {**asked, "rounds": size.rounds}, size)
            _shown("population", "pfl", found["pfl"])
    return found


def _atoll(size: Size, seed: int, data: Any, hosts: int) -> dict[str, Any]:
    def members() -> list[psutil.Process]:
        return families(process.pid for process in list(fleet.processes.values()))

    with fleet_of(hosts, size.clients, seed, data) as fleet, Memory(members) as memory:
        made = trained(fleet, job("fedavg", size, seed, data, "population"))
    return row(made["round_s"], size.drawn, memory)


def families(roots: Iterable[int]) -> list[psutil.Process]:
    """Processes by number, as far as they are there, and all that they started."""
    found = []
    for number in roots:
        with contextlib.suppress(psutil.Error):
            member = psutil.Process(number)
            found += [member, *member.children(recursive=True)]
    return found


def _flower(settings: dict[str, Any], size: Size) -> dict[str, Any]:
    with StockFlower(size.clients, simulation=True) as flower, Memory(flower.processes) as memory:
        found = flower.run(POPULATION, settings)
    return row(found["round_s"], size.drawn, memory)


def _pfl(python: str, folder: str, asked: dict[str, Any], size: Size) -> dict[str, Any]:
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": ""}
    with (
        subprocess.Popen(
            [python, str(PFL), folder, json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process,
        Memory(lambda: families([process.pid])) as memory,
    ):
        out, said = process.communicate()
    if process.returncode:
        raise CommandFailed(f"pfl: {said[-2000:]}")
    return row(json.loads(out.splitlines()[-1])["round_s"], size.drawn, memory)


# ---------------------------------------------------------------- one app


def digits(args: argparse.Namespace) -> dict[str, Any]:
    """The same app on as many nodes, in both simulations."""
    found = {"atoll": _digits_here(args)}
    _shown("digits", "atoll", found["atoll"])
    with StockFlower(args.nodes, simulation=True) as flower, Memory(flower.processes) as memory:
        found["flower"] = _app_row(lambda: flower.run(DIGITS, {"min-nodes": args.nodes}), memory)
    _shown("digits", "flower", found["flower"])
    return found


def _digits_here(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="atoll-digits-") as folder:
        out = Path(folder) / "found.json"
        config = f'min-nodes={args.nodes} out="{out}"'
        command = [sys.executable, "-P", "-m", "coordinator.cli", "flower", "simulate", str(DIGITS), "--json"]
        command += ["--nodes", str(args.nodes), "--workers", str(WORKERS), "--run-config", config]
        started: list[int] = []

        def run() -> dict[str, Any]:
            environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
            ) as process:
                started.append(process.pid)
                _, said = process.communicate()
            if process.returncode:
                raise CommandFailed(f"atoll flower simulate: {said[-2000:]}")
            result: dict[str, Any] = json.loads(out.read_text())
            result["ended_s"] = out.stat().st_mtime  # before the workers were ended
            return result

        with Memory(lambda: families(started)) as memory:
            return _app_row(run, memory)


def _app_row(run: Callable[[], dict[str, Any]], memory: Memory) -> dict[str, Any]:
    """Figures of an app's run; the first round has ended when the others' time before the result is over."""
    begun_s = time.time()
    result = run()
    took_s = result.get("ended_s", time.time()) - begun_s
    return {
        "peak_mb": memory.peak_bytes / 1e6,
        "first_round_s": took_s - sum(result["round_s"][1:]),
        "took_s": took_s,
        "acc": result["acc"],
        "at_peak_mb": {name: size / 1e6 for name, size in memory.at_peak.items()},
    }


# ---------------------------------------------------------------- figures


def _shown(part: str, system: str, found: dict[str, Any]) -> None:
    words = [f"{found['peak_mb']:.0f} MB"]
    for key, unit in (("clients_per_s", "clients/s"), ("first_round_s", "s to the first round's end")):
        words += [f"{found[key]:.1f} {unit}"] if key in found else []
    print(f"{part:<11} {system:<7} {', '.join(words)}", flush=True)


def compared(part: str, found: dict[str, Any]) -> dict[str, Any]:
    """Ratios of Atoll's figures to the others'."""
    ours, figures = found["atoll"], {}
    for name, other in found.items():
        if name == "atoll":
            continue
        figures[f"memory_over_{name}"] = ours["peak_mb"] / other["peak_mb"]
        if part == "population":
            figures[f"rate_over_{name}"] = ours["clients_per_s"] / other["clients_per_s"]
        else:
            figures[f"first_round_over_{name}"] = ours["first_round_s"] / other["first_round_s"]
            gap = np.abs(np.subtract(ours["acc"], other["acc"]))
            figures[f"images_apart_{name}"] = round(float(gap.max()) * HELD_OUT)
    return figures


def main() -> None:
    """Run the chosen parts and print the figures."""
    made = parser(__doc__ or "")
    made.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    made.add_argument("--clients", type=int, default=1000)
    made.add_argument("--drawn", type=int, default=100)
    made.add_argument("--rounds", type=int, default=6)
    made.add_argument("--images", type=int, default=60_000)
    made.add_argument(
        "--hosts", type=int, default=1, help="of Atoll's; each of Flower's two actors has a core"
    )
    made.add_argument("--nodes", type=int, default=NODES, help="of the digits app")
    made.add_argument("--pfl-python", default="", help="a Python that has pfl")
    args = made.parse_args()
    found: dict[str, Any] = {"seed": args.seed, "machine": machine()}
    if "population" in args.parts:
        need_mnist(args.json)
    for part in args.parts:
        systems = population(args) if part == "population" else digits(args)
        found[part] = {**compared(part, systems), "systems": systems}
        print(f"{part}: " + ", ".join(f"{k} {v:.3g}" for k, v in found[part].items() if k != "systems"))
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    execute(main)
