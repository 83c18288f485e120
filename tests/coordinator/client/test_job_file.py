import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll import (
    Federated,
    Job,
    OptimizerName,
    Precision,
    Recompute,
    Registered,
    Rows,
    ScheduleKind,
    TrainingSpec,
)
from atoll.errors import AtollError, UsageError
from coordinator.client.job_file import LARGE_BYTES, blaming, load_job, load_module
from coordinator.client.overrides import override_job

GOOD = """
import torch
from atoll import Job, Rows, TrainingSpec

class Net(torch.nn.Module):
    def forward(self, x):
        return x.square().mean()

def job():
    x = torch.zeros(2, 3)
    return Job(Net(), {"x": x}, Rows({"x": torch.zeros(8, 3)}), TrainingSpec(steps=10, n_micro=2), "tiny")
"""


@pytest.fixture(autouse=True)
def _path_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def _write(folder: Path, text: str) -> Path:
    path = folder / "job.py"
    path.write_text(text)
    return path


def _plain() -> Job:
    x = torch.zeros(4, 8)
    return Job(torch.nn.Linear(8, 1), {"input": x}, Rows({"input": x}), TrainingSpec(steps=10, n_micro=2))


def test_a_job_file_gives_its_job(tmp_path: Path) -> None:
    job = load_job(_write(tmp_path, GOOD))
    assert job.name == "tiny"
    assert job.training.steps == 10


def test_overrides_reach_nested_fields_by_their_types(tmp_path: Path) -> None:
    sets = ["optimizer.lr=3e-4", "steps=500", "optimizer.name=sgd", "schedule.kind=cosine", "recompute=full"]
    job = load_job(
        _write(tmp_path, GOOD), [*sets, "optimizer.betas=0.8,0.95", "optimizer.clip_norm=1", "name=other"]
    )
    assert job.training.optimizer.lr == 3e-4
    assert job.training.steps == 500
    assert job.training.optimizer.name is OptimizerName.SGD
    assert job.training.schedule.kind is ScheduleKind.COSINE
    assert job.training.recompute is Recompute.FULL
    assert job.training.optimizer.betas == (0.8, 0.95)
    assert job.training.optimizer.clip_norm == 1.0
    assert job.name == "other"


def test_an_optional_field_can_be_taken_back() -> None:
    job = override_job(_plain(), ["training.optimizer.clip_norm=2", "optimizer.clip_norm=none"])
    assert job.training.optimizer.clip_norm is None


def test_patience_comes_with_its_evaluations_and_not_with_rounds() -> None:
    sets = ["patience=2", "eval_every=5", "eval_batches=1"]
    assert override_job(_plain(), sets).training.patience == 2
    rounds = dataclasses.replace(_plain(), data=Registered("digits", {"input": "x"}), federated=Federated())
    with pytest.raises(UsageError, match="patience = 2 of a federated job"):
        override_job(rounds, sets)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("lr=1", "unknown field; known here: steps, n_micro"),
        ("optimizer.rate=1", "unknown field; known here: name, lr"),
        ("optimizer=adamw", "set one of optimizer.name"),
        ("steps.more=1", "has no fields"),
        ("steps", "write FIELD=VALUE"),
        ("=3", "write FIELD=VALUE"),
        ("steps=many", "use a whole number"),
        ("steps=1.5", "use a whole number"),
        ("optimizer.lr=fast", "use a number"),
        ("optimizer.betas=0.9", "use 2 numbers"),
        ("optimizer.groups=x", "set it in the job file"),
        ("precision=fp8", "use one of fp32, bf16"),
        ("recompute=maybe", "use one of off, selective, full, auto"),
        ("steps=0", "give a number from 1"),
        ("patience=2", "patience = 2 with eval_every = 0 and eval_batches = 0; give both"),
        ("patience=-1", "give a number from 0"),
    ],
)
def test_a_wrong_override_says_what_would_be_accepted(item: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        override_job(_plain(), [item])


@given(st.floats(min_value=1e-9, max_value=1e3), st.integers(1, 10**9), st.sampled_from(list(Precision)))
def test_what_is_printed_can_be_set_again(lr: float, steps: int, precision: Precision) -> None:
    job = override_job(_plain(), [f"optimizer.lr={lr!r}", f"steps={steps}", f"precision={precision}"])
    assert (job.training.optimizer.lr, job.training.steps, job.training.precision) == (lr, steps, precision)


def test_fields_of_a_federation_are_set_in_any_order() -> None:
    rule = Federated("fedprox", options={"mu": 1.0})
    registered = Registered("digits", {"input": "x"})
    job = dataclasses.replace(_plain(), data=registered, federated=rule)
    sets = [
        "federated.clients=1",
        "federated.min_clients=1",
        "federated.held_out=0.2",
        "federated.consent_s=60",
    ]
    more = ["federated.options.mu=0.5", "federated.local=head.*,norm.*", "federated.error_feedback=off"]
    found = override_job(job, [*sets, *more, "metrics=accuracy", "steps=3"])
    expected = Federated(
        "fedprox", {"mu": 0.5}, clients=1, min_clients=1, held_out=0.2, consent_s=60.0,
        local=("head.*", "norm.*"), error_feedback=False,
    )  # fmt: skip
    assert (found.federated, found.metrics, found.training.steps) == (expected, ("accuracy",), 3)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("federated.rounds=3", "unknown field; known here: strategy, options"),
        ("federated.clients=many", "use a whole number"),
        ("federated.options=1", "write options.OPTION=VALUE"),
        ("federated.clients=-1", "give a whole number from 0"),
    ],
)
def test_a_wrong_field_of_a_federation_says_what_would_be_accepted(item: str, message: str) -> None:
    job = dataclasses.replace(_plain(), data=Registered("digits", {"input": "x"}), federated=Federated())
    with pytest.raises(UsageError, match=message):
        override_job(job, [item])


