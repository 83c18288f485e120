"""What the demo promises, and that each broken promise is named."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from examples import demo
from examples.demo import LIMIT_S, DemoFailed, Outcome, check, main

KEPT = Outcome(
    steps=80,
    step_s=1.7,
    predicted_s=1.6,
    single_machine_s=0.4,
    trained_loss=2.428,
    plain_loss=2.428,
    entropy=3.2577,
    stages=4,
    devices=4,
)


def test_a_demo_that_keeps_every_promise_passes() -> None:
    check(KEPT, LIMIT_S, LIMIT_S)


@pytest.mark.parametrize(
    ("changes", "took_s", "words"),
    [
        ({"stages": 2}, 200.0, "2 stages"),
        ({"trained_loss": 2.9, "plain_loss": 2.9}, 200.0, "0.890 x the unigram entropy"),
        ({"trained_loss": math.nan, "plain_loss": math.nan}, 200.0, "nan x the unigram entropy"),
        ({"plain_loss": 2.4285}, 200.0, "the plain module has 2.428500"),
        ({"trained_loss": math.nan}, 200.0, "trained to nan"),
        ({}, 300.04, "it took 300.0 s, at most 300 are promised"),
        ({}, 400.0, "it took 400.0 s, at most 300 are promised"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, Any], took_s: float, words: str) -> None:
    with pytest.raises(DemoFailed, match=words):
        check(replace(KEPT, **changes), took_s, LIMIT_S)


def test_all_broken_promises_are_named() -> None:
    broken = replace(KEPT, stages=1, plain_loss=3.0)
    with pytest.raises(DemoFailed) as caught:
        check(broken, 400.0, LIMIT_S)
    assert [line.partition(" ")[0] for line in str(caught.value).splitlines()] == [
        "1",
        "held-out",
        "trained",
        "it",
    ]


def test_a_slow_machine_may_have_a_limit_of_its_own_or_none() -> None:
    check(KEPT, 400.0, 500.0)
    check(KEPT, 4000.0, 0.0)
    with pytest.raises(DemoFailed, match=r"501.0 s, at most 500 .*--limit SECONDS, 0 for none"):
        check(KEPT, 501.0, 500.0)


class FakeLab:
    """A lab that only knows whether it was closed."""

    approximate = True
    scenario = SimpleNamespace(coordinator="hub")

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    """The demo's own processes are left out: it has ``KEPT`` at once."""
    made = FakeLab()
    monkeypatch.setattr(demo, "open_lab", lambda loopback: made)
    monkeypatch.setattr(demo, "demo", lambda fleet, steps: KEPT)
    return made


def test_the_command_fails_beyond_its_limit_and_says_so(
    lab: FakeLab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--limit", "1e-9"]) == 1
    out, err = capsys.readouterr()
    assert "demo failed: it took" in err
    assert "all checks hold" not in out
    assert lab.closed


def test_the_command_passes_without_a_limit(lab: FakeLab, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--limit", "0"]) == 0
    assert "all checks hold" in capsys.readouterr().out
    assert lab.closed


def test_the_time_is_taken_when_the_lab_is_gone(lab: FakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user waits for counts, taking the lab down too."""
    clock = SimpleNamespace(monotonic=lambda: 400.0 if lab.closed else 0.0)
    monkeypatch.setattr(demo, "time", clock)
    assert main([]) == 1


def test_help_names_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--limit SECONDS" in told
    assert "default 300" in told
