"""`atoll credit`: a row a day, worker and owner; a column of energy where any machine measures it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING

from coordinator.cli import main as cli
from coordinator.cli.options import Common
from hostos.command_line import run
from protos import atoll_control_pb2 as pb

if TYPE_CHECKING:
    import pytest


def credit(worker: str, energy_mj: int | None) -> pb.Credit:
    done = pb.WorkDone(steps=3, samples=9, computed_ms=7_200_000, energy_mj=energy_mj)
    return pb.Credit(day="2026-11-30", worker=worker, name=worker, owner="research", useful=done)


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[pb.Credit], *options: str
) -> str:
    client = SimpleNamespace(credits=lambda since_s: rows)
    monkeypatch.setattr(Common, "client", lambda common: nullcontext(client))
    assert run(cli.app, ["credit", *options]) == 0
    return capsys.readouterr().out


def test_energy_is_a_column_where_a_machine_measures_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(monkeypatch, capsys, [credit("alice", 5_400_000), credit("bob", None)])
    measured, other = (line for line in text.splitlines() if "research" in line)
    assert "1.50 Wh" in measured
    assert "Wh" not in other
    (row,) = json.loads(shown(monkeypatch, capsys, [credit("bob", None)], "--json"))
    assert row["useful"]["energy_mj"] is None


def test_no_machine_that_measures_energy_makes_no_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(monkeypatch, capsys, [credit("bob", None)])
    assert "energy" not in text
    assert "Wh" not in text
