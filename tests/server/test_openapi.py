"""/openapi.json has every endpoint and field, the server keeps to it, and /docs shows it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from py_mini_racer import MiniRacer
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.server.running import RunningServer
from weft.server.app import endpoint_routes
from weft.server.openapi.document import COMMON_ERRORS, ERRORS, FIELDS, _bodies, openapi, words_of
from weft.server.openapi.endpoints import ENDPOINTS
from weft.server.page import page_routes
from weft.server.protocol import ChatBody

SERVER = {"api_key": ["a-key"]}
KEY = {"Authorization": "Bearer a-key"}
CONFIG = Path(__file__).parent / "schemathesis.toml"
ASLEEP_AFTERWARDS = "^/(sleep|wake_up|pause|resume|update_weights|v1/replicas/.*)$"
"""Paths that would make every other answer a 503, or restart the engine."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi()


@dataclass(frozen=True)
class Fuzzed:
    """One run of schemathesis: its exit code, and what it said."""

    code: int
    said: str


CHOICES = [
    ("--phases", "fuzzing", "--max-examples", "3", "--exclude-path-regex", ASLEEP_AFTERWARDS),
    ("--phases", "coverage", "--include-path-regex", "^/(v1/messages/count_tokens|detokenize|v1/models.*)$"),
]
RUN_EACH = """
import json, sys
from schemathesis.cli import schemathesis
for arguments in json.loads(sys.argv[1]):
    try:
        schemathesis(arguments)
    except SystemExit as end:
        print(f"ended with {int(end.code or 0)}", flush=True)
"""


def fuzzed(server: RunningServer, folder: Path) -> list[Fuzzed]:
    """Of each of CHOICES, then of a description that is wrong: a limit that the server does not have, and an
    answer without one of its fields. One process, whose imports take as long as a run."""
    wrong = openapi()
    wrong["components"]["schemas"]["TokenizePromptBody"]["properties"]["prompt"]["maxLength"] = 3
    wrong["components"]["schemas"]["LoadAnswer"]["required"].append("colour")
    file = folder / "wrong.json"
    file.write_bytes(msgspec.json.encode(wrong))
    located = [
        *((f"{server.url}/openapi.json", *choice) for choice in CHOICES),
        (str(file), "--url", server.url, "--phases", "coverage", "--include-path-regex", "^/(tokenize|load)$"),
    ]
    always = ["--seed", "1", "--no-color", "--warnings", "off", "-H", f"Authorization: {KEY['Authorization']}"]
    runs = [["--config-file", str(CONFIG), "run", *arguments, *always] for arguments in located]
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, json.dumps(runs)], capture_output=True, text=True, timeout=600, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    *pieces, _ = re.split(r"^ended with (\d+)\n", done.stdout, flags=re.MULTILINE)
    return [Fuzzed(int(code), said) for said, code in zip(pieces[::2], pieces[1::2], strict=True)]


def test_a_fuzzer_finds_nothing_that_breaks_the_description_and_finds_one_that_is_wrong(
    server: RunningServer, tmp_path: Path
) -> None:
    """Random requests to every endpoint, and the limits of some. docs/testing.md has the command for all. One
    test, as each worker that had a part of it would make all runs. The last one is the control."""
    *right, wrong = fuzzed(server, tmp_path)
    assert len(right) == len(CHOICES)
    for run in right:
        assert run.code == 0, run.said[-4000:]
        generated = re.search(r"(\d+) generated", run.said)
        assert generated is not None
        assert int(generated.group(1)) >= 30
    assert wrong.code == 1
    assert "'colour' is a required property" in wrong.said.replace('"', "'")
    assert "GET /load" in wrong.said
    assert "POST /tokenize" in wrong.said
    assert "2 unique failures" in wrong.said


