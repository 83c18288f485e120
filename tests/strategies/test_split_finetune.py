"""Split fine-tuning: a layer's FFN through few numbers a token, and nothing else across the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.job import TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.opdag import OpDag, StateMeta
from atoll.program import Received, stage_programs
from coordinator.capture.capture import Captured, capture
from coordinator.capture.self_check import self_check
from coordinator.planning.costs.fleet import Device, Fleet
from coordinator.planning.planner import PlanRequest, make_plan
from coordinator.planning.search.pins import pinned_ops
from examples.gpt import GPT
from strategies.split_finetune_module import SHAPES, FeedForward, Narrow, split_finetune
from tests.coordinator.capture.architectures import gemma, vit
from tests.coordinator.planning.fleets import MIB, same_links
from tests.models import bert, gpt2, llama
from tests.parameters import sampled
from tests.worker.stage.steps.crew import Case, Crew, assign
from worker.cancel import Cancel
from worker.transport.frames import Data, Direction, encode

Made = tuple[nn.Module, Callable[[int], dict[str, Tensor]], str, int]


def _gpt_batch(seed: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(seed))}


def made(shape: str) -> Made:
    """A model of that shape in evaluation mode, its batches, its last layer, and that layer's width."""
    torch.manual_seed(0)
    if shape == "examples/gpt.py":
        return GPT(32, 2, 2, 12).eval(), _gpt_batch, "blocks.1", 32
    build, layer, width = {
        "BERT": (bert, "bert.encoder.layer.1", 32),
        "GPT-2": (gpt2, "transformer.h.1", 32),
        "Llama": (llama, "model.layers.1", 32),
        "ViT": (vit, "vit.layers.0", 16),
        "Gemma": (gemma, "model.layers.1", 16),
    }[shape]
    example = build()
    return example.module.eval(), example.make_batch, layer, width


