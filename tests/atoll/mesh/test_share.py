"""A program divided among processes computes what one does, and sends what its formulas say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.execute import Executor
from atoll.job import Keeping, Recompute
from atoll.mesh.calls import MeshCalls, own_part, stored_part, stored_whole
from atoll.mesh.layout import Inside, Kernel, Split, Way
from atoll.mesh.rules import viewed
from atoll.mesh.share import Shared, Terms, share_all
from atoll.mesh.volumes import micro_volume, op_volumes
from atoll.opdag import OpDag
from atoll.program import StageProgram, stage_programs
from coordinator.capture.capture import capture
from tests.atoll.mesh.threads import ThreadGroup, together
from tests.captured_models import CapturedModel, captured_model
from tests.models import BATCH, LENGTH, of_module

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = [Inside.SHARDS, Inside.TENSOR]


class Block(nn.Module):
    """A block of a GPT of our own, with a head of 64 classes that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(64, 16), nn.Linear(16, 48)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(x)
        batch, length, width = h.shape
        q, k, v = self.mix(self.norm(h)).split(width, dim=2)
        heads = [t.view(batch, length, 4, 4).transpose(1, 2) for t in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = h + self.down(functional.gelu(self.up(h)))
        logits = functional.linear(h, self.embed.weight).view(-1, 64)
        return functional.cross_entropy(logits, labels.reshape(-1))


def _tied(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (4, 6), generator=generator)
    labels = ids.clone()
    labels[seed % 4, 1:4] = -100  # processes count unequal numbers of them
    return {"x": ids, "labels": labels}


def made(name: str, dropout: float) -> CapturedModel:
    if name != "block":
        return captured_model(name, dropout)
    example = of_module("block", Block(), _tied)
    return CapturedModel(example, capture(example.module, example.example_inputs))


@dataclass(frozen=True)
class Case:
    dag: OpDag
    program: StageProgram
    state: dict[str, Tensor]
    batch: dict[str, Tensor]

    def shared(self, kind: Inside, size: int) -> Shared:
        dag = self.dag
        states = {**dag.parameters, **dag.buffers}
        metas = {**{name: state.meta for name, state in states.items()}, **dag.constants, **dag.inputs}
        terms = Terms(kind, size, metas, frozenset(n for n, s in dag.parameters.items() if s.requires_grad))
        return share_all((self.program,), lambda _: terms)[0]


@cache
def case(name: str, dropout: float = 0.0) -> Case:
    found = made(name, dropout)
    (program,) = stage_programs(found.captured.train, (0,))
    return Case(found.captured.train, program, dict(found.captured.state), found.example.make_batch(3))


def alone(made: Case) -> tuple[float, dict[str, Tensor | None]]:
    executor = Executor(made.program)
    executor.load({name: tensor.clone() for name, tensor in made.state.items()})
    out = executor.forward(0, 0, made.batch, {})
    executor.backward(0, {})
    assert made.program.loss is not None
    return float(out[made.program.loss]), {name: executor.gradient(name) for name in executor.uses}


def of_process(
    made: Case, shared: Shared, group: ThreadGroup, recompute: Recompute
) -> tuple[float, dict[str, Tensor | None], int]:
    """Loss, whole gradients and bytes sent of a micro-batch."""
    executor = Executor(shared.program, keeping=Keeping(recompute))
    executor.mesh = MeshCalls(shared, group)
    stored = shared.stored
    executor.load(
        {
            name: stored_part(tensor, stored[name], group) if name in stored else tensor.clone()
            for name, tensor in made.state.items()
        }
    )
    inputs = shared.inputs
    batch = {n: own_part(t, inputs[n], group) if n in inputs else t for n, t in made.batch.items()}
    group.sent_bytes = 0
    out = executor.forward(0, 0, batch, {})
    executor.backward(0, {})
    sent, found = group.sent_bytes, dict[str, Tensor | None]()
    for name in executor.uses:
        gradient = executor.gradient(name)
        if gradient is not None and name in stored:
            gradient = stored_whole(group.gather(gradient), stored[name])
        elif gradient is not None and name in shared.summed:  # as at the end of a step
            gradient = group.sum(gradient)
        found[name] = gradient
    assert made.program.loss is not None
    return float(out[made.program.loss]), found, sent


MADE = [
    ("block", 0.0, Recompute.OFF),
    ("block", 0.0, Recompute.FULL),
    ("block", 0.0, Recompute.SELECTIVE),
    ("gpt2", 0.1, Recompute.OFF),
    ("llama", 0.0, Recompute.SELECTIVE),
    ("bert", 0.0, Recompute.OFF),
    ("resnet", 0.0, Recompute.OFF),
    ("branches", 0.0, Recompute.OFF),
    ("mlp", 0.0, Recompute.OFF),
]


@pytest.mark.parametrize(
    ("name", "dropout", "recompute", "kind"),
    [
        *((*made, kind) for made in MADE for kind in BOTH),
        *((name, 0.0, Recompute.OFF, Inside.SEQUENCE) for name in ("block", "gpt2", "llama", "resnet")),
        ("gpt2", 0.1, Recompute.SELECTIVE, Inside.SEQUENCE),
        *(("block", 0.0, recompute, Inside.RING) for recompute in Recompute if recompute != "auto"),
        *((name, 0.0, Recompute.OFF, Inside.RING) for name in ("gpt2", "llama")),
        *((name, 0.0, Recompute.OFF, Inside.DATA) for name in ("block", "gpt2", "llama", "resnet")),
        *(("mixtral", 0.1, Recompute.OFF, kind) for kind in Inside),
    ],
)
def test_processes_together_compute_the_loss_and_gradients_of_one_and_send_what_is_predicted(
    name: str, dropout: float, recompute: Recompute, kind: Inside
) -> None:
    made = case(name, dropout)
    shared = made.shared(kind, 2)
    loss, gradients = alone(made)
    predicted = micro_volume(shared, 2, recompute=recompute)
    for own_loss, own, sent in together(2, lambda group: of_process(made, shared, group, recompute)):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        assert own.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            other = own[parameter]
            assert (gradient is None) == (other is None), parameter
            if gradient is not None and other is not None:
                torch.testing.assert_close(other, gradient, rtol=1e-4, atol=2e-6, msg=parameter)
        if recompute is Recompute.OFF:
            assert sent == predicted.n_bytes
        elif recompute is Recompute.FULL:  # the newest micro-batch's graph is still at hand
            assert sent <= predicted.n_bytes


def test_of_a_tied_block_heads_hidden_units_and_vocabulary_are_divided_four_ways() -> None:
    made = case("block")
    shared = made.shared(Inside.TENSOR, 4)
    assert shared.stored["embed.weight"] == Split(0)
    assert shared.stored["mix.weight"] == Split(0, parts=3)  # queries, keys and values, a head each
    assert shared.stored["out.weight"] == Split(1)
    assert (shared.stored["up.bias"], shared.stored["down.weight"]) == (Split(0), Split(1))
    assert not {"norm.weight", "out.bias", "down.bias"} & shared.stored.keys()
    kernels = [turn.kernel for turn in shared.turns.values() if turn.kernel]
    assert kernels == [Kernel.VOCABULARY, Kernel.ROW, Kernel.ROW, Kernel.VOCABULARY_LOSS]
    loss, _ = alone(made)
    for own_loss, *_ in together(4, lambda group: of_process(made, shared, group, Recompute.OFF)):
        assert own_loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", BOTH)
def test_what_two_stages_share_is_whole_on_each_process(kind: Inside) -> None:
    made = case("block")
    programs = stage_programs(made.dag, (0, made.dag.cuttable()[-4]))
    dag = made.dag
    metas = {**{name: state.meta for name, state in dag.parameters.items()}, **dag.constants, **dag.inputs}
    for program in programs:
        terms = Terms(kind, 2, metas, frozenset(dag.parameters))
        (shared,) = share_all((program,), lambda _, terms=terms: terms)
        assert {tied.name for tied in program.tied} == {"embed.weight"}
        assert "embed.weight" not in shared.stored


def test_a_megatron_block_sends_two_sums_of_its_activations_each_way() -> None:
    """Shoeybi 2019, section 3: a sum behind attention and one behind the MLP, forward and backward."""
    shared = case("block").shared(Inside.TENSOR, 2)
    nodes, activation = dict(shared.program.ops), 4 * 4 * 6 * 16
    sums = [op for op, turn in shared.turns.items() if turn.kernel is Kernel.ROW]
    assert [nodes[op].outputs[0].nbytes for op in sums] == [activation] * 2
    entered = [
        move.nbytes
        for turn in shared.turns.values()
        for move in turn.moves.values()
        if move.way is Way.ENTER and move.last and move.nbytes == activation
    ]
    assert len(entered) == 3  # into attention, the MLP, and the head


def test_a_layer_of_divided_tokens_gathers_keys_and_values_twice_and_scatters_their_gradients() -> None:
    shared = case("block").shared(Inside.SEQUENCE, 2)
    (attention,) = (op for op, turn in shared.turns.items() if turn.kernel is Kernel.CAUSAL)
    heads = 4 * 6 * 16 * 4  # rows, tokens, width, bytes
    ahead, back = op_volumes(shared, 2)[attention]
    assert (ahead.n_bytes, back.n_bytes) == (2 * heads // 2, 2 * 2 * heads // 2)
    moved = {op for op, both in op_volumes(shared, 2).items() if any(sent.n_bytes for sent in both)}
    weights = {op for op in moved if any(m.of < 0 for m in shared.turns[op].moves.values())}
    loss = {op for op in moved if shared.turns[op].kernel is Kernel.ROWS_LOSS}
    assert moved == {attention} | weights | loss
    tokens = [node.outputs[0].shape for _, node in shared.program.ops if len(node.outputs[0].shape) == 3]
    assert {shape[:2] for shape in tokens} == {(4, 3)}


def test_keys_and_values_go_round_and_send_as_much_as_gathered_ones() -> None:
    made = case("block")
    for size in (2, 3):
        ring, gathered = (made.shared(kind, size) for kind in (Inside.RING, Inside.SEQUENCE))
        (op,) = (op for op, turn in ring.turns.items() if turn.kernel is Kernel.RING_CAUSAL)
        block = 4 * (6 // size) * 16 * 4  # rows, own tokens, width, bytes
        ahead, back = op_volumes(ring, size)[op]
        assert (ahead.n_bytes, back.n_bytes) == ((size - 1) * 2 * block, 2 * (size - 1) * 2 * block)
        assert micro_volume(ring, size).n_bytes == micro_volume(gathered, size).n_bytes
    loss, _ = alone(made)
    for own_loss, *_ in together(3, lambda group: of_process(made, ring, group, Recompute.OFF)):
        assert own_loss == pytest.approx(loss, rel=1e-6)


def test_attention_that_draws_dropout_or_has_a_mask_of_its_own_gathers_in_a_ring_plan() -> None:
    for name, dropout in (("gpt2", 0.1), ("bert", 0.0)):
        ring, gathered = (case(name, dropout).shared(kind, 2) for kind in (Inside.RING, Inside.SEQUENCE))
        assert ring == gathered


def test_experts_are_divided_and_tokens_come_and_go_in_one_collective_each_way() -> None:
    """What an all-to-all would send where all processes have chosen experts: tokens and results once."""
    shared = case("mixtral").shared(Inside.EXPERTS, 2)
    experts = {name: stored for name, stored in shared.stored.items() if "experts" in name}
    assert set(experts.values()) == {Split(0)}
    assert len(experts) == 2
    moves = [move for turn in shared.turns.values() for move in turn.moves.values()]
    across = [move for move in moves if move.way in (Way.LEND, Way.SCATTER)]
    tokens = BATCH * LENGTH * 16 * 4  # of the hidden size, bytes
    assert [move.nbytes for move in across] == [tokens, tokens]
    assert all(move.differentiable for move in across)
    products = [op for op, turn in shared.turns.items() if turn.kernel is Kernel.EXPERTS]
    whole = dict(case("mixtral").program.ops)
    assert all(2 * dict(shared.program.ops)[op].flops_forward == whole[op].flops_forward for op in products)


def test_rows_that_cannot_be_shared_equally_stay_whole_and_matrices_are_still_shards() -> None:
    shared = case("block").shared(Inside.SHARDS, 3)
    assert not shared.inputs
    assert set(shared.stored) >= {"embed.weight", "mix.weight", "up.weight"}
    made, (loss, _) = case("block"), alone(case("block"))
    for own_loss, *_ in together(3, lambda group: of_process(made, shared, group, Recompute.OFF)):
        assert own_loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("split", "before", "after", "found"),
    [
        (Split(2), (2, 12, 32), (2, 12, 4, 8), Split(2)),  # into heads
        (Split(2), (2, 12, 4, 8), (2, 12, 32), Split(2)),  # and back
        (Split(0), (2, 12, 32), (24, 32), Split(0)),
        (Split(1), (2, 12, 32), (24, 32), Split(0, 2)),  # tokens of each row, apart
        (Split(0, 2), (24, 32), (2, 12, 32), Split(1)),
        (Split(2, 3), (2, 12, 96), (2, 12, 3, 32), Split(3)),
        (Split(1), (2, 6, 5), (2, 3, 2, 5), None),  # three do not go into two
    ],
)
def test_a_view_keeps_blocks_together_or_says_that_it_cannot(
    split: Split, before: tuple[int, ...], after: tuple[int, ...], found: Split | None
) -> None:
    assert viewed(split, before, after, 2) == found
