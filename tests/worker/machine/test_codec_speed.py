"""Codec speeds: sustained, measured when there is time, kept for a machine and its versions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.job import Place
from compressors import speed
from compressors.speed import CodecRate
from coordinator.planning.codecs import ratios
from worker.machine.codec_speed import FIRST, KEPT, MAX_AGE_S, CodecGauge, link_codecs, packing
from worker.machine.speed_file import FILE, SpeedFile

HERE = {"torch": "2.13.0", "threads": 2}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were measured; every codec runs at 2 and 3 GB/s."""
    names: list[str] = []

    def sustained_on(name: str, *_: object, **__: object) -> CodecRate:
        names.append(name)
        return CodecRate(2e9, 3e9, 1.0)

    monkeypatch.setattr(speed, "sustained_on", sustained_on)
    monkeypatch.setattr(speed, "sustained", lambda *_, **__: CodecRate(2e9, 3e9, 1.0))
    return names


def test_link_codecs_begin_with_the_most_wanted_and_leave_out_what_no_link_carries() -> None:
    names = link_codecs()
    assert names[: len(FIRST)] == FIRST
    assert set(names) == set(ratios.link_codecs()) - {"none"}


def gauged(state_dir: Path, facts: dict[str, Any] = HERE, **settings: Any) -> CodecGauge:
    """A worker's first occasion to measure."""
    gauge = CodecGauge(SpeedFile(state_dir), facts, **settings)
    gauge.run()
    return gauge


def test_a_second_start_measures_nothing(tmp_path: Path, measured: list[str]) -> None:
    first = gauged(tmp_path)
    assert first.rates["topk"] == (2e9, 3e9)
    assert first.left == ()
    assert set(first.rates) - KEPT.keys() == set(measured) == set(link_codecs())
    assert KEPT.keys() < first.rates.keys()
    measured.clear()
    assert CodecGauge(SpeedFile(tmp_path), HERE).rates == gauged(tmp_path).rates == first.rates
    assert measured == []


