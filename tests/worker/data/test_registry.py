"""Registered data: training reads what the files say, and what is wrong is told with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from atoll.errors import StorageError, UsageError
from hostos.command_line import run
from worker.cli import main as cli
from worker.data import registry
from worker.data.registry import add_dataset, known_facts, list_datasets, load_dataset, open_dataset
from worker.data.schema import parse_field
from worker.data.sources import CSV_ROWS, Form
from worker.data.transforms import TRANSFORMS, BadValue, parse_transform, settle

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 4, 5), np.uint8)
LABELS = np.arange(7, dtype=np.uint8)


def idx(array: Any, kind: int = 0x08) -> bytes:
    """The bytes of an IDX file."""
    head = bytes([0, 0, kind, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like MNIST's."""
    made = tmp_path / "digits"
    made.mkdir()
    (made / "images").write_bytes(idx(IMAGES))
    (made / "labels").write_bytes(gzip.compress(idx(LABELS)))
    return made


def table(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_idx_files_become_the_declared_arrays(tmp_path: Path, folder: Path) -> None:
    schema = ["image:float32[1,4,5]=images|scale:1/255|normalise:0.5,0.25", "label:int64=labels"]
    added = add_dataset(tmp_path / "state", "digits", folder, schema)
    found = open_dataset(tmp_path / "state", "digits")
    expected = (IMAGES.astype(np.float32) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(found["image"], expected[:, None], atol=1e-6)
    assert found["label"].tolist() == LABELS.tolist()
    assert found["image"].dtype == np.float32
    assert not found["image"].flags.writeable
    [facts] = known_facts(tmp_path / "state")
    assert facts == added.facts
    assert [(f.name, f.dtype, f.shape) for f in facts.fields] == [
        ("image", "float32", (1, 4, 5)),
        ("label", "int64", ()),
    ]


def test_what_leaves_the_machine_names_no_file_value_or_hash(tmp_path: Path, folder: Path) -> None:
    added = add_dataset(tmp_path, "digits", folder, ["label:int64=labels"])
    told = repr(added.facts)
    assert str(folder) not in told
    assert added.sha256 not in told
    assert "labels" not in told


@pytest.mark.parametrize("cut", [3, 9, 30])
def test_a_torn_idx_file_is_refused_with_its_sizes(tmp_path: Path, folder: Path, cut: int) -> None:
    (folder / "images").write_bytes(idx(IMAGES)[:cut])
    with pytest.raises(UsageError, match=r"images"):
        add_dataset(tmp_path, "digits", folder, ["image=images"], Form("idx"))
    assert list_datasets(tmp_path) == ()
    assert not list((tmp_path / "data").glob("*"))


def test_fields_of_unequal_length_are_refused_with_both_numbers(tmp_path: Path, folder: Path) -> None:
    (folder / "labels").write_bytes(idx(LABELS[:5]))
    with pytest.raises(UsageError, match=r"images 7, labels 5"):
        add_dataset(tmp_path, "digits", folder, ["image=images", "label=labels"])


def test_a_schema_may_not_lead_out_of_its_folder(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "secret").write_bytes(idx(LABELS))
    with pytest.raises(UsageError, match="has no"):
        add_dataset(tmp_path, "digits", folder, ["x=../secret"], Form("idx"))


def test_safetensors_need_no_schema(tmp_path: Path) -> None:
    save_file({"x": IMAGES, "y": LABELS}, tmp_path / "d.safetensors")
    add_dataset(tmp_path, "d", tmp_path / "d.safetensors", [])
    found = open_dataset(tmp_path, "d")
    assert np.array_equal(found["x"], IMAGES)
    assert np.array_equal(found["y"], LABELS)
    with pytest.raises(UsageError, match=r"no tensor 'z'.*x, y"):
        add_dataset(tmp_path, "e", tmp_path / "d.safetensors", ["z=z"])


def test_csv_columns_by_name_range_number_and_the_rest(tmp_path: Path) -> None:
    path = table(tmp_path, "a,b,c,label\n1,2,3,well\n4,,6,ill\n\n7,8,9,well\n")
    schema = ["y:int64=label|classes:well,ill", "ab=a..b|missing:0", "c:int32=#3"]
    add_dataset(tmp_path, "t", path, schema)
    found = open_dataset(tmp_path, "t")
    assert found["y"].tolist() == [0, 1, 0]
    assert found["ab"].tolist() == [[1, 2], [4, 0], [7, 8]]
    assert found["ab"].dtype == np.float32
    assert found["c"].tolist() == [3, 6, 9]
    add_dataset(tmp_path, "rest", path, ["y=label|classes:well,ill", "x:float32[3]=*|missing:0"])
    assert open_dataset(tmp_path, "rest")["x"].shape == (3, 3)


@pytest.mark.parametrize(
    ("text", "schema", "told"),
    [
        ("a,b\n1,2\n3,oak\n", "x=b", r"t.csv line 3, column 'b': field 'x': 'oak' is not a number"),
        ("a,b\n1,2\n3,\n", "x=a,b", r"line 3, column 'b': field 'x': the cell is empty.*missing"),
        ("a,b\n1,2\n3\n", "x=a", r"line 3 has 1 columns, the first line has 2"),
        ("a,b\n1,2.5\n", "x:int64=b", r"line 2, column 'b'.*2.5 is not a whole number"),
        ("a,b\n1,300\n", "x:uint8=b", r"300.* does not fit into uint8, 0 to 255"),
        ("a,b\n1,nan\n", "x=b", r"nan is not a finite number"),
        ("a,b\n1,1e40\n", "x:float32=b", r"does not fit into float32"),
        ("a,b\n1,red\n", "x=b|classes:blue,green", r"'red' is not one of the classes blue, green"),
        ("a,b\n1,2\n", "x:float32[3]=a,b", r"shape \[2\], 2 elements; declared is \[3\], 3"),
        ("a,b\n1,2\n", "x=c", r"no column 'c'; it has columns a, b"),
        ("a,a\n1,2\n", "x=a", r"2 columns named 'a'"),
        ('a,b\n1,"2\n', "x=a", r"line 2: .*mend its quotes"),
        ("a,b\n", "x=a", r"has no sample"),
        ("", "x=a", r"has 0 columns"),
    ],
)
def test_what_is_wrong_in_a_table_is_told_with_line_and_column(
    tmp_path: Path, text: str, schema: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        add_dataset(tmp_path / "state", "t", table(tmp_path, text), [schema])
    assert list_datasets(tmp_path / "state") == ()


def test_a_line_is_named_rightly_beyond_the_first_piece(tmp_path: Path) -> None:
    rows = ["x", *["1"] * (CSV_ROWS + 50), "", "oops"]
    with pytest.raises(UsageError, match=f"line {CSV_ROWS + 53:,}"):
        add_dataset(tmp_path, "t", table(tmp_path, "\n".join(rows)), ["x=x"])


def test_a_table_that_is_not_utf8_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfa\n1\n\xff\n")
    with pytest.raises(UsageError, match="line 3 is not UTF-8"):
        add_dataset(tmp_path, "t", path, ["x=a"])


def test_windows_of_text_do_not_cross_documents(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"abcdefgh\fijk\f\flmnopq")
    add_dataset(tmp_path, "w", tmp_path / "t.txt", ["tokens:int64[4]=windows:4,2", "doc=document"])
    found = open_dataset(tmp_path, "w")
    words = [bytes(row.astype(np.uint8)).decode() for row in found["tokens"]]
    assert words == ["abcd", "cdef", "efgh", "lmno", "nopq"]
    assert found["doc"].tolist() == [0, 0, 0, 2, 2]
    add_dataset(tmp_path, "d", tmp_path / "t.txt", ["tokens=documents:5"])
    assert open_dataset(tmp_path, "d")["tokens"].tobytes() == b"abcdeijk\0\0lmnop"


def test_a_folder_of_text_is_one_document_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("aaaa")
    (folder / "sub" / "b.txt").write_text("bb")
    (folder / ".hidden").write_text("cccc")
    add_dataset(tmp_path, "t", folder, ["x=documents:2"])
    assert open_dataset(tmp_path, "t")["x"].tobytes() == b"aabb"
    with pytest.raises(UsageError, match="gives a window of 9"):
        add_dataset(tmp_path, "u", folder, ["x=windows:9"])


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=20))
def test_floats_written_as_text_come_back_bit_for_bit(values: list[float]) -> None:
    cells = np.array([repr(v) for v in values], object)
    if all(np.isfinite(values)):
        assert settle(cells, "float32", None).tolist() == values
    else:
        with pytest.raises(BadValue, match="finite"):
            settle(cells, "float32", None)


@given(st.lists(st.integers(-300, 300), min_size=1, max_size=20))
def test_whole_numbers_are_kept_or_refused_never_wrapped(values: list[int]) -> None:
    array = np.array(values)
    if all(-128 <= v <= 127 for v in values):
        assert settle(array, "int8", None).tolist() == values
    else:
        with pytest.raises(BadValue, match="int8, -128 to 127"):
            settle(array, "int8", None)


SAMPLES = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
CASES = {
    "scale:1/4": SAMPLES / 4,
    "normalise:1 2 3,2": (SAMPLES - np.array([1, 2, 3]).reshape(3, 1)) / 2,
    "clip:2,5": np.clip(SAMPLES, 2, 5),
    "reshape:4,3": SAMPLES.reshape(2, 4, 3),
    "transpose:1,0": SAMPLES.transpose(0, 2, 1),
    "crop:2,1": SAMPLES[:, 1:3],
    "pad:5,7": np.concatenate([SAMPLES, np.full((2, 2, 4), 7)], axis=1),
    "cast:int16": SAMPLES,
    "missing:9": SAMPLES,
}


@pytest.mark.parametrize("text", CASES)
def test_a_transform_is_its_formula(text: str) -> None:
    np.testing.assert_allclose(parse_transform("x", text).apply(SAMPLES), CASES[text], rtol=1e-6)


def test_words_become_classes_and_bytes() -> None:
    words = np.array(["no", "yes ", "né"], object)
    assert parse_transform("x", "classes:né,no,yes").apply(words).tolist() == [1, 2, 0]
    assert parse_transform("x", "bytes:4").apply(words).tobytes() == b"no\0\0yes n\xc3\xa9\0"
    assert {text.partition(":")[0] for text in CASES} | {"classes", "bytes"} == set(TRANSFORMS)


@pytest.mark.parametrize(
    "text",
    ["scale:", "scale:1,2", "scale:x", "scale:1/0", "scale:inf", "normalise:1,0", "normalise:1 2,1 2 3",
     "crop:-1", "crop:1.5", "cast:complex64", "classes:a,a", "reshape:0", "reshape:1,99999999999", "exec:rm"],
)  # fmt: skip
def test_a_transform_that_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UsageError, match="field 'x'"):
        parse_transform("x", text)


