"""Values of all rows are looked at before anything is sent, not those of the first batches alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.data import ByteText, Rows
from atoll.errors import UsageError
from atoll.job import Job, TrainingSpec
from coordinator.client import prepare as module
from coordinator.client.prepare import prepare

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fc(x), y)


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.head = nn.Embedding(128, 8), nn.Linear(8, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedded(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def said(data: Any, **training: Any) -> list[str]:
    """Prepare a job; return what its owner hears of the data's values."""
    heard: list[str] = []
    examples = {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.long)}
    prepare(Job(Net(), examples, data, TrainingSpec(steps=1, n_micro=1, **training)), tell=heard.append)
    return [words for words in heard if "data:" in words]


def with_value(like: Tensor, row: int, value: float) -> Tensor:
    changed = like.clone()
    changed[row] = value
    return changed


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_an_index_beyond_the_model_is_found_in_any_row(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    with pytest.raises(UsageError, match=r"training data: 'y' holds the index 9, first in row 37; .*0 to 3"):
        said(Rows({"x": X, "y": with_value(Y, 37, 9)}))
    held_out = {"x": X, "y": with_value(Y, 38, -1)}
    with pytest.raises(UsageError, match=r"held-out data: 'y' holds the index -1, first in row 38"):
        said(Rows({"x": X, "y": Y}, held_out), eval_batches=1)


def test_targets_that_are_left_out_are_no_indices() -> None:
    assert said(Rows({"x": X, "y": with_value(Y, 39, -100)})) == []


def test_a_byte_without_an_embedding_is_found_anywhere_in_a_text() -> None:
    text = ByteText(16, text=b"a" * 300 + "\u00e9".encode() + b"b" * 99, held_out=0.0)
    job = Job(NextByte(), {"tokens": torch.zeros(2, 16, dtype=torch.long)}, text, TrainingSpec(1, 1))
    with pytest.raises(UsageError, match="'tokens' holds the index 195, first in place 300"):
        prepare(job)


def test_a_value_that_its_input_cannot_hold_is_named() -> None:
    wide = np.asarray(X, np.float64)
    wide[31] *= 1e300
    (words,) = said(Rows({"x": wide, "y": Y}))
    assert ", beyond float32, first in row 31 of 40; a step whose loss is not finite ends the job" in words


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_and_left_to_the_model(value: float) -> None:
    rows = {"x": with_value(X, 30, value), "y": Y}
    (words,) = said(Rows(rows))
    assert words == f"training data: 'x' holds {value}, first in row 30 of 40; " + (
        "a step whose loss is not finite ends the job"
    )
    (words,) = said(Rows({"x": X, "y": Y}, {"x": np.asarray(rows["x"]), "y": Y}), eval_batches=1)
    assert words == f"held-out data: 'x' holds {value}, first in row 30 of 40"
