"""What compressed links cost in loss: dense, AdaTopK and uniform top-k, paired by seed.

The job is cut as op_fence cuts it for a scenario, and all stages run in this process, exchanging
their tensors through the links' codecs (tests/inprocess/pipeline.py): the same arithmetic as over workers,
without waiting for the lab's lines. AdaTopK keeps fast links dense; uniform top-k sends the
same bytes over the slowest line, and compresses every link. Judged is the exported model: the
plain module with the trained weights, no codec anywhere, on held-out text. The loss through the
codecs is told beside it, and never alone: it hides the damage. Lab time is steps times the step
that the timeline predicts for the scenario.

  python -m benchmarks.convergence --state convergence.jsonl --plot convergence.png --json
  python -m benchmarks.convergence --steps 200 --seeds 1 --also independent=adatopk:10:independent

Each finished (seed, variant) is a line of ``--state``; a second start goes on where the first ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.compression import Compression
from atoll.data import Materialised, sample_indices, take
from atoll.program import stage_programs
from benchmarks.convergence_report import report, show
from benchmarks.harness import ROOT, execute, fitting, machine, parser
from coordinator.capture.capture import Captured, capture
from coordinator.client.fleet_file import parse_fleet
from coordinator.client.job_file import load_job
from coordinator.planning.codecs.ratios import uniform
from coordinator.planning.costs.codec_costs import load_bytes
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Candidate, Problem
from lab.fleet import fleet_of
from lab.reader import read_scenario
from tests.inprocess.pipeline import LocalPipeline

if TYPE_CHECKING:
    from atoll.job import Job
    from atoll.plan import LinkSpec

SETTINGS = ("MICRO_BATCH=4", "n_micro=4")  # the demo's 16 sequences a step, in fewer and larger ops
CURVE_BATCHES = 16  # held-out micro-batches of a point of the curve
FINAL_BATCHES = 128  # of the exported model
BASE_SEED = 4711


@dataclass(frozen=True, slots=True)
class Variant:
    """What the links do; dense for the first ``dense_steps``."""

    name: str
    compress: str  # as after --compress; "uniform" is topk with AdaTopK's bytes on the slowest link
    dense_steps: int = 0

    @classmethod
    def parse(cls, text: str) -> Variant:
        """NAME=COMPRESS[@DENSE_STEPS]."""
        name, _, rest = text.partition("=")
        compress, _, steps = rest.partition("@")
        if not name or not compress:
            raise SystemExit(f"--also {text}: write NAME=COMPRESS[@DENSE_STEPS]")
        return cls(name, compress, int(steps or 0))


def variants_of(ratio: float, also: Sequence[str]) -> dict[str, Variant]:
    """The three that are promised, and any more that are asked for."""
    found = [Variant("dense", "off"), Variant("adatopk", f"adatopk:{ratio:g}"), Variant("uniform", "uniform")]
    found += [Variant.parse(text) for text in also]
    return {variant.name: variant for variant in found}


# ---------------------------------------------------------------- one job, cut once


class Experiment:
    """A captured job, its cut for a scenario, and what each variant does to the cut's links."""

    def __init__(self, job: Job, scenario: str, ratio: float) -> None:
        self.job, self.training = job, job.training
        self.captured: Captured = capture(job.module, job.example_inputs, job.training)
        self.fleet = parse_fleet(tomllib.loads(fleet_of(read_scenario(scenario))))
        planned = replace(self.training, compress=f"adatopk:{ratio:g}")
        self.plan = make_plan(
            PlanRequest(
                "convergence",
                1,
                self.captured.train,
                self.captured.evaluation,
                planned,
                self.fleet,
                "op_fence",
            )
        )
        devices = tuple(self.fleet.index[stage.worker] for stage in self.plan.stages)
        self.candidate = Candidate(devices, tuple(stage.start for stage in self.plan.stages))
        specs = self._problem(planned.compression).specs(self.candidate)
        if not specs:
            raise SystemExit(f"{scenario} needs one stage only for this job: nothing to compress")
        self.slow_ratio = max(spec.ratio for spec in specs)
        self.slow = {(s.source, s.target) for s in specs if s.ratio == self.slow_ratio}
        self.uniform_ratio = self._uniform_ratio(specs)

    def compression(self, variant: Variant) -> Compression:
        """What the variant asks of the links."""
        name = f"topk:{self.uniform_ratio:.6g}" if variant.compress == "uniform" else variant.compress
        return Compression.parse(name)

    def links(self, variant: Variant) -> tuple[LinkSpec, ...]:
        """The codecs of the cut's links."""
        return self._problem(self.compression(variant)).specs(self.candidate)

    def step_s(self, variant: Variant) -> float:
        """The predicted step of the same cut under the variant."""
        scored = self._problem(self.compression(variant)).score(self.candidate)
        assert scored is not None, "the cut fits: it was planned for this fleet"
        return scored.step_s

    def dense_bytes(self) -> dict[tuple[int, int], int]:
        """Payload of a step by pair of stages, nothing compressed."""
        problem = self._problem(Compression.parse("off"))
        loads = problem.traffic.loads(self.candidate.starts)
        return {(load.source, load.target): load.n_bytes * self.training.n_micro for load in loads}

    def pipeline(self) -> LocalPipeline:
        """The stages with the job's initial weights, links dense."""
        dag = self.captured.train
        return LocalPipeline(
            stage_programs(dag, [stage.start for stage in self.plan.stages]),
            self.training,
            {name: {"value": tensor.clone()} for name, tensor in self.captured.state.items()},
            eval_programs=stage_programs(
                self.captured.evaluation, [stage.eval_start for stage in self.plan.stages]
            ),
            states={**dag.parameters, **dag.buffers},
        )

    def _uniform_ratio(self, specs: Sequence[LinkSpec]) -> float:
        """Of top-k on every link, so that it sends over the slow ones what ``specs`` send there."""
        links = [
            link
            for link in self._problem(Compression.parse("off")).links_between(self.candidate)
            if link.pair in self.slow
        ]

        def sent(chosen: Sequence[LinkSpec]) -> float:
            by_pair = {(spec.source, spec.target): spec for spec in chosen}
            return sum(load_bytes(link.load, by_pair[link.pair]) for link in links)

        low, high, wanted = 1.0, 10_000.0, sent(specs)
        while high - low > 1e-3 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if sent(uniform(links, "topk", middle)) <= wanted else (middle, high)
        return high

    def _problem(self, compression: Compression) -> Problem:
        return Problem(self.captured.train, self.training, self.fleet, compression=compression)


