"""Bases in 8 and 4 bits: the weights that torchao stores, trained beside as dense ones, in their bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import Int8Tensor, PerRow, to_nf4

from atoll.errors import UsageError
from atoll.execute import Executor
from atoll.job import Keeping, Optimizer, Recompute, TrainingSpec
from atoll.opdag import OpDag
from atoll.program import stage_programs
from atoll.standing import kept_for_backward, standing_of
from coordinator.capture.capture import Captured, capture
from coordinator.client.export import Format, write_folder
from coordinator.planning.costs.memory import MemoryModel
from coordinator.planning.costs.traffic import Traffic
from strategies.lora_module import freeze_a
from strategies.quantised_module import Kind, quantise_frozen
from tests.models import VOCABULARY, gpt2, llama
from tests.parameters import sampled
from tests.people.loop import compare, job_of

ROWS = 16
KINDS: tuple[Kind, ...] = ("int8", "nf4")
INSIDE = "*layers.*"  # not the head, of 61 rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, 8), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def adapted(kind: Kind | None, dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    """Llama with adapters whose B is not 0, on a base of that kind."""
    base = llama(layers=layers).module.to(dtype)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return quantise_frozen(model, kind, INSIDE) if kind else model


@cache
def captured(kind: Kind | None) -> Captured:
    batch = {name: value[:4] for name, value in tokens().items()}
    return capture(adapted(kind), batch)


def terms(dag: OpDag) -> dict[str, float]:
    training = TrainingSpec(steps=1, n_micro=4)
    return MemoryModel(dag, training, Traffic(dag, training.optimizer)).terms(0, len(dag.ops), 4)


def base_weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: layer.weight.detach()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad and ".layers." in name
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_with_the_weight_that_torchao_gives_back(kind: Kind, dtype: torch.dtype) -> None:
    dense, found = base_weights(adapted(None, dtype)), adapted(kind, dtype)
    again = base_weights(found)
    assert again.keys() == dense.keys()
    for name, weight in dense.items():
        if kind == "int8":
            expected = Int8Tensor.from_hp(weight, PerRow()).dequantize()
        else:
            scales = found.get_submodule(name).parametrizations.weight[0].scales
            expected = to_nf4(weight, 64, scales).get_original_weight()
        assert again[name].dtype is dtype
        assert torch.equal(again[name], expected), name
        off = (again[name] - weight).abs().mean() / weight.abs().mean()
        assert 0.0 < off < (0.02 if kind == "int8" else 0.15)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: adapted("int8", layers=1), id="int8", marks=pytest.mark.slow),
        pytest.param(lambda: adapted("nf4", layers=1), id="nf4", marks=pytest.mark.slow),
        pytest.param(lambda: freeze_a(_begun(adapted("nf4", layers=1))), id="LoRA-FA on nf4"),
    ],
)
def test_adapters_train_as_in_a_plain_loop_and_to_the_same_bits_however_cut(
    make: Callable[[], nn.Module],
) -> None:
    compare(lambda: job_of(make(), tokens(), optimizer=Optimizer(lr=0.01)), cuts=2)


def _begun(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize(("kind", "cut"), sampled(1, [(kind, cut) for kind in KINDS for cut in (1, 0)]))
def test_every_way_to_recompute_and_to_defer_gives_the_same_gradients(kind: Kind, cut: int) -> None:
    """``cut``: between a weight and the layer that reads it, which a planner would never do."""
    found = captured(kind)
    dag = found.train
    layer = next(op for op, node in enumerate(dag.ops) if op > 60 and "linear" in node.target)
    starts = [0, layer] if cut else [0]
    reference: dict[str, Tensor] = {}
    for recompute in (Recompute.OFF, Recompute.SELECTIVE, Recompute.FULL):
        for defer in (False, True):
            gradients = _gradients(found, starts, recompute, defer)
            reference = reference or gradients
            assert gradients.keys() == reference.keys()
            assert all(torch.equal(gradients[name], value) for name, value in reference.items())


def _gradients(found: Captured, starts: list[int], recompute: Recompute, defer: bool) -> dict[str, Tensor]:
    programs = stage_programs(found.train, starts)
    frozen = [name for name, meta in found.train.parameters.items() if not meta.requires_grad]
    stages = [Executor(program, keeping=Keeping(recompute), defer=defer) for program in programs]
    for stage in stages:
        stage.load(found.state, frozen)
    for micro in range(2):
        batch = {n: value[4 * micro : 4 * micro + 4] for n, value in tokens().items()}
        values: dict[int, Tensor] = {}
        for stage in stages:
            inputs = {name: batch[name] for name in stage.program.inputs}
            received = {r.op: values[r.op] for r in stage.program.received}
            values |= stage.forward(0, micro, inputs, received)
        back: dict[int, Tensor | None] = {}
        for stage in reversed(stages):
            back |= stage.backward(micro, back)
            while stage.owed is not None:
                stage.weight_gradients()
    out: dict[str, Tensor] = {}
    for stage in stages:
        for name in stage.uses:
            gradient = stage.gradient(name)
            assert gradient is not None
            out[name] = gradient
    return out


class _WholeWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """References to values of a dense weight's size that ops made."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_bytes = n_bytes
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().nbytes() == self.n_bytes:
            self.made.append(StorageWeakRef(out.untyped_storage()))  # type: ignore[no-untyped-call]
        return out

    def alive(self) -> int:
        return len({kept.cdata for kept in self.made if not kept.expired()})


