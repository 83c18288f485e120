"""One of two hivemind peers that train a small net; run by a Python that has hivemind, and nothing of Atoll.

    python benchmarks/rivals/hivemind_optimizer.py RANK HOST '{"batch": 128, "share": 16, ...}'

Commands come as JSON lines on stdin, results leave as JSON lines on stdout. ``hivemind.Optimizer`` at its
defaults: a global step is due when both peers together have ``2 * share`` batches. Until a peer notices that
it goes on computing, so ``train`` counts the batches of each global step, and ``error`` compares the
parameters with one machine that took the mean over all of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import hivemind
import torch
import torch.nn.functional as F
from torch import nn

FEATURES, CLASSES = 64, 16
PATIENT_S = 300.0
LOOK_EVERY_S = 0.2


def net(width: int, seed: int) -> nn.Sequential:
    """Two hidden layers; the same values at every peer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


class Peer:
    """One peer."""

    def __init__(self, rank: int, host: str, asked: Mapping[str, Any]) -> None:
        """``asked``: width, batch, share, lr and seed."""
        self.rank, self.host = rank, host
        self.batch, self.share, self.lr = asked["batch"], asked["share"], asked["lr"]
        self.seed, width = asked["seed"], asked["width"]
        self.net, self.width = net(width, self.seed), width
        self.ended_s: list[float] = []  # global steps
        self.batches, self.computing_s = [0], [0.0]  # of each, and of the one under way

    def open(self, peers: list[str]) -> list[str]:
        """Join the DHT of ``peers``; returns the addresses that another peer needs."""
        self.dht = hivemind.DHT(
            initial_peers=peers or None, host_maddrs=[f"/ip4/{self.host}/tcp/0"], start=True
        )
        self.optimizer = hivemind.Optimizer(
            dht=self.dht,
            run_id="small",
            target_batch_size=2 * self.share * self.batch,
            batch_size_per_step=self.batch,
            params=list(self.net.parameters()),
            optimizer=lambda params: torch.optim.SGD(params, lr=self.lr),
        )
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def meet(self) -> int:
        """Compute a batch, then wait until both peers know each other: before, each would train alone."""
        self._batch()
        deadline_s = time.monotonic() + PATIENT_S
        while self.optimizer.tracker.global_progress.num_peers < 2:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no other peer in {PATIENT_S:.0f} s")
            time.sleep(LOOK_EVERY_S)
        return self.batches[-1]

    def train(self, steps: int) -> dict[str, Any]:
        """Until ``steps`` global steps: when each ended, its batches and its computing seconds."""
        deadline_s = time.monotonic() + PATIENT_S
        while len(self.ended_s) < steps:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{len(self.ended_s)} global steps in {PATIENT_S:.0f} s")
            self._batch()
        return {
            "ended_s": self.ended_s,
            "batches": self.batches[:-1],
            "computing_s": self.computing_s[:-1],
        }

    def _batch(self) -> None:
        epoch, at_s = self.optimizer.local_epoch, time.monotonic()
        self.optimizer.zero_grad()
        self._loss(self.net, self.rank, sum(self.batches)).backward()  # type: ignore[no-untyped-call]
        self.computing_s[-1] += time.monotonic() - at_s
        self.batches[-1] += 1
        self.optimizer.step()
        if self.optimizer.local_epoch != epoch:
            self.ended_s.append(time.monotonic())
            self.batches.append(0)
            self.computing_s.append(0.0)

    def error(self, batches: list[list[int]]) -> float:
        """Largest difference from one machine, over that machine's largest change; ``batches``: of each
        rank, of each global step."""
        alone, numbers = net(self.width, self.seed), [0, 0]
        begun = [value.detach().clone() for value in alone.parameters()]
        optimizer = torch.optim.SGD(alone.parameters(), lr=self.lr)
        for counts in zip(*batches, strict=True):
            optimizer.zero_grad()
            for rank, count in enumerate(counts):
                for _ in range(count):
                    (self._loss(alone, rank, numbers[rank]) / sum(counts)).backward()
                    numbers[rank] += 1
            optimizer.step()
        with torch.no_grad():
            pairs = zip(self.net.parameters(), alone.parameters(), strict=True)
            gap = max(float((a - b).abs().max()) for a, b in pairs)
            moved = zip(begun, alone.parameters(), strict=True)
            return gap / max(float((a - b).abs().max()) for a, b in moved)

    def _loss(self, model: nn.Module, rank: int, number: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(1_000_003 * self.seed + 2 * number + rank)
        x = torch.randn(self.batch, FEATURES, generator=source)
        y = torch.randint(CLASSES, (self.batch,), generator=source)
        return F.cross_entropy(model(x), y)

    def close(self) -> None:
        """End all processes."""
        self.optimizer.shutdown()
        self.dht.shutdown()


def main() -> None:
    """Obey until stdin ends."""
    torch.set_num_threads(1)
    asked: dict[str, Any] = json.loads(sys.argv[3])
    peer = Peer(int(sys.argv[1]), sys.argv[2], asked)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            print(json.dumps(getattr(peer, command)(*arguments)), file=answers, flush=True)
        peer.close()


if __name__ == "__main__":
    main()