def batch_of(data: Materialised, job: Job, n_micro: int, step: int, micro: int) -> dict[str, Tensor]:
    """A micro-batch as the workers would get it."""
    samples = sample_indices(data.spec, n_micro, step, micro)
    return {
        f.input: torch.from_numpy(np.array(take(data.arrays[f.blob], f, samples))).to(
            job.example_inputs[f.input].dtype
        )
        for f in data.spec.fields
    }


# ---------------------------------------------------------------- one training


def train(experiment: Experiment, variant: Variant, every: int) -> dict[str, Any]:
    """Train once; the curve, the exported model's loss and the bytes of a step."""
    job, steps, n_micro = experiment.job, experiment.training.steps, experiment.training.n_micro
    data, held_out = job.data.materialise(next(iter(job.example_inputs.values())).shape[0])
    assert held_out is not None, "the job keeps nothing to evaluate on"
    small, large = (
        [batch_of(held_out, job, count, 0, micro) for micro in range(count)]
        for count in (CURVE_BATCHES, FINAL_BATCHES)
    )
    pipeline, links = experiment.pipeline(), experiment.links(variant)
    dense = experiment.dense_bytes()
    slow_bytes, curve, losses = 0.0, [], []
    begun_s = time.perf_counter()
    for step in range(steps):
        if step == variant.dense_steps:
            pipeline.relink(links)
        batches = [batch_of(data, job, n_micro, step, micro) for micro in range(n_micro)]
        losses.append(pipeline.step(step, batches).loss)
        sent = sent_bytes(pipeline, dense, step - variant.dense_steps + 1)
        slow_bytes += sum(sent[pair] for pair in experiment.slow)
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append(
                {
                    "step": step + 1,
                    "loss": float(np.mean(losses[-every:])),
                    "slow_bytes": slow_bytes,
                    "held_out": pipeline.evaluate(small),
                    "coded": pipeline.evaluate(small, coded=True),
                }
            )
    took_s = time.perf_counter() - begun_s
    return {
        "curve": curve,
        "exported": exported_loss(job.module, pipeline.snapshot(), large),
        "plain": pipeline.evaluate(large),
        "coded": pipeline.evaluate(large, coded=True),
        "slow_bytes_per_step": sum(sent[pair] for pair in experiment.slow),
        "all_bytes_per_step": sum(sent.values()),
        "dense_slow_bytes_per_step": sum(dense[pair] for pair in experiment.slow),
        "links": [f"{s.source}>{s.target} {s.codec}:{s.ratio:g} {s.mask.value}".strip() for s in links],
        "lab_step_s": experiment.step_s(variant),
        "took_s": took_s,
    }


