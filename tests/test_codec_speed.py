"""Codec speeds are measured once for a machine and its versions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from compressors import CODECS, speed
from compressors.speed import CodecRate
from worker.codec_speed import FILE, FIRST, codec_speeds, link_codecs

HERE = {"torch": "2.13.0", "threads": 2}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were measured; every codec runs at 2 and 3 GB/s, ``bf16`` is broken."""
    names: list[str] = []

    def measure_on(name: str, *_: object) -> CodecRate:
        names.append(name)
        if name == "bf16":
            raise RuntimeError("no library")
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
    assert "bf16" in measured
    assert "bf16" not in first
    measured.clear()
    assert codec_speeds(tmp_path, HERE) == first
    assert measured == []


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
