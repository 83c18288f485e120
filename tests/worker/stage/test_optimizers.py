"""The optimizer by torch's functions is torch's optimizer, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from atoll.errors import UsageError
from atoll.job import Optimizer, OptimizerName, ParamGroup
from atoll.opdag import StateMeta, TensorMeta
from worker.machine.own_share import held_bytes
from worker.stage import optimizers
from worker.stage.optimizers import iterations_dtype, make_optimizer, orthogonalised

RATE = 0.05
MATRICES = {"wide": (6, 17), "tall": (40, 16), "head": (9, 16), "bias": (16,)}
STATES = {
    name: StateMeta(TensorMeta(shape, "float32"), True, hidden_matrix=name in ("wide", "tall"))
    for name, shape in MATRICES.items()
}


@pytest.mark.parametrize(
    "spec",
    [
        Optimizer(weight_decay=0.1, groups=(ParamGroup(("b",), lr_scale=0.5, weight_decay=0.0),)),
        Optimizer(OptimizerName.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
        Optimizer(OptimizerName.SGD),
    ],
    ids=["adamw", "momentum", "sgd"],
)
def test_steps_have_the_bits_of_torchs_optimizer(spec: Optimizer) -> None:
    random = torch.Generator().manual_seed(5)
    values = {name: torch.randn(17, 3, generator=random) for name in "abc"}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    groups = [
        {"params": [theirs["a"], theirs["c"]], "lr": RATE, "weight_decay": spec.weight_decay},
        {
            "params": [theirs["b"]],
            "lr": RATE * (0.5 if spec.groups else 1.0),
            "weight_decay": 0.0 if spec.groups else spec.weight_decay,
        },
    ]
    if spec.name is OptimizerName.ADAMW:
        reference: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True)
    else:
        reference = torch.optim.SGD(groups, momentum=spec.momentum, nesterov=spec.nesterov, fused=True)
    optimizer = make_optimizer(ours, spec)
    assert optimizer is not None
    for _ in range(4):
        for name in "abc":
            gradient = torch.randn(17, 3, generator=random)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient
        optimizer.step(RATE)
        reference.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in "abc")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_has_the_bits_of_torchs_where_it_takes_torchs_type(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """In float32, as on every CPU, it is what torch's step is with another type of its iterations."""
    monkeypatch.setattr(optimizers, "iterations_dtype", lambda device: dtype)
    random = torch.Generator().manual_seed(5)
    values = {n: torch.randn(s, generator=random) for n, s in MATRICES.items()}
    ours, theirs = ({n: torch.nn.Parameter(v.clone()) for n, v in values.items()} for _ in range(2))
    wide = [theirs["wide"], theirs["tall"]]
    muon = torch.optim.Muon(wide, RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([theirs["bias"], theirs["head"]], RATE, weight_decay=0.1, fused=True)
    optimizer = make_optimizer(ours, Optimizer(OptimizerName.MUON, weight_decay=0.1), STATES)
    assert optimizer is not None
    for _ in range(4):
        for name, shape in MATRICES.items():
            gradient = torch.randn(shape, generator=random)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient
        optimizer.step(RATE)
        muon.step()
        adamw.step()
        assert all(torch.equal(ours[n], theirs[n]) for n in ("bias", "head"))
        same = [torch.equal(ours[n], theirs[n]) for n in ("wide", "tall")]
        assert same == [dtype is torch.bfloat16] * 2
        assert all(torch.allclose(ours[n], theirs[n], atol=0.02) for n in ("wide", "tall"))
    kept = {name: set(state) for name, state in optimizer.state.items()}
    adamws = {"exp_avg", "exp_avg_sq", "step"}
    assert kept == {"wide": {"momentum_buffer"}, "tall": {"momentum_buffer"}, "bias": adamws, "head": adamws}


def test_muons_iterations_are_in_float32_on_a_cpu_and_bring_singular_values_near_one() -> None:
    dtype = iterations_dtype(torch.device("cpu"))
    assert dtype is torch.float32
    given = torch.randn(48, 20, generator=torch.Generator().manual_seed(1))
    found = orthogonalised(given.clone(), dtype)
    singular = torch.linalg.svdvals(found)
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    turned = left.T @ found @ right.T  # the same singular vectors: nothing off the diagonal
    assert float((turned - torch.diag(turned.diag())).abs().max()) < 1e-3
    assert float(orthogonalised(torch.zeros(3, 5), dtype).abs().max()) == 0.0
    assert torch.equal(orthogonalised(given.T.contiguous().T, dtype), found), "whatever its layout"


def test_muon_asks_what_a_parameter_is_in_the_model() -> None:
    with pytest.raises(UsageError, match="muon needs to know what w is"):
        make_optimizer({"w": torch.nn.Parameter(torch.ones(2, 2))}, Optimizer(OptimizerName.MUON))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_of_other_types_has_the_bits_of_a_plain_loops(dtype: torch.dtype, momentum: float) -> None:
    """Torch's fused SGD leaves whole vectors of 16-bit parameters on a CPU as they were."""
    random = torch.Generator().manual_seed(5)
    value = torch.randn(33, generator=random).to(dtype)
    ours, theirs = torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.clone())
    optimizer = make_optimizer({"w": ours}, Optimizer(OptimizerName.SGD, momentum=momentum, weight_decay=0.1))
    reference = torch.optim.SGD([theirs], RATE, momentum=momentum, weight_decay=0.1)
    assert optimizer is not None
    for _ in range(4):
        gradient = torch.randn(33, generator=random).to(dtype)
        ours.grad, theirs.grad = gradient.clone(), gradient
        optimizer.step(RATE)
        reference.step()
        assert torch.equal(ours, theirs)
    assert (ours != value).sum() > 30


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [(0.0, torch.float32), (0.1, torch.float32), (0.1, torch.float64), (0.0, torch.bfloat16)],
)
def test_adafactor_has_the_bits_of_torchs(decay: float, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(5)
    shapes = {"matrix": (17, 30), "vector": (33,), "kernel": (6, 5, 3, 3), "scalar": (), "row": (1, 9)}
    values = {n: torch.randn(s, generator=random).to(dtype) for n, s in shapes.items()}
    ours, theirs = ({n: torch.nn.Parameter(v.clone()) for n, v in values.items()} for _ in range(2))
    reference = torch.optim.Adafactor(theirs.values(), RATE, weight_decay=decay, foreach=False)
    optimizer = make_optimizer(ours, Optimizer(OptimizerName.ADAFACTOR, weight_decay=decay))
    assert optimizer is not None
    for _ in range(5):
        for name, shape in shapes.items():
            gradient = torch.randn(shape, generator=random).to(dtype)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient
        optimizer.step(RATE)
        reference.step()
        assert [n for n in shapes if not torch.equal(ours[n], theirs[n])] == []
    assert {k: tuple(v.shape) for k, v in optimizer.state["kernel"].items()} == {
        **{"row_var": (6, 5, 3, 1), "col_var": (6, 5, 1, 3), "step": ()},
    }


def test_lion_steps_by_signs_of_the_mixed_average() -> None:
    random = torch.Generator().manual_seed(5)
    value = torch.randn(7, 9, generator=random)
    ours = torch.nn.Parameter(value.clone())
    optimizer = make_optimizer({"w": ours}, Optimizer(OptimizerName.LION, weight_decay=0.1))
    assert optimizer is not None
    weights, average = value.double(), torch.zeros(7, 9, dtype=torch.float64)
    for _ in range(6):
        ours.grad = torch.randn(7, 9, generator=random)
        gradient = ours.grad.double()
        optimizer.step(RATE)
        update = (0.9 * average + 0.1 * gradient).sign()
        weights = weights - RATE * (update + 0.1 * weights)
        average = 0.99 * average + 0.01 * gradient
        assert torch.allclose(ours.double(), weights, atol=1e-5)
    assert torch.allclose(optimizer.state["w"]["exp_avg"].double(), average, atol=1e-6)
    assert Optimizer(OptimizerName.LION, betas=(0.95, 0.98)).lion_betas == (0.95, 0.98)


def test_a_group_has_an_optimizer_of_its_own() -> None:
    random = torch.Generator().manual_seed(5)
    spec = Optimizer(weight_decay=0.1, groups=(ParamGroup(("head",), optimizer=OptimizerName.SGD),))
    values = {n: torch.randn(s, generator=random) for n, s in MATRICES.items()}
    ours = {n: torch.nn.Parameter(v.clone()) for n, v in values.items()}
    optimizer = make_optimizer(ours, spec, STATES)
    assert optimizer is not None
    ours["head"].grad = torch.ones(MATRICES["head"])
    optimizer.step(RATE)
    expected = values["head"] - RATE * (1.0 + 0.1 * values["head"])
    assert torch.allclose(ours["head"], expected)
    assert optimizer.state.get("head", {}) == {}


def test_a_momentum_buffer_may_begin_later_than_anothers() -> None:
    spec = Optimizer(OptimizerName.SGD, momentum=0.9)
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = make_optimizer({"first": first, "second": second}, spec)
    assert optimizer is not None
    first.grad = torch.ones(2)
    optimizer.step(RATE)
    first.grad, second.grad = None, torch.ones(2)
    optimizer.step(RATE)
    assert torch.equal(first, second)


def test_an_optimizer_imports_no_compiler() -> None:
    """It would be the largest thing that a worker of a small model holds."""
    code = (
        "import sys, torch\n"
        "from atoll.job import Optimizer\n"
        "from worker.stage.optimizers import make_optimizer\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "make_optimizer({'p': p}, Optimizer()).step(0.1)\n"
        "from atoll.opdag import StateMeta, TensorMeta\n"
        "w = torch.nn.Parameter(torch.ones(2, 2)); w.grad = torch.ones(2, 2)\n"
        "states = {'w': StateMeta(TensorMeta((2, 2), 'float32'), True, hidden_matrix=True)}\n"
        "make_optimizer({'w': w}, Optimizer('muon'), states).step(0.1)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("spec", "states"),
    [
        (Optimizer(), 2),
        (Optimizer(name=OptimizerName.SGD, momentum=0.9), 1),
        (Optimizer(name=OptimizerName.SGD), 0),
        (Optimizer(name=OptimizerName.LION), 1),
        (Optimizer(name=OptimizerName.ADAFACTOR), 1),
    ],
    ids=["adamw", "momentum", "sgd", "lion", "adafactor"],
)
def test_memory_of_states_to_come_is_held_until_the_first_step(spec: Optimizer, states: int) -> None:
    """So a stage that does not fit is killed before a step of it is committed."""
    size = 10 << 20  # of 40 MiB each: blocks that the heap never keeps
    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = make_optimizer({"p": parameter}, spec)
    assert optimizer is not None
    before = held_bytes()
    optimizer.reserve()
    reserved = held_bytes() - before
    assert abs(reserved - states * 4 * size) < 4 << 20
    parameter.grad = torch.ones(size)
    optimizer.step(0.1)
    assert held_bytes() - before - 4 * size < states * 4 * size + (4 << 20), "held once"
    optimizer.reserve()
    assert held_bytes() - before - 4 * size < states * 4 * size + (4 << 20), "there is a state"
