"""Adapters of several owners: peft's LoRA under FedIT, FFA-LoRA, FedSVD and FLoRA, by the real trainer.

Source: the deltas that papers/federated.md 7 asks for: the mean of the clients' BA, which averaging both
factors misses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from atoll.errors import UsageError
from atoll.federated import NO_FLOORS, Federated, Registered
from atoll.job import Job, Optimizer, OptimizerName, TrainingSpec
from compressors.model_file import Coding, write_update
from coordinator.capture.capture import Captured, capture
from coordinator.client.prepare import federated_spec
from strategies import make_strategy
from strategies.adapters import adapters_of
from strategies.fedsvd import turned
from strategies.files import update_arrays
from strategies.layout import Layout, Role
from strategies.lora_module import check_scaling, freeze_a
from strategies.values import Broadcast, ClientState, Done
from tests.inprocess.federation import LocalFederation, local_model
from tests.parameters import each_once, sampled

RANK, ROWS = 4, 8
SCALE = 2.0
SAMPLES = {"a": 8, "b": 16, "c": 24}
ADAM = Optimizer(lr=0.01)
SGD = Optimizer(OptimizerName.SGD, lr=0.5)

pytestmark = pytest.mark.usefixtures("one_thread")


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "bert": (bert, ["query", "intermediate.dense"]),
    "llama": (llama, ["q_proj", "down_proj"]),
}


class Adapted(nn.Module):
    """The loss of a model of which the adapters alone are trained."""

    def __init__(self, kind: str, frozen: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, targets = MODELS[kind]
        settings = {"r": RANK, "target_modules": targets, "lora_alpha": int(SCALE) * RANK, **options}
        self.net = get_peft_model(make(), LoraConfig(**settings))
        self.labels = kind == "bert"
        if frozen:
            freeze_a(self.net, seed=3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=ids, labels=labels if self.labels else ids).loss
        return loss


def data(samples: int, seed: int) -> dict[str, Any]:
    """Sequences whose label is their first token's parity; each owner's own tokens are favoured."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(16 * seed, 16 * seed + 32, (samples, 8))
    return {"ids": ids, "labels": ids[:, 0] % 2}


@cache
def captured(kind: str, frozen: bool, task: str | None) -> Captured:
    """The graphs of an adapted model: a capture is the same for every optimizer, and nobody writes to it."""
    example = {name: torch.from_numpy(array[:ROWS]) for name, array in data(ROWS, 0).items()}
    return capture(Adapted(kind, frozen, task_type=task), example, TrainingSpec(steps=8, n_micro=1))


def federation(
    rule: str,
    *,
    frozen: bool,
    kind: str = "bert",
    optimizer: Optimizer = ADAM,
    task: str | None = None,
    uplink: str = "off",
    **options: Any,
) -> LocalFederation:
    training = TrainingSpec(steps=8, n_micro=1, optimizer=optimizer)
    found = captured(kind, frozen, task)
    model = local_model(found.train, found.evaluation, found.state, training)
    owners = {name: data(count, at) for at, (name, count) in enumerate(SAMPLES.items())}
    federated = Federated(rule, options, local_epochs=2, held_out=0.0, evaluate_every=0, uplink=uplink)
    return LocalFederation(model, federated, owners, floors=NO_FLOORS)


def exact_round(made: LocalFederation) -> tuple[dict[str, Any], dict[str, Any]]:
    """One round. Return the mean by samples of the clients' BA and the next BA, by layer in float64."""
    layout, sent = made.trainer.layout, made.strategy.configure(made.state)
    pairs = adapters_of("test", layout)
    mean: dict[str, Any] = {pair.base: 0.0 for pair in pairs}
    updates = []
    for name, client in made.clients.items():
        found = made.trainer.train(client, sent, made.client_states[name])
        updates.append(replace(found.update, client=name))
        for pair in pairs:
            b, a = (factor(made, found.update.delta, key) for key in (pair.b, pair.a))
            mean[pair.base] = mean[pair.base] + SAMPLES[name] / sum(SAMPLES.values()) * (b @ a)
    made.close(made.strategy.aggregate(made.state, updates), {})
    weights = made.weights
    return mean, {p.base: weights[p.b].astype(np.float64) @ weights[p.a].astype(np.float64) for p in pairs}


