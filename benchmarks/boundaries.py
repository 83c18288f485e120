"""Which codec a boundary wants: held-out loss by ratio and number of cuts, paired by seed.

A job is cut into stages of about equal numbers of ops, where least crosses, and all of them run in this
process through the links' codecs (tests/inprocess/pipeline.py). Every link has the same codec and ratio.
Judged is the plain module with the trained weights, no codec anywhere. ``--warm`` steps go first without any
codec: with most of the steps it is what fine-tuning meets. Without codecs no cut changes a bit, so these
steps and the dense training are done once a seed, in one stage. Decision 010 says which codecs `auto` takes.

  python -m benchmarks.boundaries --state boundaries.jsonl --json
  python -m benchmarks.boundaries --steps 100 --seeds 1 --cuts 1 --ratios 16 --codecs eden,topk

Each finished training is a line of ``--state``; a second start goes on where the first ended. Two that have
different seeds may share a file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.compression import Compression
from atoll.errors import UsageError
from atoll.program import stage_programs
from benchmarks.convergence import batch_of, sent_bytes, stored
from benchmarks.harness import execute, machine, parser
from benchmarks.optimizers import HeldOut, job_of
from coordinator.capture.capture import capture
from coordinator.client.fleet_file import parse_fleet
from coordinator.planning.problem import Candidate, Problem
from lab.fleet import fleet_of
from lab.reader import read_scenario
from tests.inprocess.pipeline import LocalPipeline

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.plan import LinkSpec

    State = Mapping[str, Mapping[str, Tensor]]

DENSE = "none"
TICKS = (8, 10, 12, 16, 30)
NEAR = 0.1  # of the ops: so far from an even cut the thinnest place is looked for


@dataclass(frozen=True, slots=True)
class Case:
    """A training: the codec of every link, how many times fewer bytes, and the cuts; dense ones have none."""

    codec: str
    ratio: float
    cuts: int
    seed: int

    @property
    def compression(self) -> Compression:
        return Compression.parse("off" if self.codec == DENSE else f"{self.codec}:{self.ratio:g}")


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the trainings, the dense ones first, then a ratio after the other with all its seeds."""
    seeds = range(args.seed, args.seed + args.seeds)
    yield from (Case(DENSE, 1.0, 0, seed) for seed in seeds)
    for ratio in map(float, args.ratios.split(",")):
        for seed in seeds:
            for cuts in map(int, args.cuts.split(",")):
                yield from (Case(codec, ratio, cuts, seed) for codec in args.codecs.split(","))


def starts_of(problem: Problem, cuttable: Sequence[int], cuts: int) -> tuple[int, ...]:
    """Return where stages begin: near even numbers of ops, where least crosses."""
    n_ops, found = problem.n_ops, [0]
    for number in range(1, cuts + 1):
        even = number * n_ops / (cuts + 1)
        near = [at for at in cuttable if at > found[-1] and abs(at - even) <= NEAR * n_ops]
        if not near:
            raise UsageError(f"no place for cut {number} of {cuts} near op {even:.0f} of {n_ops}")

        def crossing(at: int, even: float = even) -> tuple[int, float]:
            return sum(load.n_bytes for load in problem.traffic.loads((0, at))), abs(at - even)

        found.append(min(near, key=crossing))
    return tuple(found)


class Trainings:
    """Trains cases of one seed after another, from the state after the steps without codecs."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self._warm, self._job = args.warm, job_of(args, seed)
        self._captured = capture(self._job.module, self._job.example_inputs, self._job.training)
        self._fleet = parse_fleet(tomllib.loads(fleet_of(read_scenario(args.scenario))))
        self._held_out = HeldOut(self._job)
        self._data, _ = self._job.data.materialise(next(iter(self._job.example_inputs.values())).shape[0])
        self._state: State = copied({name: {"value": one} for name, one in self._captured.state.items()})
        if args.warm:
            self._state = self._trained((0,), (), range(args.warm)).snapshot()

    def __call__(self, case: Case) -> dict[str, Any]:
        """Return a case's held-out loss, and the bytes of its links that are dense over those sent."""
        begun_s, dag, training = time.perf_counter(), self._captured.train, self._job.training
        problem = Problem(dag, training, self._fleet, compression=case.compression)
        starts = starts_of(problem, dag.cuttable(), case.cuts)
        if len(starts) > len(self._fleet.devices):
            raise UsageError(f"{len(starts)} stages, the scenario has {len(self._fleet.devices)} machines")
        loads = problem.traffic.loads(starts)
        dense = {(load.source, load.target): load.n_bytes * training.n_micro for load in loads}
        links = problem.specs(Candidate(tuple(range(len(starts))), starts)) if case.cuts else ()
        pipeline = self._trained(starts, links, range(self._warm, training.steps))
        sent = sent_bytes(pipeline, dense, training.steps - self._warm)
        return {
            "loss": self._held_out.loss(pipeline.snapshot()),
            "times_fewer": sum(dense.values()) / sum(sent.values()) if sent else 1.0,
            "starts": list(starts),
            "took_s": time.perf_counter() - begun_s,
        }

    def _trained(self, starts: Sequence[int], links: Sequence[LinkSpec], steps: range) -> LocalPipeline:
        dag, job = self._captured.train, self._job
        programs, states = stage_programs(dag, list(starts)), {**dag.parameters, **dag.buffers}
        pipeline = LocalPipeline(programs, job.training, copied(self._state), states=states)
        pipeline.relink(links)
        micros = range(job.training.n_micro)
        for step in steps:
            batches = [batch_of(self._data, job, len(micros), step, micro) for micro in micros]
            pipeline.step(step, batches)
        return pipeline


