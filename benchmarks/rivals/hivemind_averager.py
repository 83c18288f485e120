"""One of two hivemind peers that average vectors; run by a Python that has hivemind, and nothing of Atoll.

    python benchmarks/rivals/hivemind_averager.py RANK HOST '{"tensors": 16, "elements": 1048576, "seed": 0}'

Commands come as JSON lines on stdin, results leave as JSON lines on stdout. hivemind's DecentralizedAverager
without a codec; the group is formed before the clock starts (``prepare``), so what is measured is the
exchange alone. Moments are those of the machine's monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind.averaging.control import AveragingStage

MATCHMAKING_S, REQUEST_S = 1.0, 0.7  # shortest that form a group of two every time
PATIENT_S = 60.0
LOOK_EVERY_S = 0.002


def vector(seed: int, rank: int, number: int, elements: int) -> torch.Tensor:
    """What a rank averages in round ``number``."""
    values = np.random.default_rng([seed, rank, number]).random(elements, dtype=np.float32)
    return torch.from_numpy(values - np.float32(0.5))


class Peer:
    """One peer."""

    def __init__(self, rank: int, host: str, asked: Mapping[str, Any]) -> None:
        """``asked``: tensors, elements of each, and seed."""
        self.rank, self.host, self.seed = rank, host, asked["seed"]
        self.total = asked["tensors"] * asked["elements"]
        self.vectors = [torch.zeros(asked["elements"]) for _ in range(asked["tensors"])]

    def open(self, peers: list[str]) -> list[str]:
        """Join the DHT of ``peers``; returns the addresses that another peer needs."""
        self.dht = hivemind.DHT(
            initial_peers=peers or None, host_maddrs=[f"/ip4/{self.host}/tcp/0"], start=True
        )
        self.averager = hivemind.DecentralizedAverager(
            self.vectors,
            self.dht,
            prefix="vectors",
            target_group_size=2,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            start=True,
        )
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def prepare(self, number: int) -> float:
        """Fill the vectors and find the other peer; seconds of the latter."""
        mine = vector(self.seed, self.rank, number, self.total)
        self.mean = (mine + vector(self.seed, 1 - self.rank, number, self.total)) * 0.5
        with self.averager.get_tensors() as held:
            for to, values in zip(held, mine.view(len(held), -1), strict=True):
                to.copy_(values)
        begun_s = time.monotonic()
        self.control = self.averager.step(wait=False, require_trigger=True, timeout=PATIENT_S)
        while self.control.stage is not AveragingStage.AWAITING_TRIGGER:
            if self.control.done():
                self.control.result()
                raise RuntimeError("the round ended before it was allowed to begin")
            time.sleep(LOOK_EVERY_S)
        return time.monotonic() - begun_s

    def average(self) -> list[float]:
        """[begun, ended]."""
        begun_s = time.monotonic()
        self.control.allow_allreduce()
        group = self.control.result(timeout=PATIENT_S)
        ended_s = time.monotonic()
        assert len(group) == 2
        return [begun_s, ended_s]

    def error(self) -> float:
        """Largest difference from the mean of both: a round may succeed here without a changed value."""
        with self.averager.get_tensors() as held:
            return float((torch.cat(list(held)) - self.mean).abs().max())

    def close(self) -> None:
        """End all processes."""
        self.averager.shutdown()
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
