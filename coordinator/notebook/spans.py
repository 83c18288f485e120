"""A job's timeline as traces of OpenTelemetry, beside the file for Perfetto.

One trace a job: a span for each step, and below it what each worker computed, sent and received. A worker is
a ``service.name``; a receive links to its send. Times are the coordinator's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, Tracer, set_span_in_context

from atoll.errors import ConnectionFailed
from coordinator.client.chrome_trace import NAMES

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from coordinator.client.chrome_trace import TraceSpan

SPANS_A_CALL = 512
SERVICE = "atoll"
Message = tuple[str, str, int, int, int]  # from, to, plan version, step, micro-batch


@dataclass
class _Collected(SpanProcessor):
    """Spans that have ended, in order; a batch processor would drop what comes faster than it is sent."""

    ended: list[ReadableSpan] = field(default_factory=list)

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


def export_spans(
    job: str, spans: Iterable[TraceSpan], exporter: SpanExporter, names: Mapping[str, str] | None = None
) -> int:
    """Send a job's spans to ``exporter``, and return how many; ``names`` gives workers a name for people.

    ConnectionFailed where it does not take them.
    """
    ordered = sorted(spans, key=lambda span: (span.start_s, span.kind != "send"))
    collected = _Collected()
    if ordered:
        _trace(job, ordered, names or {}, collected)
    for at in range(0, len(collected.ended), SPANS_A_CALL):
        if exporter.export(collected.ended[at : at + SPANS_A_CALL]) is not SpanExportResult.SUCCESS:
            raise ConnectionFailed(
                f"the collector took {at} of {len(collected.ended)} spans of {job}; look at its "
                "address and its log"
            )
    return len(collected.ended)


def _trace(job: str, ordered: list[TraceSpan], names: Mapping[str, str], to: _Collected) -> None:
    own = _tracer(SERVICE, to)
    root = own.start_span(job, start_time=_ns(ordered[0].start_s), attributes={"atoll.job": job})
    inside = set_span_in_context(root)
    steps: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in ordered:
        steps[span.step].append(span)
    tracers = {w: _tracer(names.get(w, w), to) for w in sorted({span.worker for span in ordered})}
    for step, found in steps.items():
        above = own.start_span(f"step {step}", inside, start_time=_ns(found[0].start_s))
        _step(found, tracers, set_span_in_context(above), names)
        above.end(_ns(max(span.end_s for span in found)))
    root.end(_ns(max(span.end_s for span in ordered)))


def _step(
    found: list[TraceSpan], tracers: Mapping[str, Tracer], above: Context, names: Mapping[str, str]
) -> None:
    sent: dict[Message, list[SpanContext]] = defaultdict(list)
    # Sends first: a receive is linked to the send of its message, and may have begun to wait before that.
    for span in sorted(found, key=lambda span: span.kind != "send"):
        message = (span.peer, span.worker, span.plan_version, span.step, span.micro)
        of_it = sent[message] if span.kind == "recv" else []
        made = tracers[span.worker].start_span(
            NAMES.get(span.kind, span.kind),
            above,
            links=[Link(of_it.pop(0))] if of_it else [],
            start_time=_ns(span.start_s),
            attributes={
                "atoll.stage": span.stage,
                "atoll.micro": span.micro,
                "atoll.plan_version": span.plan_version,
                **(
                    {"atoll.peer": names.get(span.peer, span.peer), "atoll.bytes": span.bytes}
                    if span.peer
                    else {}
                ),
            },
        )
        made.end(_ns(max(span.start_s, span.end_s)))
        if span.kind == "send":
            sent[span.worker, span.peer, span.plan_version, span.step, span.micro].append(
                made.get_span_context()
            )


def _tracer(service: str, to: _Collected) -> Tracer:
    provider = TracerProvider(resource=Resource({SERVICE_NAME: service}), shutdown_on_exit=False)
    provider.add_span_processor(to)
    return provider.get_tracer("atoll")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