def sent_bytes(
    pipeline: LocalPipeline, dense: Mapping[tuple[int, int], int], steps_linked: int
) -> dict[tuple[int, int], float]:
    """Bytes of a step by pair: the codecs' own count (headers too), payload where there is none."""
    use = pipeline.codec_use()
    return {
        pair: use[pair].wire_bytes / steps_linked
        if pair in use and steps_linked > 0 and use[pair].wire_bytes
        else n
        for pair, n in dense.items()
    }


@torch.no_grad()
def exported_loss(
    module: nn.Module, state: Mapping[str, Mapping[str, Tensor]], batches: Iterable[Mapping[str, Tensor]]
) -> float:
    """Held-out loss of the plain module with the trained weights: no pipeline, no codec."""
    weights = {name: kept["value"] for name, kept in state.items() if "value" in kept}
    own = module.state_dict()
    own.update({name: tensor for name, tensor in weights.items() if name in own})
    module.load_state_dict(own)
    module.train(False)
    losses = []
    for batch in batches:
        out = module(**batch)
        losses.append(float(getattr(out, "loss", out)))
    return float(np.mean(losses))


def run_one(args: argparse.Namespace, seed: int, variant: Variant) -> dict[str, Any]:
    """A child's whole work."""
    torch.set_num_threads(1)
    job = load_job(Path(args.job), overrides_of(args, seed))
    found = train(Experiment(job, args.scenario, args.ratio), variant, args.every)
    return {"key": key_of(args, variant), "seed": seed, "variant": variant.name, **found}


def overrides_of(args: argparse.Namespace, seed: int) -> list[str]:
    """The job's settings for one of the paired seeds: weights, data order and training."""
    own = [f"SEED={BASE_SEED + seed}"] if Path(args.job).name == "gpt.py" else []
    return [*fitting(SETTINGS, args.job), *own, f"seed={seed}", f"steps={args.steps}", *args.set]


# ---------------------------------------------------------------- all of them


