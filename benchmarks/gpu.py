"""Model FLOP/s utilisation of one-stage and two-stage plans against plain PyTorch on one GPU.

Everything runs in one process: the same Stage code that workers run, exchanging tensors in
memory, so the figures show what the interpreter and the boundary cost, not a network.

  python -m benchmarks.gpu --peak-tflops 989 --json     # bf16 peak of an H100 or H200
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Job, Optimizer, Precision, Rows, TrainingSpec
from atoll.program import stage_programs
from benchmarks.harness import machine, parser
from coordinator.capture import capture
from worker.local import LocalPipeline

if TYPE_CHECKING:
    import argparse


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = (
            self.qkv(self.norm1(x_BTD)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x_BTD = x_BTD + self.out(mixed)
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x_BTD))))
        return x_BTD + hidden


class Gpt(nn.Module):
    """A decoder whose forward returns the next-token loss."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, width // 64) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        x_BTD = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1).float(), labels.flatten())


def make_job(args: argparse.Namespace) -> Job:
    """A GPT of the asked size with random tokens: speed does not depend on the text."""
    torch.manual_seed(args.seed)
    tokens = torch.randint(0, 32_000, (args.batch * args.micro, args.length + 1))
    training = TrainingSpec(
        steps=args.steps, n_micro=args.micro, precision=Precision.BF16, optimizer=Optimizer(lr=1e-4)
    )
    return Job(
        Gpt(32_000, args.width, args.layers, args.length),
        {"tokens": tokens[: args.batch]},
        Rows({"tokens": tokens.numpy()}),
        training,
        "gpu",
    )


def plain(job: Job, batches: list[dict[str, Tensor]], steps: int) -> float:
    """Seconds a step of ordinary PyTorch with autocast and a fused AdamW."""
    module = job.module.to("cuda").train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True, weight_decay=0.0)
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = module(**batch)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    module.to("cpu")
    return sorted(seconds[2:])[len(seconds[2:]) // 2]


def ours(job: Job, batches: list[dict[str, Tensor]], steps: int, n_stages: int) -> float:
    """Seconds a step of our stages on the same GPU."""
    captured = capture(job.module, job.example_inputs, training=job.training)
    dag = captured.train
    cuts = dag.cuttable()
    # Half of the matrix work on each side.
    wanted = sum(op.flops_forward for op in dag.ops) / n_stages
    starts, done = [0], 0.0
    for position, op in enumerate(dag.ops):
        if len(starts) < n_stages and done >= wanted * len(starts) and position in cuts:
            starts.append(position)
        done += op.flops_forward
    tensors = {name: {"value": value} for name, value in captured.state.items()}
    pipeline = LocalPipeline(stage_programs(dag, starts), job.training, tensors, devices=("cuda",))
    seconds = []
    for step in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        pipeline.step(step, batches)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds[2:])[len(seconds[2:]) // 2]


def main() -> None:
    """Print seconds a step, tokens a second and utilisation of each."""
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--length", type=int, default=1024)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--micro", type=int, default=4)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU in bf16, dense")
    args = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs CUDA; this machine has none")
    job = make_job(args)
    tokens = torch.randint(0, 32_000, (args.micro, args.batch, args.length + 1), device="cuda")
    batches = [{"tokens": tokens[m]} for m in range(args.micro)]
    seconds = {
        "plain": plain(job, batches, args.steps),
        "one_stage": ours(job, batches, args.steps, 1),
        "two_stages": ours(job, batches, args.steps, 2),
    }
    trained = sum(p.numel() for p in job.module.parameters())
    n_tokens = args.batch * args.micro * args.length
    # 6 N per token, and 12 L d T for causal-unaware attention (PaLM's count, without the mask's half).
    flops = n_tokens * (6 * trained + 12 * args.layers * args.width * args.length)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "parameters": trained,
        "seconds_per_step": {k: round(v, 5) for k, v in seconds.items()},
        "mfu": {k: round(flops / v / 1e12 / args.peak_tflops, 4) for k, v in seconds.items()},
        "of_plain": {k: round(seconds["plain"] / v, 4) for k, v in seconds.items()},
    }
    for name, value in seconds.items():
        print(
            f"{name:<11} {value:.4f} s/step  {n_tokens / value:,.0f} tokens/s  MFU {result['mfu'][name]:.1%}"
        )
    print(f"machine {machine()}, {result['device']}, seed {args.seed}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
