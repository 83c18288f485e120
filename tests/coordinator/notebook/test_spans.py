"""A job's timeline for OpenTelemetry: spans below steps, receives linked to sends, nothing dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from atoll.errors import ConnectionFailed, UsageError
from coordinator.client.chrome_trace import TraceSpan
from coordinator.notebook.otlp import sent
from coordinator.notebook.spans import export_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def timeline(steps: int = 2) -> list[TraceSpan]:
    found = []
    for step in range(1, steps + 1):
        at = 10.0 * step
        found += [
            TraceSpan("w-1", 0, "F", step, 0, at, at + 1),
            TraceSpan("w-1", 0, "send", step, 0, at + 1, at + 2, 1, "w-2", 64),
            TraceSpan("w-2", 1, "recv", step, 0, at + 0.5, at + 2, 1, "w-1", 64),
            TraceSpan("w-2", 1, "B", step, 0, at + 2, at + 4),
        ]
    return found


def test_a_job_is_one_trace_with_its_steps_and_its_workers_spans() -> None:
    exporter = InMemorySpanExporter()
    count = export_spans("digits-1", reversed(timeline()), exporter, {"w-1": "attic", "w-2": "cellar"})
    spans = exporter.get_finished_spans()
    assert count == len(spans) == 1 + 2 + 8
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    by_id = {span.context.span_id: span for span in spans if span.context}
    above = {span.name: by_id[span.parent.span_id].name for span in spans if span.parent}
    assert above["step 1"] == "digits-1"
    assert above["forward"] == "step 2"
    names = {span.resource.attributes["service.name"] for span in spans}
    assert names == {"atoll", "attic", "cellar"}
    [root] = [span for span in spans if span.parent is None]
    assert (root.start_time, root.end_time) == (10 * 10**9, 24 * 10**9)


def test_a_receive_is_linked_to_the_send_of_its_message() -> None:
    exporter = InMemorySpanExporter()
    export_spans("digits-1", timeline(), exporter)
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context}
    received = [span for span in spans if span.name == "recv"]
    for span in received:
        [link] = span.links
        other = by_id[link.context.span_id]
        assert other.name == "send"
        assert other.parent == span.parent
        assert (span.attributes or {})["atoll.bytes"] == 64
    assert len(received) == 2


class Refusing(SpanExporter):
    """Takes the first batch."""

    def __init__(self) -> None:
        self.batches = [0]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append(len(spans))
        return SpanExportResult.SUCCESS if len(self.batches) == 2 else SpanExportResult.FAILURE


def test_spans_travel_in_batches_and_a_collector_that_refuses_is_named() -> None:
    exporter = Refusing()
    with pytest.raises(ConnectionFailed, match="took 512 of 1001 spans of digits-1"):
        export_spans("digits-1", timeline(200), exporter)
    assert exporter.batches == [0, 512, 489]


def test_nothing_recorded_is_nothing_sent_and_an_odd_address_is_refused() -> None:
    assert export_spans("digits-1", [], InMemorySpanExporter()) == 0
    with pytest.raises(UsageError, match="begins with http"):
        sent("digits-1", timeline(), "localhost:4318")
