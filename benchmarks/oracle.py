"""The oracle: whatever the cut, the model that comes out is the one that one stage would train.

For a job file, or for models of the tests (five unless named), K-stage plans with random valid
cuts are trained and compared with the one-stage plan: losses, gradient norms, parameters, optimizer
state and buffers (`max_abs_diff`, expected 0.0). The one-stage plan is compared with the plain module
trained by plain PyTorch, dropout 0 and SGD (`max_abs_diff_plain`, expected <= 1e-6).

  python -m benchmarks.oracle --job examples/gpt.py --stages 3 --steps 5 --plans 10
  python -m benchmarks.oracle --job examples/gpt.py --compress lossless
  python -m benchmarks.oracle --models t5,vit,whisper,gemma,qwen,mixtral --stages 4
  python -m benchmarks.oracle --json

With --replicas N, random plans of one to four replicas, each with a cut, a share of the step's blocks of
micro-batches and a schedule of its own, are compared with one machine of as many blocks (expected 0.0):

  python -m benchmarks.oracle --replicas 200 --seed 1 --json
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.compression import OFF, Compression
from atoll.data import sample_indices, take
from atoll.errors import UsageError
from atoll.exchange import Exchange
from atoll.job import Job, Optimizer, OptimizerName, Recompute, TrainingSpec
from atoll.microbatch import ScheduleName, block_ranges
from atoll.opdag import OpDag, StateMeta
from atoll.plan import LinkSpec, Mask, Plan, Replica, StageSpec
from atoll.program import stage_programs
from benchmarks.harness import execute
from compressors import codec
from coordinator.capture.capture import Captured, capture
from coordinator.client.job_file import load_job
from tests.inprocess.pipeline import LocalPipeline, usual_actions
from tests.inprocess.replicas import LocalReplicas

State = Mapping[str, Mapping[str, Tensor]]
Batches = Callable[[int], list[dict[str, Tensor]]]  # step -> its micro-batches
BUILT_IN = ("gpt2", "llama", "bert", "resnet", "branches")
REPLICATED = ("gpt2", "llama", "bert")  # dropout, two with tied weights; training writes no buffer
MAX_REPLICAS = 4
MAX_MICRO = 8
DROPOUT = 0.1
PLAIN_LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Case:
    """A captured model with its data, ready to be trained any number of times."""

    name: str
    module: nn.Module
    dag: OpDag
    states: Mapping[str, StateMeta]
    tensors: State
    training: TrainingSpec
    batches: Batches


@dataclass(frozen=True)
class Run:
    """What a training left behind: one row of figures a step, and the final state."""

    figures: tuple[tuple[float, ...], ...]
    state: State


Runner = Callable[[Case, Sequence[int]], Run]  # trains a case cut at the given starts


def built_in(name: str, training: TrainingSpec, dropout: float) -> Case:
    """A model of the tests, by name, on seeded random data."""
    from tests.captured_models import ALL, captured_model  # late, for a job file needs none of them

    if any(group.frozen for group in training.optimizer.groups):
        example = ALL[name](dropout=dropout)
        captured = capture(example.module, example.example_inputs, training)
    else:
        found = captured_model(name, dropout, training.precision)
        example, captured = found.example, found.captured

    def batches(step: int) -> list[dict[str, Tensor]]:
        first = training.seed * 1_000_003 + step * training.n_micro
        return [example.make_batch(first + micro) for micro in range(training.n_micro)]

    return case_from(name, example.module, captured, training, batches)


def model_names(text: str) -> tuple[str, ...]:
    """``--models``: names joined by commas, or "all". UsageError for one that is unknown."""
    from tests.captured_models import ALL

    known = tuple(ALL)
    names = known if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise UsageError(f"--models {text}: no model {name!r}; give all, or some of {','.join(known)}")
    return names


def from_job(job: Job, training: TrainingSpec) -> Case:
    """A job file's model on the job's own data."""
    inputs = dict(job.example_inputs)
    data, _ = job.data.materialise(next(iter(inputs.values())).shape[0])

    def batches(step: int) -> list[dict[str, Tensor]]:
        found = []
        for micro in range(training.n_micro):
            samples = sample_indices(data.spec, training.n_micro, step, micro)
            arrays = {f.input: take(data.arrays[f.blob], f, samples) for f in data.spec.fields}
            found.append({n: torch.from_numpy(np.array(a)).to(inputs[n].dtype) for n, a in arrays.items()})
        return found

    return case_of(job.name, job.module, inputs, training, batches)


def case_of(
    name: str,
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    training: TrainingSpec,
    batches: Batches,
) -> Case:
    """Capture a module for training."""
    return case_from(name, module, capture(module, inputs, training), training, batches)


def case_from(
    name: str, module: nn.Module, captured: Captured, training: TrainingSpec, batches: Batches
) -> Case:
    """A module that is captured already; ``training`` at the precision of its capture."""
    dag = captured.train
    tensors = {n: {"value": t} for n, t in captured.state.items()}
    return Case(name, module, dag, {**dag.parameters, **dag.buffers}, tensors, training, batches)


def run_local(
    case: Case,
    starts: Sequence[int],
    links: Sequence[LinkSpec] = (),
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
    devices: Sequence[torch.device | str] = ("cpu",),
) -> Run:
    """Train the case in this process, one Stage per start."""
    pipeline = LocalPipeline(
        stage_programs(case.dag, starts),
        case.training,
        case.tensors,
        devices=devices,
        actions=usual_actions(len(starts), case.training.n_micro, schedule),
        states=case.states,
    )
    pipeline.relink(links)
    results = [pipeline.step(step, case.batches(step)) for step in range(case.training.steps)]
    return Run(tuple((r.loss, *r.square_norms) for r in results), pipeline.snapshot())


def random_replicas(case: Case, source: random.Random) -> tuple[Case, Plan]:
    """Draw a plan of one to four replicas, and the case with the micro-batches and blocks that it is of.

    ``case`` has MAX_MICRO micro-batches a step. What a stage recomputes is drawn, too.
    """
    n_micro = source.randint(MAX_REPLICAS, MAX_MICRO)
    count = source.randint(1, MAX_REPLICAS)
    blocks = source.choice([g for g in sorted({1, 2, 3, 4, n_micro}) if g >= count])
    recompute = source.choice((Recompute.OFF, Recompute.SELECTIVE, Recompute.FULL))
    training = replace(case.training, n_micro=n_micro, blocks=blocks, recompute=recompute)
    schedule = source.choice(list(ScheduleName))
    borders = [block.stop for block in block_ranges(n_micro, blocks)]
    ends = [*sorted(source.sample(borders[:-1], count - 1)), n_micro]
    replicas = tuple(
        Replica((start, stop), random_stages(case.dag, schedule, stop - start, f"r{at}", source))
        for at, (start, stop) in enumerate(zip([0, *ends], ends, strict=False))
    )
    exchange = Exchange() if count > 1 else None
    plan = Plan("oracle", 1, "", "", "random", schedule, n_micro, replicas, blocks=blocks, exchange=exchange)
    return replace(case, training=training, batches=lambda step: case.batches(step)[:n_micro]), plan


def random_stages(
    dag: OpDag, schedule: ScheduleName, n_micro: int, name: str, source: random.Random
) -> tuple[StageSpec, ...]:
    """Draw one to four stages whose warm-ups descend, as what waits for each other must."""
    starts = random_starts(dag, source.randint(1, 4), source)
    depths = sorted((source.randint(0, n_micro) for _ in starts[1:]), reverse=True)
    held = [source.randint(1, n_micro) if schedule is ScheduleName.ZERO_BUBBLE else 0 for _ in starts]
    return tuple(
        StageSpec(start, stop, 0, 0, f"{name}.{at}", depth, held[at])
        for at, (start, stop, depth) in enumerate(
            zip(starts, (*starts[1:], len(dag.ops)), (*depths, 0), strict=True)
        )
    )


def run_replicas(case: Case, plan: Plan) -> Run:
    """Train the case in this process by a plan, one pipeline per replica."""
    replicas = LocalReplicas(plan, case.dag, case.training, case.tensors, states=case.states)
    results = [replicas.step(step, case.batches(step)) for step in range(case.training.steps)]
    return Run(tuple((r.loss, *r.square_norms) for r in results), replicas.snapshot())


def measure_replicas(names: Sequence[str], plans: int, steps: int, seed: int) -> dict[str, object]:
    """Compare random plans of these models, in turn, with one machine of as many blocks.

    ``other_bits``: of these machines with several blocks, those that one block gives another model; were
    there none, the comparison would show nothing.
    """
    training = TrainingSpec(steps, MAX_MICRO, seed, Optimizer(clip_norm=1.0))
    captured = [built_in(name, training, DROPOUT) for name in names]
    machines: dict[tuple[str, int, int], Run] = {}

    def machine(case: Case) -> Run:
        key = (case.name, case.training.n_micro, case.training.blocks)
        if key not in machines:
            machines[key] = run_local(case, (0,))
        return machines[key]

    source, worst, where, counts, others = random.Random(seed), 0.0, "", [0] * (MAX_REPLICAS + 1), set()
    for at in range(plans):
        case, plan = random_replicas(captured[at % len(captured)], source)
        gap = difference(run_replicas(case, plan), machine(case))
        counts[len(plan.replicas)] += 1
        if gap > worst:
            worst, where = gap, f"{case.name}, {plan.schedule}, {plan.blocks} blocks: {plan.replicas}"
        one = replace(case, training=replace(case.training, blocks=1))
        if difference(machine(case), machine(one)) > 0.0:
            others.add((case.name, plan.n_micro, plan.blocks))
    return {
        "plans": plans,
        "by_replicas": counts[1:],
        "models": list(names),
        "steps": steps,
        "seed": seed,
        "max_abs_diff": worst,
        "worst": where,
        "machines": sum(blocks > 1 for _, _, blocks in machines),
        "other_bits": len(others),
    }


def every_link(text: str, stages: int) -> tuple[LinkSpec, ...]:
    """``--compress`` on every pair of stages alike. UsageError for the modes that choose by link."""
    chosen = Compression.parse(text)
    if chosen.mode == OFF:
        return ()
    try:
        sparse = codec(chosen.mode).size_on is not None
    except UsageError:
        raise UsageError(f"--compress {text} chooses by link; give off, lossless or CODEC[:RATIO]") from None
    same = Mask.SAME if sparse else Mask.NONE
    pairs = [(s, t) for s in range(stages) for t in range(stages) if s != t]
    ratio = chosen.ratio or 1.0
    return tuple(LinkSpec(s, t, chosen.mode, ratio, same if s > t else Mask.NONE) for s, t in pairs)


def run_plain(case: Case) -> Run:
    """Train a copy of the module itself with torch's SGD at the case's learning rates."""
    module = copy.deepcopy(case.module).train()
    optimizer = torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], case.training.optimizer.lr
    )
    figures = []
    for step in range(case.training.steps):
        for group in optimizer.param_groups:
            group["lr"] = case.training.learning_rate(step)
        total = 0.0
        for batch in case.batches(step):
            out = module(**batch)
            loss = getattr(out, "loss", out) / case.training.n_micro
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        figures.append((total,))
    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return Run(tuple(figures), {name: {"value": value.detach()} for name, value in named.items()})


def without_dropout(module: nn.Module) -> nn.Module:
    """A copy whose dropout layers and dropout attributes are 0."""
    module = copy.deepcopy(module)
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and (
                "drop" in name or (name == "p" and "Dropout" in type(part).__name__)
            ):
                setattr(part, name, 0.0)
    return module


def random_starts(dag: OpDag, stages: int, source: random.Random) -> tuple[int, ...]:
    """Starts of ``stages`` stages at random valid positions, each with at least one op."""
    positions = dag.cuttable()
    return (0, *sorted(source.sample(positions, min(stages - 1, len(positions)))))


def difference(a: Run, b: Run, figures: int | None = None) -> float:
    """Largest absolute difference of the first ``figures`` of each step and of the state.

    Infinite when one has a tensor that the other lacks (among keys of both for a plain module).
    """
    worst = 0.0
    for one, other in zip(a.figures, b.figures, strict=True):
        pairs = zip(one[:figures], other[:figures], strict=True)
        worst = max([worst, *(_scalar_difference(x, y) for x, y in pairs)])
    if figures is None and {n: set(k) for n, k in a.state.items()} != {n: set(k) for n, k in b.state.items()}:
        return float("inf")
    for name in a.state.keys() & b.state.keys():
        for key in a.state[name].keys() & b.state[name].keys():
            one_tensor, other_tensor = a.state[name][key], b.state[name][key]
            if not torch.equal(one_tensor, other_tensor):
                gap = (one_tensor.double() - other_tensor.double()).abs().max()
                worst = max(worst, float(gap) if torch.isfinite(gap) else float("inf"))
    return worst


def _scalar_difference(x: float, y: float) -> float:
    if x == y:
        return 0.0
    return abs(x - y) if np.isfinite(x) and np.isfinite(y) else float("inf")


def measure(case: Case, plain: Case, stages: int, plans: int, seed: int, run: Runner) -> dict[str, object]:
    """The two figures of one case; ``plain`` is the same model without dropout, under SGD."""
    source = random.Random(seed)
    reference = run_local(case, (0,))
    links = every_link(case.training.compress, stages)
    worst, where = 0.0, None
    for _ in range(plans):
        starts = random_starts(case.dag, stages, source)
        # Real workers report losses and export weights; norms and optimizer state stay with them.
        if run is run_local:
            schedule = source.choice((ScheduleName.ONE_F_ONE_B, ScheduleName.ZERO_BUBBLE))
            gap = difference(run_local(case, starts, links=links, schedule=schedule), reference)
        else:
            gap = difference(run(case, starts), reference, 1)
        if gap > worst or where is None:
            worst, where = gap, starts
    return {
        "model": case.name,
        "ops": len(case.dag.ops),
        "stages": stages,
        "steps": case.training.steps,
        "plans": plans,
        "worst_cut": where,
        "max_abs_diff": worst,
        "max_abs_diff_plain": difference(run_local(plain, (0,)), run_plain(plain), figures=1),
    }


def plain_training(training: TrainingSpec) -> TrainingSpec:
    """The declared training with the optimizer that the comparison with torch uses."""
    return replace(training, optimizer=Optimizer(OptimizerName.SGD, lr=PLAIN_LEARNING_RATE))


def cases(args: argparse.Namespace) -> list[tuple[Case, Case]]:
    """Each case beside its dropout-free twin."""
    if args.job is None:
        optimizer = Optimizer(clip_norm=1.0)
        training = TrainingSpec(args.steps, args.micro or 4, args.seed, optimizer, compress=args.compress)
        return [
            (built_in(name, training, DROPOUT), built_in(name, plain_training(training), 0.0))
            for name in model_names(args.models)
        ]
    job = load_job(Path(args.job), args.set)
    training = replace(
        job.training,
        steps=args.steps,
        n_micro=args.micro or job.training.n_micro,
        seed=args.seed,
        compress=args.compress,
    )
    twin = replace(job, module=without_dropout(job.module))
    return [(from_job(job, training), from_job(twin, plain_training(training)))]


def measure_all(args: argparse.Namespace, run: Runner) -> list[dict[str, object]]:
    """A printed row per case, its plans trained by ``run``."""
    rows = []
    for case, plain in cases(args):
        row = measure(case, plain, args.stages, args.plans, args.seed, run)
        rows.append(row)
        print(
            f"{row['model']}: {row['ops']} ops, {args.plans} cuts into {args.stages}, {args.steps} steps: "
            f"max_abs_diff {row['max_abs_diff']}  max_abs_diff_plain {row['max_abs_diff_plain']:.2e}",
            flush=True,
        )
    return rows


def report_replicas(args: argparse.Namespace) -> int:
    """Print what ``measure_replicas`` found; exit code 1 when bits differ."""
    names = REPLICATED if args.models == ",".join(BUILT_IN) else model_names(args.models)
    row = measure_replicas(names, args.replicas, args.steps, args.seed)
    print(
        f"{row['plans']} plans of 1 to {MAX_REPLICAS} replicas ({row['by_replicas']}), {row['steps']} steps: "
        f"max_abs_diff {row['max_abs_diff']} {row['worst']}\n"
        f"{row['other_bits']} of {row['machines']} machines with several blocks have other bits than with one"
    )
    if args.json:
        print(json.dumps(row))
    return 0 if row["max_abs_diff"] == 0.0 and row["other_bits"] else 1


def main() -> int:
    """Print a row per model; exit code 1 when a figure is beyond its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--job", help="job file; default: models of the tests")
    what.add_argument(
        "--models", default=",".join(BUILT_IN), help="all, or names joined by commas (default: %(default)s)"
    )
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro", type=int, help="micro-batches a step (default: the job's, or 4)")
    parser.add_argument("--plans", type=int, default=10, help="random cuts per model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="job override, e.g. optimizer.lr=3e-4")
    parser.add_argument("--compress", default=OFF, help="off | lossless | CODEC[:RATIO], on every link")
    parser.add_argument("--workers", action="store_true", help="over real worker processes on loopback")
    parser.add_argument("--replicas", type=int, metavar="N", help="instead: N random plans with replicas")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object on the last line")
    args = parser.parse_args()
    try:
        every_link(args.compress, args.stages)
        model_names(args.models)
    except UsageError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    if args.replicas:
        return report_replicas(args)
    if args.workers:
        from benchmarks.real_workers import LoopbackFleet

        with LoopbackFleet(args.stages) as fleet:
            rows = measure_all(args, fleet.run)
    else:
        rows = measure_all(args, run_local)
    worst = max(float(str(row["max_abs_diff"])) for row in rows)
    worst_plain = max(float(str(row["max_abs_diff_plain"])) for row in rows)
    print(f"max_abs_diff {worst}")
    print(f"max_abs_diff_plain {worst_plain:.3e}")
    if args.json:
        figures = {
            "max_abs_diff": worst,
            "max_abs_diff_plain": worst_plain,
            "seed": args.seed,
            "models": rows,
        }
        print(json.dumps(figures))
    return 0 if worst == 0.0 and worst_plain <= 1e-6 else 1


if __name__ == "__main__":
    execute(main)
