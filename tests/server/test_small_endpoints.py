"""Models, tokens, health, version, load, request ids, metrics; and the banner, as a user reads it."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import RunningServer
from tests.server.scripted_engine import EOS, MAX_MODEL_LEN
from weft.version import weft_version

SERVER = {"served_model_name": ["first/name", "second"], "metrics_prefix": "vllm"}


def values(server: RunningServer) -> dict[str, float]:
    """Samples of /metrics; of labelled ones, name{reason} and, for histograms, the plain sums."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if ":" not in sample.name:  # of the process
                continue
            labels = {key: value for key, value in sample.labels.items() if key not in ("engine", "model_name")}
            assert sample.labels["model_name"] == "first/name"
            if "le" not in labels:
                found[sample.name + "".join(f"/{value}" for value in labels.values())] = sample.value
    return found


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def test_the_served_names_are_listed_with_the_context_length(server: RunningServer) -> None:
    cards = server.client().models.list().data
    assert [card.id for card in cards] == ["first/name", "second"]
    assert cards[0].max_model_len == MAX_MODEL_LEN
    assert server.client().models.retrieve("first/name").id == "first/name"
    assert server.client().models.retrieve("default").id == "first/name"


@pytest.mark.parametrize(
    ("asked", "answered"), [("first/name", "first/name"), ("second", "second"), ("default", "first/name")]
)
def test_every_served_name_works(server: RunningServer, asked: str, answered: str) -> None:
    assert server.client().completions.create(model=asked, prompt="say:a").model == answered


def test_text_becomes_tokens_and_text_again(server: RunningServer) -> None:
    text = "héllo <|end|> 🏔"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert EOS in answer["tokens"]
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_messages_become_the_tokens_that_chat_would_compute(server: RunningServer) -> None:
    turns = [{"role": "user", "content": "say:x"}]
    tokens = server.post("/tokenize", {"messages": turns}).json()["tokens"]
    answer = server.client().chat.completions.create(
        model="second", messages=turns, extra_body={"return_token_ids": True}
    )
    assert answer.prompt_token_ids == tokens


def test_health_ping_version_and_load_answer(server: RunningServer) -> None:
    assert (server.get("/health").status_code, server.get("/ping").status_code) == (200, 200)
    assert server.post("/ping").status_code == 200
    version = server.get("/version")
    assert version.json() == {"version": weft_version()}
    assert "server" not in version.headers, "nobody needs to know which library answers"
    assert server.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}


def test_a_request_id_is_echoed_or_made(server: RunningServer) -> None:
    given = server.get("/health", headers={"X-Request-Id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    made = {server.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    odd = server.get("/health", headers={"X-Request-Id": "x" * 500})
    assert odd.headers["x-request-id"] != "x" * 500
    answer = server.post("/v1/completions", {"prompt": "say:a", "request_id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"


def test_metrics_count_what_happened(server: RunningServer) -> None:
    before = after = values(server)

    def gained(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    client = server.client()
    client.completions.create(model="second", prompt="say:abcd")
    client.completions.create(model="second", prompt="sing", max_tokens=10, n=2)
    # The engine's own counters follow with its next report, a moment after the last token.
    expected_tokens = len("say:abcd") + 2 * len("sing")
    deadline = time.monotonic() + 10
    while True:
        after = values(server)
        caught_up = (
            gained("prompt_tokens_total") == expected_tokens
            and gained("iteration_tokens_total_sum") == gained("computed_tokens_total") >= 25
        )
        if caught_up or time.monotonic() > deadline:
            break
        time.sleep(0.02)

    assert gained("request_success_total/stop") == 1
    assert gained("request_success_total/length") == 2
    assert gained("prompt_tokens_total") == expected_tokens
    assert gained("generation_tokens_total") == 5 + 20
    assert gained("time_to_first_token_seconds_count") == 3
    assert gained("inter_token_latency_seconds_count") == 4 + 18
    assert gained("e2e_request_latency_seconds_count") == 3
    assert gained("request_prompt_tokens_sum") == len("say:abcd") + 2 * len("sing")
    assert gained("request_params_n_sum") == 3
    assert gained("request_params_max_tokens_sum") == 16 + 10
    assert gained("iteration_tokens_total_sum") == gained("computed_tokens_total")
    assert gained("iteration_tokens_total_count") > 0


def test_metrics_have_the_fields_names_and_buckets(server: RunningServer) -> None:
    found = values(server)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "state_cache_usage_perc",
        "engine_up",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "request_success_total/stop",
        "request_queue_time_seconds_count",
        "prompt_tokens_cached_total",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "request_inference_time_seconds_count",
        "request_time_per_output_token_seconds_count",
        "request_generation_tokens_count",
        "admission_rejections_total/queue_full",
    ):
        assert f"vllm:{name}" in found
    assert not any(name.endswith("_created") for name in found)
    text = server.get("/metrics").text
    bounds = re.findall(r'time_to_first_token_seconds_bucket\{.*?le="(.*?)"', text)
    assert [float(bound) for bound in bounds] == [
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
        20,
        40,
        80,
        160,
        640,
        2560,
        float("inf"),
    ]


def test_the_banner_says_where_and_what_and_its_snippets_work_when_pasted(server: RunningServer) -> None:
    banner = server.output
    for words in (server.url, "first/name", "arena", "30.5 MiB", "a note about what was shrunk", "/metrics"):
        assert words in banner
    assert "\x1b" not in banner
    curl = re.search(r"^curl .*\\\n.*$", banner, re.MULTILINE)
    python = re.search(r"^from openai.*?^print\(.*?$", banner, re.MULTILINE | re.DOTALL)
    assert curl is not None
    assert python is not None
    assert '"role":"assistant"' in output_of("bash", "-c", curl.group(0))
    assert output_of(sys.executable, "-c", python.group(0)).startswith("Là-haut")


def test_a_server_without_a_store_of_files_says_so(server: RunningServer) -> None:
    answer = server.get("/v1/files")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_store_off")
