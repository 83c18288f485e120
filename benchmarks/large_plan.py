"""Seconds and memory of `atoll plan` for GPT-2 of 124 M to 1.5 B parameters, tied, on six machines.

    python -m benchmarks.large_plan [--sizes small,medium,large,xl] [--folder] [--seed N] [--json]

Each size is one run of the command line in a process of its own, from a job file that draws its weights at
random: imports, capture and planning included. Memory is the process's high-water mark. Acceptance: `large`
(774 M) in at most 30 s and 1.3 times its weights, `xl` (1.5 B) in at most 60 s.

With ``--folder`` the module is on the meta device and its weights are a folder of safetensors,
holes on the disk. Acceptance: at most 2 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from atoll.errors import AtollError
from benchmarks.harness import conclude, execute, machine, parser

SIZES = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}
JOB = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from atoll import ByteText, Job, Optimizer, TrainingSpec

def job():
    torch.manual_seed({seed})
    config = GPT2Config(n_embd={width}, n_layer={layers}, n_head={heads}, n_positions=1024, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    tokens = torch.zeros(1, 128, dtype=torch.long)
    with torch.device("{device}"):
        model = GPT2LMHeadModel(config)
    return Job(model, {{"input_ids": tokens, "labels": tokens}},
               ByteText(length=128, input="input_ids", inputs_too=("labels",), max_bytes=2_000_000),
               TrainingSpec(steps=5, n_micro=4, optimizer=Optimizer(lr=3e-4), eval_batches=0),
               "gpt2", weights={weights!r})
"""
FLEET = "[default]\nmbit = 100\nms = 20\ngflops = 20000\nmemory_mib = {mib}\n" + "".join(
    f'[[device]]\nname = "{name}"\n' for name in "abcdef"
)


@dataclass(frozen=True)
class Result:
    """One run of `atoll plan`; ``share``: its memory over the weights'."""

    size: str
    weight_bytes: int
    plan_s: float
    cpu_s: float
    peak_bytes: int
    share: float
    stages: int
    step_s: float
    lower_bound_s: float


def write_holes(path: Path, width: int, layers: int, heads: int) -> None:
    """A checkpoint of this GPT-2 by transformers' names, whose numbers take no room on the disk."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, n_head=heads))
    header, at = {}, 0
    for name, tensor in model.named_parameters():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def measure(size: str, seed: int, *, folder: bool) -> Result:
    """Plan ``size`` once; AtollError where the command fails."""
    width, layers, heads = SIZES[size]
    weight_bytes = 4 * ((50257 + 1024) * width + layers * (12 * width * width + 13 * width) + 2 * width)
    with TemporaryDirectory() as name:
        job, fleet, out = (Path(name) / file for file in ("job.py", "fleet.toml", "plan.json"))
        device, weights = "cpu", None
        if folder:
            write_holes(Path(name) / "model.safetensors", width, layers, heads)
            device, weights = "meta", name
        text = JOB.format(seed=seed, width=width, layers=layers, heads=heads, device=device, weights=weights)
        job.write_text(text)
        fleet.write_text(FLEET.format(mib=8192 if size != "xl" else 16384))
        command = [sys.executable, "-m", "coordinator.cli", "plan", str(job), "--fleet", str(fleet), "--json"]
        begun_s = time.perf_counter()
        with out.open("w") as file:
            child = subprocess.Popen(command, stdout=file)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        plan_s = time.perf_counter() - begun_s
        if child.returncode:
            raise AtollError(f"`atoll plan` of {size} ended with {child.returncode}")
        plan = json.loads(out.read_text())
    peak_bytes = usage.ru_maxrss * 1024
    prediction = plan["prediction"]
    return Result(
        size, weight_bytes, plan_s, usage.ru_utime + usage.ru_stime, peak_bytes, peak_bytes / weight_bytes,
        len(prediction["stages"]), prediction["step_s"], prediction["lower_bound_s"],
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    made = parser(__doc__ or "")
    made.add_argument("--sizes", default=",".join(SIZES))
    made.add_argument("--folder", action="store_true", help="weights in a folder, the module on meta")
    options = made.parse_args(argv)
    found = {}
    for size in options.sizes.split(","):
        one = found[size] = measure(size, options.seed, folder=options.folder)
        print(
            f"{size:6s} {one.weight_bytes / 1e9:.2f} GB: {one.plan_s:5.1f} s (CPU {one.cpu_s:.1f} s), "
            f"{one.peak_bytes / 1e9:.2f} GB at most, {one.share:.2f} of the weights; {one.stages} stages, "
            f"{one.step_s:.2f} s a step, bound {one.lower_bound_s:.2f} s",
            flush=True,
        )
    figures = {size: asdict(one) for size, one in found.items()}
    return conclude({"machine": machine(), "seed": options.seed, **figures}, options.json)


if __name__ == "__main__":
    execute(main)