def factor(made: LocalFederation, delta: Mapping[str, Any], name: str) -> Any:
    whole = np.asarray(made.weights[name], np.float64)
    return whole + delta[name] if name in delta else whole


def off(mean: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Largest relative error of a layer."""
    return max(float(np.linalg.norm(found[n] - mean[n]) / np.linalg.norm(mean[n])) for n in mean)


EXACT = {"FFA-LoRA": ("fedavg", True), "FedSVD": ("fedsvd", True), "FedSVD, A not frozen": ("fedsvd", False)}


@pytest.mark.parametrize(("case", "kind"), each_once(EXACT, MODELS))
def test_the_joined_change_is_the_mean_of_the_clients_products(case: str, kind: str) -> None:
    rule, frozen = EXACT[case]
    made = federation(rule, frozen=frozen, kind=kind)
    for _ in range(3):
        assert off(*exact_round(made)) < 1e-5


def test_averaging_both_factors_is_biased() -> None:
    made = federation("fedavg", frozen=False)
    errors = [off(*exact_round(made)) for _ in range(3)]
    assert min(errors) > 0.01, errors


@pytest.mark.parametrize(
    "case",
    sampled(2, ["FedSVD", "FLoRA", "FLoRA, unlike ranks", *(c for c in EXACT if c != "FedSVD"), "FedIT"]),
)
def test_adapters_of_three_owners_learn(case: str) -> None:
    rule, frozen = EXACT.get(case, ("fedavg" if case == "FedIT" else "flora", False))
    options: dict[str, Any] = {"scaling": SCALE} if rule == "flora" else {}
    if case == "FLoRA, unlike ranks":
        options["ranks"] = "a=1 b=2"
    made = federation(rule, frozen=frozen, **options, optimizer=Optimizer(lr=0.02), task="SEQ_CLS")
    losses = [made.run_round().loss for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0], losses


def test_under_fedsvd_a_travels_down_only_and_is_orthonormal() -> None:
    made = federation("fedsvd", frozen=False)
    before = made.weights
    metrics = made.run_round()
    pairs = adapters_of("test", made.trainer.layout)
    b_bytes = sum(made.weights[p.b].nbytes for p in pairs)
    assert set(metrics.uploaded_bytes.values()) == {b_bytes}
    assert metrics.downloaded_bytes == b_bytes + sum(made.weights[p.a].nbytes for p in pairs)
    for pair in pairs:
        a = made.weights[pair.a]
        assert not np.array_equal(a, before[pair.a])
        np.testing.assert_allclose(a @ a.T, np.eye(RANK), atol=1e-6)
        b = made.weights[pair.b].astype(np.float64)
        np.testing.assert_allclose(b.T @ b, np.diag(np.diag(b.T @ b)), atol=1e-6)


def test_fedsvd_turns_a_basis_that_plain_sgd_does_not_see_and_adamw_does() -> None:
    def after(rule: str, optimizer: Optimizer) -> dict[str, Any]:
        made = federation(rule, frozen=True, optimizer=optimizer)
        return [exact_round(made) for _ in range(3)][-1][1]

    assert off(after("fedavg", SGD), after("fedsvd", SGD)) < 1e-4
    assert off(after("fedavg", ADAM), after("fedsvd", ADAM)) > 1e-2


@pytest.mark.parametrize("rank_of_b", [0, 2, 4])
def test_turned_factors_have_the_same_product_and_row_space(rank_of_b: int) -> None:
    draw = np.random.default_rng(rank_of_b)
    b = draw.normal(size=(6, rank_of_b)) @ draw.normal(size=(rank_of_b, 4))
    a = draw.normal(size=(4, 9)).astype(np.float32)
    turned_b, turned_a = turned(b, a)
    np.testing.assert_allclose(turned_b @ turned_a, b @ a, atol=1e-12)
    np.testing.assert_allclose(turned_a @ turned_a.T, np.eye(4), atol=1e-12)
    projected = a @ turned_a.T @ turned_a
    np.testing.assert_allclose(projected, a, atol=1e-6)
    lengths = np.linalg.norm(turned_b, axis=0)
    assert np.array_equal(lengths, np.sort(lengths)[::-1])
    assert (lengths > 1e-9).sum() == rank_of_b


# ---------------------------------------------------------------- LoRA-FA


def test_a_frozen_a_is_orthonormal_and_the_same_from_one_seed() -> None:
    one, two, other = (
        dict(freeze_a(get_peft_model(bert(), LoraConfig(target_modules=["query"])), seed).named_parameters())
        for seed in (5, 5, 6)
    )
    names = [name for name in one if ".lora_A." in name]
    assert len(names) == 2
    for name in names:
        a = one[name].detach()
        assert not a.requires_grad
        assert torch.equal(a, two[name])
        assert not torch.equal(a, other[name])
        torch.testing.assert_close(a @ a.T, torch.eye(len(a)))
    assert not torch.equal(one[names[0]], one[names[1]])


def test_with_an_orthonormal_a_the_jobs_optimizer_steps_as_lora_fas_does() -> None:
    from peft.optimizers import create_lorafa_optimizer

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 10))
    scale, x = 2.0, torch.randn(8, 12)

    def stepped(theirs: bool) -> Tensor:
        torch.manual_seed(1)
        made = freeze_a(get_peft_model(nn.Sequential(nn.Linear(12, 10)), LoraConfig(
            r=RANK, lora_alpha=int(scale * RANK), target_modules=["0"], lora_dropout=0.0,
        )))  # fmt: skip
        [b] = [p for n, p in made.named_parameters() if ".lora_B." in n]
        eps = 1e-12  # whose share the scale changes
        optimizer: torch.optim.Optimizer
        if theirs:
            assert isinstance(made, PeftModel)
            optimizer = create_lorafa_optimizer(made, r=RANK, lora_alpha=int(scale * RANK), lr=0.01)
            for group in optimizer.param_groups:
                group["eps"], group["weight_decay"] = eps, 0.0
        else:
            optimizer = torch.optim.AdamW([b], lr=0.01, eps=eps, weight_decay=0.0)
        for _ in range(5):
            optimizer.zero_grad()
            (made(x) - net(x)).square().mean().backward()
            optimizer.step()
        return b.detach()

    ours = stepped(theirs=False)
    assert ours.any()
    torch.testing.assert_close(ours, stepped(theirs=True), rtol=1e-3, atol=1e-5)


def test_a_frozen_a_saves_at_least_1_3_times_fewer_activations_where_all_linear_layers_have_adapters() -> (
    None
):
    config = BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    wanted = LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=0.0)
    tokens = torch.ones(4, 32, dtype=torch.long)

    def saved(change: Callable[[nn.Module], nn.Module]) -> int:
        net = change(get_peft_model(BertForMaskedLM(config), wanted))
        ops = capture(net, {"input_ids": tokens, "labels": tokens}, tail=False).train.ops
        return sum(op.bytes_saved for op in ops)

    assert saved(lambda net: net) >= 1.3 * saved(freeze_a)


def test_what_cannot_be_frozen_is_refused_with_its_name() -> None:
    with pytest.raises(UsageError, match="get_peft_model first"):
        freeze_a(bert())
    with pytest.raises(UsageError, match=r"query\.lora_A\.default.* has rank 64 and 32 inputs"):
        freeze_a(get_peft_model(bert(), LoraConfig(r=64, target_modules=["query"])))
    trained = get_peft_model(bert(), LoraConfig(target_modules=["query"], init_lora_weights=False))
    with pytest.raises(UsageError, match="its B is trained already"):
        freeze_a(trained)


# ---------------------------------------------------------------- refusals

FC = {"fc.lora_A.default.weight": (2, 4), "fc.lora_B.default.weight": (3, 2)}


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"fc.weight": (3, 4)}, "trains no adapter's B"),
        ({**FC, "e.lora_embedding_A.default": (2, 9)}, "e.lora_embedding_A.default' adapts an embedding"),
        ({**FC, "fc.lora_B.default.weight": (3, 5)}, "not two matrices"),
        ({n: (*s, 1, 1) for n, s in FC.items()}, "not two matrices"),
        (
            {"fc.lora_A.default.weight": (5, 4), "fc.lora_B.default.weight": (9, 5)},
            "rank 5, its layer at most 4",
        ),
    ],
)
def test_what_is_no_product_of_two_matrices_is_refused(shapes: dict[str, tuple[int, ...]], why: str) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(UsageError, match=why):
        make_strategy("fedsvd").adapt(Layout.of(arrays, arrays))


def test_adapters_that_clients_keep_stay_with_them() -> None:
    names = [name.replace("fc", layer) for layer in ("own", "fc") for name in FC]
    arrays = {name: np.zeros(FC[name.replace("own", "fc")], np.float32) for name in names}
    layout = Layout.of(arrays, arrays).with_roles(Role.LOCAL, names[:2])
    adapted = make_strategy("fedsvd").adapt(layout)
    assert [adapted.roles[name] for name in names] == [Role.LOCAL, Role.LOCAL, Role.TOLD, Role.TRAINED]
    with pytest.raises(UsageError, match="is local and its B is not"):
        make_strategy("fedsvd").adapt(layout.with_roles(Role.LOCAL, names[2:3]))


# ---------------------------------------------------------------- FLoRA


def folded_round(made: LocalFederation) -> tuple[dict[str, Any], dict[str, Any]]:
    """One round. Return the mean of the clients' BA and the layers' change over the scale, by layer."""
    before = made.weights
    mean, left = exact_round(made)
    assert all(not product.any() for product in left.values()), "new adapters begin at 0"
    after = made.weights
    return mean, {n: (after[n].astype(np.float64) - before[n]) / SCALE for n in mean}


@pytest.mark.parametrize("kind", sampled(1, MODELS))
def test_flora_folds_the_mean_of_the_clients_products_into_the_layers(kind: str) -> None:
    made = federation("flora", frozen=False, kind=kind, scaling=SCALE)
    for _ in range(3):
        before = made.weights
        assert off(*folded_round(made)) < 1e-5
        for pair in adapters_of("test", made.trainer.layout):
            assert not np.array_equal(made.weights[pair.a], before[pair.a])


@pytest.mark.parametrize("trained_before", [False, True])
def test_flora_folds_unlike_ranks_exactly_and_each_client_keeps_its_own(trained_before: bool) -> None:
    """Padded with zeros, a client's factors stay of its rank through AdamW."""
    made = federation("flora", frozen=False, scaling=SCALE, ranks="a=1 [ab]=2")
    pairs = adapters_of("test", made.trainer.layout)
    if trained_before:  # an adapter that somebody began
        draw = np.random.default_rng(5)
        begun = {p.b: draw.normal(0, 0.1, made.weights[p.b].shape).astype(np.float32) for p in pairs}
        made.state = replace(made.state, weights={**made.state.weights, **begun})
    for _ in range(3):
        sent = made.strategy.configure(made.state)
        for name, rank in (("a", 1), ("b", 2), ("c", RANK)):
            delta = made.trainer.train(made.clients[name], sent, made.client_states[name]).update.delta
            for pair in pairs:
                whole = sent.weights[pair.b] + delta[pair.b]
                assert delta[pair.a][:rank].any(axis=1).all()
                assert not delta[pair.a][rank:].any()
                assert whole[:, :rank].any(axis=0).all()
                assert not whole[:, rank:].any()
        assert off(*folded_round(made)) < 1e-5


def test_a_lower_rank_sends_less_through_the_lossless_codec(tmp_path: Path) -> None:
    width, rank = 768, 8
    a, b = FC
    draw = np.random.default_rng(0)
    first = draw.normal(0, 0.1, (rank, width)).astype(np.float32)
    weights = {a: first, b: np.zeros((width, rank), np.float32)}
    weights["fc.base_layer.weight"] = np.zeros((width, width), np.float32)
    rule = make_strategy("flora", {"ranks": "full=8 half=4 quarter=2 eighth=1"})
    layout = rule.adapt(Layout.of(weights, FC))
    sent = Broadcast(0, weights)

    def size(client: str) -> float:
        state = ClientState(client=client)
        (phase,) = rule.begin(layout, sent, state)
        trained = np.asarray(phase.start[a]).any(axis=1)
        change = draw.normal(0, 1e-3, (rank, width)).astype(np.float32) * trained[:, None]
        ended = {**phase.start, a: phase.start[a] + change, b: np.ascontiguousarray(change.T)}
        update, _ = rule.end(layout, sent, [Done(ended, 8, 2, 0.1)], state)
        stored = write_update(tmp_path / "update", update_arrays(update), Coding("lossless"))
        return stored.size / (2 * 4 * rank * width)

    assert size("half") < 0.5
    assert size("quarter") < 0.25
    assert size("eighth") < 0.15
    assert size("full") > 0.75


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ("a=0", "write NAME=RANK"),
        ("a", "write NAME=RANK"),
        ("=2", "write NAME=RANK"),
        ("a=2, b=1", "write NAME=RANK"),
        ("a=2 b=5", "'b=5'; the module's is 2"),
    ],
)
def test_ranks_that_are_none_or_too_high_are_refused(ranks: str, why: str) -> None:
    arrays = {n: np.zeros(s, np.float32) for n, s in {**FC, "fc.base_layer.weight": (3, 4)}.items()}
    with pytest.raises(UsageError, match=why):
        make_strategy("flora", {"ranks": ranks}).adapt(Layout.of(arrays, FC))