def outputs(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = module(**batch)
    found = found if isinstance(found, Tensor) else found.logits
    assert isinstance(found, Tensor)
    return found.detach()


def narrow_cut(dag: OpDag) -> int:
    """Where the back begins: behind the product with S."""
    (at,) = (at for at, node in enumerate(dag.ops) if node.module_path.endswith("reduce"))
    return at + 1


def crossing(dag: OpDag, cut: int) -> tuple[Received, ...]:
    return stage_programs(dag, [0, cut])[1].received


@pytest.mark.parametrize("shape", SHAPES)
def test_at_full_rank_with_its_residual_a_module_computes_what_it_did(shape: str) -> None:
    module, batch, layer, width = made(shape)
    before = outputs(module, batch(1))
    full = split_finetune(copy.deepcopy(module), layer, width, residual=True)
    assert any(isinstance(part, Narrow) for part in full.modules())
    assert torch.allclose(outputs(full, batch(1)), before, atol=1e-5, rtol=0.0)
    less = split_finetune(copy.deepcopy(module), layer, width // 4, residual=True)
    assert not torch.allclose(outputs(less, batch(1)), before, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("shape", sampled(2, SHAPES))
def test_nothing_but_rank_numbers_a_token_crosses_the_cut(shape: str) -> None:
    module, batch, layer, width = made(shape)
    thin = split_finetune(module, layer, 2).train()
    found = capture(thin, batch(0))
    self_check(thin, found, batch(1))
    cut = narrow_cut(found.train)
    assert {cut - 2, cut - 1, cut} <= set(found.train.cuttable())
    for at in (cut - 1, cut):  # in front of S and behind it
        (value,) = crossing(found.train, at)
        assert (value.meta.shape[-1], value.meta.dtype, value.requires_grad) == (2, "float32", True)
    (wide,) = {value.meta.shape[-1] for value in crossing(found.train, cut - 2)}
    assert wide == width


@pytest.mark.parametrize("shape", sampled(1, SHAPES))
def test_a_residual_that_is_kept_crosses_as_well(shape: str) -> None:
    module, batch, layer, width = made(shape)
    thin = split_finetune(module, layer, 2, residual=True).train()
    dag = capture(thin, batch(0), tail=False).train
    assert sorted(value.meta.shape[-1] for value in crossing(dag, narrow_cut(dag))) == [2, width]


def test_without_its_residual_a_layer_returns_what_its_ffn_does() -> None:
    module, batch, layer, _ = made("examples/gpt.py")
    thin = split_finetune(module, layer, 32)  # the linear as it was: what differs is the residual
    block: Any = thin.get_submodule(layer)
    seen: list[Tensor] = []
    block.norm_2.register_forward_hook(lambda _, args, out: seen.append(out))
    block.register_forward_hook(lambda _, args, out: seen.append(out))
    outputs(thin, batch(0))
    before, after = seen
    expected = block.down(nn.functional.gelu(block.up(before)))
    assert torch.equal(after, expected)


def test_the_factors_are_those_of_the_svd_and_trained_as_their_weight_was() -> None:
    module, _, layer, _ = made("Llama")
    weights = [
        getattr(module.get_submodule(f"{layer}.mlp"), f"{name}_proj").weight for name in ("gate", "up")
    ]
    both = torch.cat([weight.detach() for weight in weights])
    weights[0].requires_grad_(False)
    split_finetune(module, layer, 3)
    narrow = module.get_submodule(f"{layer}.mlp")
    assert isinstance(narrow, Narrow)
    trained = {name for name, parameter in narrow.named_parameters() if parameter.requires_grad}
    assert trained == {"reduce.weight", "back.down_proj.weight"}
    u, s, v = torch.linalg.svd(both, full_matrices=False)
    backs = [getattr(narrow.back, f"{name}_proj").weight for name in ("gate", "up")]
    product = torch.cat(backs) @ narrow.reduce.weight @ narrow.project.weight
    assert torch.allclose(product, u[:, :3] * s[:3] @ v[:3], atol=1e-6)
    assert torch.allclose(narrow.reduce.weight, s[:3].diag(), atol=1e-5)


def as_function(parts: FeedForward) -> Callable[[nn.Module], FeedForward]:
    return lambda layer: parts


def test_an_owner_names_the_parts_of_another_layer_and_wrong_ones_are_refused() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.back, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(self.back(self.wide(x).relu()) + x)
            return out

    torch.manual_seed(0)
    plain, x = nn.Sequential(Layer(), Layer()), torch.randn(3, 4)
    parts = FeedForward(("wide",), "back", "back", read_by="norm")
    thin = split_finetune(copy.deepcopy(plain), "1", 4, feed_forward=as_function(parts))
    last: Any = plain[1]
    between = plain[0](x)
    assert torch.allclose(thin(x), last.norm(last.back(last.wide(between).relu())), atol=1e-6)
    for wrong, named, why in (
        ("1", None, "not a layer as of BERT, GPT-2, Gemma, Llama, ViT, examples/gpt.py"),
        ("2", parts, "no module '2'"),
        ("1", FeedForward(("norm",), "back", "back"), "1.norm is a LayerNorm, not a plain linear"),
        ("1", FeedForward(("wide",), "wide", "back"), r"first linears \(8, 4\) do not fit 4 inputs"),
        ("1", FeedForward(("wide", "wide"), "back", "back"), "the module around them"),
    ):
        with pytest.raises(UsageError, match=why):
            split_finetune(plain, wrong, 2, feed_forward=as_function(named) if named else None)
    with pytest.raises(UsageError, match="rank 5 must be 1 to 4"):
        split_finetune(plain, "1", 5, feed_forward=as_function(parts))
    with torch.device("meta"), pytest.raises(UsageError, match="on meta has no SVD"):
        split_finetune(nn.Sequential(Layer()), "0", 2, feed_forward=as_function(parts))
    assert not any(isinstance(part, Narrow) for part in plain.modules())


# ---------------------------------------------------------------- what it is for

SIZES = [(768, 8), (384, 4)]


@cache
def classifier(width: int, rank: int, layers: int = 1, rows: int = 8, length: int = 64, at: int = -1) -> Any:
    """BERT's layers of these sizes, narrow in block ``at`` where ``rank``; capture and batches."""
    from transformers import BertConfig, BertForSequenceClassification

    def batch(seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 100, (rows, length), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(0, 2, (rows,), generator=draw)}

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    module = BertForSequenceClassification(config)
    if rank:
        split_finetune(module, f"bert.encoder.layer.{at % layers}", rank)
    return SimpleNamespace(captured=capture(module, batch(0), tail=False), batch=batch)


def case_of(captured: Captured, batch: Callable[[int], dict[str, Tensor]]) -> Case:
    dag, evaluation = captured.train, captured.evaluation
    constants = {n: StateMeta(meta) for n, meta in {**dag.constants, **evaluation.constants}.items()}
    states = {**dag.parameters, **evaluation.buffers, **dag.buffers, **constants}
    states.update({n: StateMeta(meta) for n, meta in dag.inputs.items()})
    batches: Any = SimpleNamespace(of=lambda step, micro: batch(100 * step + micro))
    return Case("", dag, evaluation, {n: {"value": t} for n, t in captured.state.items()}, states, batches)


@pytest.mark.parametrize(("width", "rank"), sampled(1, SIZES))
def test_real_links_carry_a_96th_each_way_and_hardly_any_header(width: int, rank: int) -> None:
    one = classifier(width, rank)
    dag, training = one.captured.train, TrainingSpec(1, 2)
    cut, tokens = narrow_cut(dag), 8 * 64
    crew = Crew(
        case_of(one.captured, one.batch),
        assign(case_of(one.captured, one.batch), [0, cut], training, ScheduleName.ONE_F_ONE_B),
    )
    crew.all("run_step", 0, Cancel())
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        sent = {key: packets for key, packets in crew.hub.packets.items() if key.direction is direction}
        assert {key.micro for key in sent} == {0, 1}
        assert len(sent) == 2
        for key, (packet,) in sent.items():
            payload = 4 * rank * tokens
            header = packet[: len(packet) - payload]
            frame = Data(1, key, 0, payload, header)
            assert len(packet) > payload
            assert len(encode(frame, packet[len(header) :])) <= 1.05 * payload
    plain = classifier(width, 0).captured.train
    (wide,) = {value.meta.nbytes for value in crossing(plain, narrow_at(plain))}
    assert wide / (4 * rank * tokens) == 96


def narrow_at(plain: OpDag) -> int:
    """The cheapest place for a cut of the plain module at the same layer: in front of its first linear."""
    (at,) = (at for at, node in enumerate(plain.ops) if node.module_path.endswith("0.intermediate.dense"))
    return at


# ---------------------------------------------------------------- plans


def two_homes(mib: float) -> Fleet:
    """Two machines that take 0.3 s for a step of these models, 1 Mbit/s and 10 ms apart."""
    devices = [Device(f"w{at}", round(mib * MIB), gflops={"": 500.0}, memory_gbps=50.0) for at in range(2)]
    return same_links(devices, 1e6, 0.01)


def planned_s(dag: OpDag, fleet: Fleet, cut: str) -> float:
    plan = make_plan(PlanRequest("job", 1, dag, None, TrainingSpec(10, 8), fleet, cut, standbys=0))
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.parametrize(("width", "rank"), SIZES)
def test_a_step_behind_a_thin_link_is_ten_times_as_fast_as_with_the_plain_cut(width: int, rank: int) -> None:
    thin, plain = (classifier(width, r).captured.train for r in (rank, 0))
    fleet = two_homes(1000)
    narrow, wide = (
        planned_s(dag, fleet, f"cut:{at(dag)}") for dag, at in ((thin, narrow_cut), (plain, narrow_at))
    )
    assert wide >= 10 * narrow


def test_the_planner_cuts_where_it_is_narrow() -> None:
    dag = classifier(384, 4, layers=4, rows=4, length=32).captured.train
    plan = make_plan(PlanRequest("job", 1, dag, None, TrainingSpec(10, 8), two_homes(110), standbys=0))
    assert plan.stages[1].start in (narrow_cut(dag) - 1, narrow_cut(dag))  # at either side of S


def test_around_pinned_data_a_text_model_is_narrow_twice() -> None:
    """Its loss reads the text: what a helper computes comes back through a second narrow layer."""
    torch.manual_seed(0)
    module = GPT(layers=6)
    for layer in (0, 4):
        split_finetune(module, f"blocks.{layer}", 8)
    dag = capture(module, {"tokens": torch.zeros(2, 64, dtype=torch.long)}, tail=False).train
    first, second = (at + 1 for at, node in enumerate(dag.ops) if node.module_path.endswith("reduce"))
    assert all(op < first or op >= second for op in pinned_ops(dag))
    for cut, (source, reader) in ((first, (0, 1)), (second, (1, 2))):
        (value,) = stage_programs(dag, [0, first, second])[reader].received
        assert (value.source, value.op, value.meta.shape) == (source, cut - 1, (2, 64, 8))
    found = {}
    for cut in (f"cut:{first},{second}:0,1,0", "op_fence"):  # given, and found: without narrow places 18.9 s
        request = PlanRequest("job", 1, dag, None, TrainingSpec(10, 8), two_homes(60), cut, standbys=0)
        plan = make_plan(replace(request, pinned="w0"))
        assert plan.prediction is not None
        found[cut] = plan.prediction.step_s
    assert found["op_fence"] <= min(found.values()) * 1.01 < 1.0


def test_around_pinned_data_a_classifier_is_narrow_once() -> None:
    dag = classifier(384, 4, layers=4, rows=4, length=32, at=1).captured.train
    request = PlanRequest("job", 1, dag, None, TrainingSpec(10, 8), two_homes(95), standbys=0)
    plan = make_plan(replace(request, pinned="w0"))
    assert plan.stages[1].start in (narrow_cut(dag) - 1, narrow_cut(dag))
    assert plan.prediction is not None
    assert plan.prediction.step_s < 0.5
