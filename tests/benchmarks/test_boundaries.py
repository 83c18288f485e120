"""What a codec costs at a boundary: the table, and a second start that goes on where the first ended."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from benchmarks import boundaries

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SHORT = ("--steps", "4", "--seeds", "1", "--cuts", "1", "--ratios", "8", "--codecs", "topk", "--json")
SMALL = ("--set", "WIDTH=32", "--set", "LENGTH=16")


Rows = list[dict[str, Any]]


def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str) -> Rows:
    monkeypatch.setattr(sys, "argv", ["boundaries", *SHORT, *SMALL, *more])
    boundaries.main()
    rows: Rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return rows


def test_a_table_is_stored_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = str(tmp_path / "state.jsonl")
    both = ("--codecs", "topk,none", "--warm", "2", "--state", state)
    dense, exact, coded = table(monkeypatch, capsys, *both)
    assert (dense["codec"], dense["more"]) == (boundaries.DENSE, [0.0])
    assert (exact["cuts"], exact["loss"]) == (1, dense["loss"]), "a cut and a start in between change no bit"
    assert coded["times_fewer"] > 6.0
    assert coded["more"] != [0.0]
    monkeypatch.setattr(boundaries, "Trainings", lambda *args: None)
    assert table(monkeypatch, capsys, *both) == [dense, exact, coded]
