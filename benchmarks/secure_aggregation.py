"""What secure aggregation costs: bytes and seconds of a round, beside the same round without it and Flower's.

    python -m benchmarks.secure_aggregation --json
    python -m benchmarks.secure_aggregation --clients 5 --hidden 100 --json

20 members train a net of a million parameters on images of noise; the job's machine, its messages, the
workers' training and the aggregator are the product's own, in one process and without network
(``tests.inprocess.secure_federation``). A round's seconds, of one core's time, are the mean of its members',
who work beside each other in a fleet, and the aggregator's. In ``lost`` a third is lost after training.
``flower``: SecAgg+ of the installed flwr, its workflow and its mod by themselves on vectors of the same size,
so without training.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.federated import Federated, Registered
from atoll.job import Job, Optimizer, OptimizerName, TrainingSpec
from atoll.secure import Secure, Stage
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.rivals.flower_secagg import flower_round
from coordinator.client.prepare import prepare
from coordinator.messages.jobs import Phase
from coordinator.storage.blob_store import BlobStore
from protos.session import said_to_worker, to_coordinator
from tests.coordinator.aggregation.test_server_half import Server
from tests.inprocess.secure_federation import SecureFederation

PIXELS, CLASSES, BATCH, SAMPLES, EPOCHS, ROUNDS = 784, 10, 32, 128, 2, 2
MOST_BYTES, MOST_TIME = 3.0, 2.0


class Layers(nn.Module):
    """Two layers; 1,260 units between them make a million parameters."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(PIXELS, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.last(F.relu(self.first(x))), y)


def images(seed: int) -> dict[str, Any]:
    """A client's data: noise."""
    draw = np.random.default_rng(seed)
    pixels = draw.normal(size=(SAMPLES, PIXELS)).astype(np.float32)
    return {"image": pixels, "label": draw.integers(0, CLASSES, SAMPLES)}


def submitted(folder: Path, hidden: int = 0, **options: Any) -> Server:
    """A store with the job."""
    torch.manual_seed(0)
    training = TrainingSpec(steps=ROUNDS, n_micro=1, optimizer=Optimizer(OptimizerName.SGD, lr=0.01))
    job = Job(
        Layers(hidden),
        {"x": torch.zeros(BATCH, PIXELS), "y": torch.zeros(BATCH, dtype=torch.int64)},
        Registered("set", {"x": "image", "y": "label"}),
        training,
        federated=Federated(**options),
    )
    prepared, store = prepare(job), BlobStore(folder / "blobs")
    for blob in prepared.blobs:
        store.put(b"".join(blob.read(0)))
    return Server(store, prepared, folder)


class Measured(SecureFederation):
    """Seconds and bytes of each round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.member_s: defaultdict[int, float] = defaultdict(float)
        self.server_s: defaultdict[int, float] = defaultdict(float)
        self.up: Counter[int] = Counter()
        self.down: Counter[int] = Counter()

    def says(self, worker: str, message: Any) -> None:
        at, began_s = self.state.round, time.process_time()
        self.down[at] += said_to_worker(message).ByteSize()
        super().says(worker, message)
        self.member_s[at] += time.process_time() - began_s

    def tells(self, worker: str, message: Any) -> None:
        self.up[self.state.round] += to_coordinator(message).ByteSize() + getattr(message, "update_bytes", 0)
        super().tells(worker, message)

    def answered(self, request: Any) -> None:
        at, began_s = self.state.round, time.process_time()
        super().answered(request)
        self.server_s[at] += time.process_time() - began_s


def measured(args: argparse.Namespace, options: Mapping[str, Any], lost: int = 0) -> dict[str, Any]:
    """A job's last round."""
    names = tuple(f"w{at:03d}" for at in range(args.clients))
    gone = {(at, Stage.SIGNATURES): names[:lost] for at in range(ROUNDS)}
    gone |= {(at, Stage.VECTORS): names[:lost] for at in range(ROUNDS)}
    common = {"hidden": args.hidden, "local_epochs": EPOCHS, "held_out": 0.0, "min_clients": 2}
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        made = Measured(Path(folder), names, {**common, **options}, gone, make=submitted, data=images)
        made.run()
        if made.state.phase is not Phase.FINISHED:
            raise RuntimeError(made.state.reason)
        model = made.state.model
        size = 0 if model is None else model.full.size
    at, left = ROUNDS - 1, args.clients - lost
    row = {
        "members": left,
        "up_bytes": made.up[at] / left,
        "down_bytes": made.down[at] / args.clients + size,
        "member_s": made.member_s[at] / args.clients,
        "server_s": made.server_s[at],
    }
    return {**row, "round_s": row["member_s"] + row["server_s"]}


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """All rows, and the quotients that are promised."""
    parameters = PIXELS * args.hidden + args.hidden + args.hidden * CLASSES + CLASSES
    secure = Secure()
    rows = {
        "plain": measured(args, {}),
        "secure": measured(args, {"secure": secure}),
        "lost": measured(args, {"secure": secure}, args.clients // 3),
        "random_k:10": measured(args, {"secure": secure, "uplink": "random_k:10"}),
    }
    rows |= {} if args.no_flower else {"flower": flower_round(args.clients, parameters, args.seed)}
    plain, masked = rows["plain"], rows["secure"]
    both = {name: row["up_bytes"] + row["down_bytes"] for name, row in rows.items() if "down_bytes" in row}
    return {
        "parameters": parameters,
        "clients": args.clients,
        "rows": rows,
        "bytes": both["secure"] / both["plain"],
        "up": masked["up_bytes"] / plain["up_bytes"],
        "time": masked["round_s"] / plain["round_s"],
        "lost_time": rows["lost"]["round_s"] / plain["round_s"],
    }


def main() -> int:
    """Measure all, compare, print."""
    made = parser(__doc__ or "")
    made.add_argument("--clients", type=int, default=20)
    made.add_argument("--hidden", type=int, default=1260, help="units; 1,260 are a million parameters")
    made.add_argument("--no-flower", action="store_true")
    args = made.parse_args()
    torch.set_num_threads(1)
    found = compared(args)
    for name, row in found["rows"].items():
        print(name, {key: round(value, 4) for key, value in row.items()}, flush=True)
    wrong = ""
    if found["bytes"] > MOST_BYTES or found["time"] > MOST_TIME:
        wrong = f"{found['bytes']:.2f} times the bytes, {found['time']:.2f} times the time"
    return conclude({**found, "machine": machine()}, args.json, wrong)


if __name__ == "__main__":
    execute(main)
