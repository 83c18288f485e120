"""A compute process whose gradients are a hundredth too large from a step on: finite, and not odd among one
plan's figures. What it says of them is true.

It is the real one, with two functions replaced; ``cheating_worker`` hands its text to Python.
"""

import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from protos.child_pipe import pipe_from
from worker.compute.ports import Arenas
from worker.compute.process import serve
from worker.pipe.arena import Arena
from worker.stage import stage
from worker.stage.stage import Stage

BEGUN_S = time.monotonic()
FIRST_WRONG = int(sys.argv.pop(1))
NOW = {"step": 0}
honest, begin = stage.norms_and_digest, Stage.begin_step


def enlarged(gradients: Iterable[torch.Tensor | None], device: torch.device) -> Any:
    """Spoil a step's gradients where the stage is about to take them."""
    found = list(gradients)
    for gradient in found if NOW["step"] >= FIRST_WRONG else ():
        if gradient is not None:
            gradient.mul_(1.01)
    return honest(found, device)


def begin_step(self: Stage, step: int) -> None:
    """Know which step it is."""
    NOW["step"] = step
    begin(self, step)


if __name__ == "__main__":
    given, incoming, incoming_bytes, outgoing, outgoing_bytes = map(int, sys.argv[1:])
    stage.norms_and_digest, Stage.begin_step = enlarged, begin_step  # type: ignore[method-assign]
    arenas = Arenas(Arena(incoming, incoming_bytes), Arena(outgoing, outgoing_bytes))
    serve(pipe_from(given), arenas, BEGUN_S)