def copied(state: State) -> dict[str, dict[str, Tensor]]:
    """Return a state of its own for a training that goes on from this one."""
    return {name: {kind: tensor.clone() for kind, tensor in kept.items()} for name, kept in state.items()}


# ---------------------------------------------------------------- all of them


def key_of(args: argparse.Namespace, case: Case) -> str:
    """What a stored line must agree in to be used again."""
    facts = [args.job, args.scenario, args.steps, args.warm, args.set, asdict(case), 2]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every training that the state file does not hold yet, one after another."""
    path = Path(args.state) if args.state else None
    known = {line["key"]: line for line in stored(path)} if path else {}
    trainings = cache(partial(Trainings, args))
    found = []
    for case in cases(args):
        key = key_of(args, case)
        if key not in known and args.only_stored:
            continue
        if key not in known:
            variant = f"{case.codec}:{case.ratio:g} over {case.cuts}"
            known[key] = {"key": key, "variant": variant, **asdict(case), **trainings(case.seed)(case)}
            if path:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[key]) + "\n")
            print(f"seed {case.seed} {variant:<18} {known[key]['loss']:.4f}", flush=True)
        found.append(known[key])
    return found


def rows_of(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each codec at each ratio and number of cuts: its loss, and by how much more than dense, over seeds."""
    dense = {line["seed"]: line["loss"] for line in found if line["codec"] == DENSE}
    rows: dict[tuple[int, float, str], list[Mapping[str, Any]]] = {}
    for line in found:
        rows.setdefault((line["cuts"], line["ratio"], line["codec"]), []).append(line)
    return [
        {
            "cuts": cuts,
            "ratio": ratio,
            "codec": codec,
            "times_fewer": statistics.fmean(line["times_fewer"] for line in lines),
            "seeds": len(lines),
            "loss": statistics.fmean(line["loss"] for line in lines),
            "more": [line["loss"] / dense[line["seed"]] - 1.0 for line in lines],
        }
        for (cuts, ratio, codec), lines in sorted(rows.items())
    ]


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """How much more than dense, mean and extremes over seeds, against the ratio; a panel a number of cuts."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cuts = sorted({row["cuts"] for row in rows} - {0})
    codecs = dict.fromkeys(row["codec"] for row in rows if row["codec"] != DENSE)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.0, 3.2), layout="constrained")
        panels = figure.subplots(1, len(cuts), sharey=True, squeeze=False)[0]
        for panel, count in zip(panels, cuts, strict=True):
            for codec in codecs:
                mine = [row for row in rows if row["cuts"] == count and row["codec"] == codec]
                means = [100 * statistics.fmean(row["more"]) for row in mine]
                below = [mean - 100 * min(row["more"]) for mean, row in zip(means, mine, strict=True)]
                above = [100 * max(row["more"]) - mean for mean, row in zip(means, mine, strict=True)]
                ratios = [row["times_fewer"] for row in mine]
                panel.errorbar(ratios, means, [below, above], marker="o", capsize=2, label=codec)
            panel.set(title=f"cuts: {count}", xlabel="times fewer bytes", xscale="log")
            panel.set_xticks(TICKS, [str(tick) for tick in TICKS])
            panel.minorticks_off()
        panels[0].set(ylabel="held-out loss over dense, %")
        panels[0].legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90)


def main() -> None:
    """Run what is missing, then print the table and, with --json, one object."""
    found = parser(__doc__, job="examples/gpt.py")
    found.add_argument("--scenario", default="two_islands", help="whose machines (name or path)")
    found.add_argument("--codecs", default="eden,topk", help="by commas")
    found.add_argument("--ratios", default="8,10,16,30", help="dense bytes over sent ones, by commas")
    found.add_argument("--cuts", default="1,3", help="numbers of cuts, by commas")
    found.add_argument("--steps", type=int, default=500)
    found.add_argument("--warm", type=int, default=0, help="of the steps, those before codecs begin")
    found.add_argument("--seeds", type=int, default=3, help="paired seeds, from --seed on")
    found.add_argument("--state", help="JSON lines of finished trainings; goes on from there")
    found.add_argument("--only-stored", action="store_true", help="train nothing: report what --state holds")
    found.add_argument("--plot", type=Path, help="picture of the table")
    found.add_argument("--set", action="append", default=[], help="job override")
    args = found.parse_args()
    if not 0 <= args.warm < args.steps:
        raise UsageError(f"--warm {args.warm} of {args.steps} steps")
    torch.set_num_threads(1)
    rows = rows_of(run_all(args))
    for row in rows:
        more, name = (
            ", ".join(f"{each:+.1%}" for each in row["more"]),
            f"{row['cuts']} cuts {row['codec']:<6}",
        )
        print(f"{name} {row['times_fewer']:5.1f} times fewer: {row['loss']:.4f} ({more})")
    if args.plot:
        plot(rows, args.plot)
        print(f"drawn in {args.plot}")
    if args.json:
        print(json.dumps({"rows": rows, "steps": args.steps, "warm": args.warm, "machine": machine()}))


if __name__ == "__main__":
    execute(main)
