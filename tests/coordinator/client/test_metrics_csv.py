"""Rows of steps that were done again are marked, whoever reads them."""

from __future__ import annotations

import pytest

from atoll.errors import StorageError
from coordinator.client import metrics_csv
from coordinator.client.metrics_csv import marked

LINES = (
    "step,name,value,time_s",
    "1,loss,5.0,10.0",
    "2,loss,4.0,11.0",
    "2,step_s,1.0,11.0",
    "3,loss,3.0,12.0",
    "1,rolled_back,3.0,20.0",
    "2,loss,4.0,21.0",
    "3,lo",  # torn off by a crash
)


def test_rows_of_steps_that_were_taken_back_are_marked() -> None:
    assert list(marked(LINES)) == [
        "step,name,value,time_s,rolled_back",
        "1,loss,5.0,10.0,0",
        "2,loss,4.0,11.0,1",
        "2,step_s,1.0,11.0,1",
        "3,loss,3.0,12.0,1",
        "2,loss,4.0,21.0,0",
    ]


def test_what_was_taken_back_twice_is_marked_once_each_time() -> None:
    more = ("1,rolled_back,2.0,30.0", "2,loss,4.0,31.0")
    assert [row[-1] for row in list(marked(LINES + more))[1:]] == ["0", "1", "1", "1", "1", "0"]


def test_more_rows_than_anybody_needs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_csv, "MOST_ROWS", 2)
    with pytest.raises(StorageError, match="more than 2 rows"):
        list(marked(LINES))


def test_a_job_without_a_row_has_nothing_to_show() -> None:
    assert list(marked(())) == []
