"""Facts of the device come from another process, which may not be believed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import atoll
from atoll.errors import AtollError, BadFrame, UsageError
from worker.config import WorkerConfig
from worker.machine import facts
from worker.machine.facts import ask_facts

CONFIG = WorkerConfig("127.0.0.1", device="cpu", threads=1)
HONEST: dict[str, Any] = {
    "device": {
        "kind": "cpu", "index": 0, "model": "a processor", "threads": 2, "memory_bytes": 8 << 30,
        "memory_limit_bytes": 4 << 30, "instructions": "AVX2",
    },
    "rates": {"matmul_gflops": 50.0, "memory_gbps": 10.0},
    "versions": {"atoll": "1", "torch": "2", "python": "3", "platform": "Linux x86_64"},
}  # fmt: skip


def printing(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({text!r})")


def running(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_the_real_process_finds_this_machine() -> None:
    found = ask_facts(CONFIG)
    assert (found.device.kind, found.device.threads) == ("cpu", 1)
    assert 0 < found.device.memory_limit_bytes <= found.device.memory_bytes
    assert found.device.instructions
    assert found.rates.matmul_gflops > 0.0
    assert found.versions["atoll"] == atoll.__version__
    assert found.versions["torch"]


def test_a_device_that_cannot_be_lent_is_refused_in_the_process_s_words() -> None:
    program = printing(json.dumps({"error": "--device cuda: torch 2 sees no GPU here; use --device cpu"}))
    with pytest.raises(UsageError, match="sees no GPU here; use --device cpu"):
        ask_facts(CONFIG, program)


def test_what_else_it_prints_does_not_hide_the_answer() -> None:
    found = ask_facts(CONFIG, printing(f"a warning\n{json.dumps(HONEST)}\nanother"))
    assert found.device.model == "a processor"


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("device", "kind", "abacus"),
        ("device", "memory_bytes", -1),
        ("device", "memory_bytes", 1 << 70),
        ("device", "threads", True),
        ("device", "model", 7),
        ("rates", "matmul_gflops", float("nan")),
        ("rates", "memory_gbps", "fast"),
        ("versions", "torch", None),
    ],
)
def test_a_fact_that_is_none_is_refused(part: str, field: str, value: object) -> None:
    forged = {**HONEST, part: {**HONEST[part], field: value}}
    with pytest.raises(BadFrame, match="cannot be read"):
        facts._facts(json.dumps(forged))


@pytest.mark.parametrize(
    "line", ['{"device": ', "{}", '{"device": 3, "rates": {}, "versions": []}', "{" * 9999]
)
def test_an_answer_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(BadFrame, match="cannot be read"):
        facts._facts(line)


def test_control_characters_do_not_reach_a_terminal() -> None:
    forged = {**HONEST, "device": {**HONEST["device"], "model": "\x1b[2J" + "x" * 500}}
    model = facts._facts(json.dumps(forged)).device.model
    assert "\x1b" not in model
    assert len(model) == facts.MAX_TEXT_CHARS


def test_a_process_that_breaks_is_described_with_its_last_words() -> None:
    with pytest.raises(AtollError, match=r"ended with code 1: ModuleNotFoundError: .*nothing_of_the_kind"):
        ask_facts(CONFIG, running("import nothing_of_the_kind"))


def test_a_process_that_is_killed_is_described() -> None:
    with pytest.raises(AtollError, match="ended with signal SIGABRT"):
        ask_facts(CONFIG, running("import os; os.abort()"))


def test_a_process_that_hangs_is_ended() -> None:
    with pytest.raises(AtollError, match="took longer than 1 s"):
        ask_facts(CONFIG, running("import time; print('begun', flush=True); time.sleep(600)"), within_s=1.0)


def test_a_process_that_prints_without_end_is_ended() -> None:
    with pytest.raises(AtollError, match="printed more than 64 KiB"):
        ask_facts(CONFIG, running("while True: print('x' * 1000)"))