def test_a_codec_that_fails_is_absent_until_the_next_start(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = speed.sustained_on

    def sustained_on(name: str, *rest: Any, **named: Any) -> CodecRate:
        if name == "bf16":
            measured.append(name)
            raise RuntimeError("no library")
        return works(name, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(speed, "sustained_on", sustained_on)
        gauge = gauged(tmp_path)
        gauge.run()
    assert set(gauge.rates) == {*KEPT, *link_codecs()} - {"bf16"}
    assert measured.count("bf16") == 1
    measured.clear()
    assert "bf16" in gauged(tmp_path).rates  # mended
    assert measured == ["bf16"]


@pytest.mark.parametrize(("age_s", "anew"), [(MAX_AGE_S - 1.0, False), (MAX_AGE_S, True), (-1.0, True)])
def test_what_is_kept_is_forgotten_after_a_week_or_when_the_clock_was_set_back(
    tmp_path: Path, measured: list[str], age_s: float, anew: bool
) -> None:
    gauged(tmp_path, now=lambda: 1e9)
    measured.clear()
    gauged(tmp_path, now=lambda: 1e9 + age_s)
    assert bool(measured) is anew


def test_other_versions_or_threads_are_measured_anew(tmp_path: Path, measured: list[str]) -> None:
    gauged(tmp_path)
    measured.clear()
    gauged(tmp_path, {**HERE, "threads": 1})
    assert measured


@pytest.mark.parametrize("kept", ["", "{", "[]", "null", '{"for": 1}', "x" * (65 << 10), "NaN"])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, measured: list[str], kept: str) -> None:
    (tmp_path / FILE).write_text(kept)
    assert gauged(tmp_path).left == ()
    assert measured


def test_figures_that_cannot_be_are_measured_anew(tmp_path: Path, measured: list[str]) -> None:
    gauged(tmp_path)
    kept = json.loads((tmp_path / FILE).read_text())
    for wrong in ([0.0, 1.0, 1e9], [float("inf"), 1.0, 1e9], ["a", 1.0, 1e9], [1.0, 1.0], [1.0]):
        kept["bytes_per_s"]["topk"] = wrong
        (tmp_path / FILE).write_text(json.dumps(kept))
        measured.clear()
        assert gauged(tmp_path).rates["topk"] == (2e9, 3e9)
        assert measured


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path, measured: list[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert gauged(blocked).left == ()


def test_what_the_budget_does_not_reach_is_asked_again_and_never_kept_as_absent(
    tmp_path: Path, measured: list[str]
) -> None:
    ticks = itertools.count(0.0, 1.0)
    gauge = CodecGauge(SpeedFile(tmp_path), HERE, clock=lambda: next(ticks))
    gauge.run(budget_s=2.5)
    assert measured == list(FIRST[:2])
    gauge.run(budget_s=2.5)
    assert measured == list(FIRST[:4])
    measured.clear()
    again = gauged(tmp_path)
    assert measured == list(link_codecs()[4:])
    assert again.left == ()


def test_others_that_wait_come_before_the_rest_but_not_before_the_first(
    tmp_path: Path, measured: list[str]
) -> None:
    gauge = CodecGauge(SpeedFile(tmp_path), HERE)
    assert not gauge.run(wanted_elsewhere=lambda: True)
    assert measured == list(FIRST)
    assert gauge.run()
    assert gauge.left == ()


def test_what_was_found_before_an_interruption_is_kept(tmp_path: Path, measured: list[str]) -> None:
    def check() -> None:
        if len(measured) == 3:
            raise RuntimeError("leaving")

    with pytest.raises(RuntimeError, match="leaving"):
        CodecGauge(SpeedFile(tmp_path), HERE).run(check)
    assert set(CodecGauge(SpeedFile(tmp_path), HERE).rates) == set(FIRST[:3])


def test_a_quota_shows_in_a_sustained_rate_though_the_waits_fall_between_the_clocks() -> None:
    """Every look at a clock is 0.1 ms of work; after each millisecond of it, a look at the processor's
    clock, a system call, lasts until the next period of 8 ms."""
    work_s = waited_s = 0.0

    def clock() -> float:
        nonlocal work_s
        work_s += 1e-4
        return work_s + waited_s

    def cpu_clock() -> float:
        nonlocal waited_s
        waited_s = int(work_s / 1e-3) * 7e-3
        return work_s

    tensor = speed.sample(1 << 12, 0)
    rate = speed.sustained_on("fp16", tensor, clock=clock, cpu_clock=cpu_clock)
    both_s = tensor.nbytes / rate.encode_bytes_per_s + tensor.nbytes / rate.decode_bytes_per_s
    assert work_s >= speed.SUSTAINED_CPU_S
    assert both_s > 8 * 2e-4  # two spans of 0.1 ms at an eighth of a core
    assert rate.encode_bytes_per_s == pytest.approx(rate.decode_bytes_per_s)


def test_a_machine_that_is_hardly_given_any_time_is_measured_for_a_second_at_most() -> None:
    ticks = itertools.count(0.0, 0.3)
    rate = speed.sustained_on("fp16", speed.sample(64, 0), clock=lambda: next(ticks), cpu_clock=lambda: 0.0)
    # Of the looks at the clock that fit into a second: one round of six.
    assert 256 / 1.8 <= rate.encode_bytes_per_s <= 256 / 0.3


def test_the_real_codecs_have_real_speeds(tmp_path: Path) -> None:
    gauge = CodecGauge(SpeedFile(tmp_path), HERE)
    gauge.run(budget_s=5.0)
    assert {"fp16", "int8_block", "lossless"} <= set(gauge.rates)
    assert all(encode > 0 and decode > 0 for encode, decode in gauge.rates.values())


def test_codecs_are_measured_by_the_clock_of_work(tmp_path: Path) -> None:
    # By this clock nothing takes less than an hour between two looks.
    gauge = gauged(tmp_path, at_work=itertools.count(0.0, 3600.0).__next__)
    assert gauge.rates
    assert all(rate < 1e3 for rates in gauge.rates.values() for rate in rates)


def test_packing_of_activations_is_measured_as_it_runs(tmp_path: Path) -> None:
    gauge = CodecGauge(SpeedFile(tmp_path), HERE, scratch=tmp_path)
    gauge._measure(Place.DISK.rate, speed.sample(1 << 14, 0))
    assert min(gauge.rates[Place.DISK.rate]) > 0.0
    assert Place.DISK.rate in CodecGauge(SpeedFile(tmp_path), HERE, scratch=tmp_path).left
    for name, bits in KEPT.items():
        gauge._measure(name, speed.sample(1 << 14, 0))
        assert gauge.rates[name][0] > 0.0
        seconds = next(packing(bits, speed.sample(1 << 14, 0), itertools.count(0.0, 0.5).__next__))
        assert seconds == (0.5, 0.5, (1 << 14) * (bits + 1) // 8)
