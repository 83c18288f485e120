"""A tensor's blob is the file that safetensors writes of it, and what is no such file is refused in words."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from coordinator.client.prepare import tensor_blob
from protos.tensor_files import VALUE, tensors_of

DTYPES = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
TENSORS = st.builds(
    lambda shape, dtype: torch.randint(0, 2, tuple(shape)).to(dtype),
    st.lists(st.integers(0, 5), max_size=3),
    DTYPES,
)


@given(st.dictionaries(st.text(min_size=1, max_size=8), TENSORS, min_size=1, max_size=4))
def test_a_files_tensors_are_the_blobs_that_a_job_names(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("__metadata__", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        safetensors.torch.save_file(tensors, path, {"format": "pt"})
        found = {tensor.name: tensor for tensor in tensors_of(path)}
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            data = b"".join(found[name].pieces())
            assert data == safetensors.torch.save({VALUE: tensor})
            assert data == b"".join(tensor_blob(tensor).read(0))
            assert found[name].blob_bytes == len(data)


def _file(header: Any, values: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


@given(
    st.one_of(
        st.binary(max_size=64),
        st.sampled_from(
            [
                _file([1]),
                _file({"a": 3}),
                _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
                _file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
                _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
                _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1.5]}}, bytes(4)),
                _file({"a": {"dtype": "F" * 99, "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
                _file({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, bytes(4)),
                _file(b"[" * 100_000),
                (1 << 60).to_bytes(8, "little"),
            ]
        ),
    )
)
def test_what_is_no_such_file_is_refused_in_words(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data)
        with pytest.raises(UsageError, match="cannot be read as safetensors"):
            tensors_of(path)
