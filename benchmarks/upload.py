"""Rate of an owner's upload over loopback, by TLS, to a coordinator in a process of its own.

    python -m benchmarks.upload [--mib 1024] [--blobs 64] [--under FOLDER] [--known N] [--seed N] [--json]

Random weights in so many blobs are hashed, sent, and sent again, when only the question of what is missing
travels. Seconds are of the hashing and of the sending; acceptance: 150 MB/s sent. Beside it what the machine
does with the same bytes: SHA-256, and a write with fsync, one after the other. ``--under`` is where the
coordinator keeps its state: /dev/shm leaves the disk out.

``--known``: instead, N workers are given the same weights (`atoll-worker model add`), and the owner submits
them: seconds of adding, seconds until the coordinator has them, and the bytes that the owner has put on the
wire for it, TLS and questions included; acceptance: under 1 MB.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import safetensors.torch
import torch

from benchmarks.counted import counted
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.real_workers import LoopbackFleet
from benchmarks.waits import came_about
from coordinator.client.client import Client
from coordinator.client.endpoint import find_endpoint
from coordinator.client.prepare import tensor_blob
from protos.blob_transfer import LocalBlob
from protos.telemetry import Event

MB = 1e6


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    """A coordinator on a free port of this machine, and its owner's client."""
    command = [sys.executable, "-m", "coordinator.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--state-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if "atoll-worker join" in line)
            with Client(find_endpoint(state_dir=folder)) as client:
                yield client
        finally:
            process.terminate()


def timed(act: Callable[[], object]) -> float:
    """Seconds of ``act``."""
    begun_s = time.perf_counter()
    act()
    return time.perf_counter() - begun_s


def machine_s(tensors: Sequence[torch.Tensor], folder: Path) -> float:
    """Seconds to hash the tensors' bytes and to write them, fsync a tensor, without any of our code."""

    def act() -> None:
        for number, tensor in enumerate(tensors):
            view = tensor.numpy().reshape(-1).view(np.uint8).data
            hashlib.sha256(view).digest()
            with (folder / str(number)).open("wb") as file:
                file.write(view)
                os.fsync(file.fileno())

    return timed(act)


def known(tensors: Sequence[torch.Tensor], workers: int) -> tuple[dict[str, float], str]:
    """Figures of a submission of weights that workers hold, and what is wrong with it."""
    blobs = [tensor_blob(tensor) for tensor in tensors]
    n_bytes = sum(blob.size for blob in blobs)
    with LoopbackFleet(workers) as fleet, TemporaryDirectory() as name:
        named = {f"layer{number}": tensor for number, tensor in enumerate(tensors)}
        safetensors.torch.save_file(named, Path(name) / "model.safetensors")
        add_s = timed(lambda: fleet.add_weights(range(workers), Path(name))) / workers
        _until_heard(fleet.client, workers)
        endpoint = fleet.client.endpoint
        with counted(endpoint.host, endpoint.port) as wire:
            with Client(replace(endpoint, port=wire.port)) as client:
                moved: list[int] = []
                gather_s = timed(lambda: moved.extend((client.gather(blobs), client.send(blobs))))
            sent_bytes = wire.sent_bytes
    print(
        f"{n_bytes / MB:.0f} MB in {len(blobs)} blobs, held by {workers} workers: added in {add_s:.1f} s "
        f"each; at the coordinator {gather_s:.1f} s after they were named; owner sent {sent_bytes:,} bytes"
    )
    figures = {
        "workers": workers,
        "n_bytes": n_bytes,
        "blobs": len(blobs),
        "add_s": add_s,
        "gather_s": gather_s,
        "owner_sent_bytes": sent_bytes,
    }
    wrong = (
        ""
        if moved == [n_bytes, 0] and sent_bytes < MB
        else f"{moved} bytes came, the owner sent {sent_bytes}"
    )
    return figures, wrong


def _until_heard(client: Client, workers: int) -> None:
    def heard() -> bool:
        lines = [line for line in client.logs("") if line.event == Event.WEIGHTS_HELD]
        return len({line.fields_json for line in lines}) >= workers

    came_about(heard, ())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    made = parser(__doc__ or "")
    made.add_argument("--mib", type=int, default=1024)
    made.add_argument("--blobs", type=int, default=64)
    made.add_argument(
        "--under", help="folder of the coordinator's state; default: the system's temporary one"
    )
    made.add_argument("--known", type=int, default=0, metavar="N", help="so many workers hold the weights")
    options = made.parse_args(argv)
    torch.manual_seed(options.seed)
    elements = options.mib * (1 << 18) // options.blobs
    tensors = [torch.rand(elements) for _ in range(options.blobs)]
    if options.known:
        found, wrong = known(tensors, options.known)
        return conclude({"machine": machine(), "seed": options.seed, **found}, options.json, wrong)
    blobs: list[LocalBlob] = []
    hash_s = timed(lambda: blobs.extend(map(tensor_blob, tensors)))
    n_bytes = sum(blob.size for blob in blobs)
    with TemporaryDirectory(dir=options.under) as name:
        folder = Path(name)
        own_s = machine_s(tensors, folder)
        with serving(folder / "state") as client:
            sent: list[int] = []
            send_s = timed(lambda: sent.append(client.send(blobs)))
            again_s = timed(lambda: sent.append(client.send(blobs)))
    figures = {
        "under": options.under or "",
        "n_bytes": n_bytes,
        "blobs": options.blobs,
        "hash_mb_per_s": n_bytes / hash_s / MB,
        "send_mb_per_s": n_bytes / send_s / MB,
        "machine_mb_per_s": n_bytes / own_s / MB,
        "again_s": again_s,
        "again_bytes": sent[1],
    }
    print(
        f"{n_bytes / MB:.0f} MB in {options.blobs} blobs: hashed at {n_bytes / hash_s / MB:.0f} MB/s, "
        f"sent at {n_bytes / send_s / MB:.0f} MB/s; again {sent[1]} bytes in {again_s:.2f} s; "
        f"this machine hashes and writes them at {n_bytes / own_s / MB:.0f} MB/s"
    )
    wrong = "" if sent == [n_bytes, 0] else f"sent {sent} bytes of {n_bytes}"
    return conclude({"machine": machine(), "seed": options.seed, **figures}, options.json, wrong)


if __name__ == "__main__":
    execute(main)
