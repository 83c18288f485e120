"""Traces to a collector of OpenTelemetry over HTTP: the extra ``atoll[otel]``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atoll.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from coordinator.client.chrome_trace import TraceSpan


def sent(job: str, spans: Iterable[TraceSpan], url: str, names: Mapping[str, str] | None = None) -> int:
    """Send a job's spans to ``url``, and return how many.

    UsageError without the extra, ConnectionFailed where the collector does not take them.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from coordinator.notebook.spans import export_spans
    except ModuleNotFoundError as error:
        raise UsageError(f"--otlp needs {error.name}; pip install 'atoll[otel]'") from None
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--otlp {url[:80]}: give an address that begins with http:// or https://")
    exporter: SpanExporter = OTLPSpanExporter(endpoint=url)
    try:
        return export_spans(job, spans, exporter, names)
    finally:
        exporter.shutdown()
