"""Wrong inputs end in words: the page says what each is answered, and the command answers it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from atoll import Federated, Optimizer, OptimizerName, ParamGroup, Precision, Rows, TrainingSpec
from atoll.arrays import array_of, dtype_name, tensor_of
from atoll.errors import UsageError
from coordinator.cli.main import app
from hostos.command_line import run
from tests.coordinator.client.fake_owner import FakeOwnerServer
from tests.parameters import sampled
from tests.people.wrong_inputs import PAGE, SECTIONS, TEMPLATE, Case, answer, coordinator, row

CASES = [case for cases in SECTIONS.values() for case in cases]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeOwnerServer]:
    with coordinator() as server:
        yield server


@pytest.fixture(autouse=True)
def _path_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.filterwarnings("ignore")  # of torch about what is wrong
@pytest.mark.parametrize("case", sampled(80, CASES), ids=[case.name.replace("`", "") for case in CASES])
def test_a_wrong_input_is_answered_as_the_page_says(
    case: Case, server: FakeOwnerServer, tmp_path: Path
) -> None:
    said = answer(case, server, tmp_path)
    assert said.code in (2, 3), said
    assert row(case, said) in PAGE.read_text().splitlines(), "run python -m tests.people.wrong_inputs"
    assert server.script.submissions == {}


def test_the_page_has_no_other_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| `.* \| \d+ \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [case.name for case in CASES]


def _submitted(folder: Path, server: FakeOwnerServer, change: str, *options: str) -> int:
    file = folder / "right.py"
    file.write_text(TEMPLATE.format(setup="", change=change))
    return run(app, ["submit", str(file), *options, *server.options])


@pytest.mark.parametrize(
    "change",
    [
        "data=Rows.of(SET, 'x', 'y')",
        "data=Rows({'x': X.requires_grad_(), 'y': Y})",
        "data=Rows({'x': X.tolist(), 'y': list(Y)})",
        "data=Rows({'x': X.numpy().astype('>f8'), 'y': Y.numpy().astype('uint16')})",
        "data=Rows({'x': X.bfloat16(), 'y': Y})",
        "data=Rows({'x': X.half(), 'y': Y.to(torch.uint8)})",
        "training=TrainingSpec(np.int64(8), 4, replicas=1, optimizer=Optimizer('sgd', lr=1))",
    ],
)
def test_what_can_be_used_is_used(change: str, tmp_path: Path) -> None:
    with coordinator() as server:
        assert _submitted(tmp_path, server, change) == 0
        assert len(server.script.submissions) == 1


def test_bfloat16_data_are_stored_as_they_are() -> None:
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    array = array_of("x", values)
    assert (dtype_name(array), array.nbytes, array.shape) == ("bfloat16", 36, (6, 3))
    assert torch.equal(tensor_of(array[[4, 0]]), values[[4, 0]])


class Named(Dataset[dict[str, object]]):
    """Samples that are dicts, as of `datasets`."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> dict[str, object]:
        return {"image": torch.full((2,), float(at)), "label": at, "path": f"{at}.png"}


def test_samples_of_a_data_set_are_stacked_by_position_or_by_name() -> None:
    x, y = torch.randn(5, 2), torch.arange(5)
    by_position = Rows.of(TensorDataset(x, y), "x", "y").arrays
    assert torch.equal(torch.as_tensor(by_position["x"]), x)
    assert torch.equal(torch.as_tensor(by_position["y"]), y)
    by_name = Rows.of(Named(), "image", "label").arrays
    assert [row.tolist() for row in by_name["image"]] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert by_name["label"].tolist() == [0, 1, 2]


def test_values_of_the_annotated_type_are_taken_in_other_spellings() -> None:
    training = TrainingSpec(10, 2, precision="bf16", replicas=2, blocks=2)  # type: ignore[arg-type]
    assert (training.precision, training.replica_count) == (Precision.BF16, 2)
    optimizer = Optimizer("sgd", 1, groups=[ParamGroup(["a.*"])])  # type: ignore[arg-type]
    assert optimizer == Optimizer(OptimizerName.SGD, 1.0, groups=(ParamGroup(("a.*",)),))
    assert Federated(local=["head.*"]).local == ("head.*",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "dtype", "values"),
    [
        (lambda: pyarrow.array([True, False]), "bool", [True, False]),
        (lambda: pyarrow.array([1.5, None]), "float64", [1.5, float("nan")]),
        (lambda: pyarrow.array([[1, 2], [3, 4]]), "int64", [[1, 2], [3, 4]]),
        (lambda: pandas.Series([[1, 2], [3, 4]]), "int64", [[1, 2], [3, 4]]),
        (lambda: pandas.Series([np.ones(2), np.zeros(2)]), "float64", [[1.0, 1.0], [0.0, 0.0]]),
    ],
)
def test_a_column_of_pandas_or_pyarrow_is_rows(
    column: Callable[[], object], dtype: str, values: list[object]
) -> None:
    found = array_of("x", column())
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(values))


def test_a_column_of_text_is_answered_with_how_to_number_it() -> None:
    for column in (pandas.Series(["a", "b"]), pyarrow.array(["a", "b"]), ["a", "b"]):
        with pytest.raises(UsageError, match=r"holds text \(np\.unique"):
            array_of("x", column)
