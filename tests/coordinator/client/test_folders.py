"""Folders for transformers and peft: written by the module that was trained, whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from atoll.errors import StorageError, UsageError
from coordinator.client.client import Client
from coordinator.client.export import Format
from protos import atoll_control_pb2 as pb
from tests.coordinator.client.fake_owner import FakeOwnerServer, Script

SIZES = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=8,
)  # fmt: skip
IDS = torch.arange(6).reshape(1, 6)


class Wrapped(nn.Module):
    """A model of transformers in a module of its owner's."""

    def __init__(self, inner: nn.Module, head: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(2, 2) if head else None


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with FakeOwnerServer(script) as server, Client(server.endpoint) as client:
        yield client


def bert(seed: int) -> BertForMaskedLM:
    torch.manual_seed(seed)
    return BertForMaskedLM(SIZES).eval()


def adapted(seed: int) -> PeftModel:
    """Another seed is another adapter on the same base."""
    found = get_peft_model(bert(0), LoraConfig(r=2, target_modules=["query", "value"]))
    torch.manual_seed(seed)
    for parameter in found.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return found.eval()


def trained(script: Script, module: nn.Module, prefix: str = "") -> None:
    """Have the coordinator hold the module's tensors, a tied one once."""
    reply = pb.ResultReply(step=7, update=pb.JobUpdate(job="j-1", name="bert"), prefix=prefix)
    seen: dict[int, str] = {}
    for name, tensor in module.state_dict().items():
        if (first := seen.setdefault(tensor.data_ptr(), name)) != name:
            reply.aliases.add(alias=prefix + name, name=prefix + first)
            continue
        data = save({"value": tensor.contiguous()})
        script.blobs[hashlib.sha256(data).hexdigest()] = data
        reply.tensors.add(name=prefix + name, blob=hashlib.sha256(data).hexdigest())
    script.result = reply


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_folder_of_a_model_is_loaded_with_no_key_missing(
    script: Script, client: Client, tmp_path: Path, prefix: str
) -> None:
    source = bert(1)
    trained(script, source, prefix)
    found = client.export_folder("j-1", tmp_path / "out" / "bert", bert(2), Format.HF)
    loaded, report = BertForMaskedLM.from_pretrained(found.path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, source(IDS).logits)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert [path.name for path in found.path.parent.iterdir()] == ["bert"]
    assert found.step == 7


@pytest.mark.parametrize("frozen", ["", "lora_A"])
def test_an_adapter_is_fetched_and_written_without_its_base(
    script: Script, client: Client, tmp_path: Path, frozen: str
) -> None:
    """A frozen factor too: a strategy may change it on the server."""
    source, module = adapted(1), adapted(2)
    for name, parameter in module.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    trained(script, source)
    for blob in {t.blob for t in script.result.tensors if ".lora_" not in t.name}:
        del script.blobs[blob]  # whoever asks for the base is refused
    found = client.export_folder("j-1", tmp_path / "adapter", module, Format.PEFT)
    keys = load_file(found.path / "adapter_model.safetensors").keys()
    assert len(keys) == found.tensors == 8
    assert all(key.startswith("base_model.model.bert.") and "default" not in key for key in keys)
    loaded = PeftModel.from_pretrained(bert(0), str(found.path)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, source(IDS).logits)


def test_an_adapter_that_changes_nothing_is_refused(script: Script, client: Client, tmp_path: Path) -> None:
    source = adapted(1)
    for name, parameter in source.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    trained(script, source)
    with pytest.raises(UsageError, match=r"every B is 0.*--format hf"):
        client.export_folder("j-1", tmp_path / "adapter", adapted(2), Format.PEFT)
    assert client.export_folder("j-1", tmp_path / "merged", adapted(2), Format.HF).path.is_dir()


def test_a_folder_of_an_adapted_model_is_the_model_with_the_adapter_merged(
    script: Script, client: Client, tmp_path: Path
) -> None:
    source = adapted(1)
    trained(script, source)
    found = client.export_folder("j-1", tmp_path / "merged", adapted(2), Format.HF)
    loaded = BertForMaskedLM.from_pretrained(found.path).eval()
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, source(IDS).logits, atol=1e-5)
        assert not torch.allclose(loaded(IDS).logits, bert(0)(IDS).logits, atol=1e-2)


def test_a_model_inside_another_module_writes_itself(script: Script, client: Client, tmp_path: Path) -> None:
    source = Wrapped(bert(1))
    trained(script, source)
    client.export_folder("j-1", tmp_path / "bert", Wrapped(bert(2)), Format.HF)
    loaded = BertForMaskedLM.from_pretrained(tmp_path / "bert").eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, source.inner(IDS).logits)


def plain() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "form", "words"),
    [
        (plain(), Format.HF, "nothing in Linear has save_pretrained"),
        (bert(1), Format.PEFT, "BertForMaskedLM has no adapter of peft; give --format hf"),
        (
            Wrapped(bert(1), head=True),
            Format.HF,
            "without 2 parameters of Wrapped, the first is 'head.weight'",
        ),
    ],
)
def test_a_module_that_cannot_write_itself_is_refused(
    script: Script, client: Client, tmp_path: Path, module: nn.Module, form: Format, words: str
) -> None:
    trained(script, module)
    with pytest.raises(UsageError, match=words):
        client.export_folder("j-1", tmp_path / "out", module, form)
    assert not list(tmp_path.iterdir())


def test_a_job_files_other_model_is_refused_by_its_tensors(
    script: Script, client: Client, tmp_path: Path
) -> None:
    trained(script, bert(1))
    smaller = BertForMaskedLM(BertConfig(**{**SIZES.to_dict(), "vocab_size": 16}))
    with pytest.raises(UsageError, match=r"'bert.embeddings.word_embeddings.weight' has shape \(32, 16\)"):
        client.export_folder("j-1", tmp_path / "out", smaller, Format.HF)
    with pytest.raises(UsageError, match="'weight' is missing"):
        client.export_folder("j-1", tmp_path / "out", plain(), Format.HF)


def test_a_folder_that_is_there_is_left_alone(script: Script, client: Client, tmp_path: Path) -> None:
    trained(script, bert(1))
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="already exists"):
        client.export_folder("j-1", tmp_path, bert(2), Format.HF)
    with pytest.raises(StorageError, match="give another -o"):
        client.export_folder("j-1", tmp_path / "mine" / "out", bert(2), Format.HF)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
