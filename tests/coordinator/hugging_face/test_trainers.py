"""A Trainer's arguments become a job; what its own steps alone would read is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)

from atoll.errors import UsageError
from atoll.hf import Trainer, job
from coordinator.client.prepare import prepare
from coordinator.hugging_face.resuming import note, resumed
from coordinator.hugging_face.trainer import MOST_DRAWS
from protos import atoll_control_pb2 as pb
from tests.parameters import sampled

ROWS = datasets.Dataset.from_dict(
    {
        "input_ids": [[n, n + 1, n + 2] for n in range(10)],
        "label": [n % 2 for n in range(10)],
        "note": ["a"] * 10,
    }
)


def bert(kind: Any = BertForSequenceClassification) -> Any:
    torch.manual_seed(0)
    return kind(
        BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=8,
        )
    )  # fmt: skip


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(tmp_path / "mine"), use_cpu=True, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, num_train_epochs=2, train_sampling_strategy="sequential",
    )  # fmt: skip


def test_a_job_has_the_columns_that_the_model_takes_and_as_many_steps_as_there(
    arguments: TrainingArguments,
) -> None:
    made = job(bert(), ROWS, arguments, eval_dataset=ROWS.select(range(5)))
    assert {name: tuple(value.shape) for name, value in made.example_inputs.items()} == {
        "input_ids": (2, 3),
        "labels": (2,),
    }
    assert (made.name, made.training.steps, made.training.n_micro) == ("mine", 6, 2)
    assert made.training.eval_batches == 3
    spec = prepare(made).spec
    assert spec.eval_data is not None
    assert (spec.data.n_samples, spec.data.shuffle_seed, spec.eval_data.n_samples) == (10, None, 5)


def test_a_tokenizers_padding_is_to_the_longest_of_all(arguments: TrainingArguments, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0}, "[PAD]")), pad_token="[PAD]"
    )
    rows = datasets.Dataset.from_dict({"input_ids": [[1], [2, 3], [4, 5, 6]], "labels": [0, 1, 0]})
    made = job(bert(), rows, arguments, processing_class=tokenizer)
    assert made.example_inputs["input_ids"].tolist() == [[1, 0, 0], [2, 3, 0]]
    assert made.example_inputs["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert isinstance(
        Trainer(bert(), arguments, processing_class=tokenizer).data_collator, DataCollatorWithPadding
    )


def masked_anew(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As DataCollatorForLanguageModeling masks tokens: others at each call."""
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": torch.where(torch.rand(ids.shape) < 0.5, 31, ids), "labels": ids}


@pytest.mark.parametrize(("epochs", "draws"), [(2, 2), (500, MOST_DRAWS)])
def test_masks_that_are_drawn_are_others_in_each_epoch(tmp_path: Path, epochs: int, draws: int) -> None:
    torch.manual_seed(5)
    given = TrainingArguments(output_dir=str(tmp_path / "m"), use_cpu=True, num_train_epochs=epochs)
    rows = datasets.Dataset.from_dict({"input_ids": [[n, n + 1, n + 2] for n in range(20)]})
    made = job(bert(BertForMaskedLM), rows, given, eval_dataset=rows, data_collator=masked_anew)
    arrays = made.data.arrays
    ids = torch.tensor(arrays["input_ids"]).reshape(draws, 20, 3)
    labels = torch.tensor(arrays["labels"]).reshape(draws, 20, 3)
    assert all(torch.equal(labels[0], one) for one in labels)
    assert len({tuple(one.flatten().tolist()) for one in ids}) == draws
    assert len(made.data.held_out["labels"]) == 20


def test_a_folder_is_loaded_as_the_model_that_it_names(arguments: TrainingArguments, tmp_path: Path) -> None:
    bert(BertForMaskedLM).save_pretrained(tmp_path / "bert")
    rows = ROWS.rename_column("label", "other").add_column("labels", ROWS["input_ids"])
    made = job(tmp_path / "bert", rows, arguments)
    assert type(made.module) is BertForMaskedLM
    adapted = get_peft_model(
        BertForMaskedLM.from_pretrained(tmp_path / "bert"), LoraConfig(r=2, target_modules=["query"])
    )
    adapted.save_pretrained(str(tmp_path / "adapter"))
    resumed = job(str(tmp_path / "adapter"), rows, arguments).module
    assert isinstance(resumed, PeftModel)
    trained = [name for name, parameter in resumed.named_parameters() if parameter.requires_grad]
    assert all(part.training for part in resumed.modules()), "dropout of the base, as in transformers"
    assert len(trained) == 2
    assert all("lora_" in name for name in trained)
    with pytest.raises(UsageError, match="is not a folder"):
        job(tmp_path / "nowhere", rows, arguments)


