"""Keys and values that go round in plans: what a long row costs, and where that is chosen."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.job import EXACTLY, Optimizer, TrainingSpec
from atoll.mesh.layout import Inside
from atoll.mesh.volumes import Sent
from atoll.opdag import OpDag
from coordinator.capture.capture import capture
from coordinator.planning.costs.fleet import Device, Fleet, Mesh
from coordinator.planning.inside.costs import InsideCosts, inside_costs
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.problem import Problem

TRAINING = TrainingSpec(steps=4, n_micro=2, seed=1, optimizer=Optimizer(lr=1e-3))
WIDTH, HEADS = 32, 4


class Long(nn.Module):
    """One causal layer of attention over long rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.mix(h).chunk(3, dim=2)
        heads = [t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        h = h + mixed.transpose(1, 2).flatten(2)
        return functional.cross_entropy(self.out(h).flatten(0, 1), x.flatten())


@cache
def dag(tokens: int) -> OpDag:
    return capture(Long(), {"x": torch.zeros(2, tokens, dtype=torch.int64)}).train


def costs(kind: Inside, tokens: int, size: int) -> InsideCosts:
    return inside_costs(dag(tokens), TRAINING, EXACTLY, kind, size)


def need(kind: Inside, tokens: int, size: int) -> float:
    return costs(kind, tokens, size).memory.bytes(0, len(dag(tokens).ops), 1)


def fleet(memory: float, mesh: Mesh) -> Fleet:
    site = Device("site", int(memory * mesh.size), gflops={"": 1.0}, op_overhead_s=1e-7, mesh=mesh)
    return Fleet((site,), np.full((1, 1), np.inf), np.zeros((1, 1)))


def test_a_process_of_twice_the_devices_takes_rows_of_twice_the_length() -> None:
    """Liu 2023, section 3: memory of a process follows its own tokens; gathered keys grow with all."""
    ring, gathered = (
        [need(kind, tokens, size) for tokens, size in ((2048, 2), (8192, 8))]
        for kind in (Inside.RING, Inside.SEQUENCE)
    )
    assert ring[1] < 1.05 * ring[0]
    assert gathered[1] > 1.5 * gathered[0]


def test_a_row_whose_gathered_keys_have_no_room_goes_round_and_the_plan_says_so() -> None:
    ring, gathered = need(Inside.RING, 8192, 8), need(Inside.SEQUENCE, 8192, 8)
    # Rows of two cannot be shared among eight, so of all kinds these two alone divide what a row stores.
    request = PlanRequest(
        "job", 1, dag(8192), None, TRAINING, fleet((ring + gathered) / 2, Mesh(8, 1e-5, 1e10))
    )
    plan = make_plan(request)
    assert plan.stages[0].inside == Inside.RING
    assert plan.prediction is not None
    (note,) = (note for note in plan.prediction.notes if note.startswith("inside site: "))
    assert "ring on 8 devices (each has its tokens of every row, to which keys and values come" in note
    assert f"; {Inside.SEQUENCE}: " in note


def test_sends_hide_behind_compute_or_compute_behind_sends() -> None:
    found = costs(Inside.RING, 2048, 4)
    (op,) = found.divided.overlaps
    whole = Problem(dag(2048), TRAINING, fleet(1e12, Mesh(4, 0.0, 1e30)))
    alone = whole.table.costs(whole.fleet.devices[0])
    ahead, back = found.divided.sent[op]
    assert ahead.calls == 3
    assert back == Sent(2 * ahead.n_bytes, 6)
    free = found.costs(alone, Mesh(4, 0.0, 1e30))
    assert free.forward_s[op] == pytest.approx(alone.forward_s[op] * 7 / 16)  # the last process's part
    hidden = found.costs(alone, Mesh(4, 0.0, 2 * ahead.n_bytes / free.forward_s[op]))
    assert hidden.forward_s[op] == pytest.approx(free.forward_s[op])
    assert free.backward_s[op] < hidden.backward_s[op] <= 1.2 * free.backward_s[op]
    slow = found.costs(alone, Mesh(4, 0.0, ahead.n_bytes / (100 * free.forward_s[op])))
    assert slow.forward_s[op] == pytest.approx(100.25 * free.forward_s[op])
    gathered = costs(Inside.SEQUENCE, 2048, 4)
    assert gathered.divided.sent[op][0].n_bytes == ahead.n_bytes
    late = gathered.costs(alone, Mesh(4, 0.0, 2 * ahead.n_bytes / free.forward_s[op]))
    assert late.forward_s[op] == pytest.approx(1.5 * free.forward_s[op])
