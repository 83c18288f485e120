"""A module's weights come from a folder of safetensors, and nothing of them is read before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from atoll import Job, Optimizer, ParamGroup, Rows, TrainingSpec
from atoll.errors import UsageError
from coordinator.client.prepare import capture_graphs, prepare, tensor_blob
from coordinator.client.weights import with_weights
from protos.tensor_files import INDEX


class Tied(nn.Module):
    """An embedding that is the head as well, a buffer and a frozen layer in bf16."""

    base_model_prefix = "net"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Module()
        self.net.table = nn.Embedding(11, 6)
        self.net.base = nn.Linear(6, 6, dtype=torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.net.table.weight
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net.table(x) * self.scale
        hidden = hidden + self.net.base(hidden.to(torch.bfloat16)).float()
        return nn.functional.cross_entropy(self.head(hidden), y)


def _job(module: nn.Module, weights: Path | None = None) -> Job:
    rows = torch.arange(16) % 11
    groups = (ParamGroup(("*net.base.*",), frozen=True),)
    training = TrainingSpec(2, 2, optimizer=Optimizer(groups=groups), eval_batches=0)
    return Job(
        module, {"x": rows[:4], "y": rows[:4]}, Rows({"x": rows, "y": rows}), training, weights=weights
    )


def _meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def _saved(folder: Path, tensors: Mapping[str, Tensor], *, index: bool) -> Path:
    """The tensors in two files, with an index of them or without."""
    names = sorted(tensors)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, own in parts.items():
        safetensors.torch.save_file({name: tensors[name].contiguous() for name in own}, folder / file)
    if index:
        where = {name: file for file, own in parts.items() for name in own}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_module_without_weights_is_submitted_with_those_of_a_folder(
    tmp_path: Path, index: bool, prefix: str
) -> None:
    torch.manual_seed(3)
    real = Tied()
    named = {name.removeprefix(prefix): tensor for name, tensor in _state(real).items()}
    blank = _job(_meta(), _saved(tmp_path, named, index=index))
    expected, found = prepare(_job(real)), prepare(blank)
    assert found.spec == expected.spec
    assert found.spec.tensors["net.table.weight"] == found.spec.tensors["head.weight"]
    assert {b.hash: b"".join(b.read(0)) for b in found.blobs} == {
        b.hash: b"".join(b.read(0)) for b in expected.blobs
    }


def test_a_folder_is_planned_without_reading_its_tensors(tmp_path: Path) -> None:
    state = {name: torch.full_like(tensor, float("nan")) for name, tensor in _state(Tied()).items()}
    _saved(tmp_path, state, index=True)
    graphs = capture_graphs(_job(_meta(), tmp_path))
    assert graphs.blob.hash == capture_graphs(_job(Tied())).blob.hash


def test_what_a_checkpoint_lacks_stays_as_it_is_and_is_named(tmp_path: Path) -> None:
    module = _meta()
    module.scale = torch.ones(6)
    state = {name: tensor for name, tensor in _state(Tied()).items() if name != "scale"}
    words = with_weights(_job(module, _saved(tmp_path, state, index=False)))
    assert words.endswith("kept as they are: 'scale'")
    assert words.startswith("3 tensors of the module")
    assert torch.equal(module.scale, torch.ones(6))
    assert module.head.weight is module.net.table.weight
    assert not module.net.base.weight.requires_grad


def test_the_base_of_an_adapter_is_found_under_its_own_names(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    real = Tied()
    real.net.base.to(torch.float32)
    folder = _saved(tmp_path, _state(real), index=False)
    other = Tied()
    other.net.base.to(torch.float32)
    adapted = peft.get_peft_model(other, peft.LoraConfig(r=2, target_modules=["base"]))
    words = with_weights(replace(_job(adapted), weights=folder))
    assert "lora_A" in words
    assert torch.equal(other.net.base.base_layer.weight, real.net.base.weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("net.base.weight"), r"'net.base.weight' of the module, on the meta device"),
        (lambda s: s.update({"scale": torch.ones(5)}), r"'scale' of the module has shape \(6,\)"),
        (lambda s: s.update({"scale": torch.ones(6).bfloat16()}), r"build the module in the checkpoint's"),
    ],
)
def test_a_folder_of_another_model_is_refused_with_the_tensors_name(
    tmp_path: Path, change: object, says: str
) -> None:
    state = _state(Tied())
    assert callable(change)
    change(state)
    with pytest.raises(UsageError, match=says):
        with_weights(_job(_meta(), _saved(tmp_path, state, index=False)))


def test_what_is_no_folder_of_weights_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \.safetensors"):
        with_weights(_job(_meta(), tmp_path))
    (tmp_path / "a.safetensors").write_bytes(b"no header")
    with pytest.raises(UsageError, match="cannot be read"):
        with_weights(_job(_meta(), tmp_path))
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(UsageError, match="not an index of safetensors"):
        with_weights(_job(_meta(), tmp_path))
    with pytest.raises(UsageError, match="give the path of a folder"):
        replace(_job(Tied()), weights=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_a_tensors_blob_is_the_file_that_safetensors_writes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(shape).to(dtype)
    blob = tensor_blob(tensor)
    whole = safetensors.torch.save({"value": tensor})
    assert b"".join(blob.read(0)) == whole
    assert blob.size == len(whole)
    assert all(b"".join(blob.read(at)) == whole[at:] for at in (1, 8, len(whole) - 1))
