"""A stage larger than its worker's memory trains by what it keeps elsewhere, or in few bits; what that costs.

    python -m benchmarks.thin_memory                    # both halves
    python -m benchmarks.thin_memory --only fleet       # one real worker, its memory bounded
    python -m benchmarks.thin_memory --only loss        # 200 steps, three seeds, in this process

The first half plans a GPT-2 of transformers with a tied head for one worker with room. ``--memory`` of
another is what it holds idle and the stage's figure, divided by ``--times``. There the job must be refused as
it is, and train with `saved_on` and `state_on` auto, and with `activations` auto; steps are compared with the
prediction. The second half trains a small GPT with exact, 8-bit and 4-bit activations from equal weights on
equal batches; losses are means over the last tenth of the steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from atoll import ByteText, Job, Optimizer, TrainingSpec
from atoll.errors import AtollError
from atoll.job import EXACTLY, Activations, Place
from atoll.program import stage_programs
from benchmarks.harness import conclude, execute, machine, parser, skip, steady
from benchmarks.oracle import from_job
from benchmarks.real_workers import LoopbackFleet
from coordinator.client.prepare import prepare
from examples import gpt
from hostos.units import MIB
from protos.convert import from_proto
from tests.inprocess.pipeline import LocalPipeline
from worker.hosting.contained.control_group import memory_groups

if TYPE_CHECKING:
    from atoll.plan import Plan

STEPS, LENGTH, ROWS, MICROS = 12, 64, 32, 2
WITHIN = 0.2
LOSS_WITHIN = {"int8": 0.01, "int4": 0.03}
FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "elsewhere": {"saved_on": Place.AUTO, "state_on": Place.AUTO},
    "few bits": {"activations": Activations.AUTO},
}


@dataclass(frozen=True)
class Ran:
    """A job on one worker."""

    form: str
    state: str
    kept: str = ""
    planned_mib: float = 0.0
    measured_mib: float = 0.0
    predicted_s: float = 0.0
    step_s: float = 0.0

    @property
    def off(self) -> float:
        """The step beside its prediction."""
        return self.step_s / self.predicted_s - 1.0 if self.predicted_s else float("inf")


def tied_gpt2(seed: int, steps: int = STEPS) -> Job:
    """GPT-2 of transformers, 4 blocks of width 256 and a head that is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, use_cache=False)
    example = {name: torch.zeros(ROWS, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    return Job(
        module=GPT2LMHeadModel(config),
        example_inputs=example,
        data=ByteText(LENGTH, "input_ids", max_bytes=200_000, inputs_too={"labels": "input_ids"}),
        training=TrainingSpec(steps=steps, n_micro=MICROS, seed=seed, optimizer=Optimizer(lr=3e-4)),
        name="tied_gpt2",
    )


def ran(fleet: LoopbackFleet, job: Job, form: str) -> tuple[Ran, Plan | None]:
    """Train a job in one of the forms; where it is refused, its state says why."""
    prepared = prepare(replace(job, training=replace(job.training, **FORMS[form])))
    plan: Plan | None = None
    seconds, most = [], 0
    try:
        for update in fleet.client.watch(fleet.client.submit(prepared).job):
            if update.HasField("plan"):
                plan = from_proto(update.plan)
            seconds += [p.value for p in update.metrics if p.name == "step_s"]
            most = max([most, *(stage.measured_bytes for stage in update.stages)])
            if update.state in ("queued", "paused") and " short; " in update.reason:
                return Ran(form, f"{update.state}: {update.reason}"), None
    except AtollError as refused:
        return Ran(form, f"refused: {refused}"), None
    if plan is None or plan.prediction is None:
        return Ran(form, f"{update.state}: {update.reason}"), None
    (stage,), keeping = plan.prediction.stages, plan.stages[0].keeping
    state = update.state if update.state == "finished" else f"{update.state}: {update.reason}"
    usual = asdict(EXACTLY)
    kept = ", ".join(f"{name} {value}" for name, value in asdict(keeping).items() if value != usual[name])
    return Ran(
        form, state, kept,
        stage.memory_bytes / MIB, most / MIB, plan.prediction.step_s, steady(seconds) if seconds else 0.0,
    ), plan  # fmt: skip


def on_workers(seed: int, times: float, steps: int = STEPS) -> tuple[list[Ran], list[str]]:
    """Every form on a worker whose memory for stages is ``times`` less than the stage takes as it is."""
    job, wrong = tied_gpt2(seed, steps), []
    with LoopbackFleet(1, options=("--memory", "4GiB")) as fleet:
        own = fleet.client.status().workers[0].device.own_memory_bytes
        roomy, plan = ran(fleet, job, "as it is")
    if plan is None:
        raise AtollError(f"with room the job ended {roomy.state}")
    found = [replace(roomy, form="with room")]
    limit = own / MIB + roomy.planned_mib / times
    for form in FORMS:
        with LoopbackFleet(1, options=("--memory", f"{limit:.0f}MiB")) as fleet:
            one, _ = ran(fleet, job, form)
        found.append(one)
        if (form == "as it is") == (one.state == "finished"):
            wrong.append(f"{form}: {one.state}")
        elif form != "as it is" and abs(one.off) > WITHIN:
            wrong.append(f"{form}: a step of {one.step_s:.3f} s, predicted {one.predicted_s:.3f}")
    return found, wrong


def losses(seed: int, steps: int, activations: Activations) -> float:
    """Mean loss over the last tenth of the steps of a small GPT."""
    torch.manual_seed(seed)
    training = TrainingSpec(
        steps=steps, n_micro=2, seed=seed, optimizer=Optimizer(lr=1.5e-3), activations=activations
    )
    module = gpt.GPT(64, 2, 2, 64)
    example = {"tokens": torch.zeros(8, 64, dtype=torch.long)}
    case = from_job(
        Job(module, example, ByteText(length=64, input="tokens", max_bytes=500_000), training), training
    )
    pipeline = LocalPipeline(stage_programs(case.dag, (0,)), training, case.tensors, states=case.states)
    shown = [pipeline.step(step, case.batches(step)).loss for step in range(steps)]
    return statistics.fmean(shown[-max(1, steps // 10) :])


def convergence(seeds: Sequence[int], steps: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Losses by seed, and how far each form is off exact on average."""
    rows, wrong = [], []
    for seed in seeds:
        row = {form.value: losses(seed, steps, form) for form in Activations if form is not Activations.AUTO}
        rows.append({"seed": seed, **row})
        parts = [f"{form} {row[form]:.4f} ({row[form] / row['exact'] - 1:+.2%})" for form in LOSS_WITHIN]
        print(f"seed {seed}: exact {row['exact']:.4f}, {', '.join(parts)}", flush=True)
    for form, within in LOSS_WITHIN.items():
        off = statistics.fmean(row[form] / row["exact"] - 1.0 for row in rows)
        if off > within:
            wrong.append(f"{form}: loss {off:+.1%} of exact")
    return rows, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    made = parser(__doc__ or "")
    made.add_argument("--only", choices=("fleet", "loss"), help="one half")
    made.add_argument("--times", type=float, default=1.5, help="stage over its worker's memory (%(default)s)")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--steps", type=int, default=200)
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"machine": machine(), "seed": options.seed, "times": options.times}
    wrong: list[str] = []
    if options.only != "loss":
        if reason := memory_groups():
            skip(reason, options.json)
        found, wrong = on_workers(options.seed, options.times)
        for one in found:
            print(
                f"{one.form:10s} {one.state[:90]:12s} {one.kept or 'all as it is'}: "
                f"planned {one.planned_mib:.0f} MiB, measured {one.measured_mib:.0f}; "
                f"step {one.step_s:.3f} s, predicted {one.predicted_s:.3f}",
                flush=True,
            )
        figures["runs"] = [asdict(one) for one in found]
    if options.only != "fleet":
        rows, apart = convergence(range(options.seed, options.seed + options.seeds), options.steps)
        wrong += apart
        figures["losses"] = rows
    return conclude(figures, options.json, "; ".join(wrong))


if __name__ == "__main__":
    execute(main)
