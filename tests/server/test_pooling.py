"""Embeddings, rerank and scores over HTTP: clients, batches, workers, replicas, limits."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from tests.fixtures.pooled_checkpoints import INSTRUCTION, colbert, cross_encoder, embedder
from tests.fleet.test_replicas import engine_pids
from tests.server.running import RunningServer, eventually, running_server

ENGINE = {"memory": "32MB", "threads": 1, "max_model_len": 512, "dtype": "float32"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = embedder(tmp_path_factory.mktemp("pooled") / "embedder", "qwen3_5")
    settings = {
        "http_workers": 2,
        "api_key": ["one"],
        "replicas": "2",
        "key_requests_per_minute": 2000,
        "file_store": str(tmp_path_factory.mktemp("files")),
    }
    with running_server("", engine={"model": str(directory), **ENGINE}, server=settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client(api_key="one")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = cross_encoder(tmp_path_factory.mktemp("pooled") / "cross-encoder")
    with running_server("", engine={"model": str(directory), **ENGINE}) as running:
        yield running


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = colbert(tmp_path_factory.mktemp("pooled") / "colbert")
    with running_server("", engine={"model": str(directory), **ENGINE}) as running:
        yield running


def post(server: RunningServer, path: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30, headers={"authorization": "Bearer one"}, **more)


def test_numbers_and_base64_are_the_same_embeddings(client: openai.OpenAI) -> None:
    texts = ["hello", "a longer text " * 20]
    numbers = client.embeddings.create(model="embedder", input=texts, encoding_format="float")
    raw = client.post(
        "/embeddings", cast_to=object, body={"model": "embedder", "input": texts, "encoding_format": "base64"}
    )
    for one, coded in zip(numbers.data, raw["data"], strict=True):
        data = base64.b64decode(coded["embedding"])
        assert list(struct.unpack(f"<{len(data) // 4}f", data)) == one.embedding
        assert sum(value * value for value in one.embedding) == pytest.approx(1.0, abs=1e-6)
    assert [one.index for one in numbers.data] == [0, 1]
    assert numbers.usage.prompt_tokens == numbers.usage.total_tokens > 100
    tokens = post_tokens(client, "hello")
    ids = client.embeddings.create(model="embedder", input=[tokens, tokens], encoding_format="float")
    assert ids.data[0].embedding == ids.data[1].embedding
    assert ids.data[0].embedding == pytest.approx(numbers.data[0].embedding, abs=1e-6)
    short = client.embeddings.create(model="embedder", input="hello", dimensions=5)
    assert len(short.data[0].embedding) == 5
    assert sum(value * value for value in short.data[0].embedding) == pytest.approx(1.0, abs=1e-6)


def post_tokens(client: openai.OpenAI, text: str) -> list[int]:
    answer = httpx.post(
        str(client.base_url).replace("/v1/", "/tokenize"),
        json={"prompt": text},
        timeout=30,
        headers={"authorization": "Bearer one"},
    )
    return answer.json()["tokens"]


def test_an_instruction_is_a_prefix_that_is_computed_once(server: RunningServer) -> None:
    cached = 0
    for number in range(6):  # to one of two replicas, in one of two workers
        body = {"input": f"question {number}", "prompt_name": "query"}
        answer = post(server, "/v1/embeddings", body).json()
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 4 * 64, f"of the {len(INSTRUCTION)} tokens of the instruction"


def test_ollamas_client_embeds_too(server: RunningServer, client: openai.OpenAI) -> None:
    theirs = ollama.Client(host=server.url, headers={"authorization": "Bearer one"})
    answer = theirs.embed(model="embedder:latest", input=["hello", "you"])
    mine = client.embeddings.create(model="embedder", input=["hello", "you"], encoding_format="float")
    for one, other in zip(answer.embeddings, mine.data, strict=True):
        assert list(one) == pytest.approx(other.embedding, abs=1e-6)
    assert answer.prompt_eval_count == mine.usage.prompt_tokens
    assert answer.total_duration > 0
    older = theirs.embeddings(model="embedder", prompt="hello")
    assert list(older.embedding) == list(answer.embeddings[0])
    with pytest.raises(ollama.ResponseError, match=r"input has 600 tokens; the limit is 512"):
        theirs.embed(model="embedder", input="x" * 600)
    body = {"model": "embedder", "input": ["y", "x" * 600], "truncate": True}
    cut = post(server, "/api/embed", body).json()
    assert cut["truncated"] == [1], "never without a word"


def test_embeddings_outlive_the_engine_that_computes_them(server: RunningServer) -> None:
    """One of two engines stands still, so that it holds its share of the inputs when it is killed."""
    body = {"input": [f"number {number} " * 20 for number in range(40)], "encoding_format": "base64"}
    expected = post(server, "/v1/embeddings", body).json()["data"]
    pid = engine_pids(server)[0]
    os.kill(pid, signal.SIGSTOP)
    before = _metric(server, "prompt_tokens_total")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, server, "/v1/embeddings", body)
        assert eventually(lambda: _metric(server, "prompt_tokens_total") > before)
        assert not answer.done()
        os.kill(pid, signal.SIGKILL)
        assert answer.result().json()["data"] == expected
    assert _metric(server, "engine_restarts_total") == 1


def _metric(server: RunningServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer one"}).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"weft:{name}{{"))


@pytest.mark.parametrize("url", ["/v1/embeddings", "/pooling"])
def test_a_batch_has_embeddings(url: str, client: openai.OpenAI) -> None:
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": {"input": text}})
        for number, text in enumerate(("a", "b" * 600))
    ]
    given = client.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    batch = client.batches.create(input_file_id=given.id, endpoint=url, completion_window="24h")
    assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    [answer] = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    [row] = answer["response"]["body"]["data"]
    assert len(row.get("embedding", row.get("data"))) == 64
    [error] = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert error["response"]["body"]["error"]["code"] == "context_length_exceeded"


BAD = [
    ("/v1/embeddings", {}, "input is missing"),
    ("/v1/embeddings", {"input": []}, "input is an empty list"),
    ("/v1/embeddings", {"input": ""}, "input is empty"),
    ("/v1/embeddings", {"input": ["a", ""]}, r"input[1] is empty"),
    ("/v1/embeddings", {"input": [[]]}, "input is empty"),
    ("/v1/embeddings", {"input": {"a": 1}}, "expected str | array"),
    ("/v1/embeddings", {"input": ["a", 1]}, r"input[1]: expected str or a list of token ids"),
    ("/v1/embeddings", {"input": [1, 99999]}, "has token 99999"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions is 0"),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}, "at most 64"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "stream": True}, "stream is not supported"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "other"}, "of this model are document, query"),
    ("/v1/embeddings", {"input": [1, 2], "prompt_name": "query"}, "this input is token ids"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
    ("/v1/embeddings", {"input": ["a"] * 1025}, "1025 sequences"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "has no score head"),
    ("/v1/score", {"text_1": "a", "text_2": ["b"]}, "has no score head"),
    ("/v1/completions", {"prompt": "a"}, "generates none"),
    ("/classify", {"input": "a"}, "cannot classify: it has no score head"),
    ("/pooling", {}, "a request has input or messages"),
    ("/pooling", {"input": "a", "task": "token_classify"}, "cannot classify"),
    ("/pooling", {"input": "a", "task": "token_embed", "dimensions": 65}, "at most 64"),
    ("/pooling", {"input": "a", "task": "classify", "dimensions": 3}, "dimensions cuts vectors"),
    ("/pooling", {"input": ["a", ""]}, "input[1] is empty"),
    ("/pooling", {"messages": [{"role": "user", "content": "a"}]}, "has no chat template"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, ""),
    ("/api/embed", {"model": "embedder", "input": "a", "options": {"num_ctx": 0, "nonsense": 1}}, ""),
    ("/api/embed", {"model": "embedder", "input": ["a" * 20], "options": {"num_ctx": 10}}, "the limit is 10"),
]


@pytest.mark.parametrize(("path", "body", "said"), BAD)
def test_bad_input_is_named(server: RunningServer, path: str, body: dict[str, Any], said: str) -> None:
    answer = post(server, path, body)
    if "nonsense" in str(body):  # noted, as every unknown field is
        assert answer.status_code == 200
        assert "options.nonsense" in answer.headers["x-weft-ignored"]
        return
    assert answer.status_code == 400
    assert said in str(answer.json()["error"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/classify", "/pooling", "/api/embed"])
def test_the_new_doors_have_the_locks_of_the_others(server: RunningServer, path: str) -> None:
    body = {"model": "embedder", "input": "a", "prompt": "a"}
    assert httpx.post(server.url + path, json=body, timeout=30).status_code == 401
    assert post(server, path, body).status_code in (200, 400)
    for header, status in (({"origin": "http://evil.example"}, 403), ({"host": "evil.example"}, 421)):
        answer = httpx.post(server.url + path, json=body, timeout=30, headers={"authorization": "Bearer one", **header})
        assert answer.status_code == status
    other = httpx.post(
        server.url + path,
        content=b"{}",
        timeout=30,
        headers={"authorization": "Bearer one", "content-type": "text/plain"},
    )
    assert other.status_code == (400 if path.startswith("/api") else 415)


def test_metrics_count_embeddings_as_prompts(server: RunningServer) -> None:
    assert post(server, "/v1/embeddings", {"model": "embedder", "input": "counted"}).is_success
    assert eventually(lambda: server.metric("prompt_tokens_total", headers={"authorization": "Bearer one"}) > 0)


def test_texts_are_embedded_in_the_words_of_cohere(server: RunningServer) -> None:
    texts = ["one text", "another"]
    vectors = [
        one["embedding"]
        for one in post(server, "/v1/embeddings", {"input": texts, "prompt_name": "query"}).json()["data"]
    ]
    body = {"texts": texts, "input_type": "search_query", "model": "embedder"}
    answer = post(server, "/v2/embed", body | {"embedding_types": ["float", "base64", "ubinary", "binary"]}).json()
    forms = answer["embeddings"]
    assert forms["float"] == vectors
    assert [list(struct.unpack(f"<{len(vectors[0])}f", base64.b64decode(text))) for text in forms["base64"]] == vectors
    bits = [[int(number >= 0) for number in vector] for vector in vectors]
    assert forms["ubinary"] == [np.packbits(row).tolist() for row in bits]
    assert forms["binary"] == [[byte - 128 for byte in row] for row in forms["ubinary"]]
    assert (answer["texts"], answer["response_type"]) == (texts, "embeddings_by_type")
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    parts = {"inputs": [{"content": [{"type": "text", "text": "one "}, {"type": "text", "text": "text"}]}]}
    plain = post(server, "/v2/embed", parts | {"input_type": "clustering", "output_dimension": 8})
    assert plain.headers["x-weft-ignored"] == "input_type"
    assert len(plain.json()["embeddings"]["float"][0]) == 8
    long = {"texts": ["x" * 900]}
    assert post(server, "/v2/embed", long | {"truncate": "END"}).json()["truncated"] == [0]
    for bad, said in (
        (long, "limit is 512"),
        ({}, "texts or inputs"),
        ({"texts": []}, "empty list"),
        ({**body, "embedding_types": ["int8"]}, "'int8'"),
        ({**body, "truncate": "START"}, "'END'"),
        ({**body, "max_tokens": 4}, "truncate END"),
        ({"images": ["data:image/png;base64,AA"]}, "reads texts"),
    ):
        refused = post(server, "/v2/embed", bad)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]


def test_documents_are_ranked_in_the_words_of_cohere_and_jina(scorer: RunningServer) -> None:
    documents = ["first", {"text": "second"}, "third " * 5]
    body = {"model": "cross-encoder", "query": "which?", "documents": documents}
    whole = post(scorer, "/v1/rerank", body).json()
    scores = [one["relevance_score"] for one in whole["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one["index"] for one in whole["results"]) == [0, 1, 2]
    assert {one["document"]["text"] for one in whole["results"]} == {"first", "second", "third " * 5}
    for path in ("/rerank", "/v2/rerank"):
        top = post(scorer, path, body | {"top_n": 1, "return_documents": False}).json()
        assert top["results"] == [{"index": whole["results"][0]["index"], "relevance_score": scores[0]}]
    assert whole["usage"]["total_tokens"] > 0
    pairs = post(scorer, "/v1/score", {"text_1": "which?", "text_2": ["first", "second"]}).json()
    by_index = {one["index"]: one["relevance_score"] for one in whole["results"]}
    assert [one["score"] for one in pairs["data"]] == pytest.approx([by_index[0], by_index[1]], abs=1e-6)
    cut = post(scorer, "/rerank", {**body, "documents": ["x" * 900], "max_tokens_per_doc": 100}).json()
    assert cut["truncated"] == [0]
    for bad, said in (
        ({"documents": []}, "empty list"),
        ({"documents": [3]}, "documents[0]"),
        ({"top_n": 0}, "top_n is 0"),
        ({"instruction": "x"}, "instruction"),
        ({"documents": ["x" * 900]}, "limit is 512"),
        ({"rank_fields": ["a"]}, "rank_fields"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc is 0"),
    ):
        answer = post(scorer, "/v1/rerank", body | bad)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    wrong = post(scorer, "/score", {"text_1": ["a", "b"], "text_2": ["c"]})
    assert "text_1 has 2 texts and text_2 has 1" in wrong.json()["error"]["message"]
    assert post(scorer, "/api/show", {"model": "cross-encoder"}).json()["capabilities"] == ["rerank"]


def test_rows_of_a_task_are_those_of_the_other_endpoints(server: RunningServer, client: openai.OpenAI) -> None:
    texts = ["hello", "a longer text"]
    embedded = client.embeddings.create(model="embedder", input=texts, encoding_format="float").data
    vectors = post(server, "/pooling", {"input": texts}).json()["data"]
    tokens = post(server, "/pooling", {"input": texts, "task": "token_embed", "encoding_format": "base64"}).json()[
        "data"
    ]
    for vector, of_tokens, expected in zip(vectors, tokens, embedded, strict=True):
        assert vector["data"] == pytest.approx(expected.embedding, abs=1e-6)
        data = base64.b64decode(of_tokens["data"])
        rows = struct.unpack(f"<{len(data) // 4}f", data)
        assert list(rows[-64:]) == pytest.approx(expected.embedding, abs=1e-6), "the last token is pooled here"
        assert len(rows) % 64 == 0
        assert len(rows) > 64
    [raw] = post(server, "/pooling", {"input": "hello", "use_activation": False}).json()["data"]
    assert sum(value * value for value in raw["data"]) != pytest.approx(1.0, abs=0.1)


def test_labels_are_those_of_the_head(scorer: RunningServer) -> None:
    [found] = post(scorer, "/classify", {"input": "which?"}).json()["data"]
    assert (found["label"], found["num_classes"], len(found["probs"])) == ("LABEL_0", 1, 1)
    [logit] = post(scorer, "/pooling", {"input": "which?", "use_activation": False}).json()["data"]
    assert found["probs"] == pytest.approx([1 / (1 + math.exp(-logit["data"][0]))], abs=1e-6)
    [each] = post(scorer, "/pooling", {"input": "which?", "task": "token_classify"}).json()["data"]
    assert each["data"][-1] == pytest.approx(found["probs"], abs=1e-6)
    assert each["data"][0] != pytest.approx(found["probs"], abs=1e-3)
    cut = post(scorer, "/classify", {"input": "x" * 900, "truncate_prompt_tokens": 10}).json()
    assert (cut["truncated"], cut["usage"]["prompt_tokens"]) == ([0], 10)


def test_pairs_are_scored_by_max_sim(late: RunningServer) -> None:
    query, documents = "what is it?", ["Hello, world.", "b" * 60, "Hello, world."]

    def vectors(**body: Any) -> list[np.ndarray]:
        data = post(late, "/pooling", body).json()["data"]
        return [np.array(one["data"]) for one in data]

    [of_query] = vectors(input=query, prompt_name="query")
    sums = [(of_query @ rows.T).max(axis=1).sum() for rows in vectors(input=documents)]
    assert of_query.shape == (32, 16), "with its expansions"
    ranked = post(late, "/v1/rerank", {"query": query, "documents": documents}).json()
    scores = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    assert [scores[index] for index in range(3)] == pytest.approx(sums, abs=1e-4)
    once = post(late, "/v1/rerank", {"query": query, "documents": documents[:2]}).json()
    assert ranked["usage"]["prompt_tokens"] == once["usage"]["prompt_tokens"], "a text is computed once"
    pairs = post(late, "/v1/score", {"text_1": query, "text_2": documents}).json()["data"]
    assert [one["score"] for one in pairs] == pytest.approx(sums, abs=1e-4)
    refused = post(late, "/v1/embeddings", {"input": query}).json()["error"]["message"]
    assert "a vector for each token; ask /pooling or /v1/rerank" in refused
    assert post(late, "/api/show", {"model": "colbert"}).json()["capabilities"] == ["rerank"]


def test_clients_learn_what_a_model_does(server: RunningServer) -> None:
    assert post(server, "/api/show", {"model": "embedder"}).json()["capabilities"] == ["embedding"]
