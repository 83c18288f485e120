"""A machine asks what it has given, and its owner reads it in one line of `atoll-worker status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import ConnectionFailed
from hostos.command_line import run
from protos import atoll_control_pb2 as pb
from worker.cli import main as cli
from worker.config import make_config
from worker.control import given
from worker.control.given import Given, summed

if TYPE_CHECKING:
    import pytest


def rows() -> pb.CreditList:
    made = [("2026-11-30", "w-1", 3), ("2026-11-30", "w-1/1", 4), ("2026-11-29", "w-1", 5)]
    return pb.CreditList(
        credits=[
            pb.Credit(
                day=day,
                worker=worker,
                owner=owner,
                useful=pb.WorkDone(steps=steps, samples=2, computed_ms=1_800_000, sent_bytes=1 << 20),
                pending=pb.WorkDone(steps=1),
                discarded=pb.WorkDone(steps=2, computed_ms=9_000_000),
            )
            for owner, (day, worker, steps) in zip("aab", made, strict=True)
        ]
    )


def test_the_sums_of_a_machines_devices_owners_and_days_are_one() -> None:
    assert summed(rows()) == Given("2026-11-29", 2, 15, 6, 5400.0, 0, 3 << 20, 3, 6)
    assert summed(pb.CreditList()) == Given("", 0, 0, 0, 0.0, 0, 0, 0, 0)


def test_it_is_one_line_for_people_and_none_where_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config({"state_dir": tmp_path, "host": "127.0.0.1"}, {})
    monkeypatch.setattr(given, "ask_given", lambda config: summed(rows()))
    assert cli._given(config) == (
        "1.50 h of computing since 2026-11-29: 15 steps, 6 samples, 0.0 MiB received, 3.0 MiB sent; "
        "3 steps are not stored yet, 6 were discarded"
    )
    measured = rows()
    measured.credits[0].useful.energy_mj = measured.credits[1].pending.energy_mj = 9_000_000
    assert summed(measured).energy_j == 18_000.0
    monkeypatch.setattr(given, "ask_given", lambda config: summed(measured))
    assert "6 samples, 5.00 Wh measured, 0.0 MiB received" in str(cli._given(config))
    monkeypatch.setattr(given, "ask_given", lambda config: summed(pb.CreditList()))
    assert cli._given(config) == "nothing yet"

    def away(config: object) -> Given:
        raise ConnectionFailed("nobody answers")

    monkeypatch.setattr(given, "ask_given", away)
    assert cli._given(config) is None


def test_a_machine_that_has_not_joined_asks_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli.app, ["status", "--json", "--state-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["given"] is None
