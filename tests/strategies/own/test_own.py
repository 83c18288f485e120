"""Own strategies: what the tutorial writes is ours to the bit, and what cannot be captured is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll import Optimizer, OptimizerName, TrainingSpec
from atoll.errors import AtollError, UnsupportedOp, UsageError
from atoll.federated import NO_FLOORS, Federated, FederatedSpec
from atoll.formulas import FORMULA_OPS, MAX_FORMULA_OPS, STAND_IN, DeclaredStrategy, Formula, value
from atoll.opdag import Autocast, Kind, LeafRef, OpNode, OpRef, Source, TensorMeta
from atoll.ops import ALLOWED
from atoll.signatures import parameters
from coordinator.capture.capture import Captured, capture
from protos.convert import decode, encode
from strategies.layout import Layout, Role
from strategies.own import OwnStrategy, own_strategy
from strategies.own.base import Values, make_own
from strategies.own.captured import captured, with_own
from strategies.own.computed import Computer
from strategies.own.conformance import check_own
from strategies.own.declared import Declared
from strategies.own.words import client_words
from strategies.privacy.private import strategy_of
from strategies.values import ClientUpdate
from tests.inprocess.federation import LocalFederation, local_model
from tests.strategies.own.tutorial import ClientMomentum, blocks, tutorial

BATCH = 8


class Net(nn.Module):
    """All that trained tensors are: kernels, a tied matrix, vectors, one number; and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.low, self.high = nn.Linear(16, 16), nn.Linear(16, 16)
        self.high.weight = self.low.weight
        self.out = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.norm(self.conv(x[:, None])).relu().mean(1)
        found = self.high(self.low(found).tanh())
        return F.cross_entropy(self.out(found) * self.scale, y)


def data(n: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 4, n)
    return {"x": (np.eye(4)[y].repeat(4, 1) + draw.normal(size=(n, 16))).astype("float32"), "y": y}


@cache
def graphs(net: Callable[[], nn.Module]) -> Captured:
    """A net's graphs, which are the same for every optimizer."""
    example = {name: torch.from_numpy(array[:BATCH]) for name, array in data(BATCH, 0).items()}
    return capture(net(), example, TrainingSpec(steps=1, n_micro=1))


def rounds(strategy: str, options: dict[str, Any], momentum: float, count: int = 2) -> LocalFederation:
    optimizer = Optimizer(OptimizerName.SGD, lr=0.1, momentum=momentum, clip_norm=2.0)
    training = TrainingSpec(steps=count, n_micro=1, optimizer=optimizer)
    found = graphs(Net)
    torch.manual_seed(1)  # whichever test captured it
    state = {name: tensor.clone() for name, tensor in found.state.items()}
    model = local_model(found.train, found.evaluation, state, training)
    rule = with_own(Federated(strategy, options, local_epochs=2, clients=2, held_out=0.0, evaluate_every=0))
    clients = {f"c{at}": data(16 + 8 * at, at) for at in range(3)}
    made = LocalFederation(model, rule, clients, floors=NO_FLOORS)
    for _ in range(count):
        made.run_round()
    return made


def bits(arrays: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("theirs", "ours", "options", "momentum"),
    [
        ("proximal", "fedprox", {"mu": 0.3}, 0.9),
        ("controls", "scaffold", {"server_lr": 0.7}, 0.0),
        ("controls", "scaffold", {}, 0.9),
    ],
)
def test_what_the_tutorial_writes_trains_to_the_bits_of_ours(
    theirs: str, ours: str, options: dict[str, Any], momentum: float
) -> None:
    tutorial()
    one, two = rounds(theirs, options, momentum), rounds(ours, options, momentum)
    plain = rounds("fedavg", {}, momentum)
    assert bits(one.weights) == bits(two.weights) != bits(plain.weights)
    mine, kept = (list(made.client_states.values()) for made in (one, two))
    for a, b in zip(mine, kept, strict=True):
        for slot, other in zip(a.slots.values(), b.slots.values(), strict=True):
            assert bits(slot) == bits(other)


