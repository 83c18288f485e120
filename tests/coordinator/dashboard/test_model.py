"""Changes that are applied to what a viewer has give what everybody else has, whatever happened before."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.dashboard.curves import Curves
from coordinator.dashboard.model import View, applied, changes, content
from protos import atoll_control_pb2 as pb

SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3)
ROWS = st.dictionaries(
    st.sampled_from("abcdef"), st.fixed_dictionaries({"x": SCALARS, "y": SCALARS}), max_size=6
)
POINTS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["loss", "eval_loss", "rolled_back"]), st.floats()),
    max_size=12,
)


def steps(draw: Any) -> list[View]:
    curves = Curves()
    views = []
    for _ in range(draw(st.integers(1, 5))):
        for step, name, value in draw(POINTS):
            curves.point(step, name, value)
        facts = draw(st.dictionaries(st.sampled_from("pqr"), SCALARS))
        tables = draw(st.dictionaries(st.sampled_from(["workers", "jobs"]), ROWS))
        views.append(
            View({**dict.fromkeys("pqr"), **facts}, {"workers": {}, "jobs": {}, **tables}, curves.seen())
        )
    return views


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_changes_applied_to_a_snapshot_give_the_next_snapshot(data: st.DataObject) -> None:
    views = steps(data.draw)
    # As they were sent: the curves of later views are longer already.
    sent = [json.loads(json.dumps(changes(before, after))) for before, after in pairwise(views)]
    have = json.loads(json.dumps(content(views[0])))
    for change, after in zip(sent, views[1:], strict=True):
        have = applied(have, change)
        assert have == json.loads(json.dumps(content(after)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nothing_is_sent_where_nothing_is_other(data: st.DataObject) -> None:
    for view in steps(data.draw):
        assert changes(view, view) == {}


def test_a_row_whose_one_field_changed_is_sent_as_that_field() -> None:
    before = View({}, {"workers": {"w": {"state": "pool", "name": "alice"}}})
    after = View({}, {"workers": {"w": {"state": "dead", "name": "alice"}}})
    assert changes(before, after) == {"rows": {"workers": {"w": {"state": "dead"}}}}


def test_points_that_are_new_are_sent_alone() -> None:
    curves = Curves()
    curves.add(pb.MetricPoint(step=step, name="loss", value=float(-step), time_s=step) for step in range(3))
    before = View(curves=curves.seen())
    curves.add([pb.MetricPoint(step=3, name="loss", value=float("nan"), time_s=3)])
    change = changes(before, View(curves=curves.seen()))
    assert change == {"more": {"loss": [[3], ["nan"]]}}
    json.dumps(change, allow_nan=False)


def test_a_thousand_workers_of_whom_ten_changed_are_ten_rows() -> None:
    draw = random.Random(7)
    rows = {f"w{n}": {"state": "pool", "gflops": draw.random()} for n in range(1000)}
    later = {**rows, **{f"w{n}": {**rows[f"w{n}"], "state": "suspect"} for n in range(10)}}
    change = changes(View({}, {"workers": rows}), View({}, {"workers": later}))
    assert change == {"rows": {"workers": {f"w{n}": {"state": "suspect"} for n in range(10)}}}
