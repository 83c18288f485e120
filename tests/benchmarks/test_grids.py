"""Closed forms of bytes inside a site, against what plans count and what a grid of threads sends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.job import EXACTLY, TrainingSpec
from atoll.mesh.layout import Inside
from benchmarks import grids
from coordinator.capture.capture import capture
from coordinator.planning.inside.costs import inside_costs
from tests.atoll.mesh.threads import Meeting, ThreadGroup, together

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, TOKENS = 64, 4, 32


class Layers(nn.Module):
    """Layers of four products each: what two have more than one, the formulas count."""

    def __init__(self, count: int) -> None:
        super().__init__()
        shapes = {"mix": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH}
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {name: nn.Linear(WIDTH, n, bias=False) for name, n in shapes.items()}
                | {"down": nn.Linear(4 * WIDTH, WIDTH, bias=False)}
            )
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            heads = [t.unflatten(2, (4, -1)).transpose(1, 2) for t in layer["mix"](x).chunk(3, dim=2)]
            mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + layer["out"](mixed.transpose(1, 2).flatten(2))
            x = x + layer["down"](functional.gelu(layer["up"](x)))
        return x.square().mean()


def counted(kind: Inside, size: int) -> float:
    """Numbers for each of width^2 that a process sends for one layer of a plan."""
    sent = []
    for count in (1, 2):
        dag = capture(Layers(count), {"x": torch.zeros(ROWS, TOKENS, WIDTH)}).train
        sent.append(inside_costs(dag, TrainingSpec(steps=1, n_micro=1), EXACTLY, kind, size).sent_bytes)
    return (sent[1] - sent[0]) / 4 / WIDTH**2


@pytest.mark.parametrize("size", [2, 4])
def test_plans_send_what_the_papers_formulas_say(size: int) -> None:
    ratio = ROWS * TOKENS / WIDTH
    assert counted(Inside.TENSOR, size) == pytest.approx(grids.tensor(ratio, size))
    assert counted(Inside.SHARDS, size) == pytest.approx(grids.shards(ratio, size))


def product_on_a_grid(x: Tensor, w: Tensor, rows: ThreadGroup, columns: ThreadGroup) -> Tensor:
    """A block of x w, and of the gradients of sum(x w)^2 / 2, as SUMMA has them (Xu 2021, algorithms 1 to 3).

    Process (i, j) has block (i, j) of both; ``rows``: the processes of its row, ``columns``: of its column.
    """
    side, out = rows.size, torch.cat(tuple(rows.gather(x)), 1) @ torch.cat(tuple(columns.gather(w)), 0)
    of_x = out @ torch.cat(tuple(columns.gather(w)), 0).T  # a part of the sum over the row
    of_w = torch.cat(tuple(rows.gather(x)), 1).T @ out
    grad_x = rows.sum_parts(torch.stack(of_x.chunk(side, 1)))
    grad_w = columns.sum_parts(torch.stack(of_w.chunk(side, 0)))
    return torch.cat((out.flatten(), grad_x.flatten(), grad_w.flatten()))


@pytest.mark.parametrize("side", [2, 3])
def test_a_square_grid_sends_what_its_formula_says_and_computes_the_product(side: int) -> None:
    width = 4 * side * side
    tokens = 2 * width
    generator = torch.Generator().manual_seed(3)
    across, down = ([Meeting(side) for _ in range(side)] for _ in range(2))

    def layer(group: ThreadGroup) -> int:
        i, j = divmod(group.rank, side)
        rows, columns = ThreadGroup(j, across[i]), ThreadGroup(i, down[j])
        for (k, n), (x, w) in zip(shapes, values, strict=True):
            found = product_on_a_grid(block(x, i, j), block(w, i, j), rows, columns)
            out = x @ w
            expected = [block(each, i, j).flatten() for each in (out, out @ w.T, x.T @ out)]
            torch.testing.assert_close(found, torch.cat(expected), msg=f"{k} by {n}")
        return rows.sent_bytes + columns.sent_bytes

    def block(whole: Tensor, i: int, j: int) -> Tensor:
        return whole.chunk(side, 0)[i].chunk(side, 1)[j].contiguous()

    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    values = [
        tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in ((tokens, k), (k, n)))
        for k, n in shapes
    ]
    formula = grids.summa(tokens / width, side * side)
    assert formula is not None
    assert together(side * side, layer) == [pytest.approx(8 * formula * width**2)] * side**2


def test_a_square_grid_of_four_is_never_the_least_and_one_of_sixteen_never_less_than_rows_by_tensor() -> None:
    assert grids.wins(4) is None
    low, high = grids.wins(16) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(1.895, rel=1e-3), pytest.approx(6.857, rel=1e-3))
    for size in (4, 9, 16, 64):
        for ratio in (0.1, 1.0, 4.5, 30.0, 1000.0):
            grid = grids.summa(ratio, size)
            assert grid is not None
            assert grids.rows_by_tensor(ratio, size) < grid
            won = grids.wins(size)
            least = min(grids.tensor(ratio, size), grids.shards(ratio, size))
            assert (grid < least) is (won is not None and won[0] < ratio < won[1])
    assert grids.summa(1.0, 8) is None
