"""Are 50 RTX 3080 four H100? The planner's samples a second by the rate of their links, and the collapse.

    python -m benchmarks.consumer_fleet --json
    python -m benchmarks.consumer_fleet --sky --json

Sixteen layers of GPT-3's width with embedding and head are 50 pieces of 0.6 billion parameters, one a card;
a whole layer's training state fits none of them. Speeds are data sheets' (examples/fleets), where the two
fleets' FLOPs are 0.98 to 1 (Tang 2023, "FusionAI"). Nothing runs but the planner: once with the cards'
memory, and once as if they had room for all micro-batches in flight. A sample is 2,048 tokens.

With --sky: 160 layers of BERT on 63 nodes of unlike speed, the server being the 64th. The cut into equally
many units a node is held against the planner's, under four laws of slowness (Zhu 2022, "Sky Computing").
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from atoll.errors import NotEnoughMemory
from atoll.job import Optimizer, OptimizerName, Precision, Recompute, TrainingSpec
from atoll.opdag import OpDag
from benchmarks.block_graphs import UNITS, transformer
from benchmarks.harness import ROOT, conclude, execute, machine, parser
from coordinator.client.fleet_file import parse_fleet
from coordinator.planning.costs.fleet import Fleet
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.search.op_fence import Effort

FLEETS = ROOT / "examples" / "fleets"
WIDTH, LAYERS, VOCABULARY, CONTEXT = 12_288, 16, 50_257, 2048
TOKENS = 1 << 18  # of a step
MICRO = {"h100_x4": (1024,), "rtx3080_x50": (256,), "ample": (256, 512)}
"""Tokens of a micro-batch, of which the fastest are taken; the others of 256, 512 and
1,024 were slower. More fill a card's memory, fewer read its weights too often."""
UNBOUNDED = 1e6  # Mbit/s, and MiB
RATES = {"unbounded": UNBOUNDED, "10 Gbit/s": 1e4, "1 Gbit/s": 1e3, "100 Mbit/s": 1e2}
# Long pipelines of equal devices: what a thorough search gains is below 1 %, and it takes minutes.
BRIEF = Effort(
    few=0,
    judged=4,
    improved=1,
    moves=8,
    actions=2000,
    short_actions=2000,
    rings=0,
    orders_kept=4,
    order_moves=20,
)
SGD = Optimizer(name=OptimizerName.SGD, lr=1e-3, momentum=0.0)
LAWS = ("U[1,2)", "U[1,4)", "1..6", "1 + 1..6")
NODES, BERT_LAYERS, BERT_WIDTH, BERT_TOKENS = 63, 160, 1024, 32 * 128
BERT_MICROS = 4 * NODES
BERT_GFLOPS = 10_000.0


def fleet_of(name: str, mbit: float | None = None, memory_mib: float | None = None) -> Fleet:
    """A fleet file of ours, with other links or memory where given."""
    document: dict[str, Any] = tomllib.loads((FLEETS / f"{name}.toml").read_text())
    changed = {"mbit": mbit, "memory_mib": memory_mib}
    document["default"] |= {key: value for key, value in changed.items() if value is not None}
    return parse_fleet(document, name)


def gpt(tokens: int) -> OpDag:
    """A micro-batch of so many tokens."""
    return transformer(WIDTH, LAYERS, tokens, context=CONTEXT, vocabulary=VOCABULARY, dtype="bfloat16")


def planned(dag: OpDag, fleet: Fleet, n_micro: int, seed: int, recompute: Recompute) -> dict[str, Any]:
    """The planner's figures of a step; samples_per_s is 0 where the model does not fit."""
    training = TrainingSpec(
        steps=1, n_micro=n_micro, seed=seed, optimizer=SGD, precision=Precision.BF16, eval_batches=0,
        recompute=recompute,
    )  # fmt: skip
    request = PlanRequest("consumer", 1, dag, None, training, fleet, standbys=0)
    found = None
    for effort in (BRIEF, Effort()):
        try:
            found = make_plan(request, effort).prediction
        except NotEnoughMemory as error:
            why = str(error)
        if found is not None:
            break
    if found is None:
        return {"samples_per_s": 0.0, "why": why[:200]}
    return {
        "samples_per_s": TOKENS / CONTEXT / found.step_s,
        "step_s": found.step_s,
        "bound_s": found.lower_bound_s,
        "stages": len(found.stages),
        "bottleneck": found.bottleneck,
        "recompute": recompute.value,
    }


