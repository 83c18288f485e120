"""Codec speeds are measured once for a machine and its versions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from compressors import CODECS, speed
from compressors.speed import CodecRate
from worker.codec_speed import FILE, FIRST, MAX_AGE_S, codec_speeds, link_codecs

HERE = {"torch": "2.13.0", "threads": 2}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were measured; every codec runs at 2 and 3 GB/s."""
    names: list[str] = []

    def measure_on(name: str, *_: object) -> CodecRate:
        names.append(name)
        return CodecRate(2e9, 3e9, 1.0)

    monkeypatch.setattr(speed, "measure_on", measure_on)
    return names


def test_link_codecs_begin_with_the_most_wanted_and_leave_out_what_no_link_carries() -> None:
    names = link_codecs()
    assert names[: len(FIRST)] == FIRST
    assert "none" not in names
    assert not any(CODECS[name].shared_state for name in names)


def test_a_second_start_measures_nothing(tmp_path: Path, measured: list[str]) -> None:
    first = codec_speeds(tmp_path, HERE)
    assert first["topk"] == (2e9, 3e9)
    assert set(first) == set(measured) == set(link_codecs())
    measured.clear()
    assert codec_speeds(tmp_path, HERE) == first
    assert measured == []


def test_where_one_codec_fails_the_others_are_reported_and_nothing_is_remembered(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = speed.measure_on

    def measure_on(name: str, *rest: Any) -> CodecRate:
        if name == "bf16":
            raise RuntimeError("no library")
        return works(name, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(speed, "measure_on", measure_on)
        assert set(codec_speeds(tmp_path, HERE)) == set(link_codecs()) - {"bf16"}
    assert not (tmp_path / FILE).exists()
    assert "bf16" in codec_speeds(tmp_path, HERE)  # mended: the next start reports it
    assert (tmp_path / FILE).exists()


@pytest.mark.parametrize(("age_s", "anew"), [(MAX_AGE_S - 1.0, False), (MAX_AGE_S, True), (-1.0, True)])
def test_what_is_kept_is_forgotten_after_a_month_or_when_the_clock_was_set_back(
    tmp_path: Path, measured: list[str], age_s: float, anew: bool
) -> None:
    codec_speeds(tmp_path, HERE, now=lambda: 1e9)
    measured.clear()
    codec_speeds(tmp_path, HERE, now=lambda: 1e9 + age_s)
    assert bool(measured) is anew


def test_other_versions_or_threads_are_measured_anew(tmp_path: Path, measured: list[str]) -> None:
    codec_speeds(tmp_path, HERE)
    measured.clear()
    codec_speeds(tmp_path, {**HERE, "threads": 1})
    assert measured


@pytest.mark.parametrize("kept", ["", "{", "[]", "null", '{"for": 1}', "x" * (65 << 10), "NaN"])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, measured: list[str], kept: str) -> None:
    (tmp_path / FILE).write_text(kept)
    assert codec_speeds(tmp_path, HERE)
    assert measured


def test_figures_that_cannot_be_are_measured_anew(tmp_path: Path, measured: list[str]) -> None:
    codec_speeds(tmp_path, HERE)
    kept = json.loads((tmp_path / FILE).read_text())
    for wrong in ([0.0, 1.0], [float("inf"), 1.0], ["a", 1.0], [1.0]):
        kept["bytes_per_s"]["topk"] = wrong
        (tmp_path / FILE).write_text(json.dumps(kept))
        measured.clear()
        assert codec_speeds(tmp_path, HERE)["topk"] == (2e9, 3e9)
        assert measured


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, measured: list[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert codec_speeds(blocked, HERE)


def test_the_budget_ends_the_measuring(tmp_path: Path, measured: list[str]) -> None:
    ticks = itertools.count(0.0, 1.0)
    codec_speeds(tmp_path, HERE, budget_s=2.5, clock=lambda: next(ticks))
    assert measured == list(FIRST[:2])


def test_the_real_codecs_have_real_speeds(tmp_path: Path) -> None:
    rates = codec_speeds(tmp_path, HERE, budget_s=5.0)
    assert {"fp16", "int8_block", "lossless"} <= set(rates)
    assert all(encode > 0 and decode > 0 for encode, decode in rates.values())