def test_every_route_is_in_the_description_and_the_other_way_round(document: dict[str, Any]) -> None:
    async def nothing(request: Request) -> Response:
        return Response()

    routes = endpoint_routes({row.operation: nothing for row in ENDPOINTS})
    served = {
        (re.sub(":path", "", route.path), method.lower())
        for route in routes
        for method in route.methods or ()
        if method != "HEAD" or "GET" not in (route.methods or ())
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert served == described
    operations = [row.operation for row in ENDPOINTS]
    assert len(set(operations)) == len(operations)


def test_the_application_has_no_route_besides_the_table_and_the_page(server: RunningServer) -> None:
    """A route that is added elsewhere would not be described."""
    source = (Path(__file__).parents[2] / "src" / "weft" / "server" / "app.py").read_text("utf-8")
    assert re.findall(r"\bRoute\((.*?),", source) == ["path"]
    assert "routes = [*endpoint_routes(" in source
    assert all(
        isinstance(route, Route) and (route.path in ("/", "/docs") or route.path.startswith("/page/"))
        for route in page_routes()
    )


def test_every_field_of_a_request_is_explained(document: dict[str, Any]) -> None:
    components = document["components"]["schemas"]
    bodies = _bodies(components)
    assert {"ChatBody", "CompletionBody", "MessagesBody", "ChatMessage"} <= set(bodies)
    unexplained = [
        (body, name)
        for body in bodies
        for name in components[body].get("properties", {})
        if words_of(body, name) is None
    ]
    assert unexplained == [], "each needs a row in weft/server/openapi/document.py"
    fields = {name for body in bodies for name in components[body].get("properties", {})}
    assert {name.rpartition(".")[2] for name in FIELDS} <= fields, "rows for fields that no body has"


def test_the_document_is_openapi_and_its_schemas_are_json_schema(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert re.fullmatch(r"\w+", name)
    text = json.dumps(document)
    references = set(re.findall(r'"#/components/(\w+)/(\w+)"', text))
    assert references
    assert all(name in document["components"][kind] for kind, name in references)
    assert {
        int(status)
        for methods in document["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
    } <= {200, *ERRORS}


def test_limits_and_defaults_of_the_sampler_are_in_the_description(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 100.0}
    assert (chat["temperature"]["default"], chat["n"]["default"]) == (1.0, 1)
    assert chat["top_p"]["anyOf"][0]["exclusiveMinimum"] == 0.0
    assert chat["stop"]["anyOf"][1]["maxItems"] == 64


def test_the_description_needs_no_key_and_names_nothing_of_this_server(server: RunningServer) -> None:
    answer = server.get("/openapi.json")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == json.loads(msgspec.json.encode(openapi()))
    assert server.get("/docs").status_code == 200
    for word in ("scripted", "a-key", server.url):
        assert word not in answer.text
    assert server.get("/load").status_code == 401


def test_sleep_and_wake_answer_as_described(server: RunningServer, document: dict[str, Any]) -> None:
    for path, body in (("/sleep", {"level": 1}), ("/wake_up", {"tags": ["weights", "kv_cache"]})):
        answer = server.post(path, body, headers=KEY)
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer.status_code == 200
        jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


def test_the_page_of_the_description_says_types_and_limits_in_words() -> None:
    source = (resources.files("weft.server") / "page_files" / "docs.js").read_text("utf-8")
    engine = MiniRacer()
    engine.eval(source.replace("export ", ""))
    chat = openapi()["components"]["schemas"]["ChatBody"]["properties"]

    def said(function: str, name: str) -> Any:
        return engine.eval(f"{function}({json.dumps(chat[name])})")

    assert said("typeText", "messages") == "array of ChatMessage"
    assert said("typeText", "temperature") == "number or null"
    assert said("limitsText", "temperature") == "at least 0, at most 100"
    assert said("limitsText", "stop") == (
        "at least 1 characters, at most 4096 characters, at most 64 items, "
        "each at least 1 characters, each at most 4096 characters"
    )
    assert said("limitsText", "top_p") == "above 0, at most 1"
    assert said("limitsText", "priority") == "at least -2147483648, at most 2147483647"


def test_an_endpoint_says_that_it_may_not_find_a_model_or_a_replica() -> None:
    for path, operations in openapi()["paths"].items():
        for method, operation in operations.items():
            if "{replica}" in path:
                [number] = [one["schema"] for one in operation["parameters"] if one["name"] == "replica"]
                assert number["minimum"] == 0, path
            if "{replica}" in path or (path.startswith("/api/") and "requestBody" in operation):
                assert "404" in operation["responses"], (method, path)


COMPUTED = re.compile(
    r"/v1/(chat/completions|completions|responses|messages|embeddings)|(/v1|/v2)?/rerank|(/v1)?/score"
    r"|/v1/(decisions|systemone)|/classify|/pooling|/v2/embed"
    r"|/api/(chat|generate|embed|embeddings)"
)
"""Endpoints whose answer an engine computes."""
OF_NO_OBJECT = {"/v1/load_lora_adapter", "/v1/cache/flush", "/ping"}
CHANGES_THE_ENGINE = {"/sleep", "/wake_up", "/pause", "/update_weights"}


def test_an_endpoint_names_the_errors_of_what_it_does(document: dict[str, Any]) -> None:
    components = document["components"]["schemas"]
    computed = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            said, body = operation["responses"], json.dumps(operation.get("requestBody", {}))
            names = re.findall(r"schemas/(\w+)", body)
            has_model = any("model" in components[name].get("properties", {}) for name in names)
            if (has_model or re.search(r"\{(?!digest)", path)) and path not in OF_NO_OBJECT:
                assert "404" in said, (method, path)
            if COMPUTED.fullmatch(path) and method == "post":
                computed.add(path)
                assert {"413", "422"} <= set(said), (method, path)
            elif path in CHANGES_THE_ENGINE:
                assert "409" in said, (method, path)
            assert ("422" in said) == (path in computed and method == "post"), (method, path)
    assert len(computed) == 19
    assert "413" in document["paths"]["/api/blobs/{digest}"]["post"]["responses"]


@pytest.mark.parametrize(("path", "method"), [("/health", "get"), ("/ping", "get"), ("/ping", "post")])
def test_an_endpoint_that_tells_of_health_has_the_same_object_with_a_503(
    document: dict[str, Any], path: str, method: str
) -> None:
    responses = document["paths"][path][method]["responses"]
    schemas = [responses[status]["content"]["application/json"]["schema"] for status in ("200", "503")]
    assert schemas[0] in (schemas[1], *schemas[1].get("anyOf", ()))


def test_a_body_of_one_shape_is_that_shape_and_one_of_two_is_either(document: dict[str, Any]) -> None:
    def body(path: str) -> Any:
        return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    assert body("/v1/chat/completions") == {"$ref": "#/components/schemas/ChatBody"}
    assert [one["$ref"].rpartition("/")[2] for one in body("/tokenize")["oneOf"]] == [
        "TokenizePromptBody",
        "TokenizeChatBody",
    ]


def test_a_page_of_a_list_has_twenty_entries_and_a_hundred_at_most(document: dict[str, Any]) -> None:
    limits = [
        parameter["schema"]
        for operations in document["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["name"] == "limit"
    ]
    assert len(limits) == 4
    assert all((one["minimum"], one["default"], one["maximum"]) == (1, 20, 100) for one in limits)


def test_each_error_has_its_own_words(document: dict[str, Any]) -> None:
    words = {int(status): one["description"] for status, one in document["components"]["responses"].items()}
    assert words == ERRORS
    assert "other methods" in words[405]
    assert "unknown_path" in words[404]


def test_an_endpoint_names_no_error_that_every_endpoint_has() -> None:
    assert [row.operation for row in ENDPOINTS if {*row.errors} & {*COMMON_ERRORS}] == []


@pytest.mark.parametrize("name", ["cache_boundaries", "truncate_prompt_tokens"])
def test_the_largest_number_of_the_description_is_the_largest_that_is_read(document: dict[str, Any], name: str) -> None:
    schema = document["components"]["schemas"]["ChatBody"]["properties"][name]
    [largest] = set(re.findall(r'"maximum": (\d+)', json.dumps(schema)))
    for number, is_read in ((int(largest), True), (int(largest) + 1, False)):
        body = {"messages": [], name: [number] if name == "cache_boundaries" else number}
        try:
            msgspec.json.decode(json.dumps(body), type=ChatBody)
        except msgspec.ValidationError:
            assert not is_read
        else:
            assert is_read


def test_a_default_of_the_description_is_what_a_body_without_the_field_has(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["StreamOptions"]["properties"]["continuous_usage_stats"]["default"] is False
    assert schemas["OllamaPullBody"]["properties"]["insecure"]["default"] is False
    tokens = schemas["RerankBody"]["properties"]["max_tokens_per_doc"]
    assert 1 in [part.get("minimum") for part in tokens.get("anyOf", [tokens])]