def key_of(args: argparse.Namespace, variant: Variant) -> str:
    """What a stored line must agree in to be used again."""
    facts = [args.job, args.scenario, args.steps, args.ratio, args.every, args.set, SETTINGS]
    facts += [variant.compress, variant.dense_steps, CURVE_BATCHES, FINAL_BATCHES, 2]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def stored(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of the state file; one torn by a kill is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and {"key", "seed", "variant"} <= set(found):
            yield found


def run_all(args: argparse.Namespace, chosen: Sequence[Variant]) -> list[dict[str, Any]]:
    """Every (seed, variant) that the state file does not hold yet, ``--jobs`` at a time."""
    path = Path(args.state) if args.state else Path(tempfile.mkdtemp(prefix="atoll-bench-")) / "state.jsonl"
    keys = {variant.name: key_of(args, variant) for variant in chosen}
    done = {(r["seed"], r["variant"]): r for r in stored(path) if keys.get(r["variant"]) == r["key"]}
    left = [(seed, v) for seed in range(args.seed, args.seed + args.seeds) for v in chosen]
    left = [(seed, v) for seed, v in left if (seed, v.name) not in done]
    running: list[tuple[int, Variant, subprocess.Popen[str]]] = []
    try:
        while left or running:
            while left and len(running) < args.jobs:
                seed, variant = left.pop(0)
                running.append((seed, variant, _start(args, seed, variant)))
            time.sleep(0.2)
            for entry in [r for r in running if r[2].poll() is not None]:
                running.remove(entry)
                result = _result(*entry)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
                done[result["seed"], result["variant"]] = result
                print(
                    f"seed {result['seed']} {result['variant']:<14} exported {result['exported']:.4f} "
                    f"({result['took_s'] / args.steps:.2f} s a step here)",
                    flush=True,
                )
    finally:
        for _, _, process in running:
            process.kill()
    return [done[key] for key in sorted(done)]


def _start(args: argparse.Namespace, seed: int, variant: Variant) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.convergence", "--one", f"{seed}:{variant.name}"]
    command += ["--job", args.job, "--scenario", args.scenario, "--steps", str(args.steps)]
    command += ["--ratio", repr(args.ratio), "--every", str(args.every)]
    for name in ("set", "also"):
        command += [part for value in getattr(args, name) for part in (f"--{name}", value)]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the child has ended
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True)
    process.log = log  # type: ignore[attr-defined]
    return process


def _result(seed: int, variant: Variant, process: subprocess.Popen[str]) -> dict[str, Any]:
    log = process.log  # type: ignore[attr-defined]
    log.seek(0)
    said = log.read()
    log.close()
    if process.returncode:
        raise SystemExit(f"seed {seed} {variant.name} failed: {said[-2000:]}")
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found


def options() -> argparse.ArgumentParser:
    """The command line."""
    found = parser(__doc__, job="examples/gpt.py")
    found.add_argument("--scenario", default="two_islands", help="whose cut and links (name or path)")
    found.add_argument("--steps", type=int, default=800)
    found.add_argument("--seeds", type=int, default=3, help="paired seeds, from --seed on")
    found.add_argument("--ratio", type=float, default=10.2, help="dense bytes / wire bytes on the slow link")
    found.add_argument("--every", type=int, default=50, help="steps between points of the curve")
    found.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    found.add_argument("--state", help="JSON lines of finished trainings; goes on from there")
    found.add_argument("--plot", help="picture of loss against bytes and against lab time")
    found.add_argument("--only", help="variants, by commas")
    found.add_argument(
        "--also", action="append", default=[], help="NAME=COMPRESS[@DENSE_STEPS]; may be repeated"
    )
    found.add_argument("--set", action="append", default=[], help="job override")
    found.add_argument("--one", help=argparse.SUPPRESS)
    return found


def main() -> None:
    """Run what is missing, then print the table and, with --json, one object."""
    args = options().parse_args()
    known = variants_of(args.ratio, args.also)
    if args.one:
        seed, _, name = args.one.partition(":")
        print(json.dumps(run_one(args, int(seed), known[name])))
        return
    wanted = args.only.split(",") if args.only else list(known)
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"--only: no variant {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = run_all(args, [known[name] for name in wanted])
    found = report(results)
    show(found)
    print(f"machine {machine()}, seeds {args.seed} to {args.seed + args.seeds - 1}, {args.steps} steps")
    if args.plot:
        from benchmarks.convergence_report import plot

        plot(results, Path(args.plot))
        print(f"drawn in {args.plot}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    execute(main)
