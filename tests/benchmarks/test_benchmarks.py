"""`make bench`: its list, what cannot be run here, and values that are wrong."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from atoll.errors import UsageError
from benchmarks import (
    adaptive_compression,
    gpu,
    harness,
    journal,
    oracle,
    pipeline_vs_torch,
    transport,
    two_parts,
)
from benchmarks.adaptive_compression import Series, same_losses
from benchmarks.harness import CommandFailed, LabFleet, conclude, execute, fitting, follow
from benchmarks.pipeline_vs_torch import strays
from coordinator.client.job_file import load_job
from tests.parameters import sampled
from tests.patience import HUNG_S

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
HELPERS = {"prestart", "looking", "small_jobs"}  # processes of a fleet in the lab; they measure nothing
REPORT = "report"  # runs others
SHARED = ("harness", "registered_fleet", "bandwidth_lab")
STARTS = re.compile(r"\b(Lab|Registered|App)Fleet\)?[(:]")
IN_THE_LAB = sorted(name for name, text in SOURCES.items() if name not in SHARED and STARTS.search(text))


def ended(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a benchmark's main."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    try:
        return int(module.main() or 0)
    except SystemExit as end:
        return int(end.code or 0)


# ---------------------------------------------------------------- the list


def test_make_bench_lists_every_benchmark_once() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^BENCHMARKS := (.*)$", text, re.MULTILINE)
    assert found is not None
    programs = {name for name, source in SOURCES.items() if '__name__ == "__main__"' in source}
    assert sorted(found[1].split()) == sorted(programs - {*HELPERS, REPORT})


# ---------------------------------------------------------------- what cannot be run here


def test_every_benchmark_that_starts_a_fleet_in_the_lab_is_known() -> None:
    assert {"pipeline_vs_torch", "vs_flower"} <= set(IN_THE_LAB)


WHERE_ASKED = {"wan_speedrun"}
"""Benchmarks that start a fleet in the lab with ``--lab`` alone."""


@pytest.mark.parametrize("name", IN_THE_LAB)
def test_without_a_lab_a_benchmark_says_so_and_ends_well(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "unavailable", lambda: "not root")
    module = importlib.import_module(f"benchmarks.{name}")
    asked = ["--lab"] if name in WHERE_ASKED else []
    assert ended(module, monkeypatch, "--json", *asked) == 0
    line, last = capsys.readouterr().out.splitlines()
    assert line == "skipped: no lab here: not root"
    assert json.loads(last) == {"skipped": "no lab here: not root"}


def test_lab_links_alone_are_skipped_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "unavailable", lambda: "no ip command")
    assert ended(transport, monkeypatch, "--scenario", "lossy") == 0
    assert capsys.readouterr().out == "skipped: no lab here: no ip command\n"


def test_settings_of_the_usual_job_leave_another_one_as_it_is(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("WIDTH: int = 8\nLAYERS = 2\n\ndef job() -> None:\n    LENGTH = 3\n")
    usual = ("LAYERS=8", "LENGTH=128", "WIDTH=4", "n_micro=16", "optimizer.lr=1")
    assert fitting(usual, str(job)) == ["LAYERS=8", "WIDTH=4", "n_micro=16", "optimizer.lr=1"]


def test_without_a_gpu_its_benchmark_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ended(gpu, monkeypatch, "--json") == 0
    line, last = capsys.readouterr().out.splitlines()
    assert line == "skipped: no CUDA"
    assert json.loads(last) == {"skipped": "no CUDA"}


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("equal", [True, False])
def test_orders_of_work_that_differ_in_a_gradient_are_told(
    equal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not equal:
        monkeypatch.setattr(two_parts, "_take", lambda _: None)
    options = ("--stages", "2", "--rounds", "1", "--set", "WIDTH=32", "--set", "LAYERS=2", "--json")
    assert ended(two_parts, monkeypatch, *options) == (0 if equal else 1)
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["stage"], row["same"], set(row["cpu_ms"])) == (1, equal, set(two_parts.ORDERS))


def test_wrong_values_are_told_before_the_figures_and_in_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert conclude({"a": 1}, True) == 0
    assert capsys.readouterr().out == '{"a": 1}\n'
    assert conclude({"a": 1}, True, "losses differ") == 1
    assert capsys.readouterr().out == 'WRONG VALUES: losses differ\n{"a": 1}\n'
    assert conclude({"a": 1}, False, "losses differ") == 1
    assert capsys.readouterr().out == "WRONG VALUES: losses differ\n"


@pytest.mark.parametrize(
    ("losses", "same"),
    [
        ([4.0, 3.0], True),
        ([4.0, 3.005], True),
        ([4.0, 3.007], False),
        ([4.0], False),
        ([4.0, 3.0, 2.0], False),
        ([4.0, math.nan], False),
    ],
)
def test_losses_follow_a_reference_step_by_step_and_are_as_many(losses: list[float], same: bool) -> None:
    assert follow(losses, [4.0, 3.0], 2e-3) is same


@pytest.mark.parametrize("losses", [[], [math.nan], [math.inf]])
def test_losses_that_are_no_numbers_agree_with_nothing(losses: list[float]) -> None:
    assert not follow(losses, losses, 2e-3)


def test_each_run_is_compared_with_the_reference_of_its_round() -> None:
    losses = {"ours": {0: [4.0], 1: [5.0]}, "even": {0: [4.0], 1: [5.0]}, "rival": {1: [5.0]}}
    assert strays(losses, "ours") == []
    losses["even"] = {0: [5.0], 1: [5.0]}
    losses["rival"] = {1: [4.0]}
    assert strays(losses, "ours") == ["even in round 0", "rival in round 1"]


def test_a_round_that_differs_shows_although_a_later_one_does_not() -> None:
    reference, other = Series(), Series()
    for number in range(2):
        reference.add({"step_s": [1.0], "loss": [4.0, 3.0]}, number)
        other.add({"step_s": [1.0], "loss": [4.0, 3.0 + 0.1 * (number == 0)]}, number)
    assert not same_losses({"op_fence_off": reference, "even_off": other}, "op_fence_off")
    other.losses[0] = [4.0, 3.0]
    assert same_losses({"op_fence_off": reference, "even_off": other}, "op_fence_off")


def test_a_stopped_job_gives_the_figures_of_the_steps_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = object.__new__(LabFleet)
    monkeypatch.setattr(fleet, "atoll", lambda *args: {"job": "j"}, raising=False)
    updates = [{"state": "cancelled", "step": 4, "plan": {"stages": []}}]
    monkeypatch.setattr(fleet, "_watched", lambda *args: updates, raising=False)
    series = {"step_s": [1.0, 2.0, 3.0, 4.0], "loss": [9.0, 8.0, 7.0, 6.0]}
    monkeypatch.setattr(fleet, "_metrics", lambda job: series, raising=False)
    run = fleet.train("job.py", "even", [], stop_after=3)
    assert (run["step_s"], run["loss"]) == ([1.0, 2.0, 3.0], [9.0, 8.0, 7.0])


# ---------------------------------------------------------------- pipeline_vs_torch


class FakeFleet:
    """Runs of made-up losses and seconds; ``odd``: (name, round) whose losses are others."""

    scenario = SimpleNamespace(name="fake", join_order=("a", "b"))
    odd: tuple[str, int] | None = None
    step_s = (1.0, 4.0, 2.0)  # by round

    def __init__(self, scenario: str) -> None:
        self.runs: dict[str, int] = {}

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def _run(self, name: str) -> dict[str, Any]:
        number = self.runs.get(name, 0)
        self.runs[name] = number + 1
        loss = [4.0 + number, 3.5 if (name, number) == self.odd else 3.0]
        return {"step_s": [self.step_s[number]] * 3, "loss": loss}

    def train(self, job: str, name: str, settings: list[str], stop_after: int) -> dict[str, Any]:
        if stop_after == pipeline_vs_torch.REFRESHING_STEPS:
            return {}
        prediction = {"step_s": 1.0, "lower_bound_s": 0.5, "bottleneck": "latency"}
        stage = {"start": 0, "stop": 5, "workers": ["w1"]}
        plan = {"prediction": prediction, "stages": [stage], "schedule": "1f1b"}
        return {**self._run(name), "plan": plan}

    def rival(self, job: str, order: list[str], name: str, steps: int, settings: list[str]) -> dict[str, Any]:
        if name == "1f1b":
            raise CommandFailed("a rank failed")
        return self._run(name)

    def status(self) -> dict[str, Any]:
        return {"workers": [{"worker": "w1", "name": "a"}]}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> type[FakeFleet]:
    class Fleet(FakeFleet):
        """Of one test."""

    monkeypatch.setattr(pipeline_vs_torch, "LabFleet", Fleet)
    monkeypatch.setattr(harness, "unavailable", lambda: None)
    return Fleet


PIPELINE = ("--json", "--rounds", "3", "--steps", "3", "--job", str(ROOT / "examples" / "gpt.py"))


def test_the_limit_ratio_is_the_median_of_all_rounds(
    fleet: type[FakeFleet], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(pipeline_vs_torch, monkeypatch, *PIPELINE) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours = ("op_fence", "one_piece", "proportional", "even")
    assert found["limit_ratio"] == dict.fromkeys(ours, 4.0)
    assert found["same_losses"] is True
    assert list(found["refused"]) == ["torch_1f1b"]


def test_the_rival_has_no_more_devices_than_the_model_has_blocks(fleet: type[FakeFleet]) -> None:
    five = fleet("homes")
    names = [{"worker": f"w{n}", "name": name} for n, name in enumerate("abcde")]
    five.status = lambda: {"workers": names}  # type: ignore[method-assign]
    starts = (0, 20, 25, 60, 80, 99)
    cut = enumerate(itertools.pairwise(starts))
    plan = {"stages": [{"start": a, "stop": b, "workers": [f"w{n}"]} for n, (a, b) in cut]}
    lab: Any = five

    def hosts(blocks: int, stages: int = 5) -> list[str]:
        module = torch.nn.ModuleList(torch.nn.Identity() for _ in range(blocks))
        return pipeline_vs_torch.hosts_of(lab, {"stages": plan["stages"][:stages]}, module)

    assert hosts(8) == ["a", "b", "c", "d", "e"]
    assert hosts(4) == ["a", "c", "d", "e"]
    assert hosts(4, stages=1) == ["a", "b"]
    assert hosts(0) == ["a", "c"]  # which the rival then refuses
    lacking: Any = torch.nn.Linear(1, 1)
    assert pipeline_vs_torch.hosts_of(lab, plan, lacking) == ["a", "c"]


def test_ranks_that_wait_for_one_that_failed_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = object.__new__(LabFleet)
    monkeypatch.setattr(fleet, "_quotas", lambda hosts, held: None, raising=False)
    killed: list[Any] = []
    monkeypatch.setattr(
        fleet, "lab", SimpleNamespace(kill=lambda p: (killed.append(p), p.kill())), raising=False
    )

    def rank(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    waits, fails = rank("import time; time.sleep(60)"), rank("raise SystemExit('no such split')")
    fleet._when_built(["a", "b"], [waits, fails])
    with pytest.raises(CommandFailed, match="a rank failed: no such split"):
        fleet._ended([waits, fails], "torch")
    assert killed == [waits]
    built = [rank("print('loading', flush=True); print('built', flush=True); print('{}')") for _ in range(2)]
    fleet._when_built(["a", "b"], built)
    assert [out for out, _ in fleet._ended(built, "torch")] == [b"{}\n"] * 2


def test_the_rival_s_ranks_may_dial_each_other_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = object.__new__(LabFleet)
    doors: list[tuple[str, bool]] = []

    def popen(host: str, command: list[str], **_: object) -> subprocess.Popen[bytes]:
        assert doors == [("a", True), ("b", True)]
        code = "raise SystemExit('no such split')"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    lab = SimpleNamespace(
        address=lambda host: "10.0.0.1",
        popen=popen,
        open_door=lambda host, opened: doors.append((host, opened)),
        kill=lambda process: process.kill(),
    )
    for name, value in {
        "lab": lab,
        "python": sys.executable,
        "_quotas": lambda hosts, held: None,
        "_environment": dict,
    }.items():
        monkeypatch.setattr(fleet, name, value, raising=False)
    with pytest.raises(CommandFailed, match="no such split"):
        fleet.rival("job.py", ["a", "b"], "gpipe", 1, [])
    assert doors[2:] == [("a", False), ("b", False)]


def test_only_what_is_asked_for_runs_beside_op_fence(
    fleet: type[FakeFleet], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(pipeline_vs_torch, monkeypatch, *PIPELINE, "--only", "even", "torch_gpipe") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["samples_per_s"]) == {"op_fence", "even", "torch_gpipe"}
    assert set(found["limit_ratio"]) == {"op_fence", "even"}
    assert found["refused"] == {}


@pytest.mark.parametrize(("odd", "told"), [(("even", 0), "even"), (("gpipe", 1), "torch_gpipe")])
def test_other_losses_in_any_round_end_the_benchmark_with_a_failure(
    odd: tuple[str, int],
    told: str,
    fleet: type[FakeFleet],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet.odd = odd
    assert ended(pipeline_vs_torch, monkeypatch, *PIPELINE) == 1
    *_, words, last = capsys.readouterr().out.splitlines()
    assert words == f"WRONG VALUES: the losses of {told} in round {odd[1]} (fake) differ from op_fence's"
    found = json.loads(last)
    assert found["same_losses"] is False
    assert found["strays"] == [f"{told} in round {odd[1]}"]


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_other_losses_of_dense_variants_fail_the_slow_link_benchmark(
    same: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "unavailable", lambda: None)
    result = {"scenario": "home_pair", "same_losses": same}
    monkeypatch.setattr(adaptive_compression, "compare", lambda *args: result)
    monkeypatch.setattr(adaptive_compression, "show", lambda result: None)
    assert ended(adaptive_compression, monkeypatch, "--json", "--scenario", "home_pair") == code
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == result
    assert ("WRONG VALUES: dense variants gave different losses in home_pair" in out) is not same


# ---------------------------------------------------------------- gpu

TINY = ("LENGTH=16", "WIDTH=32", "LAYERS=2", "MICRO_BATCH=2", "n_micro=2", "steps=4", "eval_batches=0")


@pytest.fixture(scope="module", params=sampled(1, ["fp32", "bf16"]))
def case(request: pytest.FixtureRequest) -> gpu.Case:
    path = ROOT / "examples" / "gpt.py"
    return gpu.case_of_job(load_job(path, [*TINY, f"precision={request.param}"]))


def test_plain_torch_and_our_stages_train_alike_from_the_same_weights(case: gpu.Case) -> None:
    settled: list[str] = []
    found = gpu.measure(case, torch.device("cpu"), lambda: settled.append("ours"), 1.0)
    assert settled == ["ours"]
    assert found["same_losses"] == {"plain": True, "one_stage": True, "two_stages": True}
    assert found["samples_per_step"] == 4
    assert len(found["losses"]["plain"]) == 4
    assert found["losses"]["plain"][-1] < found["losses"]["plain"][0]
    assert found["loss_tolerance"] == gpu.LOSS_TOLERANCE[case.training.precision]


def test_a_model_that_trains_otherwise_is_noticed(case: gpu.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu.ours

    def wrong(case: gpu.Case, device: torch.device, n_stages: int) -> gpu.Run:
        run = right(case, device, n_stages)
        return gpu.Run(run.step_s, [loss * (1.0 if n_stages == 1 else 1.02) for loss in run.losses])

    monkeypatch.setattr(gpu, "ours", wrong)
    found = gpu.measure(case, torch.device("cpu"), lambda: None, 1.0)
    assert found["same_losses"] == {"plain": True, "one_stage": True, "two_stages": False}


def test_two_stages_share_the_work_about_evenly(case: gpu.Case) -> None:
    assert gpu.even_starts(case.dag, 1) == [0]
    first, second = gpu.even_starts(case.dag, 2)
    total = sum(op.flops_forward for op in case.dag.ops)
    assert first == 0
    assert 0.3 < sum(op.flops_forward for op in case.dag.ops[:second]) / total < 0.7


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [(UsageError("no scenario 'x'"), 2, "error: no scenario 'x'\n"), (KeyboardInterrupt(), 130, "")],
)
def test_a_users_error_ends_a_benchmark_with_one_line(
    capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, said: str
) -> None:
    def main() -> int:
        raise raised

    with pytest.raises(SystemExit) as left:
        execute(main)
    assert (left.value.code, capsys.readouterr().err) == (code, said)


def test_every_benchmark_leaves_so() -> None:
    for name, source in SOURCES.items():
        if "__main__" in source and name not in HELPERS:
            assert source.endswith("    execute(main)\n"), name


def test_a_job_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot read the job file nosuch\.py"):
        fitting(("MICRO_BATCH=4",), "nosuch.py")


def test_the_oracle_runs_as_a_file_too(tmp_path: Path) -> None:
    """From any folder."""
    command = [sys.executable, str(ROOT / "benchmarks" / "oracle.py"), "--job", "nosuch.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_S)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "nosuch.py is not there" in ran.stderr


def test_the_oracle_takes_models_by_name() -> None:
    assert oracle.model_names("t5, vit") == ("t5", "vit")
    assert {*oracle.BUILT_IN, "mixtral"} < {*oracle.model_names("all")}
    with pytest.raises(UsageError, match=r"no model 'vgg'; give all, or some of mlp,"):
        oracle.model_names("t5,vgg")


def test_a_journals_snapshot_and_all_its_records_are_the_same_state() -> None:
    figures = journal.measured(steps=1500, seed=3)
    assert (figures["same_state"], figures["records_after_snapshot"]) == (True, 1500)
    assert (
        figures["records"] == 2000 + 1500 + 3 * 2 + 3 + 2 + 1
    )  # steps, beginnings, checkpoints, ends, the term
