"""Server halves against their formulas step by step, robust rules against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadUpdate, UsageError
from strategies import make_strategy
from strategies.base import Strategy
from strategies.fedimpro import COUNTS, PAIRS, WEIGHT
from strategies.krum import Krum
from strategies.layout import Layout, Role
from strategies.values import ClientState, ClientUpdate, Done
from strategies.vhl import MATCH

DRAWN = np.random.default_rng(5).normal(size=(6, 3, 4))  # rounds, clients, coordinates
SAMPLES = (1, 2, 5)


def layout_of(width: int = 4) -> tuple[Layout, dict[str, Any]]:
    arrays = {"x": np.linspace(-1.0, 1.0, width)}
    return Layout.of(arrays, {"x"}), arrays


def updates(at_round: int, deltas: Any, samples: Sequence[int] = SAMPLES) -> list[ClientUpdate]:
    return [
        ClientUpdate(at_round, n, 1, {"x": delta}, client=f"c{at}")
        for at, (n, delta) in enumerate(zip(samples, deltas, strict=True))
    ]


def trajectory(rule: Strategy) -> list[Any]:
    layout, arrays = layout_of()
    state, found = rule.init(layout, arrays, 3), []
    for at_round, deltas in enumerate(DRAWN):
        state = rule.aggregate(state, updates(at_round, deltas))
        found.append(state.weights["x"])
    return found


def mean_deltas() -> list[Any]:
    return [(d[0] + 2 * d[1] + 5 * d[2]) / 8 for d in DRAWN]


def check(rule: Strategy, expected: list[list[float]]) -> None:
    for found, wanted in zip(trajectory(rule), expected, strict=True):
        assert np.allclose(found, wanted, rtol=0.0, atol=1e-12)


def scalars(step: Any) -> list[list[float]]:
    """Run ``step(w, D, memory, t)`` for each coordinate on Python floats."""
    columns = []
    for j in range(4):
        w, memory, path = float(np.linspace(-1.0, 1.0, 4)[j]), {}, []
        for t, mean in enumerate(mean_deltas()):
            w = step(w, float(mean[j]), memory, t)
            path.append(w)
        columns.append(path)
    return [list(row) for row in zip(*columns, strict=True)]


def test_fedavg_is_the_mean_of_the_models_by_samples() -> None:
    check(make_strategy("fedavg"), scalars(lambda w, d, m, t: w + d))
    check(make_strategy("fedavg", {"server_lr": 0.5}), scalars(lambda w, d, m, t: w + 0.5 * d))


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_is_its_formula(nesterov: bool) -> None:
    def step(w: float, d: float, memory: dict[str, float], t: int) -> float:
        pseudo = -d
        memory["m"] = 0.7 * memory.get("m", 0.0) + pseudo
        return w - 0.9 * (pseudo + 0.7 * memory["m"] if nesterov else memory["m"])

    check(make_strategy("fedavgm", {"beta": 0.7, "server_lr": 0.9, "nesterov": nesterov}), scalars(step))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_fedadam_and_fedyogi_are_their_formulas(name: str, corrected: bool) -> None:
    eta, b1, b2, tau = 0.05, 0.8, 0.95, 1e-2

    def step(w: float, d: float, memory: dict[str, float], t: int) -> float:
        m, v = memory.get("m", 0.0), memory.get("v", tau**2)
        m = b1 * m + (1 - b1) * d
        if name == "fedadam":
            v = b2 * v + (1 - b2) * d * d
        else:
            v = v - (1 - b2) * d * d * ((v > d * d) - (v < d * d))
        memory.update(m=m, v=v)
        if corrected:
            m, v = m / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))
        return w + eta * m / (sqrt(v) + tau)

    options = {"server_lr": eta, "b1": b1, "b2": b2, "tau": tau, "bias_correction": corrected}
    check(make_strategy(name, options), scalars(step))


def test_fedadagrad_is_its_formula() -> None:
    def step(w: float, d: float, memory: dict[str, float], t: int) -> float:
        memory["v"] = memory.get("v", 1e-6) + d * d
        return w + 0.1 * d / (sqrt(memory["v"]) + 1e-3)

    check(make_strategy("fedadagrad"), scalars(step))


def test_qfedavg_is_its_formula_and_q_0_is_the_plain_mean() -> None:
    losses, lr, q = (0.5, 2.0, 1.0), 0.1, 0.7
    layout, arrays = layout_of()
    made = [
        ClientUpdate(0, 1, 1, {"x": d}, scalars={"start_loss": f, "lr": lr}, client=str(at))
        for at, (d, f) in enumerate(zip(DRAWN[0], losses, strict=True))
    ]
    rule = make_strategy("qfedavg", {"q": q})
    found = rule.aggregate(rule.init(layout, arrays, 3), made).weights["x"]
    pushes = [-d / lr for d in DRAWN[0]]  # L (w - w_k)
    top = sum(f**q * p for f, p in zip(losses, pushes, strict=True))
    bottom = sum(q * f ** (q - 1) * float(p @ p) + f**q / lr for f, p in zip(losses, pushes, strict=True))
    assert np.allclose(found, arrays["x"] - top / bottom, atol=1e-8)
    plain = make_strategy("qfedavg", {"q": 0.0})
    found = plain.aggregate(plain.init(layout, arrays, 3), made).weights["x"]
    assert np.allclose(found, arrays["x"] + DRAWN[0].mean(0), atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    q=st.floats(0.0, 10.0),
    loss=st.floats(0.0, 1e6),
    rate=st.floats(1e-12, 1e3),
    size=st.floats(0.0, 1e18),
    alone=st.booleans(),
)
def test_no_single_client_makes_qfedavgs_step_anything_but_finite(
    q: float, loss: float, rate: float, size: float, alone: bool
) -> None:
    weights = {"x": np.zeros(4, "float32")}
    layout, rule = Layout.of(weights, {"x"}), make_strategy("qfedavg", {"q": q})
    state = rule.init(layout, weights, 2)

    def update(client: str, moved: float, numbers: dict[str, float]) -> ClientUpdate:
        return ClientUpdate(0, 1, 1, {"x": np.full(4, moved, "float32")}, scalars=numbers, client=client)

    honest = [] if alone else [update("a", 0.01, {"start_loss": 0.7, "lr": 0.1})]
    odd = update("odd", size, {"start_loss": loss, "lr": rate})
    try:
        found = rule.aggregate(state, [*honest, odd])
    except BadUpdate as error:
        assert str(error).startswith("client 'odd': ")  # noqa: PT017 - both ends are right
        return
    assert np.isfinite(found.weights["x"]).all()


def test_scaffold_feddyn_and_fednova_are_their_formulas_with_some_clients_absent() -> None:
    layout, arrays = layout_of()
    x = arrays["x"]
    scaffold = make_strategy("scaffold", {"server_lr": 0.5})
    state = scaffold.init(layout, arrays, 12)
    made = [
        ClientUpdate(0, n, 4, {"x": d}, {"control": {"x": 2 * d}}, client=str(n))
        for n, d in zip(SAMPLES, DRAWN[0], strict=True)
    ]
    after = scaffold.aggregate(state, made)
    assert np.allclose(after.weights["x"], x + 0.5 * DRAWN[0].mean(0), atol=1e-12)
    assert np.allclose(after.slots["control"]["x"], 3 / 12 * (2 * DRAWN[0]).mean(0), atol=1e-12)
    feddyn = make_strategy("feddyn", {"alpha": 0.5})
    after = feddyn.aggregate(feddyn.init(layout, arrays, 12), updates(0, DRAWN[0]))
    dual = -0.5 / 12 * DRAWN[0].sum(0)
    assert np.allclose(after.slots["dual"]["x"], dual, atol=1e-12)
    assert np.allclose(after.weights["x"], x + DRAWN[0].mean(0) - dual / 0.5, atol=1e-12)
    fednova = make_strategy("fednova")
    a, p = (3.0, 7.0, 2.0), np.array(SAMPLES) / 8
    made = [
        ClientUpdate(0, n, 1, {"x": d}, scalars={"effective_steps": s}, client=str(n))
        for n, d, s in zip(SAMPLES, DRAWN[0], a, strict=True)
    ]
    after = fednova.aggregate(fednova.init(layout, arrays, 3), made)
    expected = x + (p @ a) * sum(w * d / s for w, d, s in zip(p, DRAWN[0], a, strict=True))
    assert np.allclose(after.weights["x"], expected, atol=1e-12)


def test_scaffolds_client_control_is_option_two() -> None:
    layout, arrays = layout_of()
    rule = make_strategy("scaffold")
    state = rule.init(layout, arrays, 2)
    common = {"x": np.full(4, 0.3)}
    broadcast = type(rule.configure(state))(0, state.weights, {"control": common})
    mine = ClientState({"control": {"x": np.full(4, 0.2)}})
    phase = rule.begin(layout, broadcast, mine)[0]
    assert np.allclose(phase.correction.offset["x"], 0.1)  # c - c_i
    y = arrays["x"] - 0.05
    update, kept = rule.end(layout, broadcast, [Done({"x": y}, 1, 5, 0.02, momentum=0.5)], mine)
    expected = 0.2 - 0.3 + 0.05 / (5 * 0.02 / (1 - 0.5))
    assert np.allclose(kept.slots["control"]["x"], expected)
    assert np.allclose(update.extra["control"]["x"], expected - 0.2)


vectors = st.integers(3, 8).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=n, max_size=n
    )
)


def aggregated(rule: Strategy, rows: list[list[float]]) -> list[float]:
    layout, arrays = layout_of(3)
    made = updates(0, [np.array(row) for row in rows], [1] * len(rows))
    after = rule.aggregate(rule.init(layout, arrays, len(rows)), made)
    return (after.weights["x"] - arrays["x"]).tolist()


@settings(max_examples=30, deadline=None)
@given(rows=vectors)
def test_the_median_is_the_middle_of_each_coordinate(rows: list[list[float]]) -> None:
    n = len(rows)
    expected = [(sorted(c)[(n - 1) // 2] + sorted(c)[n // 2]) / 2 for c in zip(*rows, strict=True)]
    assert aggregated(make_strategy("coordinate_median"), rows) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(rows=vectors, beta=st.floats(0.0, 0.49))
def test_the_trimmed_mean_leaves_out_both_ends(rows: list[list[float]], beta: float) -> None:
    cut = int(beta * len(rows))
    kept = [sorted(c)[cut : len(rows) - cut] for c in zip(*rows, strict=True)]
    expected = [sum(c) / len(c) for c in kept]
    found = aggregated(make_strategy("trimmed_mean", {"beta": beta}), rows)
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_krum_takes_the_update_whose_best_neighbourhood_is_tightest(seed: int) -> None:
    draw = np.random.default_rng(seed)
    n, faulty = 7 + seed % 3, 2
    rows = draw.normal(size=(n, 3))

    def score(i: int) -> float:
        others = [j for j in range(n) if j != i]
        return min(
            sum(float(((rows[i] - rows[j]) ** 2).sum()) for j in near)
            for near in combinations(others, n - faulty - 2)
        )

    ranked = sorted(range(n), key=score)
    assert aggregated(Krum(faulty=faulty), rows.tolist()) == pytest.approx(rows[ranked[0]].tolist())
    multi = rows[ranked[:3]].mean(0).tolist()
    assert aggregated(Krum(faulty=faulty, keep=3), rows.tolist()) == pytest.approx(multi)


def test_krum_says_how_many_updates_it_needs() -> None:
    with pytest.raises(UsageError, match="krum needs 7 updates a round, 6 arrived"):
        aggregated(Krum(faulty=2), [[0.0] * 3] * 6)


@pytest.mark.parametrize("rule", ["coordinate_median", "trimmed_mean", "krum", "multi-krum"])
def test_two_of_twelve_that_send_ten_times_the_opposite_do_not_leave_the_honest_spread(rule: str) -> None:
    draw = np.random.default_rng(1)
    honest = 1.0 + 0.1 * draw.normal(size=(10, 3))
    rows = [*honest.tolist(), *(-10.0 * honest[:2]).tolist()]
    made = Krum(faulty=2, keep=6) if rule == "multi-krum" else None
    found = np.array(aggregated(made or (Krum(faulty=2) if rule == "krum" else make_strategy(rule)), rows))
    assert np.all((honest.min(0) <= found) & (found <= honest.max(0)))
    plain = np.array(aggregated(make_strategy("fedavg"), rows))
    assert np.all(plain < honest.min(0))


def test_opwa_enlarges_what_few_updates_hold() -> None:
    rows = [[1.0, 2.0, 0.0], [0.0, 4.0, 0.0], [0.0, 6.0, 0.0]]
    assert aggregated(make_strategy("opwa", {"gamma": 3.0}), rows) == pytest.approx([1.0, 4.0, 0.0])
    wider = make_strategy("opwa", {"gamma": 3.0, "overlap": 3})
    assert aggregated(wider, rows) == pytest.approx([1.0, 12.0, 0.0])
    with pytest.raises(UsageError, match="error feedback"):
        make_strategy("opwa", {"error_feedback": True})


def test_fedbn_keeps_every_tensor_of_a_batch_norm_with_its_client() -> None:
    arrays = {
        "fc.weight": np.ones(2),
        "bn.weight": np.ones(2),
        "bn.running_mean": np.zeros(2),
        "bn.num_batches_tracked": np.array(0),
    }
    rule = make_strategy("fedbn")
    state = rule.init(Layout.of(arrays, {"fc.weight", "bn.weight"}, {"bn.running_mean"}), arrays, 2)
    assert set(state.weights) == {"fc.weight"}
    own = {"bn.weight", "bn.running_mean", "bn.num_batches_tracked"}
    assert set(state.layout.names(Role.LOCAL)) == own
    broadcast = rule.configure(state)
    ended = {name: array + 1 for name, array in arrays.items()}
    update, mine = rule.end(state.layout, broadcast, [Done(ended, 1, 1, 0.1)], ClientState())
    assert set(update.delta) == {"fc.weight"}
    start = rule.begin(state.layout, broadcast, mine)[0].start
    assert {name: start[name].tolist() for name in own} == {name: ended[name].tolist() for name in own}
    assert rule.evaluate_with(broadcast, mine)["bn.weight"].tolist() == [2.0, 2.0]
    with pytest.raises(UsageError, match="no BatchNorm"):
        rule.adapt(Layout.of({"x": np.zeros(1)}, {"x"}))


def test_ditto_trains_a_personal_model_near_the_common_one() -> None:
    layout, arrays = layout_of()
    rule = make_strategy("ditto", {"lam": 2.0})
    broadcast = rule.configure(rule.init(layout, arrays, 1))
    common, personal = rule.begin(layout, broadcast, ClientState())
    assert not common.correction
    assert np.array_equal(personal.start["x"], arrays["x"])
    pulled = personal.correction.gradient("x", np.zeros(4), arrays["x"] + 1.0)
    assert np.allclose(pulled, 2.0)
    done = [Done({"x": arrays["x"] + k}, 1, 1, 0.1) for k in (1, 7)]
    update, mine = rule.end(layout, broadcast, done, ClientState())
    assert np.allclose(update.delta["x"], 1.0)
    assert np.allclose(rule.begin(layout, broadcast, mine)[1].start["x"], arrays["x"] + 7)


def test_vhl_matches_features_in_the_first_epochs_only_whatever_its_base() -> None:
    rule = make_strategy("vhl", {"base": "scaffold", "match_epochs": 2})
    assert rule.facts.needs_client_state
    assert rule.facts.changes_loss
    layout, arrays = layout_of()
    broadcast = rule.configure(rule.init(layout, arrays, 1))
    assert [float(rule.at_epoch(layout, broadcast, e)[MATCH]) for e in range(4)] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("base", "text", "options"),
    [
        ("fedprox", "mu=0.5", {"mu": 0.5}),
        ("fedavgm", "beta=0.7, nesterov=true", {"beta": 0.7, "nesterov": True}),
        ("feddyn", "alpha=1", {"alpha": 1.0}),
        ("fedavg", "", {}),
    ],
)
def test_vhl_around_a_base_with_options_is_that_base_with_these(
    base: str, text: str, options: dict[str, Any]
) -> None:
    rule, alone = make_strategy("vhl", {"base": base, "base_options": text}), make_strategy(base, options)
    for one, other in zip(trajectory(rule), trajectory(alone), strict=True):
        assert np.array_equal(one, other)
    layout, arrays = layout_of()
    found, wanted = (
        r.begin(layout, r.configure(r.init(layout, arrays, 3)), r.client_init(layout))[0].correction
        for r in (rule, alone)
    )
    assert found.pull == wanted.pull
    assert found.offset.keys() == wanted.offset.keys()


def fedimpro_model() -> tuple[Layout, dict[str, Any]]:
    arrays = {"x": np.zeros(2), WEIGHT: np.zeros(()), COUNTS: np.zeros(3)}
    for at, (shared, own) in enumerate(PAIRS.items()):
        arrays[shared] = np.full((3, 2), 10.0 + at)
        arrays[own] = np.full((3, 2), 10.0 + at)
    return Layout.of(arrays, {"x"}, {*PAIRS.values(), COUNTS}), arrays


@pytest.mark.parametrize("beta", [0.0, 0.25])
def test_fedimpros_server_weighs_each_class_by_who_saw_it(beta: float) -> None:
    layout, arrays = fedimpro_model()
    rule = make_strategy("fedimpro", {"beta": beta})
    state = rule.init(layout, arrays, 2)
    counts = {"a": np.array([4.0, 0.0, 0.0]), "b": np.array([2.0, 8.0, 0.0])}
    samples = {"a": 8, "b": 5}
    made = []
    for at, name in enumerate(("a", "b")):
        found = {own: np.full((3, 2), at + 1.0) for own in PAIRS.values()}
        extra = {"statistics": {**found, COUNTS: counts[name]}}
        made.append(ClientUpdate(0, samples[name], 1, {"x": np.ones(2)}, extra, client=name))
    after = rule.aggregate(state, made)
    for at, shared in enumerate(PAIRS):
        first = (8.0 * 1.0 + 1.0 * 2.0) / 9.0  # a saw class 0 in all its 8 samples, b in one of its 5
        mixed = [beta * (10.0 + at) + (1 - beta) * v for v in (first, 2.0)]
        assert np.allclose(after.weights[shared][:, 0], [*mixed, 10.0 + at])
    assert np.allclose(after.weights["x"], 1.0)


def test_fedimpro_tells_weight_and_statistics_and_adds_noise_of_the_clients_own_seed() -> None:
    layout, arrays = fedimpro_model()
    rule = make_strategy("fedimpro", {"ramp_rounds": 4.0, "max_weight": 0.5, "noise": 0.1})
    state = rule.init(layout, arrays, 1)
    told = []
    for at_round in range(4):
        broadcast = rule.configure(state)
        told.append(float(broadcast.weights[WEIGHT]))
        start = rule.begin(state.layout, broadcast, ClientState())[0].start
        assert all(np.array_equal(start[own], broadcast.weights[s]) for s, own in PAIRS.items())
        done = [Done({**arrays, **start, COUNTS: np.array([1.0, 1.0, 0.0])}, 2, 1, 0.1)]
        one, _ = rule.end(state.layout, broadcast, done, ClientState(), seed=1)
        two, _ = rule.end(state.layout, broadcast, done, ClientState(), seed=2)
        own = next(iter(PAIRS.values()))
        assert not np.allclose(one.extra["statistics"][own], two.extra["statistics"][own])
        assert np.array_equal(one.extra["statistics"][COUNTS], [1.0, 1.0, 0.0])
        assert one.round == at_round
        state = rule.aggregate(state, [one])
    assert told == [0.0, 0.25, 0.5, 0.5]
    with pytest.raises(UsageError, match="wrap it"):
        rule.adapt(layout_of()[0])


def test_moon_fills_its_copies_from_what_was_received_and_from_its_last_round() -> None:
    arrays = {name: np.zeros(2) for name in ("net.w", "anchor.w", "previous.w")}
    rule = make_strategy("moon")
    state = rule.init(Layout.of(arrays, {"net.w"}), {**arrays, "net.w": np.ones(2)}, 1)
    broadcast = rule.configure(state)
    first = rule.begin(state.layout, broadcast, ClientState())[0].start
    assert {name: float(array[0]) for name, array in first.items()} == dict.fromkeys(arrays, 1.0)
    ended = {**arrays, "net.w": np.full(2, 3.0)}
    update, mine = rule.end(state.layout, broadcast, [Done(ended, 1, 1, 0.1)], ClientState())
    assert set(update.delta) == {"net.w"}
    start = rule.begin(state.layout, broadcast, mine)[0].start
    assert [float(start[name][0]) for name in arrays] == [1.0, 1.0, 3.0]