def test_what_work_on_a_job_raises_is_told_with_the_files_own_line(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD.replace("return x.square().mean()", "return x + 'a'"))
    module = load_job(path).module
    with (
        pytest.raises(UsageError, match=r"job\.py:7: TypeError: .* at `return x \+ 'a'`"),
        blaming(path, False),
    ):
        module(torch.zeros(1))


def test_what_leads_to_no_line_of_the_file_is_told_in_words_too(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD)
    told = r"ZeroDivisionError: .*, at .*\.py:\d+; --trace shows"
    with pytest.raises(AtollError, match=told), blaming(path, False):
        1 // 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), blaming(path, True):
        1 // 0  # noqa: B018


def test_a_file_that_raises_is_told_with_its_own_line(tmp_path: Path) -> None:
    path = _write(tmp_path, "import json\n\ndef job():\n    return json.loads('{')\n")
    with pytest.raises(UsageError, match=r"job\.py:4: JSONDecodeError: .* at `return json"):
        load_job(path)


def test_the_whole_traceback_is_there_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        load_job(_write(tmp_path, "1 / 0\n"), full_trace=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def job(:\n", r"job\.py:1: SyntaxError"),
        ("x = 1\n", r"no function job\(\)"),
        ("def job(lr, *rest, width=2): pass\n", "needs lr; give them defaults"),
        ("def job():\n    return 3\n", "returned 3; return an atoll.Job"),
        ("import sys\nsys.exit(3)\n", r"job\.py:2: SystemExit"),
        ("import nowhere_to_be_found\n", r"job\.py:1: ModuleNotFoundError"),
    ],
)
def test_a_file_that_is_no_job_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_job(_write(tmp_path, text))


def test_a_missing_file_is_refused_with_the_one_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for missing, said in (
        ("none.py", r"none\.py is not there; give the path of a job file"),
        ("mine", r"mine is a folder; give the path of a job file in it"),
        ("mnie/job.py", r"job\.py is not there, nor is its folder .*mnie;"),
    ):
        with pytest.raises(UsageError, match=said):
            load_job(tmp_path / missing)
    (tmp_path / "mine" / "job.py").touch()
    for missing, said in (
        ("mine", r"mine is a folder; give .*mine/job\.py$"),
        ("mine/jbo.py", r"jbo\.py is not there; is it .*mine/job\.py\?"),
    ):
        with pytest.raises(UsageError, match=said):
            load_job(tmp_path / missing)


def test_loading_twice_gives_two_modules_and_neighbours_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "atoll_test_neighbour.py").write_text("VALUE = 7\n")
    path = _write(tmp_path, "import atoll_test_neighbour as n\nvalue = [n.VALUE]\n")
    first, second = load_module(path), load_module(path)
    assert first is not second
    assert first.value == [7]


def test_a_job_files_own_constants_can_be_set_by_name() -> None:
    gpt = Path(__file__).resolve().parents[3] / "examples" / "gpt.py"
    made = load_job(gpt, ["MICRO_BATCH=3", "n_micro=5"])
    assert made.example_inputs["tokens"].shape[0] == 3
    assert made.training.n_micro == 5
    with pytest.raises(UsageError, match="has no constant WIDHT"):
        load_job(gpt, ["WIDHT=3"])
    with pytest.raises(UsageError, match="give a int"):
        load_job(gpt, ["MICRO_BATCH=three"])


LARGE = """
import torch
from atoll import Job, Rows, TrainingSpec

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large = torch.nn.Linear(1024, 512)
        self.small = torch.nn.Linear(512, 2)
        self.scale = torch.nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return self.small(self.large(x * self.scale)).square().mean()

def job():
    x = torch.zeros(2, 1024)
    return Job(Net(), {"x": x}, Rows({"x": torch.zeros(8, 1024)}), TrainingSpec(steps=10, n_micro=2), "large")
"""


def test_weights_of_a_model_that_is_only_planned_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path, LARGE)
    drawn = load_job(path).module.state_dict()
    filled: list[int] = []
    uniform = torch.Tensor.uniform_
    monkeypatch.setattr(
        torch.Tensor, "uniform_", lambda t, *a, **k: (filled.append(t.nbytes), uniform(t, *a, **k))[1]
    )
    blank = load_job(path, shapes_only=True).module.state_dict()
    assert filled
    assert max(filled) < LARGE_BYTES <= drawn["large.weight"].nbytes
    assert {name: t.shape for name, t in blank.items()} == {name: t.shape for name, t in drawn.items()}
    assert torch.equal(blank["scale"], drawn["scale"])
    assert float(blank["small.weight"].abs().max()) > 0.0


def test_a_plan_of_shapes_is_the_plan_of_the_weights(tmp_path: Path) -> None:
    from coordinator.client.prepare import capture_graphs

    path = _write(tmp_path, LARGE)
    graphs = [capture_graphs(load_job(path, shapes_only=only)) for only in (False, True)]
    assert graphs[0].blob.hash == graphs[1].blob.hash
    assert graphs[0].eval_blob.hash == graphs[1].eval_blob.hash