def best(name: str, seed: int, mbit: float | None = None, *, ample: bool = False) -> dict[str, Any]:
    """The better of keeping activations and of computing forwards again."""
    fleet = fleet_of(name, mbit, UNBOUNDED if ample else None)
    ways = (Recompute.OFF,) if ample else (Recompute.OFF, Recompute.FULL)
    found = [
        planned(gpt(tokens), fleet, TOKENS // tokens, seed, way)
        for tokens in MICRO["ample" if ample else name]
        for way in ways
    ]
    return max(found, key=lambda one: float(one["samples_per_s"]))


def consumer(seed: int) -> dict[str, Any]:
    """Rows by the rate of the cards' links, with the memory that they have and without its limit."""
    rival = best("h100_x4", seed)
    print(f"4 H100: {rival['samples_per_s']:.2f} samples/s, {rival['bottleneck']}")
    rows = []
    for words, mbit in RATES.items():
        row: dict[str, Any] = {"links": words}
        for what, ample in (("ample_memory", True), ("memory_10_gb", False)):
            row[what] = best("rtx3080_x50", seed, mbit, ample=ample)
            row[what]["of_h100"] = row[what]["samples_per_s"] / rival["samples_per_s"]
        rows.append(row)
        print(
            f"50 RTX 3080, {words:<11} {row['ample_memory']['of_h100']:.3f} of the H100 with ample memory, "
            f"{row['memory_10_gb']['of_h100']:.3f} with 10 GB",
            flush=True,
        )
    return {"h100": rival, "rows": rows}


# ---------------------------------------------------------------- Sky Computing's table


def slowness(law: str, seed: int) -> list[float]:
    """Seconds of each node over those of the fastest there might be."""
    draw = random.Random(seed)
    if law.startswith("U"):
        return [draw.uniform(1, 2 if law == "U[1,2)" else 4) for _ in range(NODES)]
    return [draw.randint(1, 6) + float(law.startswith("1 +")) for _ in range(NODES)]


def sky(law: str, seed: int) -> Mapping[str, float]:
    """Steps of both cuts on nodes of this law with unbounded links, and how much less the planner's takes."""
    devices = [
        {"name": f"node{at:02d}", "gflops": BERT_GFLOPS / slow} for at, slow in enumerate(slowness(law, seed))
    ]
    fleet = parse_fleet(
        {"default": {"mbit": UNBOUNDED, "ms": 0, "memory_mib": 1e6, "memory_gbps": 1e5, "op_overhead_us": 0},
         "device": devices}
    )  # fmt: skip
    dag = transformer(BERT_WIDTH, BERT_LAYERS, BERT_TOKENS, context=128)
    training = TrainingSpec(steps=1, n_micro=BERT_MICROS, seed=seed, optimizer=SGD, eval_batches=0)
    request = PlanRequest("sky", 1, dag, None, training, fleet, "even", schedule="1f1b", standbys=0)
    step_s, slowest_s = [], []
    for partitioner in ("even", "op_fence"):
        found = make_plan(replace(request, partitioner=partitioner), BRIEF).prediction
        assert found is not None
        step_s.append(found.step_s)
        slowest_s.append(max(stage.compute_s for stage in found.stages))
    return {
        "even_s": step_s[0],
        "planned_s": step_s[1],
        "less": 1.0 - step_s[1] / step_s[0],
        "less_at_slowest": 1.0 - slowest_s[1] / slowest_s[0],
    }


def sky_table(seed: int, draws: int) -> dict[str, Any]:
    """Means over draws, by law."""
    rows: dict[str, Any] = {}
    print(
        f"{BERT_LAYERS} layers of BERT ({UNITS * BERT_LAYERS} units) on {NODES} nodes, means of {draws} draws"
    )
    for law in LAWS:
        found = [sky(law, seed + at) for at in range(draws)]
        rows[law] = {key: fmean(one[key] for one in found) for key in found[0]}
        print(
            f"{law:<10} {rows[law]['less']:.0%} less time than the even cut, "
            f"{rows[law]['less_at_slowest']:.0%} at the slowest node",
            flush=True,
        )
    return rows


def main() -> int:
    """Print the table that is asked for."""
    options = parser(__doc__ or "")
    options.add_argument("--sky", action="store_true", help="Sky Computing's table instead")
    options.add_argument("--draws", type=int, default=3, help="of the nodes' speeds")
    args = options.parse_args()
    found = {"laws": sky_table(args.seed, args.draws)} if args.sky else consumer(args.seed)
    return conclude({**found, "machine": machine()}, args.json)


if __name__ == "__main__":
    execute(main)
