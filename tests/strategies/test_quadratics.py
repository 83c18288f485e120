"""Two scalar quadratics: what local steps do to each rule, to four decimals."""

from __future__ import annotations

import pytest

from strategies import make_strategy
from strategies.base import Strategy
from strategies.fednova import effective_steps
from tests.strategies.federation import quadratic, run, scalar

TABLE = {
    (1, 1): (0.6, 0.6, 0.6, 0.6),
    (5, 5): (0.4965, 0.4965, 0.6, 0.6),
    (20, 20): (0.2129, 0.2129, 0.6, 0.6),
    (20, 2): (-0.2811, 0.6975, 0.6, 0.6),
}
RULES = [make_strategy(n) for n in ("fedavg", "fednova", "scaffold")] + [
    make_strategy("feddyn", {"alpha": 0.5})
]


def fixed_point(
    rule: Strategy, steps: tuple[int, int], lr: float, rounds: int, momentum: float = 0.0
) -> float:
    """Where the server's x ends with losses 1/2 (x+1)^2 and 4/2 (x-1)^2; their sum is least at 0.6."""
    curves = [(1.0, -1.0), (4.0, 1.0)]
    clients = [
        quadratic(a, e, steps=n, lr=lr, momentum=momentum) for (a, e), n in zip(curves, steps, strict=True)
    ]
    return float(run(rule, *scalar(), clients, rounds).weights["x"][0])


@pytest.mark.parametrize("steps", TABLE, ids=str)
@pytest.mark.parametrize("at", range(4), ids=[rule.name for rule in RULES])
def test_the_published_fixed_points_are_met(steps: tuple[int, int], at: int) -> None:
    found = fixed_point(RULES[at], steps, lr=0.05, rounds=400)
    assert found == pytest.approx(TABLE[steps][at], abs=5e-5)


@pytest.mark.parametrize(("at", "expected"), [(0, 0.9494), (1, 0.5879), (2, 0.6)])
def test_at_a_small_rate_fednova_removes_the_bias_of_step_counts_but_not_the_drift(
    at: int, expected: float
) -> None:
    found = fixed_point(RULES[at], (2, 20), lr=0.001, rounds=3000)
    assert found == pytest.approx(expected, abs=5e-5)


def test_scaffold_meets_the_optimum_under_heavy_ball_momentum_too() -> None:
    assert fixed_point(RULES[2], (20, 5), lr=0.01, rounds=800, momentum=0.9) == pytest.approx(0.6, abs=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps_agree_with_the_closed_forms(momentum: float) -> None:
    tau, lr, mu = 17, 0.1, 0.3
    closed = (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
    assert effective_steps(tau, lr, momentum) == pytest.approx(closed, rel=1e-12)
    prox = (1 - (1 - lr * mu) ** tau) / (lr * mu)
    assert effective_steps(tau, lr, mu=mu) == pytest.approx(prox, rel=1e-12)


def test_effective_steps_of_nesterov_are_what_torch_does() -> None:
    import torch

    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.8, nesterov=True)
    for _ in range(7):
        weight.grad = 1.0 + 0.5 * weight.detach()
        sgd.step()
    assert effective_steps(7, 0.1, 0.8, True, mu=0.5) == pytest.approx(-weight.item() / 0.1, rel=1e-9)
