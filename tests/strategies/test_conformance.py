"""Conformance: what every rule by name must keep, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import BadFrame, BadUpdate, JobFailed, UsageError
from atoll.opdag import DTYPE_BYTES, TensorMeta
from strategies import STRATEGIES, make_strategy
from strategies.base import Strategy
from strategies.checking import Limits, check_broadcast, check_update
from strategies.layout import SHARED, Layout, Role
from strategies.linear import Linear
from strategies.sums import total
from strategies.values import Broadcast, ClientState, ClientUpdate, Correction, Done, ServerState
from tests.strategies.federation import Arrays

N = 7
ROOT = Path(__file__).resolve().parents[2]
RULES = [make_strategy(name) for name in STRATEGIES]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def model(dtype: str = "float64") -> tuple[Layout, Arrays]:
    """One of everything: what the wrappers of VHL, FedImpro and MOON add is there for every rule, and an
    adapter."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return draw.normal(size=shape).astype(dtype)

    net: dict[str, Any] = {
        "net.fc.weight": normal(3, 4),
        "net.fc.bias": normal(3),
        "net.bn.weight": normal(3),
        "net.bn.running_mean": normal(3),
        "net.bn.num_batches_tracked": np.array(5),
        "net.frozen": normal(2),
        "net.up.base_layer.weight": normal(5, 3),
        "net.up.lora_A.default.weight": normal(2, 3),
        "net.up.lora_B.default.weight": np.zeros((5, 2), dtype),
    }
    factors = ("net.up.lora_A.default.weight", "net.up.lora_B.default.weight")
    trained = ("net.fc.weight", "net.fc.bias", "net.bn.weight", *factors)
    copies = {p + n.removeprefix("net."): a.copy() for p in ("anchor.", "previous.") for n, a in net.items()}
    kinds = ("means", "stds", "shared_means", "shared_stds")
    stats = {f"fedimpro_{kind}": np.abs(normal(2, 3)) for kind in kinds}
    rest = {
        "fedimpro_counts": np.zeros(2, dtype),
        "fedimpro_weight": np.zeros((), dtype),
        "vhl_match": np.ones((), "float32"),
    }
    arrays = {**net, **copies, **stats, **rest}
    written = ("net.bn.running_mean", "fedimpro_means", "fedimpro_stds", "fedimpro_counts")
    return Layout.of(arrays, trained, written), arrays


def trained_locally(layout: Layout, start: Arrays, whole: Arrays, seed: int) -> Done:
    """As after local steps: every tensor that training writes has moved by the seed's numbers."""
    draw = np.random.default_rng(seed)
    weights = {**whole, **start}
    for name in sorted(weights):
        array = weights[name]
        if layout.roles[name] in (*SHARED, Role.LOCAL) and array.dtype.kind == "f":
            weights[name] = array + (0.1 * draw.normal(size=array.shape)).astype(array.dtype)
    weights["fedimpro_counts"] = np.array([seed, 2.0 + seed], weights["fedimpro_counts"].dtype)
    return Done(weights, 10 + seed, 3 + seed, 0.05, start_loss=0.5 + seed, metrics={"loss": 0.25})


def frozen(*sets: Arrays) -> None:
    for arrays in sets:
        for array in arrays.values():
            array.flags.writeable = False


def start(rule: Strategy, dtype: str = "float64") -> tuple[ServerState, Arrays]:
    layout, arrays = model(dtype)
    frozen(arrays)
    return rule.init(layout, arrays, n_clients=2 * N), arrays


def one_round(
    rule: Strategy, state: ServerState, whole: Arrays, clients: dict[str, ClientState]
) -> list[ClientUpdate]:
    broadcast = rule.configure(state)
    frozen(state.weights, *state.slots.values(), broadcast.weights, *broadcast.extra.values())
    check_broadcast(rule, state.layout, broadcast)
    updates = []
    for at in range(N):
        name = f"c{at}"
        mine = clients.get(name, rule.client_init(state.layout))
        phases = rule.begin(state.layout, broadcast, mine)
        done = [trained_locally(state.layout, phase.start, whole, at) for phase in phases]
        update, clients[name] = rule.end(state.layout, broadcast, done, mine, seed=at)
        updates.append(replace(update, client=name))
        frozen(update.delta, *update.extra.values(), *clients[name].slots.values())
    return updates


