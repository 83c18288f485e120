"""Files of broadcasts and updates: exact where they say so, and hostile ones refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from atoll.errors import BadFrame, UsageError
from atoll.opdag import TensorMeta
from compressors.container import most_file_bytes, read_coded, read_dense, write_dense
from compressors.model_file import (
    Coding,
    read_delta,
    read_model,
    read_update,
    write_delta,
    write_model,
    write_update,
)

Arrays = dict[str, Any]
BASE = "ab" * 32
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def metas(arrays: Arrays) -> dict[str, TensorMeta]:
    return {name: TensorMeta(tuple(a.shape), str(a.dtype)) for name, a in arrays.items()}


def some(seed: int = 0) -> Arrays:
    draw = np.random.default_rng(seed)
    return {
        "weights/conv.weight": draw.normal(size=(16, 3, 40)).astype(np.float32),
        "weights/head": draw.normal(size=(40, 60)).astype(np.float32),
        "weights/half": draw.normal(size=5000).astype(np.float16),
        "weights/scalar": np.float32(draw.normal()).reshape(()),
        "extra/control/head": draw.normal(size=(40, 60)),
        "extra/counts/n": np.arange(7),
        "extra/none/empty": np.zeros((0, 3), np.float32),
        "extra/flags/seen": draw.random(9) < 0.5,
    }


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[n].dtype and a.shape == other[n].shape and a.tobytes() == other[n].tobytes()
        for n, a in one.items()
    )


def lossy(codec: str = "topk", feedback: bool = True) -> Coding:
    return Coding(codec, 8.0, frozenset({"weights/conv.weight", "weights/head"}), feedback)


def values() -> st.SearchStrategy[Arrays]:
    dtypes = st.sampled_from([np.float32, np.float16, np.float64, np.int64, np.uint8, np.bool_])
    one = dtypes.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))
    return st.dictionaries(st.text(min_size=1, max_size=12), one, min_size=1, max_size=4)


@quick
@given(values())
def test_dense_and_lossless_files_hold_the_same_bits(tmp_path: Path, arrays: Arrays) -> None:
    for coding in (Coding(), Coding("lossless")):
        stored = write_update(tmp_path / "f", arrays, coding)
        assert stored.size == (tmp_path / "f").stat().st_size <= most_file_bytes(metas(arrays))
        assert same(read_update(tmp_path / "f", metas(arrays), coding), arrays)
        assert same(read_model(tmp_path / "f", metas(arrays)), arrays)


@quick
@given(values(), st.integers(0, 2**32))
def test_a_delta_gives_the_new_bits_whatever_they_are(tmp_path: Path, arrays: Arrays, seed: int) -> None:
    draw = np.random.default_rng(seed)
    new = {}
    for name, array in arrays.items():
        flat = np.frombuffer(draw.bytes(array.nbytes), array.dtype if array.dtype != bool else np.uint8)
        new[name] = (
            (flat % 2).astype(bool).reshape(array.shape) if array.dtype == bool else flat.reshape(array.shape)
        )
    write_delta(tmp_path / "d", new, arrays, BASE)
    assert same(read_delta(tmp_path / "d", metas(arrays), arrays, BASE), new)


def test_the_dense_form_is_safetensors_and_the_same_arrays_give_the_same_file(tmp_path: Path) -> None:
    arrays = some()
    stored = write_dense(tmp_path / "a", arrays)
    assert same(load_file(tmp_path / "a"), arrays)
    for coding in (Coding(), Coding("lossless"), lossy()):
        hashes = set()
        for at in range(8):
            moved = {n: np.copy(a) for n, a in reversed(arrays.items())}
            hashes.add(write_update(tmp_path / f"b{at}", moved, coding).hash)
        assert len(hashes) == 1
    assert stored.hash == write_model(tmp_path / "c", arrays).hash


def test_arrays_of_a_dense_file_are_writable_and_leave_it_alone(tmp_path: Path) -> None:
    write_dense(tmp_path / "a", some())
    found = read_dense(tmp_path / "a", metas(some()))
    found["weights/head"][:] = 0
    assert same(read_dense(tmp_path / "a", metas(some())), some())


def test_a_delta_of_small_changes_is_small_and_refuses_another_base(tmp_path: Path) -> None:
    old = {"w": np.random.default_rng(0).normal(size=200_000).astype(np.float32)}
    new = {"w": old["w"] * np.float32(1.0001)}
    stored = write_delta(tmp_path / "d", new, old, BASE)
    assert stored.size < 0.55 * old["w"].nbytes
    with pytest.raises(BadFrame, match="this side holds cdcdcd"):
        read_delta(tmp_path / "d", metas(old), old, "cd" * 32)
    wrong = {"w": old["w"] + 1}
    with pytest.raises(BadFrame, match="another model"):
        read_delta(tmp_path / "d", metas(old), wrong, BASE)


@pytest.mark.parametrize("codec", ["topk", "random_k", "int8_block", "chunk_topk", "error_feedback"])
def test_a_lossy_update_loses_only_what_may_be_lost(tmp_path: Path, codec: str) -> None:
    arrays, coding = some(), lossy(codec)
    stored = write_update(tmp_path / "u", arrays, coding, seed=3)
    found = read_update(tmp_path / "u", metas(arrays), coding)
    exact = {n: a for n, a in arrays.items() if n not in coding.lossy}
    assert same({n: found[n] for n in exact}, exact)
    assert not same(found, arrays)
    assert stored.size < most_file_bytes(metas(arrays))
    head = found["weights/head"]
    assert np.linalg.norm(head - arrays["weights/head"]) < np.linalg.norm(arrays["weights/head"])


def test_what_an_update_leaves_out_comes_with_the_next_ones(tmp_path: Path) -> None:
    arrays, coding = some(), lossy()
    errors: Arrays = {}
    total = np.zeros_like(arrays["weights/head"])
    for at in range(40):
        write_update(tmp_path / "u", arrays, coding, at, errors.get, errors.__setitem__)
        total += read_update(tmp_path / "u", metas(arrays), coding)["weights/head"]
    assert errors.keys() == coding.lossy
    owed = errors["weights/head"].reshape(total.shape).numpy()
    assert np.allclose(total + owed, 40 * arrays["weights/head"], rtol=2e-3, atol=0.05)
    assert np.abs(total / 40 - arrays["weights/head"]).max() < 0.5


def test_codecs_that_keep_a_state_and_unknown_ones_are_refused() -> None:
    for name in ("powersgd", "acp_sgd", "nonsense"):
        with pytest.raises(UsageError):
            Coding(name, 8.0)
    assert not Coding("qsgd", 8.0, frozenset({"w"}), True).keeps_residual  # unbiased: variance would pile up
    assert Coding("random_k", 8.0, frozenset({"w"}), True).keeps_residual
    assert not Coding("topk", 8.0, frozenset({"w"})).keeps_residual


# ---------------------------------------------------------------- hostile files


def refused(path: Path, expected: dict[str, TensorMeta], coding: Coding) -> bool:
    """Whether the file is refused, or else read as exactly what was expected, within bounded memory."""
    tracemalloc.start()
    try:
        found = read_update(path, expected, coding)
    except BadFrame:
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20
    assert metas(found) == expected
    return False


@pytest.mark.parametrize("coding", [Coding(), Coding("lossless"), lossy()], ids=["dense", "lossless", "topk"])
def test_mutated_files_are_refused_or_hold_what_was_expected(tmp_path: Path, coding: Coding) -> None:
    arrays, path = some(), tmp_path / "u"
    write_update(path, arrays, coding)
    good, draw = path.read_bytes(), np.random.default_rng(7)
    expected, bad = metas(arrays), 0
    for _ in range(250):
        data = bytearray(good)
        kind = draw.integers(4)
        if kind == 0:
            del data[int(draw.integers(len(data))) :]
        elif kind == 1:
            at = int(draw.integers(len(data)))
            data[at:at] = draw.bytes(int(draw.integers(1, 64)))
        else:  # the ends hold the lengths
            for _ in range(int(draw.integers(1, 6))):
                reach = 700 if kind == 2 else len(data)
                at = int(draw.integers(reach))
                data[at if draw.random() < 0.5 else -1 - at] = int(draw.integers(256))
        path.write_bytes(bytes(data))
        bad += refused(path, expected, coding)
    assert bad > 100


@quick
@given(st.binary(max_size=400))
def test_any_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    for head in (b"", b"ATOLLPK1", struct.pack("<Q", len(data))):
        (tmp_path / "u").write_bytes(head + data)
        for coding in (Coding(), lossy()):
            assert refused(tmp_path / "u", metas(some()), coding)


def dense_with(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


W = {"w": TensorMeta((2,), "float32")}
OF_W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (dense_with({"w": {**OF_W, "shape": [2**62]}}, bytes(8)), "expected"),
        (dense_with({"w": {**OF_W, "dtype": "F64"}}, bytes(8)), "expected"),
        (dense_with({"w": {**OF_W, "data_offsets": [4, 12]}}, bytes(8)), "lies at"),
        (dense_with({"w": {**OF_W, "data_offsets": [-8, 0]}}, bytes(8)), "lies at"),
        (dense_with({"w": OF_W, "v": OF_W}, bytes(8)), "unknown"),
        (dense_with({}, bytes(8)), "lacks"),
        (dense_with({"w": OF_W}, bytes(9)), "9 bytes of tensors"),
        (dense_with([], b""), "list"),
        (dense_with(b"[" * 3000, b""), "not JSON"),
        (struct.pack("<Q", 2**63) + bytes(100), "header of"),
        (b"", "0 bytes"),
    ],
)
def test_a_dense_file_that_is_not_what_was_agreed_is_refused_with_the_reason(
    tmp_path: Path, data: bytes, why: str
) -> None:
    (tmp_path / "u").write_bytes(data)
    with pytest.raises(BadFrame, match=why):
        read_dense(tmp_path / "u", W)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {"v": OF_W, "w": OF_W}
    (tmp_path / "u").write_bytes(dense_with(header, bytes(16)))
    with pytest.raises(BadFrame, match="overlap"):
        read_dense(tmp_path / "u", {**W, "v": W["w"]})


def test_a_coded_file_cannot_choose_its_decoder(tmp_path: Path) -> None:
    arrays = some()
    write_update(tmp_path / "u", arrays, lossy("int8_block"))
    with pytest.raises(BadFrame, match="codec 'int8_block', the plan says 'topk'"):
        read_update(tmp_path / "u", metas(arrays), lossy("topk"))
    with pytest.raises(BadFrame, match="in codecs"):
        read_update(tmp_path / "u", metas(arrays), Coding())
    write_dense(tmp_path / "u", arrays)
    with pytest.raises(BadFrame, match="not in codecs"):
        read_update(tmp_path / "u", metas(arrays), lossy())
    with pytest.raises(BadFrame, match="no coded"):
        read_coded(tmp_path / "u", metas(arrays))
