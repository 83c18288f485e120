"""Data sets as people have them: of torch, of ``datasets``, with a collator of transformers."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from atoll import Rows, samples
from atoll.errors import UsageError
from atoll.samples import ROWS_A_READ

IDS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def columnar(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


class Mine(Dataset[dict[str, object]]):
    """Samples that are dicts of tensors and numbers."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> dict[str, object]:
        return {"x": torch.full((2,), float(at)), "y": at}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As collators of transformers do it: to the longest of the samples that it is given."""
    longest = max(len(sample["ids"]) for sample in samples)
    ids = [sample["ids"] + [0] * (longest - len(sample["ids"])) for sample in samples]
    return {"ids": torch.tensor(ids), "mask": torch.tensor(ids) != 0}


def test_a_columnar_data_set_gives_its_columns_in_the_types_it_declares() -> None:
    found = Rows.of(columnar(ids=IDS, label=[0, 1, 0], weight=[0.5, 1.0, 2.0]), held_out=one_sample()).arrays
    assert {name: (array.dtype.name, array.shape) for name, array in found.items()} == {
        "ids": ("int64", (3, 3)),
        "label": ("int64", (3,)),
        "weight": ("float32", (3,)),
    }
    assert found["ids"].tolist() == IDS


def one_sample() -> datasets.Dataset:
    return columnar(ids=[[0, 0, 0]], label=[1], weight=[1.0])


def test_what_is_read_in_pieces_is_what_is_read_row_by_row() -> None:
    count = 2 * ROWS_A_READ + 3
    values = np.random.default_rng(5).integers(0, 99, (count, 2)).tolist()
    by_column = Rows.of(columnar(x=values), "x").arrays["x"]
    by_row = Rows.of([{"x": row} for row in values], "x").arrays["x"]
    assert by_column.dtype == by_row.dtype
    assert np.array_equal(by_column, by_row)


def test_a_format_of_its_owners_functions_is_read_sample_by_sample() -> None:
    made = columnar(ids=IDS).with_transform(lambda rows: {"total": [sum(row) for row in rows["ids"]]})
    assert Rows.of(made).arrays["total"].tolist() == [6, 15, 24]


def test_a_data_set_of_torch_has_samples_whatever_else_its_class_offers() -> None:
    class Table(torch.utils.data.Dataset[dict[str, int]]):
        columns, dtypes = ("x", "y"), ("int64", "int64")

        def __len__(self) -> int:
            return 3

        def __getitem__(self, at: int) -> dict[str, int]:
            return {"x": at, "y": 2 * at}

    assert Rows.of(Table()).arrays["y"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("columns", [("x", "y"), ()])
def test_samples_that_are_dicts_need_no_names(columns: tuple[str, ...]) -> None:
    found = Rows.of(Mine(), *columns)
    assert list(found.arrays) == ["x", "y"]
    assert found.arrays["y"].tolist() == [0, 1, 2]


def test_a_collator_pads_training_and_held_out_samples_to_one_length() -> None:
    train, held = [{"ids": [1]}, {"ids": [2, 3]}], [{"ids": [4, 5, 6]}]
    found = Rows.of(train, held_out=held, collate=padded)
    assert found.arrays["ids"].tolist() == [[1, 0, 0], [2, 3, 0]]
    assert found.held_out is not None
    assert found.held_out["ids"].tolist() == [[4, 5, 6]]
    assert list(Rows.of(train, "ids", collate=padded).arrays) == ["ids"]


def test_a_collator_gets_few_samples_at_a_time_and_makes_what_one_call_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "ROWS_A_READ", 7)
    draw = np.random.default_rng(3)
    rows = [{"ids": [1] * int(draw.integers(1, 40)), "box": draw.random((2, 3 + at % 4))} for at in range(50)]
    most = 0

    def padded_both(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        nonlocal most
        most = max(most, len(some))
        width = max(row["box"].shape[1] for row in some)
        boxes = [np.pad(row["box"], ((0, 0), (0, width - row["box"].shape[1]))) for row in some]
        return {**padded(some), "box": torch.from_numpy(np.stack(boxes))}

    found, once = Rows.of(rows[:30], held_out=rows[30:], collate=padded_both), padded_both(rows)
    assert most == 50
    most = 0
    Rows.of(rows[:30], held_out=rows[30:], collate=padded_both)
    assert most <= 7 + 3, "the longest ids, the widest box, and at most 7 more"
    assert found.held_out is not None
    for name, expected in once.items():
        assert torch.equal(torch.tensor(found.arrays[name]), expected[:30])
        assert torch.equal(torch.tensor(found.held_out[name]), expected[30:])


def test_a_collator_whose_rows_change_from_call_to_call_is_refused() -> None:
    lengths = iter(range(1, 99))
    with pytest.raises(UsageError, match="makes rows of other shapes each time; pad all to one length"):
        Rows.of([(1,)] * 3, collate=lambda some: {"x": torch.zeros(len(some), next(lengths))})


class Mirrored(Dataset[tuple[torch.Tensor, int]]):
    """Images that are mirrored at random, as torchvision's transforms do it, and their labels."""

    def __init__(self, count: int) -> None:
        self.images = torch.arange(count * 4.0).reshape(count, 4)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        image = self.images[at]
        return image.flip(0) if torch.rand(()) < 0.5 else image, at


