"""Traces of requests for OpenTelemetry (``--otlp-endpoint URL``): one span a request, its phases below it.

    received        tokenized      first step       first token            last token
       |--- prepare ---|---- queue ----|--- prefill ----|------ decode ---------|

Times are the same as in the metrics. Attributes have the names of OpenTelemetry's conventions for generative AI, and no
span has text of a prompt or an answer. The span joins the trace of a ``traceparent``.

A request builds its spans but never waits for them: a thread of the SDK sends them, and a full queue drops the oldest
spans (law L11). The SDK also reads the ``OTEL_*`` variables of the environment.
"""

from __future__ import annotations

import itertools
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError
from weft.version import weft_version

if TYPE_CHECKING:
    from opentelemetry.context import Context

OPERATIONS: Mapping[str, str] = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
}
"""Operations by path, in the words of the conventions. Only these paths have spans."""
OTHER_ROUTE = "other"
"""Route of a request that no endpoint answers: with the path, every client could add series of metrics."""
_TRACES_PATH = "/v1/traces"
_TRACE_STATE_CHARS = 512
"""Most characters of ``tracestate``; a longer one is left out."""
_LAST_BATCH_S = 2.0
"""Seconds that a stopping server waits for the collector."""
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutcome:
    """Facts of a generation. Times are readings of ``time.perf_counter``; None: never reached."""

    model: str
    arrived_s: float
    began_s: float | None
    first_s: float | None
    last_s: float
    parameters: Mapping[str, Any]
    """Attributes ``gen_ai.request.*``, by the last part of the name."""
    adapter: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: Sequence[str]
    error_type: str | None


class RequestTrace:
    """One request, from its headers on. The handler sets ``outcome``, the router ``route``, and the gate ``status``,
    ``error`` (the code of a refusal) and ``key`` (a name, never the key itself)."""

    __slots__ = (
        *("client", "error", "headers", "key", "method", "outcome", "path", "received_ns", "received_s"),
        *("request_id", "route", "status"),
    )

    def __init__(
        self, method: str, path: str, request_id: str, headers: Mapping[str, str], *, client: str | None = None
    ) -> None:
        self.received_ns, self.received_s = time.time_ns(), time.perf_counter()
        self.method, self.path, self.client = method, path, client
        self.request_id = request_id
        self.route = OTHER_ROUTE
        self.error: str | None = None
        self.key = ""
        self.headers = {name: value for name in ("traceparent", "tracestate") if (value := headers.get(name))}
        if len(self.headers.get("tracestate", "")) > _TRACE_STATE_CHARS:
            del self.headers["tracestate"]
        self.outcome: GenerationOutcome | None = None
        self.status: int | None = None

    @property
    def operation(self) -> str | None:
        """Name of the operation in the conventions; None: the request has no span."""
        return OPERATIONS.get(self.path) if self.method == "POST" else None

    def ns(self, reading_s: float) -> int:
        """Return the time of day of a reading of ``time.perf_counter``."""
        return self.received_ns + int((reading_s - self.received_s) * 1e9)


class RequestTracer:
    """A sender of spans. ``endpoint``: the collector's URL for OTLP over HTTP, with or without ``/v1/traces``.

    Raises ConfigError."""

    def __init__(self, endpoint: str) -> None:
        check_endpoint(endpoint)

        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = weft_version()
        resource = Resource.create({"service.version": version})
        # The SDK's default name if no variable sets one.
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "weft"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=_traces_url(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("weft", version)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, trace: RequestTrace) -> None:
        """Queue the spans of ``trace``, if its operation has any; never wait."""
        if trace.operation is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        outcome = trace.outcome
        name = trace.operation if outcome is None else f"{trace.operation} {outcome.model}"
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(trace.headers),
            kind=SpanKind.SERVER,
            start_time=trace.received_ns,
            attributes=_attributes(trace),
        )
        if span.is_recording():
            error = _error_type(trace)
            if error is not None:
                span.set_attribute("error.type", error)
                span.set_status(Status(StatusCode.ERROR))
            if outcome is not None:
                self._phases(trace, outcome, set_span_in_context(span))
        span.end(trace.ns(time.perf_counter()))

    def close(self) -> None:
        """Send the queued spans, for at most some seconds."""
        ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(_LAST_BATCH_S)

    def _phases(self, trace: RequestTrace, outcome: GenerationOutcome, context: Context) -> None:
        end_s = time.perf_counter() if outcome.first_s is None else outcome.last_s
        edges = [
            ("prepare", trace.received_s),
            ("queue", outcome.arrived_s),
            ("prefill", outcome.began_s),
            ("decode", outcome.first_s),
            ("", end_s),
        ]
        reached = [(name, reading_s) for name, reading_s in edges if reading_s is not None]
        for (name, start_s), (_, next_s) in itertools.pairwise(reached):
            span = self._tracer.start_span(name, context=context, start_time=trace.ns(start_s))
            span.end(trace.ns(max(start_s, next_s)))


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for a value that is not an HTTP URL, and if packages are missing."""
    flag = "--otlp-endpoint"
    try:
        url = urllib.parse.urlsplit(endpoint)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"{flag} {endpoint!r}: it takes the URL of a collector, such as http://localhost:4318", param=flag
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{flag} needs packages that are not installed ({error.name}): install the extra "
            "otlp, as in pip install 'weft[otlp]'",
            param=flag,
        ) from None


def _traces_url(endpoint: str) -> str:
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(_TRACES_PATH) else endpoint + _TRACES_PATH


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": "weft",
        "http.request.method": "POST",
        "url.path": trace.path,
        "weft.request.id": trace.request_id,
    }
    if trace.status is not None:
        attributes["http.response.status_code"] = trace.status
    outcome = trace.outcome
    if outcome is None:
        return attributes
    attributes |= {f"gen_ai.request.{name}": value for name, value in outcome.parameters.items() if value is not None}
    attributes |= {
        "gen_ai.request.model": outcome.model,
        "gen_ai.response.model": outcome.model,
        "gen_ai.usage.input_tokens": outcome.input_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "gen_ai.response.finish_reasons": list(outcome.finish_reasons),
    }
    if outcome.first_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = outcome.first_s - trace.received_s
    return attributes


def _error_type(trace: RequestTrace) -> str | None:
    """Return the error of a span; refusals (4xx) are not errors of a server."""
    if trace.outcome is not None and trace.outcome.error_type is not None:
        return trace.outcome.error_type
    return str(trace.status) if trace.status is not None and trace.status >= _SERVER_ERROR else None
