"""Parts of a demo, its promises, and its summary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING

from coordinator.cli.processes import DemoFailed, Start, start_here
from coordinator.cli.views.format import in_seconds
from hostos.command_line import quoted

if TYPE_CHECKING:
    from pathlib import Path

SAME_LOSS = 2e-4  # the stages and the plain module may add in another order


@dataclass(frozen=True, slots=True)
class Lender:
    """A worker: its name, which is its host's too, and further options of `atoll-worker join`."""

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """The job, its workers, and the expected result."""

    title: str
    job: str  # path of the job file, which evaluates exported weights when it is run with --load
    workers: tuple[Lender, ...]
    stages: int  # at least so many
    loss_share: float  # of the unigram entropy: the trained model's loss is at most that
    training: tuple[str, ...]  # further options of `atoll submit`
    why: str  # what forces the model into stages
    host: str = "here"  # the coordinator's
    listen: str = "127.0.0.1:0"
    page: bool = False  # whether a browser on this machine reaches the coordinator's host
    start: Start = field(default=start_here, repr=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a demo that ran to its end; losses in nats a byte."""

    steps: int
    stages: int
    devices: int
    step_s: float  # median, of the commits
    predicted_s: float
    single_machine_s: float | None  # on the fastest of the machines alone, memory aside
    trained_loss: float
    plain_loss: float
    entropy: float


def small_scene(folder: Path, steps: int) -> Scene:
    """`atoll demo`: two workers on loopback, neither with the memory for the model. Writes its job file."""
    job = folder / "job.py"
    job.write_text(resources.files("experiments.demo").joinpath("job.py").read_text())
    options = ("--listen", "127.0.0.1:0", "--threads", "1", "--device", "cpu", "--stage-memory", "10MiB")
    return Scene(
        title="a byte model of 0.65 M parameters, two workers with 10 MiB for a stage each",
        job=str(job),
        workers=tuple(Lender(name, options) for name in ("one", "two")),
        stages=2,
        loss_share=0.88,
        training=("--steps", str(steps)),
        why="neither worker has the memory for the whole model",
        page=True,
    )


def check(outcome: Outcome, scene: Scene) -> None:
    """Check a demo's promises; DemoFailed with the number that broke one."""
    if broken := list(_broken(outcome, scene)):
        raise DemoFailed("\n".join(broken))


def _broken(outcome: Outcome, scene: Scene) -> Iterator[str]:
    if outcome.stages < scene.stages:
        yield f"{outcome.stages} stages; at least {scene.stages}, since {scene.why}"
    if not outcome.plain_loss <= scene.loss_share * outcome.entropy:
        share = outcome.plain_loss / outcome.entropy
        yield f"held-out loss is {share:.3f} x the unigram entropy; at most {scene.loss_share}"
    if not abs(outcome.plain_loss - outcome.trained_loss) <= SAME_LOSS:
        yield f"trained to {outcome.trained_loss:.6f}, the plain module has {outcome.plain_loss:.6f}"


def summary(outcome: Outcome, scene: Scene, took_s: float) -> str:
    """Return a summary in plain words."""
    share = outcome.plain_loss / outcome.entropy
    lines = [
        f"trained {outcome.steps} steps in {outcome.stages} stages on {outcome.devices} workers: {scene.why}",
        f"step {in_seconds(outcome.step_s)} measured, {in_seconds(outcome.predicted_s)} predicted",
        f"held-out loss {outcome.plain_loss:.4f} nats a byte, {share:.2f} x the unigram entropy "
        f"{outcome.entropy:.4f} (at most {scene.loss_share})",
        f"the plain module evaluates to the same loss: {outcome.trained_loss:.4f} in training, "
        f"{outcome.plain_loss:.4f} loaded",
    ]
    if outcome.single_machine_s:
        times = outcome.step_s / outcome.single_machine_s
        word = f"{times:.1f}x faster" if times > 1 else f"{1 / times:.1f}x slower"
        lines.append(
            f"one of these machines alone, had it the memory, would take "
            f"{in_seconds(outcome.single_machine_s)} a step, {word}; memory is what it has not"
        )
    lines.append(f"all checks hold; {took_s:.0f} s in all")
    return "\n".join(f"  {line}" for line in lines)


def next_steps(job: str) -> str:
    """Three commands to go on with."""
    return "\n".join(
        (
            "next, on machines of your own:",
            "  atoll serve                             where others reach it; it prints the join command",
            "  atoll-worker join HOST:7700 --token T   on each machine that lends itself",
            f"  atoll submit {quoted(job)} --watch".ljust(42) + "a job file; `atoll new my-job` writes one",
        )
    )
