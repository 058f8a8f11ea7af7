"""--otlp-endpoint: spans of requests at a collector that the test starts, in protobuf over HTTP."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.running import RunningServer, eventually, running_server
from weft.errors import ConfigError
from weft.server.config import ServerConfig
from weft.server.tracing import RequestTrace, RequestTracer, check_endpoint

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans, or is too slow to take any (``silent``)."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.paths: set[str] = set()
        self.silent = False
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                if collector.silent:
                    time.sleep(60)
                collector.take(self.path, ExportTraceServiceRequest.FromString(raw))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """No lines in the output of the tests."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path: str, batch: ExportTraceServiceRequest) -> None:
        self.paths.add(path)
        for group in batch.resource_spans:
            self.resources.append(values(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans.extend(scope.spans)

    def wait(self, request_id: str) -> tuple[Any, dict[str, Any]]:
        """The span of a request, and the spans below it by name."""

        def of_request() -> list[Any]:
            return [span for span in self.spans if id_of(span) == request_id]

        assert eventually(lambda: bool(of_request())), [span.name for span in self.spans]
        [root] = of_request()
        return root, {span.name: span for span in self.spans if span.parent_span_id == root.span_id}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(one) for one in value.array_value.values]
        return getattr(value, kind)

    return {one.key: plain(one.value) for one in attributes}


def id_of(span: Any) -> str | None:
    return values(span.attributes).get("weft.request.id")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def server(collector: Collector, model_directory: Path) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
        with running_server(
            "build_paced", engine={"model": str(model_directory)}, server={"otlp_endpoint": collector.url}
        ) as running:
            yield running


def test_a_request_is_a_span_with_its_phases_in_order(server: RunningServer, collector: Collector) -> None:
    body = {"prompt": "say:Good morning", "max_tokens": 8, "temperature": 0}
    before_ns = time.time_ns()
    answer = server.post("/v1/completions", body, headers={"X-Request-Id": "whole"}).json()
    after_ns = time.time_ns()
    span, phases = collector.wait("whole")
    assert span.name == f"text_completion {answer['model']}"
    assert span.kind == span.SPAN_KIND_SERVER
    assert not span.parent_span_id
    assert list(phases) == ["prepare", "queue", "prefill", "decode"]
    edges = [edge for phase in phases.values() for edge in (phase.start_time_unix_nano, phase.end_time_unix_nano)]
    assert edges == sorted(edges)
    assert before_ns <= span.start_time_unix_nano == edges[0]
    # The client may have the last byte before the server has noted the end.
    assert edges[-1] <= span.end_time_unix_nano <= after_ns + 1_000_000_000
    assert edges[-1] <= after_ns
    assert edges[-1] - edges[-2] > 5_000_000  # 8 steps of 1 ms
    attributes = values(span.attributes)
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 8
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.request.max_tokens"] == 8
    assert attributes["http.response.status_code"] == 200
    assert "Good morning" not in str(span)
    assert collector.paths == {"/v1/traces"}
    resource = collector.resources[0]
    assert resource["service.name"] == "weft"
    assert resource["deployment.environment.name"] == "tests"


def test_a_stream_joins_the_trace_of_its_client(server: RunningServer, collector: Collector) -> None:
    headers = {"X-Request-Id": "stream", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    body = {"messages": [{"role": "user", "content": "say:one two"}], "stream": True, "n": 2}
    server.post("/v1/chat/completions", body, headers=headers)
    span, phases = collector.wait("stream")
    assert span.name.startswith("chat ")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert {phase.trace_id.hex() for phase in phases.values()} == {TRACE_ID}
    attributes = values(span.attributes)
    assert attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.request.stream"] is True


def test_a_client_that_does_not_sample_has_no_span(server: RunningServer, collector: Collector) -> None:
    for request_id, flag in (("unsampled", "00"), ("sampled", "01")):
        server.post(
            "/v1/completions",
            {"prompt": "say:a"},
            headers={"X-Request-Id": request_id, "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flag}"},
        )
    collector.wait("sampled")
    assert "unsampled" not in map(id_of, collector.spans)


@pytest.mark.parametrize("parent", ["nonsense", "00-0-0-00", "ff-" + "0" * 5000, f"00-{'0' * 32}-{PARENT_ID}-01"])
def test_a_wrong_traceparent_begins_a_trace_of_its_own(
    server: RunningServer, collector: Collector, parent: str
) -> None:
    name = f"wrong-{parent[:8]}-{len(parent)}"
    headers = {"X-Request-Id": name, "traceparent": parent, "tracestate": "a=" + "b" * 9000}
    assert server.post("/v1/completions", {"prompt": "say:a"}, headers=headers).status_code == 200
    span, _ = collector.wait(name)
    assert not span.parent_span_id
    assert not span.trace_state


def test_a_refusal_has_a_span_without_phases_and_a_look_has_none(server: RunningServer, collector: Collector) -> None:
    server.get("/health", headers={"X-Request-Id": "look"})
    server.post("/v1/completions", {"prompt": 1.5}, headers={"X-Request-Id": "refused"})
    span, phases = collector.wait("refused")
    assert values(span.attributes)["http.response.status_code"] == 400
    assert not phases
    assert span.status.code == span.status.STATUS_CODE_UNSET
    assert "look" not in map(id_of, collector.spans)


def test_a_silent_collector_holds_up_neither_answers_nor_the_end_of_the_server(model_directory: Path) -> None:
    stuck = Collector()
    stuck.silent = True
    try:
        with running_server(
            "build", engine={"model": str(model_directory)}, server={"otlp_endpoint": stuck.url}
        ) as running:
            begin_s = time.monotonic()
            for _ in range(30):
                assert running.post("/v1/completions", {"prompt": "say:a"}).status_code == 200
            assert time.monotonic() - begin_s < 60, "an export takes 10 s"
            running.interrupt()
            assert running.exit_code(limit_s=40) == 0
    finally:
        stuck.stop()


def test_the_queue_of_spans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector = Collector()
    collector.silent = True
    begin_s = time.monotonic()
    closed_port = "http://127.0.0.1:9"
    tracers = [RequestTracer(collector.url + "/v1/traces"), RequestTracer(closed_port)]
    try:
        for number in range(200):
            for tracer in tracers:
                tracer.ended(RequestTrace("POST", "/v1/messages", str(number), {}))
        assert time.monotonic() - begin_s < 30, "one export to either takes 10 s"
        for tracer in tracers:
            [processor] = tracer._provider._active_span_processor._span_processors
            assert len(processor._batch_processor._queue) <= 16  # type: ignore[attr-defined]
    finally:
        for tracer in tracers:
            tracer.close()
        collector.stop()
    assert time.monotonic() - begin_s < 50


@pytest.mark.parametrize("url", ["", "localhost:4318", "ftp://a", "http://", "http://a:99999", "grpc://a:4317"])
def test_what_is_no_url_of_a_collector_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint") as refused:
        ServerConfig(otlp_endpoint=url).check()
    assert repr(url) in refused.value.message


@pytest.mark.parametrize("url", ["http://collector", "https://collector.example/v1/traces", "http://[::1]:4318"])
def test_a_collector_has_the_port_of_its_scheme_where_none_is_named(url: str) -> None:
    check_endpoint(url)
    with pytest.raises(ConfigError, match="it takes the URL of a collector"):
        check_endpoint("http://collector:0")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(otlp_endpoint="http://localhost:4318")
    config.check()
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"weft\[otlp\]"):
        config.check()
