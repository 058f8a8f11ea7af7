"""The log of requests and of engines, its file, and the dashboard of deploy/; queries name metrics of the server."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.server.running import ROOT, RunningServer, eventually, running_server, server_ended, started_again
from weft.cli.main import main
from weft.logs import JsonFormatter
from weft.server.access_log import is_look, request_fields
from weft.server.edge import Origins
from weft.server.errors import on_bug
from weft.server.gate import Gate
from weft.server.tenants import Keys
from weft.server.tracing import GenerationOutcome, RequestTrace
from weft.version import weft_version

KEY = {"Authorization": "Bearer secret-key"}


@pytest.fixture(scope="module")
def servers(model_directory: Path) -> Iterator[Callable[[], RunningServer]]:
    def start() -> AbstractContextManager[RunningServer]:
        settings = {"log_format": "json", "api_key": ["secret-key"], "replicas": "2"}
        return running_server("build", engine={"model": str(model_directory)}, server=settings)

    with started_again(start, server_ended) as current:
        yield current


@pytest.fixture
def server(servers: Callable[[], RunningServer]) -> RunningServer:
    return servers()


def test_every_query_of_the_dashboard_names_a_metric_of_the_server(server: RunningServer) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"weft:(\w+)", query)}
    assert len(asked) > 15
    assert asked >= {
        "store_bytes",
        "store_writes_total",
        "store_uploads_waiting",
        "store_uploads_total",
        "store_unreachable_seconds_total",
    }
    server.client(api_key="secret-key").completions.create(model="default", prompt="say:a")

    def missing() -> set[str]:
        text = server.get("/metrics", headers=KEY).text
        return asked - set(re.findall(r"^(?:# TYPE )?weft:(\w+)", text, re.MULTILINE))

    assert eventually(lambda: not missing()), missing()
    # The control: a name that no server has is found out.
    asked.add("no_such_metric")
    assert missing() == {"no_such_metric"}


@pytest.mark.parametrize(
    ("path", "method", "status", "written"),
    [
        ("/metrics", "GET", 200, False),
        ("/v1/cache", "GET", 200, False),
        ("/metrics", "GET", 401, True),
        ("/health", "GET", 503, False),
        ("/v1/cache/flush", "POST", 200, True),
        ("/v1/models", "GET", 200, True),
        ("/", "GET", 200, True),
    ],
)
def test_looks_that_succeed_do_not_fill_the_access_log(path: str, method: str, status: int, written: bool) -> None:
    trace = RequestTrace(method, path, "", {})
    trace.status = status
    assert is_look(trace) is not written


def test_a_line_of_text_says_what_a_request_cost_and_the_file_may_be_moved(
    model_directory: Path, tmp_path: Path
) -> None:
    """logrotate moves the file and tells nobody: the next line goes into a new one."""
    file = tmp_path / "weft.log"
    with running_server(
        "build_paced", engine={"model": str(model_directory)}, server={"log_file": str(file)}
    ) as running:
        running.post("/v1/completions", {"prompt": "say:hello", "max_tokens": 3})
        assert eventually(lambda: "completions" in file.read_text())
        file.rename(tmp_path / "weft.log.1")
        answer = running.post("/v1/completions", {"prompt": "crash"}, headers={"X-Request-Id": "unlucky"})
        assert answer.status_code == 422
        assert eventually(lambda: file.exists() and "unlucky" in file.read_text())
        running.interrupt()
        running.exit_code()
        output = running.rest_of_output()
    first, second = (tmp_path / "weft.log.1").read_text(), file.read_text()
    assert re.search(
        r"INFO POST /v1/completions 200 in \d\.\d{3} s, 127\.0\.0\.1:\d+, id [0-9a-f]{32}, \S+, "
        r"9 prompt tokens \(0 cached\), 3 output tokens at [\d.]+/s, queued \d\.\d{3} s$",
        first,
        re.MULTILINE,
    ), first
    assert "Traceback" in second, "the engine that died logs into the new file, too"
    assert "INFO" not in output
    assert "API " in output


def test_a_log_file_that_cannot_be_written_ends_the_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--log-file", str(tmp_path / "none" / "weft.log")]) == 2
    assert f"--log-file {tmp_path / 'none' / 'weft.log'} cannot be written: No such file" in capsys.readouterr().err


def test_a_bug_is_found_by_the_id_that_the_client_got() -> None:
    """Each record of the request's task has the id, those of libraries too."""
    written: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    async def broken(request: Request) -> Response:
        logging.getLogger("some.library").warning("odd")
        raise KeyError("private")

    app = Starlette(routes=[Route("/v1/models", broken)], exception_handlers={Exception: on_bug})
    ended: list[RequestTrace] = []
    gate = Gate(app, keys=Keys([]), origins=Origins(), on_end=lambda trace, ignored: ended.append(trace))
    lines = Lines()
    lines.setFormatter(JsonFormatter())
    logging.getLogger("some.library").addHandler(lines)
    client = TestClient(gate, base_url="http://127.0.0.1", raise_server_exceptions=False)
    answer = client.get("/v1/models", headers={"X-Request-Id": "my-id-2"})
    assert "(KeyError); its log has the details under the request id my-id-2" in answer.json()["error"]["message"]
    assert [json.loads(line)["request_id"] for line in written] == ["my-id-2"]
    fields = request_fields(ended[0], ended[0].received_s + 1.5)
    assert fields == {"request_id": "my-id-2", "client": "testclient:50000", "method": "GET", "path": "/v1/models",
                      "status": 500, "duration_s": 1.5, "error": "internal_error"}  # fmt: skip


