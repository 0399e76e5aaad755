"""Spans of OpenTelemetry, for programs that have set up its SDK.

Theory of operation: only the API is used, and it is never imported here. A program that has an SDK
has imported the API itself, so one look into the loaded modules says whether there is anything to
do. The span of a rollout is the current one for all that runs for it. Model calls and tools are
children of its phase, unless the agent's own code has opened a span of its own around them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from attrs import define

from rollout._telemetry import names
from rollout._version import package_version

__all__ = [
    "TRACEPARENT",
    "RolloutTrace",
    "begin_call",
    "context_with",
    "current_parent",
    "current_trace",
    "current_traceparent",
    "end_call",
    "inject",
    "parent_of",
    "tool_span",
]

TRACEPARENT = "traceparent"
"""The header of W3C that names the span of who sends a request."""

_tracers: dict[Any, Any] = {}
_trace: ContextVar[RolloutTrace | None] = ContextVar("rollout_trace", default=None)


def _tracer() -> Any:
    """Return the tracer of the SDK that the program has set up; ``None`` without one."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider):
        return None
    if provider not in _tracers:
        _tracers.clear()
        _tracers[provider] = provider.get_tracer("trio-rollout", package_version())
    return _tracers[provider]


def _api() -> Any:
    return sys.modules["opentelemetry.trace"]


@cache
def _propagator() -> Any:
    module = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    return module.TraceContextTextMapPropagator()


def parent_of(headers: Mapping[str, str]) -> Any:
    """Return the context that a ``traceparent`` among headers names; ``None`` if none is valid."""
    if TRACEPARENT not in headers or _tracer() is None:
        return None
    context = _propagator().extract(headers)
    valid = _api().get_current_span(context).get_span_context().is_valid
    return context if valid else None


def inject(parent: Any, headers: MutableMapping[str, str]) -> None:
    """Write a context into headers, as `TRACEPARENT`; ``None`` writes nothing."""
    if parent is not None:
        _propagator().inject(headers, parent)


def current_traceparent() -> str | None:
    """Return the ``traceparent`` of the current span; ``None`` without one."""
    if _tracer() is None or not _api().get_current_span().get_span_context().is_valid:
        return None
    headers: dict[str, str] = {}
    _propagator().inject(headers)
    return headers.get(TRACEPARENT)


def current_trace() -> RolloutTrace | None:
    """Return the trace of the rollout that runs here."""
    return _trace.get()


def current_parent() -> Any:
    """Return the context for what the rollout that runs here does; ``None`` without a trace."""
    if _tracer() is None:
        return None
    trace, span = _trace.get(), _api().get_current_span()
    if trace is not None and span is trace.span:
        return trace.parent
    return _api().set_span_in_context(span) if span.get_span_context().is_valid else None


@define(eq=False)
class RolloutTrace:
    """The span of a rollout, and that of its present phase."""

    span: Any
    _context: Any
    _phase: Any = None

    @classmethod
    def begin(
        cls, agent: str | None, attributes: Mapping[str, Any], traceparent: str | None
    ) -> RolloutTrace | None:
        """Begin the span of a rollout; ``None`` without an SDK.

        Args:
            agent: What runs.
            attributes: Further attributes; those that are ``None`` are left out.
            traceparent: The span of who asked for it.
        """
        tracer = _tracer()
        if tracer is None:
            return None
        parent = parent_of({} if traceparent is None else {TRACEPARENT: traceparent})
        known = {names.OPERATION: "invoke_agent", names.AGENT_NAME: agent, **attributes}
        span = tracer.start_span(
            f"invoke_agent {agent}" if agent else "invoke_agent",
            context=importlib.import_module("opentelemetry.context").Context()
            if parent is None
            else parent,
            attributes=_known(known),
        )
        return cls(span, _api().set_span_in_context(span))

    @property
    def parent(self) -> Any:
        """The context of the present phase."""
        if self._phase is None:
            return self._context
        return _api().set_span_in_context(self._phase, self._context)

    @contextmanager
    def current(self) -> Generator[None, None, None]:
        """Make it the current one within the block."""
        token = _trace.set(self)
        try:
            with _api().use_span(self.span, record_exception=False, set_status_on_exception=False):
                yield
        finally:
            _trace.reset(token)

    def enter(self, phase: str | None) -> None:
        """End the present phase, and begin another one if one is named."""
        if self._phase is not None:
            self._phase.end()
        tracer = _tracer()
        self._phase = (
            None if phase is None or tracer is None else tracer.start_span(phase, self._context)
        )

    def end(
        self, attributes: Mapping[str, Any], *, error: str | None, scores: Mapping[str, float]
    ) -> None:
        """End the rollout.

        Args:
            attributes: Attributes that are known by now.
            error: What kind of failure it is; ``None`` for a success.
            scores: What it has been given, by name.
        """
        self.enter(None)
        for name, value in scores.items():
            said = {names.EVALUATION_NAME: name, names.EVALUATION_SCORE: value}
            self.span.add_event(names.EVALUATION_EVENT, said)
        _end(self.span, attributes, error)


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _end(span: Any, attributes: Mapping[str, Any], error: str | None) -> None:
    span.set_attributes(_known(attributes))
    if error is not None:
        span.set_attribute(names.ERROR_TYPE, error)
        span.set_status(_api().StatusCode.ERROR)
    span.end()


def begin_call(parent: Any, url: Any, body: Mapping[str, Any], *, anthropic: bool) -> Any:
    """Begin the span of a model call; ``None`` without an SDK.

    Args:
        parent: The context that it belongs to, if any.
        url: Where it goes.
        body: What is asked.
        anthropic: Whether the endpoint's API is that of Anthropic, not of OpenAI.
    """
    tracer = _tracer()
    if tracer is None:
        return None
    model = body.get("model")
    return tracer.start_span(
        f"chat {model}" if isinstance(model, str) else "chat",
        parent,
        kind=_api().SpanKind.CLIENT,
        attributes=_known(
            {
                names.OPERATION: "chat",
                names.PROVIDER: "anthropic" if anthropic else "openai",
                names.REQUEST_MODEL: model if isinstance(model, str) else None,
                names.SERVER_ADDRESS: url.host,
                names.SERVER_PORT: url.port,
            }
        ),
    )


def end_call(span: Any, attributes: Mapping[str, Any], error: str | None) -> None:
    """End the span of a model call; see `RolloutTrace.end`."""
    _end(span, attributes, error)


def context_with(span: Any) -> Any:
    """Return the context of a span; ``None`` without one."""
    return None if span is None else _api().set_span_in_context(span)


@contextmanager
def tool_span(name: str) -> Generator[None, None, None]:
    """Have a span of a tool around the block, which is the current one within it."""
    tracer = _tracer()
    if tracer is None:
        yield
        return
    with tracer.start_as_current_span(
        f"execute_tool {name}",
        current_parent(),
        attributes={names.OPERATION: "execute_tool", names.TOOL_NAME: name},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except BaseException as error:
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            span.set_status(_api().StatusCode.ERROR)
            raise