def test_copies_hold_what_the_round_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    page = tutorial()

    def made(weight: float) -> LocalFederation:
        monkeypatch.setattr("tests.strategies.own.test_own.Net", lambda: page.Taught(Small(), weight))
        return rounds("distilled", {}, 0.0, 3)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.low, self.high = nn.Linear(16, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.high(self.low(x).relu())

    free, held = made(0.0), made(0.7)
    broadcast = held.strategy.configure(held.state)
    (phase,) = held.strategy.begin(held.trainer.layout, broadcast, held.client_states["c0"])
    assert phase.start["teacher.low.weight"] is broadcast.weights["net.low.weight"]
    assert set(held.state.weights) == {"net.low.weight", "net.low.bias", "net.high.weight", "net.high.bias"}
    assert bits(free.state.weights) != bits(held.state.weights)
    first = held.model.tensors["teacher.low.weight"].numpy()
    assert not np.array_equal(first, broadcast.weights["net.low.weight"])
    # In the last round its copies held what that round began with, which is not what it was built with.
    monkeypatch.setattr("strategies.own.declared.Declared._own_start", lambda *_: {})
    assert bits(made(0.0).state.weights) == bits(free.state.weights)
    assert bits(made(0.7).state.weights) != bits(held.state.weights)


def test_copies_are_frozen_namesakes_of_what_is_trained() -> None:
    rule = Declared("taught", DeclaredStrategy("", copies={"teacher.": "net."}))
    like = {"net.w": np.zeros((2, 2), "float32"), "teacher.w": np.zeros((2, 2), "float32")}
    assert rule.adapt(Layout.of(like, {"net.w"})).roles["teacher.w"] == Role.STILL
    with pytest.raises(UsageError, match=r"'teacher\.w' is trained; freeze"):
        rule.adapt(Layout.of(like, set(like)))
    for odd in ({"net.w": like["net.w"]}, {**like, "teacher.w": np.zeros(3, "float32")}):
        with pytest.raises(UsageError, match=r"the model has no 'teacher\.w' like net\."):
            rule.adapt(Layout.of(odd, {"net.w"}))
    with pytest.raises(UsageError, match="the model has no"):
        rule.adapt(Layout.of({"x": np.zeros(2, "float32")}, {"x"}))
    with pytest.raises(UsageError, match="COPIES: 'net'"):
        DeclaredStrategy("", copies={"teacher.": "net"})


def test_the_tutorials_strategies_are_short_and_conform() -> None:
    tutorial()  # its last block is the conformance test itself
    written = [block for block in blocks() if "@own_strategy" in block]
    assert len(written) == 3
    assert all(len(block.strip().splitlines()) <= 40 for block in written)
    check_own(ClientMomentum(alpha=0.3))


class Trial(OwnStrategy):
    """A strategy whose method is given."""

    name = "trial"
    SERVER: ClassVar = ("v",)


def trial(**members: Any) -> OwnStrategy:
    made: OwnStrategy = type("Trial", (Trial,), {"__doc__": "Trial.", **members})()
    return made


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda self, at: 1 / 0, r"trial\.gradient\(\) raised ZeroDivisionError: division by zero"),
    "unknown value": (lambda self, at: at.mean, r"trial\.gradient\(\) reads at\.mean; there are gradient, w"),
    "no tensor": (lambda self, at: 3, "returns int; return a tensor"),
    "other name": (lambda self, at: {"x": at.weight}, r"gradient\(\) returns 'x'; it returns gradient"),
    "one number": (lambda self, at: at.gradient.sum(), "'gradient' is one number"),
    "a row": (lambda self, at: at.gradient + at.gradient.sum(0), "aten.sum.dim_IntList"),
    "branches": (lambda self, at: at.gradient if at.weight.sum() > 0 else at.weight, "use torch.where"),
    "reads a size": (lambda self, at: at.gradient / at.gradient.numel(), "do not use shapes or sizes"),
    "draws": (lambda self, at: torch.randn_like(at.gradient), "the op aten.randn_like.default"),
    "writes": (lambda self, at: at.gradient.add_(1.0), r"the op aten\.add_\.Tensor"),
    "lifts": (lambda self, at: at.gradient * torch.tensor(0.1), "write them as numbers"),
    "other dtype": (lambda self, at: at.gradient.double(), "give results the values' dtype"),
    "numpy": (lambda self, at: np.sqrt(at.gradient), "torch's functions on the values of at"),
    "long": (
        lambda self, at: sum((at.gradient * i for i in range(MAX_FORMULA_OPS)), at.gradient),
        f"from 1 to {MAX_FORMULA_OPS}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_a_method_that_cannot_be_captured_is_refused_by_its_name(how: str) -> None:
    method, reason = REFUSED[how]
    with pytest.raises(UsageError, match=reason):
        captured(trial(gradient=method))


def test_a_method_that_does_not_end_is_interrupted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    captured(trial(gradient=lambda self, at: at.gradient * 2.0))  # torch is loaded: the rest is the method's
    monkeypatch.setattr("strategies.own.captured.MOST_S", 0.5)

    def gradient(self: Any, at: Values) -> Any:
        while True:
            at.gradient  # noqa: B018

    with pytest.raises(UsageError, match=r"trial\.gradient\(\) does not end: .* after 0\.5 s of computing"):
        captured(trial(gradient=gradient))


def test_a_method_that_depends_on_more_than_its_values_is_refused() -> None:
    calls: list[int] = []

    def gradient(self: Any, at: Values) -> Any:
        calls.append(1)
        return at.gradient * (1.0 if len(calls) <= 2 else 2.0)

    with pytest.raises(UsageError, match="depends on more than its values"):
        captured(trial(gradient=gradient))


def test_every_array_that_is_declared_is_computed() -> None:
    with pytest.raises(UsageError, match=r"step\(\) does not return 'weight'"):
        captured(trial(step=lambda self, at: {"v": at.v + at.mean}))
    with pytest.raises(UsageError, match=r"step\(\) returns 'w'; it returns weight, v"):
        captured(trial(step=lambda self, at: {"weight": at.weight, "w": at.mean}))
    with pytest.raises(UsageError, match=r"nothing computes; define after\(\)"):
        captured(trial(CLIENT=("kept",)))
    with pytest.raises(UsageError, match=r"after\(\) does not return 'up'"):
        captured(trial(SENT_UP=("up",), CLIENT=("kept",), after=lambda self, at: {"kept": at.delta}))
    with pytest.raises(UsageError, match="'other' is sent down, but is not an array of the server"):
        captured(trial(SENT_DOWN=("other",)))


@pytest.mark.parametrize("names", [("lr",), ("a", "a"), ("../up",), ("a" * 33,), ("weight",)])
def test_arrays_have_names_of_their_own(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="named"):
        DeclaredStrategy("", server=names)


def test_a_stateless_server_s_array_stays_and_one_that_is_not_finite_fails_the_job_by_name() -> None:
    grows = trial(step=lambda self, at: {"weight": at.weight + at.mean, "v": (at.v + 60.0).exp()})
    layout = Layout.of({"w": np.zeros(2, "float32")}, {"w"})
    rule = Declared("trial", captured(grows))
    state = rule.init(layout, {"w": np.zeros(2, "float32")}, 1)

    def after(state: Any) -> Any:
        return rule.aggregate(
            state, [ClientUpdate(state.round, 1, 1, {"w": np.ones(2, "float32")}, client="a")]
        )

    state = after(state)
    assert np.isfinite(state.slots["v"]["w"]).all()
    with pytest.raises(AtollError, match=r"round 1: strategy trial, step\(\): 'v' of 'w' is not finite"):
        after(state)


# ---------------------------------------------------------------- what peers are sent


def node(target: str = "aten.neg.default", *args: Any, **changed: Any) -> OpNode:
    made = OpNode("n", Kind.NON_PARAMETRIC, target, args or (value("gradient"),), (), (STAND_IN,))
    return replace(made, **changed)


FORGED: dict[str, tuple[OpNode, str]] = {
    "op": (node("aten.randn_like.default"), "element by element"),
    "matrix": (node("aten.mm.default", value("gradient"), value("gradient")), "element by element"),
    "shape": (node(outputs=(TensorMeta((1 << 20, 1 << 20), "float32"),)), "bytes|makes"),
    "later": (node("aten.neg.default", OpRef(0)), "comes after"),
    "leaf": (node("aten.neg.default", LeafRef(Source.PARAMETER, "w")), "reads a value that it does not have"),
    "random": (node(random=True), "makes"),
    "autocast": (node(autocast=Autocast(True, "bfloat16")), "makes"),
    "two": (node(outputs=(STAND_IN, STAND_IN), is_tuple=True), "makes"),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_formula_is_refused_before_anything_runs(how: str) -> None:
    forged, reason = FORGED[how]
    with pytest.raises(AtollError, match=reason):
        Formula((forged,), {"gradient": 0})


def test_formulas_are_bounded_and_read_and_return_what_is_theirs() -> None:
    with pytest.raises(UsageError, match="256"):
        Formula((node(),) * 257, {"gradient": 0})
    with pytest.raises(UsageError, match="without its results"):
        Formula((node(),), {"gradient": 1})
    with pytest.raises(UsageError, match=r"gradient\(\) reads 'delta'"):
        DeclaredStrategy("", gradient=Formula((node("aten.neg.default", value("delta")),), {"gradient": 0}))
    with pytest.raises(UsageError, match="one of ours"):
        Declared("fedavg", DeclaredStrategy("really"))


def test_an_argument_of_another_type_is_refused_by_the_rehearsal_that_names_the_method() -> None:
    bad = Formula((node("aten.add.Tensor", value("gradient"), "one"),), {"gradient": 0})
    rule = Declared("forged", DeclaredStrategy("", gradient=bad))
    with pytest.raises(UnsupportedOp, match=r"strategy forged, gradient\(\): for tensors float32 \(2,\)"):
        rule.fit(Layout.of({"w": np.zeros(2, "float32")}, {"w"}))


@pytest.mark.parametrize("target", sorted(FORMULA_OPS))
def test_each_op_keeps_a_tensor_s_shape_or_makes_one_number(target: str) -> None:
    """Whatever its arguments: none may make a tensor of another size."""
    assert target in ALLOWED
    kinds: dict[str, list[Any]] = {
        "Tensor": [value("gradient"), value("weight")],
        "number": [0.5],
        "float": [2.0],
        "int": [1],
    }
    kinds |= {"bool": [True], "str": ["floor"]}
    needed = [p for p in parameters(target) if (p.required or p.kind == "Tensor") and not p.is_list]
    optional = {"aten.clamp.default": [0.0]}.get(target, [])
    args: list[Any] = [
        kinds[p.kind][at % len(kinds[p.kind])] for at, p in enumerate(needed) if not p.keyword_only
    ]
    args += optional
    kwargs = tuple((p.name, kinds[p.kind][0]) for p in needed if p.keyword_only)
    found = 0
    for shape, dtype in product((STAND_IN.shape, ()), ("float32", "bool")):
        made = node(target, *args, kwargs=kwargs, outputs=(TensorMeta(shape, dtype),))
        result = node("aten.add.Tensor", value("gradient"), OpRef(0))
        for first in (made, replace(made, args=(_flag(), *made.args[1:]))):
            try:
                formula = Formula((*_flags(), _moved(first), _moved(result, 1)), {"gradient": 2})
                Computer(formula).rehearse([TensorMeta((7,), "float32"), TensorMeta((2, 2, 2), "float64")])
                found += 1
            except (UnsupportedOp, UsageError):
                continue
    assert found, target


def _flags() -> tuple[OpNode, ...]:
    return (node("aten.gt.Scalar", value("weight"), 0.0, outputs=(TensorMeta(STAND_IN.shape, "bool"),)),)


def _flag() -> OpRef:
    return OpRef(0)


def _moved(node_: OpNode, by: int = 0) -> OpNode:
    return replace(
        node_, args=tuple(OpRef(arg.op + by) if isinstance(arg, OpRef) else arg for arg in node_.args)
    )


def test_a_declaration_travels_whole_and_small() -> None:
    tutorial()
    spec = FederatedSpec(with_own(Federated("controls", {"server_lr": 0.5})), "digits", {"x": "image"})
    data = encode(spec)
    assert decode(FederatedSpec, data) == spec
    assert len(data) < 2_000
    assert decode(FederatedSpec, encode(replace(spec, rule=Federated()))).rule.own is None


def test_facts_follow_from_what_is_declared() -> None:
    tutorial()
    controls = strategy_of(with_own(Federated("controls"))).facts
    assert (controls.needs_client_state, controls.sgd_only, controls.asynchronous) == (True, True, False)
    momentum = strategy_of(with_own(Federated("client_momentum"))).facts
    assert (momentum.needs_client_state, momentum.sgd_only, momentum.asynchronous) == (False, False, True)
    assert momentum.linear
    assert momentum.bounded
    assert "the job owner's own" in momentum.summary


def test_data_owners_read_the_formulas() -> None:
    tutorial()
    own = with_own(Federated("controls")).own
    assert own is not None
    assert client_words(own) == (
        "each step new gradient = gradient + (c - c_i). after each round new change = (neg(c)) - (delta / "
        "((steps * lr) / (1 - momentum))); new c_i = c_i + new change"
    )


# ---------------------------------------------------------------- names


def test_an_unknown_name_is_refused_with_those_that_there_are_and_the_remedy() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)no strategy 'momentumm'; ours.*scaffold.*@own_strategy.*atoll\.stra"
    ):
        with_own(Federated("momentumm"))


