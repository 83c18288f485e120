"""benchmarks.codecs: it has every operation of the notes, and judges both thread counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import codecs
from benchmarks.codec_operations import COLUMNS, OPERATIONS, Operation

NOTES = [operation for operation in OPERATIONS if not operation.goal]
SAMPLE = codecs.sample(20 * COLUMNS, seed=4711)


def operation(name: str) -> Operation:
    (found,) = [each for each in OPERATIONS if each.name == name]
    return found


@pytest.mark.parametrize("each", OPERATIONS, ids=lambda each: each.name)
def test_every_operation_runs_again_and_again(each: Operation) -> None:
    work = each.prepare(SAMPLE.to(getattr(torch, each.dtype)))
    work()
    work()


def test_names_are_unique_and_the_docs_count_them() -> None:
    assert len({each.name for each in OPERATIONS}) == len(OPERATIONS)
    text = (Path(__file__).resolve().parents[2] / "docs" / "compression.md").read_text()
    assert f" {len(NOTES)} operations with the reference figures" in text


def test_the_residual_is_the_sum_and_zero_where_a_tenth_is_kept() -> None:
    work = operation("residual add and zero kept, 10 %").prepare(SAMPLE)
    work()
    residual = work()
    kept = residual == 0.0
    assert float(kept.double().mean()) == pytest.approx(0.1, abs=0.02)
    flat = SAMPLE.view(-1)
    assert flat[kept].abs().min() >= flat[~kept].abs().max()
    assert torch.equal(residual[~kept], 2 * flat[~kept])


# ---------------------------------------------------------------- the verdict


def facts(**vs_notes: list[float | None]) -> dict[str, Any]:
    """Of runs with one and two threads; None where the notes have no figure."""
    rows: dict[str, dict[str, Any]] = {"1": {}, "2": {}}
    for name, each in vs_notes.items():
        for threads, ratio in zip(rows, each, strict=True):
            rows[threads][name] = {"vs_notes": ratio, "least": 1 / codecs.FACTOR, "x_copy": 0.5}
    return {"threads": {threads: {"operations": found} for threads, found in rows.items()}}


def test_both_thread_counts_are_judged_where_the_notes_have_a_figure() -> None:
    found = facts(fine=[1.0, 0.8], one=[0.7, 1.0], two=[1.0, 0.7], alone=[1.0, None])
    assert codecs.slower(found) == {"1": ["one"], "2": ["two"]}
    one, two = codecs.verdict_lines(found)
    assert one == "1 thread(s): 4 operations judged; slower than the notes / 1.3: one (0.70x, 0.50 x copy)"
    assert two == "2 thread(s): 3 operations judged; slower than the notes / 1.3: two (0.70x, 0.50 x copy)"


def test_a_goal_is_to_be_reached_and_the_notes_within_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "best_s", lambda works, repeats: SAMPLE.nbytes / 3.5e9)
    for goal, least in ((True, 1.0), (False, 1 / codecs.FACTOR)):
        row = codecs.measure_operation(Operation("x", lambda _: lambda: None, 4.0, goal=goal), [SAMPLE], 1)
        assert (row["vs_notes"], row["least"]) == (pytest.approx(3.5 / 4.0), least)


@pytest.mark.parametrize(("two", "code"), [(0.9, 0), (0.7, 1)])
def test_a_second_thread_that_is_too_slow_shows_in_the_exit_code(
    two: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codecs, "run", lambda options: facts(some=[1.0, two]))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(sys, "argv", ["codecs", "--json"])
    assert codecs.main() == code
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["slower_than_notes"] == {"1": [], "2": ["some"] * code}