class Wide(nn.Module):
    """Three frozen layers, and what is trained before them, so that gradients pass through all."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.layers = nn.ModuleList(layers).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.scale))
        return x.square().mean()


def test_no_micro_batch_in_flight_keeps_a_weight_at_full_width() -> None:
    batch = {"x": torch.ones(4, 128)}
    found = capture(quantise_frozen(Wide(), "nf4"), batch, tail=False)
    executor = Executor(stage_programs(found.train, [0])[0])
    frozen = [name for name, meta in found.train.parameters.items() if not meta.requires_grad]
    executor.load(found.state, frozen)
    with _WholeWeights(4 * 128 * 128) as weights:
        for micro in range(3):
            executor.forward(0, micro, batch, {})
        assert len(weights.made) > 9
        assert weights.alive() == 0
        for micro in range(3):
            executor.backward(micro, {})
        assert weights.alive() == 0
    plain = quantise_frozen(Wide(), "nf4")
    for _ in range(3):
        plain(**batch).backward()
    gradient, expected = executor.gradient("scale"), plain.scale.grad
    assert gradient is not None
    assert expected is not None
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "least", "most"), [("int8", 1.0, 1.03), ("nf4", 0.5, 0.6)])
def test_a_base_in_few_bits_takes_them_in_the_plan_and_saves_no_more_for_its_backward(
    kind: Kind, least: float, most: float
) -> None:
    width = 256
    batch = {"x": torch.ones(4, width)}
    dense = capture(Wide(width), batch, tail=False).train
    few = capture(quantise_frozen(Wide(width), kind), batch, tail=False).train
    before, after = terms(dense), terms(few)
    trained = 4 * width
    assert least < (after["weights"] - trained) / (3 * width * width) <= most
    assert after["activations"] == before["activations"]
    assert after["gradients"] == before["gradients"]
    assert after["optimizer"] == before["optimizer"] == 2 * trained
    one_layer = 4 * width * width
    assert one_layer < after["largest op"] <= 2.1 * one_layer


def test_a_planner_counts_that_a_backward_dequantises_again() -> None:
    dag = captured("nf4").train
    untrained = standing_of(dag, lambda name: dag.parameters[name].requires_grad)
    again = kept_for_backward(dag, untrained)
    targets = {dag.ops[op].target for op in again}
    assert {"aten.index_select.default", "aten.mul.Tensor"} <= targets
    assert not any(dag.ops[op].requires_grad for op in again)
    assert not standing_of(dag, lambda name: True)


def test_an_adapter_on_a_quantised_base_is_exported_and_loaded_by_peft(tmp_path: Any) -> None:
    trained = adapted("nf4").eval()
    write_folder(tmp_path / "adapter", trained, Format.PEFT)
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert len(keys) == 8
    assert all(".lora_" in key for key in keys)
    loaded = PeftModel.from_pretrained(llama().module, str(tmp_path / "adapter"))
    again = quantise_frozen(loaded, "nf4", INSIDE).eval()
    batch = tokens()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, trained(**batch).logits)


def test_a_quantised_base_is_not_written_as_a_model_of_its_own(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=r"quantise_frozen.*--format peft"):
        write_folder(tmp_path / "model", adapted("int8"), Format.HF)


def test_gpt2s_layers_are_quantised_and_what_is_trained_or_tied_is_not() -> None:
    model = gpt2().module.requires_grad_(False)
    model.transformer.h[0].mlp.c_fc.requires_grad_(True)
    quantise_frozen(model, "int8")
    done = {name for name, layer in model.named_modules() if parametrize.is_parametrized(layer)}
    assert "transformer.h.1.mlp.c_fc" in done
    assert "transformer.h.0.mlp.c_fc" not in done
    assert "lm_head" not in done
    assert len(done) == 7


@pytest.mark.parametrize(
    ("make", "kind", "layers", "words"),
    [
        (lambda: nn.Linear(64, 64), "nf4", "*", "get_peft_model first"),
        (lambda: nn.Linear(64, 64).requires_grad_(False), "nf4", "head", "matches 'head'"),
        (lambda: nn.Linear(3, 5).requires_grad_(False), "nf4", "*", "15 elements, no multiple of 64"),
        (lambda: nn.Linear(64, 64, device="meta").requires_grad_(False), "int8", "*", "load the numbers"),
        (lambda: nn.Linear(64, 64).requires_grad_(False), "int3", "*", "not a kind"),
        (lambda: nn.Linear(64, 64).double().requires_grad_(False), "nf4", "*", "cast it to float32"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    make: Callable[[], nn.Module], kind: Any, layers: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        quantise_frozen(make(), kind, layers)


def test_what_a_frozen_group_of_the_job_freezes_stands_too() -> None:
    """A weight that a layer casts: the cast is no micro-batch's, whoever froze the weight."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.scale) @ self.base.float()).square().mean()

    batch = {"x": torch.ones(4, 32)}
    found = capture(Cast(), batch)
    executor = Executor(stage_programs(found.train, [0])[0])
    executor.load(found.state, ["base"])
    with _WholeWeights(4 * 32 * 32) as weights:
        executor.forward(0, 0, batch, {})
        assert weights.alive() == 0
    executor.load(found.state)
    with _WholeWeights(4 * 32 * 32) as weights:
        executor.forward(0, 0, batch, {})
        assert weights.alive() == 1
