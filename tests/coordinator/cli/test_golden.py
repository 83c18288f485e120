"""Help, status, plan, watch and errors look as their files say, and keep to the width they are given."""

from __future__ import annotations

import pytest

from coordinator.cli.views.brief import MOST_LINES, brief_view
from tests.coordinator.cli.golden import FOLDER, LOSSES, NAMES, REFRESH, WIDTHS, cases, made, printed, update

CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_output_is_as_in_its_file(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    assert path.exists(), f"{REFRESH} writes it"
    assert made(name, CASES[name]) == path.read_text(), f"if that is meant: {REFRESH}"


def test_no_file_is_left_of_a_case_that_is_gone() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(CASES)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("errors")])
def test_no_line_on_a_terminal_is_longer_than_it_is_wide(name: str) -> None:
    width = WIDTHS[name.rpartition(".")[2]]
    if width:
        assert max(len(line.rstrip()) for line in (FOLDER / f"{name}.txt").read_text().splitlines()) <= width


@pytest.mark.parametrize("stages", [0, 1, 4, 5, 40])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_running_job_takes_at_most_ten_lines(stages: int, width: int) -> None:
    lines = printed(brief_view(update(stages), LOSSES, NAMES), width).splitlines()
    assert 3 <= len(lines) <= MOST_LINES == 10
    assert max(len(line) for line in lines) <= width


@pytest.mark.parametrize("name", ["status", "plan"])
def test_a_pipe_gets_a_line_a_fact_at_any_width(name: str) -> None:
    lines = (FOLDER / f"{name}.pipe.txt").read_text().splitlines()
    subjects = {
        "status": ("worker w-1:", "job gpt-1:", "link fast1 > slow1:"),
        "plan": ("stage 0:", "link fast1"),
    }
    for subject in subjects[name]:
        assert len([line for line in lines if line.startswith(subject)]) == 1
    assert not any("█" in line or "·" in line for line in lines)
