"""T5, ViT, Whisper, Gemma, Qwen and Mixtral are captured as they are, and no cut changes their bits.

One cut of each in the default run; every mode, precision and many cuts where `slow` tests run.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from atoll.errors import CaptureError
from atoll.job import Optimizer, Precision, TrainingSpec
from atoll.ops import GROUPED
from atoll.program import stage_programs
from atoll.rehearse import rehearse
from benchmarks.oracle import (
    Case,
    Run,
    built_in,
    difference,
    plain_training,
    random_starts,
    run_local,
    run_plain,
)
from coordinator.capture.capture import capture
from coordinator.capture.self_check import self_check
from coordinator.cli.main import app
from hostos.command_line import run
from tests.coordinator.capture.architectures import ARCHITECTURES, mixtral, qwen
from tests.coordinator.capture.captured import Honest, honest
from tests.coordinator.capture.test_capture import check_invariants

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(steps=3, n_micro=2, seed=11, optimizer=Optimizer(weight_decay=0.01, clip_norm=0.5))


def prove(found: Honest) -> None:
    """Both graphs are well formed and agree with the module on another batch."""
    captured = found.captured
    assert self_check(found.example.module, captured, found.example.make_batch(3)).compared > 20
    for dag in (captured.train, captured.evaluation):
        check_invariants(dag)
    assert any(node.random for node in captured.train.ops)
    assert not any(node.random for node in captured.evaluation.ops)


@cache
def case(name: str) -> Case:
    return honest(f"{name}:fp32").case(TRAINING)


@cache
def one_stage(name: str) -> Run:
    return run_local(case(name), (0,))


def differs(name: str, stages: int, seed: int) -> float:
    starts = random_starts(case(name).dag, stages, random.Random(seed))
    return difference(run_local(case(name), starts), one_stage(name))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_unmodified_model_is_captured_in_both_modes_and_proves_itself(name: str) -> None:
    prove(honest(f"{name}:fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_in_bf16_too(name: str) -> None:
    prove(honest(f"{name}:bf16"))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_random_cut_in_three_is_bit_equal_to_one_stage(name: str) -> None:
    assert differs(name, 3, seed=1) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_stage_passes_its_rehearsal(name: str, precision: Precision) -> None:
    captured = honest(f"{name}:{precision.value}").captured
    for dag in (captured.train, captured.evaluation):
        leaves = {n: s.meta for n, s in (dag.parameters | dag.buffers).items()} | dag.constants
        for stage in stage_programs(dag, random_starts(dag, 3, random.Random(2))):
            rehearse(stage, leaves, dag.inputs, precision)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_random_cuts_in_two_to_four_are_bit_equal_to_one_stage(name: str, stages: int, seed: int) -> None:
    assert differs(name, stages, seed) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_one_stage_agrees_with_the_plain_module(name: str) -> None:
    plain = built_in(name, plain_training(TRAINING), 0.0)
    assert difference(run_local(plain, (0,)), run_plain(plain), figures=1) <= 1e-6


def test_experts_whose_shares_depend_on_the_data_are_refused_with_the_switch() -> None:
    example = mixtral(experts="eager")
    with pytest.raises(CaptureError, match='experts_implementation="grouped_mm"') as refusal:
        capture(example.module, example.example_inputs)
    assert "model.layers.0.mlp.experts" in str(refusal.value)


def test_experts_in_batches_are_captured_too() -> None:
    example = mixtral(experts="batched_mm")
    captured = capture(example.module, example.example_inputs)
    assert GROUPED not in {node.target for node in captured.train.ops}
    assert GROUPED in {node.target for node in honest("mixtral:fp32").captured.train.ops}
    assert self_check(example.module, captured, example.make_batch(3)).compared > 20


def test_attention_that_cannot_be_trained_here_is_refused_with_the_switch() -> None:
    example = qwen(attention="flex_attention")
    with pytest.raises(CaptureError, match='attn_implementation="sdpa"'):
        capture(example.module, example.example_inputs)


def test_atoll_ops_names_the_switch_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experts.py").write_text(
        "from atoll import Job, Rows, TrainingSpec\n"
        "from tests.coordinator.capture.architectures import mixtral\n\n\n"
        "def job():\n"
        "    model = mixtral(experts='eager')\n"
        "    rows = Rows(dict(model.example_inputs))\n"
        "    return Job(model.module, model.example_inputs, rows, TrainingSpec(steps=1, n_micro=1))\n"
    )
    assert run(app, ["ops", str(tmp_path / "experts.py")]) == 3
    assert 'experts_implementation="grouped_mm"' in " ".join(capsys.readouterr().err.split())