def masked(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """As transformers' collator for masked language models draws them."""
    ids = torch.arange(len(samples) * 32).reshape(-1, 32)
    return {"ids": torch.where(torch.rand(ids.shape) < 0.15, -1, ids)}


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(("collate", "name"), [(None, "x"), (masked, "ids")])
def test_samples_that_are_drawn_anew_at_each_read_are_not_read_once_in_silence(
    held_out: bool, collate: Any, name: str
) -> None:
    torch.manual_seed(3)
    drawn, still = Mirrored(40), [(torch.ones(4), 1)]
    sets = {"held_out": drawn} if held_out else {}
    inputs = () if collate is not None else ("x", "y")
    with pytest.raises(UsageError, match=f"'{name}' of the same samples differs from read to read.*reads=N"):
        Rows.of(still if held_out and collate is None else drawn, *inputs, **sets, collate=collate)


def test_draws_of_a_sample_become_rows_as_many_as_are_asked_for() -> None:
    torch.manual_seed(3)
    drawn = Mirrored(40)
    found = Rows.of(drawn, "x", "y", held_out=drawn, reads=3)
    x, y = (torch.tensor(found.arrays[name]) for name in ("x", "y"))
    assert y.tolist() == list(range(40)) * 3
    assert not torch.equal(x[:40], x[40:80])
    assert not torch.equal(x[40:80], x[80:])
    assert torch.equal(x.sort(1).values, drawn.images.repeat(3, 1))
    assert found.held_out is not None
    assert len(found.held_out["x"]) == 40
    assert len(Rows.of(drawn, "x", "y", reads=1).arrays["x"]) == 40
    assert Rows.of(drawn, collate=masked, reads=2).arrays["ids"].shape == (80, 32)


@pytest.mark.parametrize("reads", [0, 2.0, True, "2"])
def test_a_number_of_draws_is_a_whole_one(reads: Any) -> None:
    with pytest.raises(UsageError, match="give a number of draws from 1"):
        Rows.of(Mirrored(4), "x", "y", reads=reads)


def test_samples_that_hold_nan_are_the_same_at_each_read() -> None:
    assert len(Rows.of([(float("nan"), 0)] * 4, "x", "y").arrays["x"]) == 4


def test_a_collator_that_packs_samples_is_refused() -> None:
    def packed(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"ids": torch.tensor([[id for sample in samples for id in sample["ids"]]])}

    with pytest.raises(UsageError, match="made 1 rows of 'ids' from 2 samples"):
        Rows.of([{"ids": [1]}, {"ids": [2, 3]}], collate=packed)


@pytest.mark.parametrize(
    ("dataset", "inputs", "words"),
    [
        (columnar(text=["a", "b"], y=[0, 1]), (), "'text' holds no numbers, first 'a'; name the inputs"),
        (columnar(ids=[[1], [2, 3]]), (), r"rows of different shapes, \(1,\) and \(2,\); pad them"),
        (columnar(ids=[[1]] * ROWS_A_READ + [[2, 3]]), (), "rows of different shapes"),
        (columnar(ids=IDS), ("labels",), "samples have ids, not labels"),
        (columnar(ids=[]), (), "has no samples"),
        ([(1, 2)], (), "names no inputs"),
    ],
)
def test_what_cannot_be_stacked_is_refused_in_words(
    dataset: Any, inputs: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Rows.of(dataset, *inputs)
