"""Capture finds the matrices between embeddings and heads, which Muon steps, in unmodified models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.job import Optimizer, OptimizerName, ParamGroup
from atoll.opdag import OpDag
from atoll.optimizers import muon_words, optimizers_of
from coordinator.capture.capture import capture
from tests.models import Example, bert, gpt2, llama, resnet

MUON = Optimizer(OptimizerName.MUON)


@cache
def dag_of(build: Callable[[], Example]) -> OpDag:
    example = build()
    return capture(example.module, example.example_inputs).train


def hidden(dag: OpDag) -> set[str]:
    return {name for name, state in dag.parameters.items() if state.hidden_matrix}


def test_a_llamas_projections_are_hidden_and_its_embedding_and_head_are_not() -> None:
    dag = dag_of(llama)
    others = set(dag.parameters) - hidden(dag)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert sorted(n.rsplit(".", 2)[-2] for n in hidden(dag)) == sorted(projections * 2)
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert ends < others
    assert all("norm" in n for n in others - ends)


def test_gpt2s_tied_table_is_no_hidden_matrix_nor_are_its_positions() -> None:
    dag = dag_of(gpt2)
    assert dag.aliases["lm_head.weight"] == "transformer.wte.weight"
    assert hidden(dag) == {
        f"transformer.h.{block}.{name}.weight"
        for block in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_berts_transform_is_hidden_as_the_tied_decoder_follows_it() -> None:
    found = hidden(dag_of(bert))
    assert "cls.predictions.transform.dense.weight" in found
    assert len(found) == 2 * 6 + 1
    assert not [name for name in found if "embeddings" in name or "decoder" in name]


def test_kernels_of_convolutions_are_no_matrices_so_a_resnet_is_left_to_adamw() -> None:
    dag = dag_of(resnet)
    assert any(len(state.meta.shape) == 4 for state in dag.parameters.values())
    assert hidden(dag) == set()
    assert set(optimizers_of(dag.parameters, MUON).values()) == {OptimizerName.ADAMW}
    words = muon_words(dag.parameters, MUON)
    assert words.startswith("muon steps 0 matrices, 0 % of the trained parameters; ")
    assert words.endswith(f"; {len(dag.parameters)} others have another optimizer")
    assert muon_words(dag.parameters, Optimizer()) == ""


class Odd(nn.Module):
    """Matrices that are read in ways other than as a layer's weight, beside those that are."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("both", "transposed", "looked_up", "queries", "shared", "head"):
            self.register_parameter(name, nn.Parameter(torch.randn(8, 8) / 3))
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.transposed.t() + F.linear(x, self.both) + self.both.sum()
        x = torch.relu(x + self.looked_up[:4].mean(0))
        x = F.linear(F.linear(x, self.shared), self.shared) + F.linear(self.queries, self.shared).sum(0)
        x, _ = self.recurrent(x)
        return F.linear(x, self.head).square().mean()


def test_a_matrix_that_anything_but_a_product_reads_is_none() -> None:
    dag = capture(Odd(), {"x": torch.randn(2, 4, 8)}).train
    assert hidden(dag) == {"transposed", "shared"}


def test_the_first_of_two_layers_is_hidden_and_the_last_is_a_head() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x))).square().mean()

    assert hidden(capture(Two(), {"x": torch.randn(3, 8)}).train) == {"first.weight"}


def test_a_group_may_keep_matrices_from_muon_or_give_it_others() -> None:
    dag = dag_of(llama)
    kept = ParamGroup(("*.o_proj.weight",), optimizer=OptimizerName.ADAMW)
    spec = Optimizer(OptimizerName.MUON, groups=(kept,))
    found = optimizers_of(dag.parameters, spec)
    muon = {n for n, o in found.items() if o is OptimizerName.MUON}
    assert muon == {n for n in hidden(dag) if "o_proj" not in n}
    assert muon_words(dag.parameters, spec).startswith(f"muon steps {len(muon)} matrices, ")
    given = ParamGroup(("lm_head.*", "*norm*"), optimizer=OptimizerName.MUON)
    found = optimizers_of(dag.parameters, Optimizer(groups=(given,)))
    assert {n for n, o in found.items() if o is OptimizerName.MUON} == {"lm_head.weight"}
