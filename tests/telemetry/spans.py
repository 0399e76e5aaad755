"""An SDK of OpenTelemetry for the length of a test, and the spans that end meanwhile."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs pip install opentelemetry-sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """What has ended within `recorded`."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, start: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name.startswith(start)]

    def one(self, start: str) -> ReadableSpan:
        (found,) = self.named(start)
        return found

    def children(self, parent: ReadableSpan) -> list[str]:
        return [
            span.name
            for span in self.all()
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]


@contextmanager
def sdk(monkeypatch: pytest.MonkeyPatch, *processors: Any) -> Generator[None, None, None]:
    """Have the program's SDK set up within the block."""
    made = TracerProvider()
    for each in processors:
        made.add_span_processor(each)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made)
    try:
        yield
    finally:
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
        made.shutdown()


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Generator[Spans, None, None]:
    """Keep the spans that end within the block."""
    exporter = InMemorySpanExporter()
    with sdk(monkeypatch, SimpleSpanProcessor(exporter)):
        yield Spans(exporter)