@pytest.mark.parametrize(("last_s", "rate"), [(12.0, 3.5), (10.0, None)])
def test_a_rate_needs_two_moments(last_s: float, rate: float | None) -> None:
    """Tokens after the first, by the seconds after it; none where all came at once."""
    trace = RequestTrace("POST", "/v1/completions", "id", {})
    trace.outcome = GenerationOutcome(
        model="m", arrived_s=9.0, began_s=9.5, first_s=10.0, last_s=last_s, parameters={}, adapter=None,
        input_tokens=3, cached_tokens=0, output_tokens=8, finish_reasons=["stop"], error_type=None)  # fmt: skip
    assert request_fields(trace, 13.0).get("tokens_per_s") == rate


def test_requests_are_counted_by_route_and_the_version_and_the_process_are_metrics(server: RunningServer) -> None:
    for path in ("/v1/models", "/v1/models/wrong", "/a", "/b", "/"):
        server.get(path, headers=KEY)
    text = server.get("/metrics", headers=KEY).text
    counted = re.findall(r'^weft:http_requests_total{.*method="GET".*} (\S+)$', text, re.MULTILINE)
    routes = re.findall(r'^weft:http_requests_total{.*route="([^"]*)".*}', text, re.MULTILINE)
    assert set(routes) >= {"/v1/models", "other", "/"}
    assert any(route.startswith("/v1/models/{") for route in routes)
    assert not {"/a", "/b", "/v1/models/wrong"} & set(routes)
    assert len(counted) >= 4
    assert re.search(rf'^weft:build_info{{.*version="{re.escape(weft_version())}"}} 1.0$', text, re.MULTILINE)
    assert re.search(r"^process_resident_memory_bytes \d", text, re.MULTILINE)


def test_each_line_is_a_json_object_without_keys_and_texts(server: RunningServer) -> None:
    """Lines of the start and of requests, each found by the id that the client got."""
    client = server.client(api_key="secret-key")
    id_of = {"X-Request-Id": "my-id-1"}
    stream = client.completions.create(model="default", prompt="say:private", stream=True, extra_headers=id_of)
    # A busy machine puts several tokens into one event, so their number says nothing.
    assert "".join(event.choices[0].text for event in stream if event.choices) == "private"
    refused = server.get("/v1/models/wrong?key=in-the-query", headers=KEY)
    assert server.post("/v1/completions", {"prompt": "say:a"}).status_code == 401
    server.interrupt()
    assert server.exit_code() == 0
    text = server.rest_of_output()
    assert "import OpenAI" not in text, "a log has no use for the snippets of the banner"
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    assert {line["level"] for line in lines} == {"info"}
    assert any("API " in line["message"] for line in lines)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line["time"]) for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    streamed, missing, unknown = [line for line in lines if "status" in line][-3:]
    assert streamed.items() >= {
        "request_id": "my-id-1", "method": "POST", "path": "/v1/completions", "status": 200, "key": "key 1",
        "prompt_tokens": 11, "cached_tokens": 0, "finish_reason": "stop",
    }.items()  # fmt: skip
    assert streamed["output_tokens"] >= len("private")
    assert 0 <= streamed["queue_s"] <= streamed["first_token_s"] <= streamed["duration_s"]
    # Tokens of one event, which a busy machine makes, have no rate: ``test_a_rate_needs_two_moments`` has the others.
    assert streamed.get("tokens_per_s", 1.0) > 0
    assert missing.items() >= {"status": 404, "error": "model_not_found", "path": "/v1/models/wrong"}.items()
    assert missing["request_id"] == refused.headers["x-request-id"]
    assert (unknown["status"], unknown["error"]) == (401, "missing_api_key")
    assert "key" not in unknown
    assert not re.search("secret-key|private|in-the-query", text)