def test_options_are_those_of_the_class() -> None:
    tutorial()
    with pytest.raises(UsageError, match="proximal has no option 'nu'; it has mu"):
        with_own(Federated("proximal", {"nu": 1.0}))
    one, two = (with_own(Federated("proximal", {"mu": mu})).own for mu in (0.1, 0.2))
    assert one != two


def test_a_name_of_ours_is_refused_at_the_class() -> None:
    with pytest.raises(UsageError, match=r"Mine\.name = 'fedavg'; that is one of ours"):
        own_strategy(type("Mine", (OwnStrategy,), {"name": "fedavg"}))
    other: Any = SimpleNamespace
    with pytest.raises(UsageError, match="is not an OwnStrategy"):
        own_strategy(other)


def test_an_installed_package_s_strategy_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "theirs-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[atoll.strategies]\ninstalled_one = theirs_strategies:Installed\n"
        "broken_one = theirs_strategies:Missing\nmisnamed = theirs_strategies:Installed\n"
    )
    (folder.parent / "theirs_strategies.py").write_text(
        "from strategies.own import OwnStrategy, own_strategy\n"
        "@own_strategy\n"
        "class Installed(OwnStrategy):\n"
        "    name = 'installed_one'\n"
        "    def step(self, at):\n"
        "        return {'weight': at.weight + 0.5 * at.mean}\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    check_own(make_own("installed_one", {}))
    with pytest.raises(UsageError, match="strategy broken_one: theirs_strategies:Missing does not load"):
        make_own("broken_one", {})
    with pytest.raises(UsageError, match=r"strategy misnamed: .* is not a class of that name"):
        make_own("misnamed", {})