class Stepping(TrainerCallback):
    """Wants to hear of steps."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class Logging(TrainerCallback):
    """Wants to hear of logs."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class Own(Trainer):
    """Has a loss of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"callbacks": [Stepping()]}, "callbacks: Stepping.on_step_end"),
        ({"callbacks": [EarlyStoppingCallback()]}, "callbacks: EarlyStoppingCallback.on_evaluate"),
        ({"callbacks": [Stepping]}, "callbacks: Stepping.on_step_end"),
        ({"compute_loss_func": max}, "compute_loss_func"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "optimizer_cls_and_kwargs"),
        ({"optimizers": (sgd(bert()), None)}, "optimizers"),
        ({"kind": Own}, "compute_loss"),
    ],
)
def test_what_only_its_own_steps_would_read_is_refused_by_name(
    given: dict[str, Any], named: str, arguments: TrainingArguments
) -> None:
    kind = given.pop("kind", Trainer)
    with pytest.raises(UsageError, match=f"do not honour these of a Trainer: {named}"):
        kind(bert(), arguments, train_dataset=ROWS, **given)


def test_what_is_honoured_here_is_taken(arguments: TrainingArguments) -> None:
    found = Trainer(
        bert(),
        arguments,
        train_dataset=ROWS,
        callbacks=[Logging(), Logging],
        compute_metrics=lambda found: {"one": 1.0},
    )
    assert found.evaluate(ROWS)["eval_one"] == 1.0
    with pytest.raises(UsageError, match="takes no trial"):
        found.train(trial=object())


class Fleet:
    """A coordinator's answers about jobs."""

    def __init__(self, *jobs: pb.JobUpdate, kept: int = 0) -> None:
        self._jobs, self._kept = jobs, kept
        self.restored: list[tuple[str, int, int | None]] = []

    def status(self) -> pb.StatusReply:
        return pb.StatusReply(jobs=self._jobs)

    def checkpoints(self, job: str) -> list[pb.Checkpoint]:
        return [pb.Checkpoint(step=step) for step in range(1, self._kept + 1)]

    def restore(self, job: str, step: int, steps: int | None = None) -> pb.SubmitReply:
        self.restored.append((job, step, steps))
        return pb.SubmitReply(job="j-9")


def seen(state: str, job: str = "j-1", name: str = "mine", steps: int = 6) -> pb.JobUpdate:
    return pb.JobUpdate(job=job, name=name, state=state, steps=steps)


def test_who_resumes_follows_the_job_of_the_folder_or_has_its_newest_checkpoint_trained_on(
    arguments: TrainingArguments, tmp_path: Path
) -> None:
    made = job(bert(), ROWS, arguments)
    note(tmp_path, "j-1", made)
    for state, steps in (("training", 6), ("waiting", 6), ("finished", 6), ("finished", 8)):
        assert resumed(Fleet(seen(state, steps=steps)), True, tmp_path, made) == "j-1"  # type: ignore[arg-type]
    assert resumed(Fleet(seen("training", "j-4")), "j-4", tmp_path, made) == "j-4"  # type: ignore[arg-type]
    for state, steps in (("failed", 6), ("cancelled", 6), ("finished", 3)):
        fleet = Fleet(seen(state, steps=steps), kept=2)
        assert resumed(fleet, True, tmp_path, made) == "j-9"  # type: ignore[arg-type]
        assert fleet.restored == [("j-1", 2, 6)]


def test_who_cannot_resume_hears_why(arguments: TrainingArguments, tmp_path: Path) -> None:
    made = job(bert(), ROWS, arguments)

    def refused(fleet: Fleet, asked: object, words: str, folder: Path = tmp_path) -> None:
        with pytest.raises(UsageError, match=words):
            resumed(fleet, asked, folder, made)  # type: ignore[arg-type]

    refused(Fleet(), True, "no job was submitted for")
    note(tmp_path, "j-1", made)
    refused(Fleet(), True, "there is no job 'j-1'")
    refused(Fleet(seen("failed")), True, "failed before its first checkpoint")
    refused(Fleet(seen("training", name="other")), True, "its name is 'other', not 'mine'")
    arguments.learning_rate = 1.0
    note(tmp_path, "j-1", job(bert(), ROWS, arguments))
    refused(Fleet(seen("training")), True, "it trains with other arguments")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    refused(Fleet(), str(tmp_path / "checkpoint-3"), "a checkpoint of steps on this machine")