@pytest.mark.parametrize(
    "line",
    ["x", "=y", "1x=y", "x:=y", "x:float=y", "x:float32[a]=y", "x=", "x=y|" + "|".join(["missing:0"] * 17)],
)
def test_a_schema_line_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        parse_field(line)


def test_names_out_of_bounds_and_twice_given_are_refused(tmp_path: Path, folder: Path) -> None:
    for name in ("../x", "", "a/b", "a" * 65, ".hidden"):
        with pytest.raises(UsageError, match="data set"):
            add_dataset(tmp_path, name, folder, ["x=labels"])
    with pytest.raises(UsageError, match="'x' is declared 2 times"):
        add_dataset(tmp_path, "d", folder, ["x=labels", "x=images"])
    add_dataset(tmp_path, "d", folder, ["x=labels"])
    with pytest.raises(UsageError, match="--replace"):
        add_dataset(tmp_path, "d", folder, ["x=images"])
    add_dataset(tmp_path, "d", folder, ["x=images"], replace=True)
    assert open_dataset(tmp_path, "d")["x"].shape == (7, 4, 5)


def test_damage_is_found(tmp_path: Path, folder: Path) -> None:
    add_dataset(tmp_path, "d", folder, ["x=labels"])
    stored = tmp_path / "data" / "d" / "x.bin"
    stored.write_bytes(b"\x01" * 7)
    load_dataset(tmp_path, "d")
    with pytest.raises(StorageError, match="not what was registered"):
        registry.verify_dataset(tmp_path, "d")
    stored.write_bytes(b"\x01" * 6)
    with pytest.raises(StorageError, match="6 bytes, not 7"):
        load_dataset(tmp_path, "d")
    assert known_facts(tmp_path) == ()
    manifest = tmp_path / "data" / "d" / "manifest.json"
    for text in ("", "[]", "{}", manifest.read_text().replace('"n_samples": 7', '"n_samples": 6')):
        manifest.write_text(text)
        with pytest.raises(StorageError, match="damaged"):
            load_dataset(tmp_path, "d")


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "KEPT_FREE_BYTES", 1 << 62)
    with pytest.raises(StorageError, match=r"full after 0 samples"):
        add_dataset(tmp_path, "d", folder, ["x=labels"])
    assert not list((tmp_path / "data").glob("*"))


def test_the_commands_add_list_show_and_remove(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    schema = tmp_path / "schema.txt"
    schema.write_text("# what the model wants\n\nlabel:int64=labels\n")
    add = ["data", "add", "digits", str(folder), "--schema", "image=images", "--schema-file", str(schema)]
    assert run(cli.app, [*add, *state]) == 0
    assert "image:uint8[4,5]" in capsys.readouterr().out
    assert run(cli.app, ["data", "list", "--json", *state]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["name"] == "digits"
    assert found["n_samples"] == 7
    assert run(cli.app, ["data", "show", "digits", "--verify", *state]) == 0
    assert found["sha256"] in capsys.readouterr().out
    assert run(cli.app, [*add, *state]) == 2
    assert "--replace" in capsys.readouterr().err
    assert run(cli.app, ["data", "remove", "digits", *state]) == 0
    assert run(cli.app, ["data", "show", "digits", *state]) == 2
    assert "no data set 'digits'" in capsys.readouterr().err
    assert (folder / "images").exists()
