"""Bytes of adapters: what is frozen stays at home, in rounds of a federation and between peers.

Source: LoRA (Hu 2021), section 4.1: r (d_in + d_out) numbers a layer; LoRA-FA (Zhang 2023), section 3: A is
frozen, so B's r d_out are left.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from atoll.exchange import Exchange
from atoll.federated import NO_FLOORS, Federated
from atoll.job import Optimizer, TrainingSpec
from atoll.program import stage_programs
from coordinator.capture.capture import Captured, capture
from coordinator.planning.costs.snapshots import sent_bytes
from tests.inprocess.federation import LocalFederation, local_model
from tests.inprocess.peers import LocalPeers, WholeModel

RANK, WIDTH, INNER = 8, 256, 1024
ROWS = 8
TRAINING = TrainingSpec(steps=2, n_micro=1, optimizer=Optimizer(lr=0.01))
SHAPES = {"query": (WIDTH, WIDTH), "intermediate.dense": (WIDTH, INNER)}
"""Layers with an adapter: in, out."""
LAYERS = 2
HEADER = 4096  # bytes of names and shapes in a file
LORA = 4 * RANK * LAYERS * sum(d_in + d_out for d_in, d_out in SHAPES.values())
ONLY_B = 4 * RANK * LAYERS * sum(d_out for _, d_out in SHAPES.values())
SIZES = {"LoRA": LORA, "LoRA-FA": ONLY_B}

pytestmark = pytest.mark.usefixtures("one_thread")


class Classifier(nn.Module):
    """A classifier of which the adapters alone are trained."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        base = BertForSequenceClassification(
            BertConfig(
                vocab_size=64, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
                intermediate_size=INNER, max_position_embeddings=16,
            )
        )  # fmt: skip
        self.net = get_peft_model(base, LoraConfig(r=RANK, target_modules=list(SHAPES), lora_dropout=0.0))
        if kind == "LoRA-FA":
            for name, parameter in self.net.named_parameters():
                if "lora_A" in name:
                    parameter.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.net(input_ids=ids, labels=labels).loss
        return found


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(64, (ROWS, 8), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids[:, 0] % 2}


@cache
def graphs(kind: str) -> Captured:
    return capture(Classifier(kind), batch(0), TRAINING)


def captured(kind: str) -> Captured:
    """The same graphs for every test, with a state of its own."""
    found = graphs(kind)
    torch.manual_seed(0)  # whichever test captured it
    return replace(found, state={name: tensor.clone() for name, tensor in found.state.items()})


@pytest.mark.parametrize("kind", SIZES)
def test_an_update_of_an_adapter_has_its_factors_and_a_header(kind: str) -> None:
    found = captured(kind)
    model = local_model(found.train, found.evaluation, found.state, TRAINING)
    data = {name: {n: v.numpy() for n, v in batch(seed).items()} for seed, name in enumerate("ab")}
    rule = Federated("fedavg", held_out=0.0, evaluate_every=0)
    federation = LocalFederation(model, rule, data, floors=NO_FLOORS)
    before = dict(federation.state.weights)
    metrics = federation.run_round()
    exact = SIZES[kind]
    for client, sent in metrics.uploaded_bytes.items():
        assert exact <= sent <= 1.02 * exact + HEADER, (client, sent, exact)
    assert metrics.downloaded_bytes <= 1.02 * exact + HEADER
    changed = [n for n, value in federation.state.weights.items() if (value != before[n]).any()]
    assert changed
    assert all("lora_B" in name or (kind == "LoRA" and "lora_A" in name) for name in changed)


@pytest.mark.parametrize("kind", SIZES)
def test_peers_exchange_the_factors_alone(kind: str) -> None:
    found = captured(kind)
    (program,) = stage_programs(found.train, (0,))
    tensors = {name: {"value": tensor} for name, tensor in found.state.items()}
    states = {**found.train.parameters, **found.train.buffers}
    model = WholeModel(program, TRAINING, tensors, states=states)
    peers = LocalPeers(model, Exchange("diloco", every=2), 2)
    sent = [peers.step(step, lambda rank, at: [batch(10 * at + rank)]).sent_bytes for step in range(2)]
    assert sent[0] == (0, 0)
    # Of two peers each sends half of what it contributes, and half of the sum: one model in all.
    exact = SIZES[kind]
    for bytes_of_one in sent[1]:
        assert exact <= bytes_of_one <= 1.02 * exact + HEADER, (sent, exact)


@pytest.mark.parametrize("kind", SIZES)
def test_a_checkpoint_sends_an_adapter_with_its_moments_and_nothing_of_the_base(kind: str) -> None:
    dag = captured(kind).train
    sent = sent_bytes(dag, TRAINING, [[(0, len(dag.ops))]], bytes_per_s=1e6)
    assert sent.whole_bytes == 3 * SIZES[kind]
    base = sum(p.numel() for p in Classifier(kind).parameters() if not p.requires_grad)
    assert 4 * base <= sent.still_bytes <= 4.1 * base  # and tables of positions
    assert f"nothing of {sent.still_bytes / 1e6:.3g} MB frozen" in sent.words
    assert "as deltas" in sent.words
    fast = sent_bytes(dag, TRAINING, [[(0, len(dag.ops))]], bytes_per_s=1e9)
    assert "as deltas" not in fast.words
