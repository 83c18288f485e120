"""Losses of micro-batches that hold unequal numbers of targets, beside a plain loop over whole batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.exchange import Exchange
from atoll.job import Job, Optimizer, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.opdag import OpDag
from atoll.plan import Plan, Replica, StageSpec
from atoll.program import stage_programs
from coordinator.client.prepare import prepare
from tests.inprocess.pipeline import LocalPipeline, StepResult
from tests.inprocess.replicas import LocalReplicas
from tests.people.loop import SGD, batches_of, job_of, refusal

ADAMW = Optimizer(lr=1e-2, weight_decay=0.1, clip_norm=0.5)
IGNORED = -100
Step = Callable[[int, list[Any]], StepResult]


def padded(empty: slice = slice(0, 0)) -> dict[str, Tensor]:
    """Sequences of one to six targets; those of ``empty`` have none."""
    g = torch.Generator().manual_seed(5)
    x = torch.randint(0, 16, (48, 6), generator=g)
    lengths = torch.randint(1, 7, (48, 1), generator=g)
    y = ((x * 3 + 1) % 16).masked_fill(torch.arange(6)[None] >= lengths, IGNORED)
    y[empty] = IGNORED
    return {"x": x, "y": y}


class Tokens(nn.Module):
    """Predicts each token's successor; its loss is a sum over targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(16, 24), nn.Linear(24, 32), nn.Linear(32, 16)

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(self.embedding(x))))
        return found.flatten(0, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        count = (y != IGNORED).sum()
        total = F.cross_entropy(self.logits(x), y.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": total, "weight": count}


class Masked(Tokens):
    """A masked squared error; the count is a float, and known first."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        mask = (y != IGNORED).float()
        errors = (self.logits(x).mean(1).reshape(y.shape) - y / 16).square() * mask
        return {"weight": mask.sum(), "loss": errors.sum()}


class Counted(Tokens):
    """Its count is a number of Python's: every position."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        total = F.cross_entropy(self.logits(x), y.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": total, "weight": y.numel()}


class Mean(Tokens):
    """The usual mean over the targets of a micro-batch."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.logits(x), y.flatten(), ignore_index=IGNORED)


class TwoHeads(Tokens):
    """A model of transformers in its form, whose loss is not one cross entropy over its targets."""

    loss_function = None

    def forward(self, x: Tensor, y: Tensor, **kwargs: Any) -> Any:
        reduction = "sum" if "num_items_in_batch" in kwargs else "mean"
        logits = self.logits(x)
        return F.cross_entropy(logits, y.flatten(), reduction=reduction) + logits.square().mean()


def job(module: nn.Module, rows: Mapping[str, Tensor], **training: Any) -> Job:
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return job_of(module, rows, **{"steps": 3, "n_micro": 3, "optimizer": ADAMW, **training})


def whole_batches(made: Job, mean: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> list[float]:
    """Train the job's module on each step's micro-batches as one batch."""
    net, spec = made.module, made.training.optimizer
    net.train()
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[spec.name.value](net.parameters(), spec.lr, weight_decay=spec.weight_decay)
    losses = []
    for step in range(made.training.steps):
        micros = batches_of(made, step)
        batch = {name: torch.cat([micro[name] for micro in micros]) for name in micros[0]}
        optimizer.zero_grad()
        loss = mean(net, batch)
        losses.append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        if spec.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), spec.clip_norm)
        optimizer.step()
    return losses


def over_weight(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = net(**batch)
    total: Tensor = found["loss"] / found["weight"]
    return total


@dataclass(frozen=True)
class Submitted:
    """A job as its workers get it."""

    made: Job
    dag: OpDag
    tensors: Mapping[str, Mapping[str, Tensor]]

    def trained(self, *cut: int, steps: int = 0) -> tuple[list[StepResult], LocalPipeline]:
        training, states = self.made.training, {**self.dag.parameters, **self.dag.buffers}
        programs = stage_programs(self.dag, (0, *cut))
        pipeline = LocalPipeline(programs, training, self.tensors, states=states)
        return [
            pipeline.step(at, batches_of(self.made, at)) for at in range(steps or training.steps)
        ], pipeline


def submitted(made: Job) -> Submitted:
    found = prepare(made)
    blobs, named = {blob.hash: blob for blob in found.blobs}, found.spec.tensors.items()
    tensors = {name: safetensors.torch.load(b"".join(blobs[key].read(0))) for name, key in named}
    return Submitted(made, found.graphs.dag, tensors)


def held(pipeline: LocalPipeline) -> dict[str, Tensor]:
    return {name: kept["value"] for name, kept in pipeline.snapshot().items()}


@pytest.mark.parametrize(
    ("kind", "empty", "optimizer"),
    [
        (Tokens, slice(0, 0), ADAMW),
        (Tokens, slice(12, 16), SGD),  # of a micro-batch
        (Masked, slice(12, 16), ADAMW),
        (Counted, slice(0, 0), ADAMW),
    ],
)
def test_a_sum_over_its_weight_is_the_mean_over_the_whole_batch(
    kind: Callable[[], nn.Module], empty: slice, optimizer: Optimizer
) -> None:
    made = job(kind(), padded(empty), optimizer=optimizer)
    steps, pipeline = submitted(made).trained()
    expected = whole_batches(made, over_weight)
    assert [step.loss for step in steps] == pytest.approx(expected, abs=1e-6)
    for name, tensor in made.module.state_dict().items():
        torch.testing.assert_close(held(pipeline)[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", [Tokens, Masked])
def test_any_cut_of_a_weighted_job_has_the_bits_of_one_process(kind: Callable[[], nn.Module]) -> None:
    made = job(kind(), padded())
    sent = submitted(made)
    steps, whole = sent.trained()
    for cut in random.Random(11).sample(sent.dag.cuttable(), 4):
        found, pipeline = sent.trained(cut)
        assert found == steps
        assert all(torch.equal(held(pipeline)[name], tensor) for name, tensor in held(whole).items())


def test_replicas_of_a_weighted_job_have_the_bits_of_one_process() -> None:
    made = job(Tokens(), padded(), n_micro=4, blocks=4)
    sent = submitted(made)
    steps, whole = sent.trained()
    dag = sent.dag
    cut, ops = dag.cuttable()[3], len(dag.ops)
    replicas = (
        Replica((0, 3), (StageSpec(0, cut, 0, 0, "a", 0), StageSpec(cut, ops, 0, 0, "b", 0))),
        Replica((3, 4), (StageSpec(0, ops, 0, 0, "c", 0),)),
    )
    plan = Plan("j", 1, "", "", "", ScheduleName.GPIPE, 4, replicas, blocks=4, exchange=Exchange())
    shared = LocalReplicas(plan, dag, made.training, sent.tensors)
    found = [shared.step(at, batches_of(made, at)) for at in range(made.training.steps)]
    assert [one.loss for one in found] == [one.loss for one in steps]
    assert [one.gradient_scale for one in found] == [one.gradient_scale for one in steps]
    after = shared.snapshot()
    assert all(torch.equal(after[name]["value"], tensor) for name, tensor in held(whole).items())


def test_a_step_without_a_single_target_changes_nothing() -> None:
    sent = submitted(job(Tokens(), padded(slice(12, 24))))
    _, before = sent.trained(steps=1)
    steps, pipeline = sent.trained(steps=2)
    assert (steps[1].weight, steps[1].gradient_scale) == (0.0, 0.0)
    for name, kept in before.snapshot().items():
        assert all(torch.equal(pipeline.snapshot()[name][key], tensor) for key, tensor in kept.items())


def test_undeclared_a_micro_batch_without_targets_adds_no_gradient_and_is_left_out_of_the_loss() -> None:
    made = job(Mean(), padded(slice(12, 16)), steps=2)
    steps, pipeline = submitted(made).trained()
    assert all(step.finite and math.isfinite(step.loss) for step in steps)
    assert all(torch.isfinite(tensor).all() for tensor in held(pipeline).values())
    alone = [float(made.module(**batch).detach()) for batch in batches_of(made, 0)]
    assert steps[0].loss == pytest.approx(sum(alone) / 3, abs=1e-6)


def test_who_leaves_targets_out_hears_how_to_get_a_mean_over_targets() -> None:
    words: list[str] = []
    prepare(job(Mean(), padded()), tell=words.append)
    assert any("return their sum as loss and their number as weight" in word for word in words)
    words.clear()
    prepare(job(Tokens(), padded()), tell=words.append)
    assert any("a sum over its weight: 14 in the checked batch" in word for word in words)


def test_a_loss_that_only_looks_like_transformers_stays_a_mean() -> None:
    assert prepare(job(TwoHeads(), {"x": padded()["x"], "y": padded()["x"]})).graphs.dag.weight is None


class TwoCounts(Tokens):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {**super().forward(x, y), "weight": (y != IGNORED).sum(1)}


class OnlyTraining(Tokens):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        found = super().forward(x, y)
        return found if self.training else found["loss"] / found["weight"]


class Flag(Tokens):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {**super().forward(x, y), "weight": (y != IGNORED).any()}


class Negative(Tokens):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {**super().forward(x, y), "weight": -(y != IGNORED).sum()}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TwoCounts, "a tensor of shape (4,) and type torch.int64 as weight; return one number"),
        (Flag, "type torch.bool as weight"),
        (OnlyTraining, "a weight in training mode, but not in evaluation"),
        (Negative, "returned a weight of -14.0"),
    ],
)
def test_what_is_no_count_is_refused(kind: Callable[[], nn.Module], words: str) -> None:
    assert words in refusal(lambda: job(kind(), padded()))


def transformers_model(name: str) -> nn.Module:
    import transformers as hf

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    match name:
        case "gpt2":
            off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            own = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False}
            config = hf.GPT2Config(vocab_size=16, bos_token_id=None, eos_token_id=None, **own, **off)
            return hf.GPT2LMHeadModel(config)
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=16, use_cache=False, **sizes))
    raise ValueError(name)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_that_take_num_items_in_batch_have_the_mean_over_all_targets(name: str) -> None:
    rows = padded(slice(8, 12))
    torch.manual_seed(3)
    net = transformers_model(name)
    made = job_of(net, {"input_ids": rows["x"], "labels": rows["y"]}, steps=2, n_micro=3)
    steps, pipeline = submitted(made).trained()
    assert pipeline.programs[-1].weight is not None
    expected = whole_batches(made, lambda net, batch: net(**batch).loss)
    assert [step.loss for step in steps] == pytest.approx(expected, abs=2e-6)
    for key, parameter in net.named_parameters():
        torch.testing.assert_close(held(pipeline)[key], parameter.detach(), atol=2e-6, rtol=1e-5)


def test_a_federated_job_is_told_to_return_means() -> None:
    from atoll.federated import Federated, Registered

    made = Job(
        module=Tokens(),
        example_inputs={"x": torch.zeros(4, 6, dtype=torch.long), "y": torch.zeros(4, 6, dtype=torch.long)},
        data=Registered("texts", inputs={"x": "x", "y": "y"}),
        training=TrainingSpec(steps=2, n_micro=1),
        federated=Federated(),
    )
    assert "return the mean (loss / weight) and no weight" in refusal(lambda: made)
