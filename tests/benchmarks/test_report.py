"""The table of promises is written from two files, and figures come from commands that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.errors import UsageError
from benchmarks import report
from benchmarks.report import Command, Figure, NothingMeasured, Promise, figure_of

SUMMARY = "....\n=== 8 passed, 3 deselected in 2.05s ===\n"


def _of(command: Command, output: str, code: int = 0) -> str:
    return figure_of(command, output, code, 3.0)[0]


def test_a_benchmarks_figure_is_a_format_over_the_last_lines_object() -> None:
    command = Command("run --seed 7", figure="{step[median]:.1f} ms", at_most={"step[median]": 3.0})
    assert figure_of(command, 'text\n{"step": {"median": 2.53}}\n', 0, 1.0) == ("2.5 ms", 7)
    assert figure_of(command, '{"step": {"median": 3.14}, "seed": 9}', 0, 1.0) == ("**3.1 ms**", 9)


def test_a_list_of_rows_is_shown_by_its_places() -> None:
    command = Command("run", figure="{0[error]:+.1%}, {1[error]:+.1%}", at_least={"1[error]": -0.15})
    assert _of(command, '[{"error": 0.01}, {"error": -0.2}]') == "**+1.0%, -20.0%**"


def test_pytest_is_counted_and_anything_else_timed() -> None:
    assert _of(Command("pytest"), SUMMARY) == "8 passed in 2 s"
    assert _of(Command("make demo && make test"), "a\n" + SUMMARY) == "8 passed in 2 s"
    assert _of(Command("make check"), "fine\n") == "passes in 3 s"
    assert _of(Command("demo", pattern=r"(trained \d+).*?(\d+ s in all)"), "trained 5, 9 s in all") == (
        "trained 5, 9 s in all"
    )


def test_a_failed_command_is_bold_with_its_exit_code() -> None:
    assert _of(Command("pytest"), "2 failed, 6 passed in 1.00s\n", 1) == (
        "**exit code 1: 2 failed, 6 passed in 1 s**"
    )


@pytest.mark.parametrize(
    "output", ["", "no json", '{"skipped": "no lab here"}', '{"another": 1}', "5 skipped in 1.00s"]
)
def test_a_command_that_skips_or_shows_nothing_has_no_figure(output: str) -> None:
    template = "" if "skipped in" in output else "{value}"
    with pytest.raises(NothingMeasured):
        _of(Command("run", figure=template), output)


def test_a_run_stores_its_figure_and_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    kept = {"other": {"figure": "1 s", "date": "2026-01-01", "machine": "m", "commit": "c", "seed": 0}}
    (tmp_path / report.FIGURES).write_text(json.dumps(kept))
    beside = Command("sleep 600 & echo '{\"value\": 4}'", figure="{value} x")
    skipping = Command('echo \'{"skipped": "no GPU"}\'', figure="{value}")
    rows = [Promise("quick", "a", "p", (beside, beside)), Promise("other", "a", "p", (skipping,))]
    assert report.run_all(rows, tmp_path) == 1
    found = report.figures((tmp_path / report.FIGURES).read_text())
    assert found["quick"].figure == "4 x; 4 x"
    assert found["quick"].seed == 0
    assert found["quick"].machine
    assert found["other"] == Figure(**kept["other"])  # type: ignore[arg-type]


def test_tests_are_found_by_name_wherever_they_stand(tmp_path: Path) -> None:
    for path in ("tests/a/test_one.py", "tests/b/test_two.py", "tests/c/test_two.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    command = "python -m pytest test_one.py c/test_two.py -k x"
    assert report.located(command, tmp_path) == (
        "python -m pytest tests/a/test_one.py tests/c/test_two.py -k x"
    )
    for name in ("test_two.py", "test_three.py"):
        with pytest.raises(UsageError, match=name):
            report.located(f"pytest {name}", tmp_path)


def test_a_promise_without_a_figure_has_a_dash() -> None:
    page = report.table([Promise("a", "Area", "holds | always", (Command("make check", slow=True),))], {})
    assert "## Area\n" in page
    assert "| holds \\| always | `make check` (slow) | - |  |  |\n" in page


def test_ids_that_repeat_and_unknown_fields_are_refused() -> None:
    row = '[[promise]]\nid = "a"\narea = "x"\npromise = "p"\n[[promise.command]]\nrun = "true"\n'
    assert [p.id for p in report.promises(row)] == ["a"]
    with pytest.raises(UsageError, match="repeat: a"):
        report.promises(row + row)
    with pytest.raises(UsageError, match="a: "):
        report.promises(row + 'bound = "x"\n')