def rounds(rule: Strategy, count: int, dtype: str = "float64") -> tuple[ServerState, dict[str, ClientState]]:
    state, whole = start(rule, dtype)
    clients: dict[str, ClientState] = {}
    for _ in range(count):
        state = rule.aggregate(state, one_round(rule, state, whole, clients))
    return state, clients


def same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(
        same(one[key], two[key]) if isinstance(one[key], dict) else np.array_equal(one[key], two[key])
        for key in one
    )


@every_rule
def test_the_same_rounds_give_the_same_state_to_the_bit(rule: Strategy) -> None:
    (one, mine), (two, again) = rounds(rule, 3), rounds(rule, 3)
    assert one.round == two.round == 3
    assert same(one.weights, two.weights)
    assert same(one.slots, two.slots)
    assert all(same(mine[name].slots, again[name].slots) for name in mine)


@every_rule
def test_the_order_of_updates_does_not_matter(rule: Strategy) -> None:
    state, whole = start(rule)
    updates = one_round(rule, state, whole, {})
    expected = rule.aggregate(state, updates).weights
    for order in list(permutations(range(N)))[:: 5040 // 5]:
        found = rule.aggregate(state, [updates[at] for at in order]).weights
        for name, array in expected.items():
            assert np.allclose(found[name], array, rtol=0.0, atol=1e-12)


@every_rule
def test_partial_sums_in_any_grouping_give_the_same_round(rule: Strategy) -> None:
    core = rule.core
    assert rule.facts.linear == isinstance(core, Linear)
    if not isinstance(core, Linear):
        return
    state, whole = start(rule)
    updates = one_round(rule, state, whole, {})
    devices = [updates[:3], updates[3:4], updates[4:]]
    parts = [total(core.contribute(state.layout, u) for u in mine) for mine in devices]
    found = core.finish(state, total(parts))
    expected = rule.aggregate(state, updates)
    assert total(parts).clients == N
    for name, array in expected.weights.items():
        assert np.allclose(found.weights[name], array, rtol=0.0, atol=1e-12)


@every_rule
def test_names_shapes_and_dtypes_stay_and_nothing_given_is_written_to(rule: Strategy) -> None:
    layout, arrays = model("float32")
    state, clients = rounds(rule, 2, "float32")  # in which every array is read-only
    assert set(state.weights) == set(state.layout.names(*SHARED, Role.TOLD))
    for name, array in state.weights.items():
        assert array.shape == arrays[name].shape
        assert array.dtype == arrays[name].dtype
    for slots in (state.slots, *(mine.slots for mine in clients.values())):
        for slot in slots.values():
            known = {name: array for name, array in slot.items() if name in layout.metas}
            assert all(layout.metas[name].dtype == str(array.dtype) for name, array in known.items())


@every_rule
def test_declared_traffic_is_what_travels(rule: Strategy) -> None:
    state, whole = start(rule)
    update = one_round(rule, state, whole, {})[0]
    broadcast = rule.configure(state)

    def size(arrays: Any, slots: Any) -> int:
        return sum(a.nbytes for part in (arrays, *slots.values()) for a in part.values())

    def declared(metas: Any, slots: Any) -> int:
        every: list[TensorMeta] = [m for part in (metas, *slots.values()) for m in part.values()]
        return sum(meta.elements * DTYPE_BYTES[meta.dtype] for meta in every)

    layout = state.layout
    down = declared(layout.metas_of(*SHARED, Role.TOLD), rule.extra_down(layout))
    assert down == size(broadcast.weights, broadcast.extra)
    assert declared(layout.metas_of(*SHARED), rule.extra_up(layout)) == size(update.delta, update.extra)


@every_rule
def test_integer_counters_and_frozen_tensors_never_travel(rule: Strategy) -> None:
    state, whole = start(rule)
    update = one_round(rule, state, whole, {})[0]
    for name in ("net.bn.num_batches_tracked", "net.frozen"):
        assert name not in update.delta
        assert name not in state.weights


@every_rule
def test_a_client_without_its_state_starts_anew(rule: Strategy) -> None:
    state, whole = start(rule)
    broadcast = rule.configure(state)
    for mine in (ClientState(), rule.client_init(state.layout)):
        phases = rule.begin(state.layout, broadcast, mine)
        done = [trained_locally(state.layout, phase.start, whole, 1) for phase in phases]
        rule.end(state.layout, broadcast, done, mine)


def with_delta(update: ClientUpdate, name: str, array: Any) -> ClientUpdate:
    return replace(update, delta={**update.delta, name: array})


BAD: dict[str, tuple[Callable[[ClientUpdate], ClientUpdate], str]] = {
    "nan": (lambda u: with_delta(u, "net.fc.bias", np.array([0.0, np.nan, 1.0])), "1 non-finite"),
    "infinite": (lambda u: with_delta(u, "net.fc.bias", np.full(3, np.inf)), "3 non-finite"),
    "shape": (lambda u: with_delta(u, "net.fc.bias", np.zeros(4)), r"\(4,\)"),
    "dtype": (lambda u: with_delta(u, "net.fc.bias", np.zeros(3, "float32")), "float32"),
    "unknown name": (lambda u: with_delta(u, "other", np.zeros(3)), "unknown 1"),
    "missing name": (
        lambda u: replace(u, delta={n: a for n, a in u.delta.items() if n != "net.fc.bias"}),
        "lacks 1",
    ),
    "old round": (lambda u: replace(u, round=u.round - 1), "round -1; this is round 0"),
    "samples": (lambda u: replace(u, n_samples=10**12), "1000000000000 samples"),
    "no samples": (lambda u: replace(u, n_samples=0), "0 samples"),
    "steps": (lambda u: replace(u, steps=0), "0 steps"),
    "extra": (lambda u: replace(u, extra={**u.extra, "more": {}}), "extra arrays"),
    "number": (lambda u: replace(u, scalars={**u.scalars, "more": 1.0}), "numbers"),
    "metric": (lambda u: replace(u, metrics={"loss": float("nan")}), "metric 'loss' is nan"),
    "many metrics": (lambda u: replace(u, metrics={str(i): 0.0 for i in range(65)}), "65 metrics"),
}


@every_rule
@pytest.mark.parametrize("how", BAD)
def test_a_bad_update_is_refused_by_name_and_reason(rule: Strategy, how: str) -> None:
    state, whole = start(rule)
    updates = one_round(rule, state, whole, {})
    change, reason = BAD[how]
    updates[2] = change(updates[2])
    with pytest.raises(BadUpdate, match=f"'c2'.*{reason}"):
        rule.aggregate(state, updates)


@every_rule
def test_extra_arrays_and_numbers_are_bounded_too(rule: Strategy) -> None:
    state, whole = start(rule)
    update = one_round(rule, state, whole, {})[0]
    for slot, metas in rule.extra_up(state.layout).items():
        name = next(iter(metas))
        bad = {**update.extra[slot], name: np.full(metas[name].shape, np.nan)}
        with pytest.raises(BadUpdate, match="non-finite"):
            check_update(rule, state.layout, 0, replace(update, extra={**update.extra, slot: bad}))
    for scalar in rule.scalars_up():
        for value in (float("nan"), scalar.high * 2 + 1, scalar.low - 1):
            worse = replace(update, scalars={**update.scalars, scalar.name: value})
            with pytest.raises(BadUpdate, match=scalar.name):
                check_update(rule, state.layout, 0, worse)


@every_rule
def test_two_updates_of_one_client_and_too_few_are_refused(rule: Strategy) -> None:
    state, whole = start(rule)
    updates = one_round(rule, state, whole, {})
    with pytest.raises(BadUpdate, match="two updates of client 'c0'"):
        rule.aggregate(state, [*updates, updates[0]])
    with pytest.raises(UsageError, match="0 arrived"):
        rule.aggregate(state, [])


def test_limits_of_a_client_bound_its_samples_and_its_norm() -> None:
    rule = make_strategy("fedavg")
    state, whole = start(rule)
    update = one_round(rule, state, whole, {})[3]
    norm = float(np.sqrt(sum((a**2).sum() for a in update.delta.values())))
    check_update(rule, state.layout, 0, update, Limits(samples=13, norm=norm * 1.01))
    with pytest.raises(BadUpdate, match="from 1 to 12"):
        check_update(rule, state.layout, 0, update, Limits(samples=12))
    with pytest.raises(BadUpdate, match="norm"):
        check_update(rule, state.layout, 0, update, Limits(norm=norm * 0.99))
    assert issubclass(BadUpdate, BadFrame)


def test_a_rate_is_the_schedules_where_that_is_known() -> None:
    rule = make_strategy("qfedavg")
    state, whole = start(rule)
    update = one_round(rule, state, whole, {})[0]
    check_update(rule, state.layout, 0, update)
    check_update(rule, state.layout, 0, update, Limits(rate=0.05 * (1 + 1e-9)))
    with pytest.raises(BadUpdate, match=r"rate 0\.05; this round's is 0\.06"):
        check_update(rule, state.layout, 0, update, Limits(rate=0.06))
    plain = make_strategy("fedavg")
    check_update(plain, state.layout, 0, replace(update, scalars={}), Limits(rate=0.06))


def test_a_broadcast_is_checked_by_the_client_too() -> None:
    rule = make_strategy("scaffold")
    state, _ = start(rule)
    good = rule.configure(state)
    with pytest.raises(BadUpdate, match="extra arrays"):
        check_broadcast(rule, state.layout, Broadcast(0, good.weights))
    with pytest.raises(BadUpdate, match="round -1"):
        check_broadcast(rule, state.layout, replace(good, round=-1))


def test_a_sum_that_overflows_fails_the_job_with_the_tensors_name() -> None:
    rule = make_strategy("fedavg", {"server_lr": 10.0})
    weights = {"x": np.full(1, 6.5e4, "float16")}
    state = rule.init(Layout.of(weights, {"x"}), weights, 1)
    huge = ClientUpdate(0, 1, 1, {"x": np.full(1, 200.0, "float16")}, client="a")
    with pytest.raises(JobFailed, match="'x' is not finite"):
        rule.aggregate(state, [huge])


def test_one_client_with_the_largest_finite_numbers_is_refused_rather_than_failing_the_job() -> None:
    rule = make_strategy("fedavg")
    weights = {"x": np.zeros(1, "float32")}
    state = rule.init(Layout.of(weights, {"x"}), weights, 1)
    huge = ClientUpdate(0, 1, 1, {"x": np.full(1, 3e38, "float32")}, client="a")
    with pytest.raises(BadUpdate, match="beyond 1e"):
        rule.aggregate(state, [huge])
    most = ClientUpdate(0, 10**9, 1, {"x": np.full(1, 9e17, "float32")}, client="a")
    assert np.isfinite(rule.aggregate(state, [most]).weights["x"]).all()


def test_roles_follow_from_dtype_and_from_what_training_writes() -> None:
    layout, arrays = model()
    assert layout.roles["net.bn.num_batches_tracked"] is Role.STILL
    assert layout.roles["net.bn.running_mean"] is Role.AVERAGED
    assert layout.roles["net.frozen"] is Role.STILL
    with pytest.raises(UsageError, match="not in the state dict"):
        Layout.of(arrays, {"nothing"})
    with pytest.raises(UsageError, match="int64"):
        Layout.of(arrays, {"net.bn.num_batches_tracked"})


def test_options_are_checked_when_a_rule_is_made() -> None:
    with pytest.raises(UsageError, match="no strategy 'fedsgd'"):
        make_strategy("fedsgd")
    with pytest.raises(UsageError, match="no option 'mew'"):
        make_strategy("fedprox", {"mew": 1.0})
    with pytest.raises(UsageError, match="give a float"):
        make_strategy("fedprox", {"mu": "much"})
    with pytest.raises(UsageError, match="0 to 100"):
        make_strategy("fedprox", {"mu": -1})
    with pytest.raises(UsageError, match="more than 0"):
        make_strategy("feddyn", {"alpha": 0.0})
    with pytest.raises(UsageError, match="goes around"):
        make_strategy("vhl", {"base": "krum"})
    for text, why in (
        ("mu=-1", "fedprox: mu = -1; give a number from 0 to 100"),
        ("mew=1", "fedprox has no option 'mew'; it has server_lr, mu"),
        ("mu=much", "fedprox: mu = 'much'; give a float"),
        ("mu=true", "fedprox: mu = True; give a float"),
        ("mu", "base_options 'mu'; write each option once"),
        ("mu=1,mu=2", "base_options 'mu=2'; write each option once"),
    ):
        with pytest.raises(UsageError, match=re.escape(why)):
            make_strategy("vhl", {"base": "fedprox", "base_options": text})
    assert make_strategy("fedavgm", {"beta": 0, "nesterov": True}).facts.linear


def test_a_correction_is_one_formula_on_numpy_and_torch() -> None:
    import torch

    offset, anchor = {"x": np.array([1.0, 2.0])}, {"x": np.array([0.5, 0.5])}
    correction = Correction(offset, anchor, 3.0)
    g, w = np.array([0.1, 0.2]), np.array([1.0, 2.0])
    expected = g + offset["x"] + 3.0 * (w - anchor["x"])
    assert np.allclose(correction.gradient("x", g, w), expected)
    mapped = correction.mapped(torch.from_numpy)
    found = mapped.gradient("x", torch.from_numpy(g), torch.from_numpy(w))
    assert isinstance(found, torch.Tensor)
    assert np.allclose(found.numpy(), expected)
    assert np.array_equal(correction.gradient("other", g, w), g)
    assert correction
    assert not Correction()
    assert not Correction(anchor=anchor)


def test_the_server_half_loads_without_torch() -> None:
    modules = [p.stem for p in (ROOT / "strategies").glob("*.py") if not p.stem.endswith("_module")]
    pure = sorted(set(modules) - {"__init__", "flower"})
    imports = ";".join(f"import strategies.{stem}" for stem in pure)
    code = f"import sys;{imports};sys.exit('torch' if 'torch' in sys.modules else 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


HELPERS = ("fingerprint", "parts_of")  # of the splits


def test_every_selector_and_split_is_in_the_docs() -> None:
    from dataclasses import fields

    from strategies import partition_data
    from strategies.selectors import SELECTORS

    text = (ROOT / "docs" / "federated.md").read_text()
    for name, kind in SELECTORS.items():
        assert all(f"`{word}`" in text for word in (name, *(f.name for f in fields(kind))))
    home = partition_data.__name__
    here = [name for name, made in vars(partition_data).items() if getattr(made, "__module__", "") == home]
    splits = [name for name in here if not name.startswith("_") and name not in HELPERS]
    assert len(splits) == 8
    assert [name for name in splits if f"| `{name}` |" not in text] == []


@every_rule
def test_every_rule_and_its_options_are_in_the_docs(rule: Strategy) -> None:
    from dataclasses import fields

    text = (ROOT / "docs" / "federated.md").read_text()
    assert f"| `{rule.name}` |" in text
    assert [f.name for f in fields(rule) if f"`{f.name}`" not in text] == []
