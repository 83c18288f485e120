import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coordinator.client.chrome_trace import TraceSpan, chrome_trace


def _span(worker: str, kind: str, start_s: float, end_s: float, **more: object) -> TraceSpan:
    facts: dict[str, object] = {"stage": int(worker[-1]), "step": 3, "micro": 0, **more}
    return TraceSpan(worker=worker, kind=kind, start_s=start_s, end_s=end_s, **facts)  # type: ignore[arg-type]


EXCHANGE = [
    _span("w0", "F", 10.0, 10.5),
    _span("w0", "send", 10.5, 10.7, peer="w1", bytes=4096),
    _span("w1", "recv", 10.6, 10.8, peer="w0", bytes=4096),
    _span("w1", "F", 10.8, 11.0),
]


def test_each_worker_is_a_row_named_with_its_stage() -> None:
    trace = chrome_trace("j-1", EXCHANGE, {"w0": "fast1"})
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["fast1, stage 0", "w1, stage 1"]
    rows = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert rows == ["compute", "to w1", "compute", "from fast1"]


def test_spans_are_microseconds_from_the_first_and_carry_their_keys() -> None:
    trace = chrome_trace("j-1", EXCHANGE)
    send = next(e for e in trace["traceEvents"] if e["name"] == "send 0")
    assert (send["ts"], send["dur"]) == (500_000.0, 200_000.0)
    assert send["args"] == {"step": 3, "micro": 0, "stage": 0, "plan_version": 0, "peer": "w1", "bytes": 4096}


def test_a_send_and_its_receive_are_joined_by_an_arrow() -> None:
    events = chrome_trace("j-1", EXCHANGE)["traceEvents"]
    begin, end = [e for e in events if e["ph"] in "sf"]
    assert begin["id"] == end["id"]
    assert (begin["pid"], end["pid"]) == (1, 2)


def test_a_receive_that_never_came_has_no_arrow() -> None:
    events = chrome_trace("j-1", EXCHANGE[:2])["traceEvents"]
    assert not [e for e in events if e["ph"] in "sf"]


def test_no_spans_give_an_empty_trace() -> None:
    assert chrome_trace("j-1", [])["traceEvents"] == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w0", "w1", "w2"]),
            st.sampled_from(["F", "B", "send", "recv", "opt"]),
            st.floats(0, 100),
            st.floats(-1, 5),
        ),
        max_size=40,
    )
)
def test_spans_on_one_row_never_overlap(drawn: list[tuple[str, str, float, float]]) -> None:
    trace = chrome_trace("j", [_span(w, kind, at, at + took, peer="w9") for w, kind, at, took in drawn])
    json.dumps(trace, allow_nan=False)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert sum(map(len, rows.values())) == len(drawn)
    for spans in rows.values():
        spans.sort()
        # Rounding to a thousandth of a microsecond may shift a border by as much.
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(spans))