def test_the_best_model_is_that_of_the_held_out_loss_stored_as_often_as_evaluated(tmp_path: Path) -> None:
    def arguments(**given: Any) -> TrainingArguments:
        return TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, num_train_epochs=2,
            load_best_model_at_end=True,
            **{"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, **given},
        )  # fmt: skip

    made = job(bert(), ROWS, arguments(), eval_dataset=ROWS).training
    assert (made.eval_every, made.checkpoint_every) == (2, 2)
    whole = arguments(eval_strategy="epoch", save_strategy="epoch")
    made = job(bert(), ROWS, whole, eval_dataset=ROWS).training
    assert (made.eval_every, made.checkpoint_every) == (5, 5)
    for odd, words in (
        ({"save_steps": 4}, "another save_steps than eval_steps"),
        ({"metric_for_best_model": "accuracy"}, "metric_for_best_model = 'accuracy'"),
        ({"greater_is_better": True}, "greater_is_better = True"),
    ):
        with pytest.raises(UsageError, match=words):
            Trainer(bert(), arguments(**odd), train_dataset=ROWS, eval_dataset=ROWS)


class Watched:
    """A client whose job reports these points, (step, name, value), an update each list."""

    def __init__(self, *updates: list[tuple[int, str, float]]) -> None:
        self._updates = updates

    def watch(self, job: str) -> Any:
        for points in self._updates:
            metrics = [pb.MetricPoint(step=step, name=name, value=value) for step, name, value in points]
            yield pb.JobUpdate(job=job, state="training", metrics=metrics)
        yield pb.JobUpdate(job=job, state="finished", step=10, steps=10)


def test_logs_are_of_their_steps_and_of_epochs_where_those_are_asked_for(tmp_path: Path) -> None:
    """Held-out losses come late: workers are a step further by then."""
    given = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, num_train_epochs=2,
        logging_strategy="epoch", eval_strategy="epoch", learning_rate=0.1,
    )  # fmt: skip
    trainer = Trainer(bert(), given, train_dataset=ROWS, eval_dataset=ROWS)
    made = trainer.job()
    early = [*((step, "loss", float(step)) for step in range(1, 7)), (5, "eval_loss", 0.5)]
    late = [(7, "loss", 7.0)], [(5, "eval_loss", 0.5)], [(step, "loss", 8.0) for step in (8, 9, 10)]
    for updates in ((early, *late[::2]), ([one for one in early if one[1] == "loss"], *late)):
        trainer._follow(Watched(*updates), "j-1", made)  # type: ignore[arg-type]
        logs = trainer.state.log_history
        assert [log["step"] for log in logs if "eval_loss" in log] == [5]
        assert [log["epoch"] for log in logs if "eval_loss" in log] == [1.0]
        assert [(log["step"], log["loss"]) for log in logs if "loss" in log] == [(5, 3.0), (10, 7.4)]


def test_several_evaluation_sets_are_refused_where_workers_would_evaluate(tmp_path: Path) -> None:
    several = {"one": ROWS, "other": ROWS}
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, eval_strategy="epoch")
    with pytest.raises(UsageError, match="eval_dataset: several"):
        Trainer(bert(), given, train_dataset=ROWS, eval_dataset=several)


class Endless(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        yield from ROWS


def test_a_stream_is_refused(tmp_path: Path) -> None:
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=3)
    with pytest.raises(UsageError, match="train_dataset has no length"):
        job(bert(), Endless(), given)


@pytest.mark.parametrize("missing", sampled(1, ["transformers", "peft", "accelerate"]))
def test_without_the_extra_its_installation_is_named(missing: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
import atoll.hf
try:
    atoll.hf.Trainer
except Exception as error:
    print(type(error).__name__, error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == f"UsageError atoll.hf needs {missing}; pip install 'atoll[hf]'\n"


def test_the_rest_of_atoll_starts_without_transformers() -> None:
    script = """
import sys
import atoll, atoll.hf, coordinator.cli.main, coordinator.client.prepare, worker.cli.main
print([name for name in ("transformers", "peft", "accelerate", "datasets") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