def test_what_a_layer_cannot_be_folded_into_is_refused() -> None:
    shapes = {**FC, "fc.base_layer.weight": (3, 4)}
    a, b, base = shapes

    def adapted(
        trained: tuple[str, ...] = (a, b), dtype: str = "float32", **given: tuple[int, ...]
    ) -> Layout:
        made = {**shapes, **({base: given["base"]} if given else {})}
        arrays = {n: np.zeros(s, dtype if n == base else "float32") for n, s in made.items()}
        return make_strategy("flora").adapt(Layout.of(arrays, trained))

    assert adapted().roles[base] is Role.TOLD
    for why, found in {
        r"is float32 \(4, 3\)": lambda: adapted(base=(4, 3)),
        "is float16": lambda: adapted(dtype="float16"),
        "is frozen; take fedavg or fedsvd": lambda: adapted((b,)),
        "is trained beside its adapter": lambda: adapted((a, b, base)),
    }.items():
        with pytest.raises(UsageError, match=why):
            found()  # type: ignore[no-untyped-call]


def test_the_scale_of_flora_is_that_of_the_module() -> None:
    def made(**options: Any) -> nn.Module:
        settings = {"r": 4, "lora_alpha": 8, "target_modules": ["query"], **options}
        return get_peft_model(bert(), LoraConfig(**settings))

    conv = nn.Sequential(Conv1D(4, 6))  # type: ignore[no-untyped-call]
    transposed = get_peft_model(conv, LoraConfig(target_modules=["0"], fan_in_fan_out=True))
    check_scaling(made(), 2.0)
    check_scaling(made(use_rslora=True), 4.0)
    for module, why in (
        (made(), r"'.*query' scales its adapter by 2"),
        (made(use_dora=True, lora_alpha=4), "DoRA"),
        (transposed, "fan_in_fan_out"),
    ):
        with pytest.raises(UsageError, match=why):
            check_scaling(module, 1.0)


def test_a_wrong_scale_is_refused_at_submit() -> None:
    example = {name: torch.from_numpy(array) for name, array in data(ROWS, 0).items()}

    def job(scaling: float) -> Job:
        return Job(
            Adapted("bert", frozen=False),
            example,
            Registered("reviews", {"ids": "ids", "labels": "labels"}),
            TrainingSpec(steps=1, n_micro=1),
            federated=Federated("flora", {"scaling": scaling}),
        )

    assert federated_spec(job(SCALE)) is not None
    with pytest.raises(UsageError, match=r"scales its adapter by 2, the job's option by 1;"):
        federated_spec(job(1.0))
