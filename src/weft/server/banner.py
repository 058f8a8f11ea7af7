"""The banner on the terminal once the model is ready: addresses, use of the memory, snippets to paste.

Plain lines when the output is not a terminal. Snippets are never wrapped and never indented, so that they work when
pasted. A key is never printed: the snippets read it from $WEFT_API_KEY.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from weft.default_sampling import sampling_sentence
from weft.kv_events import FLAG as KV_EVENTS
from weft.logs import is_json
from weft.server.config import ServerConfig
from weft.server.running import socket_path
from weft.units import format_bytes

if TYPE_CHECKING:
    from weft.server.models import Models
    from weft.server.served_model import ServedModel

_AT_SOCKET = "http://localhost"
"""URL for a client of a Unix socket, whose host is never looked up."""


def _lines_to(console: Console) -> Callable[..., None]:
    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)

    return line


def print_places(line: Callable[..., None], url: str, key_words: str, config: ServerConfig) -> None:
    """Print the addresses. ``key_words``: the key that requests need; empty without one."""
    if not key_words and not config.is_local():
        line()
        line(
            f"WARNING: any client that reaches {config.host or '0.0.0.0'} may use this server: it has no key. Models, "
            "stored answers, files and /metrics are open. Name a key with --api-key-file FILE, or listen on this "
            "machine only with --host 127.0.0.1",
            "bold yellow",
        )
    if addresses := config.open_event_addresses():
        line()
        line(
            f"WARNING: whoever reaches {' or '.join(addresses)} ({KV_EVENTS}) reads the tokens of all prompts: nothing "
            "is encrypted there and no key is asked for. Name ipc://PATH or tcp://[::1]:PORT, or let a firewall pass "
            "only the router",
            "bold yellow",
        )
    line()
    if socket_path(url) is not None:
        line(f"socket   {socket_path(url)}")
        url = _AT_SOCKET
    line(f"API      {url}/v1")
    line(f"page     {url}/")
    line(f"metrics  {url}/metrics")
    line(f"health   {url}/health")
    if key_words:
        line(f"Requests need a key; {key_words}.")
    line()


def print_banner(console: Console, models: Models, url: str, config: ServerConfig) -> None:
    """Print where the server listens, and its models' shares of the memory."""
    if models.first.served is not None and models.first.stays:
        _print_model(console, models.first.served, url, config)
    else:
        _print_models(console, models, url, config)


def _print_model(console: Console, model: ServedModel, url: str, config: ServerConfig) -> None:
    info, line, with_key = model.info, _lines_to(console), bool(config.client_keys())
    line()
    line(f"weft serves {', '.join(model.names)} at {url}", "bold green")
    line(
        f"{info.family}: {info.layers}; {info.dtype} on {info.device}, {info.threads} "
        f"thread{'' if info.threads == 1 else 's'}, {info.kernels} kernels; loaded in {info.load_s:.1f} s"
    )
    if config.own_replicas > 1:
        line(f"{config.own_replicas} engine processes (--replicas); of each one:")
    line(
        f"up to {info.sizes.max_model_len} tokens per sequence, {info.sizes.rows_max} sequences at once, "
        f"{info.sizes.step_tokens_max} tokens per step"
    )
    line()
    name_width = max((len(row.name) for row in info.memory), default=0)
    for row in info.memory:
        line(f"{row.name:{name_width}}  {format_bytes(row.size_bytes):>9}  {row.remark}")
    if info.generates:
        line()
        line(sampling_sentence(info.generation_defaults, info.default_sampling))
    for note in info.notes:
        line(f"note: {note}", "yellow")
    print_places(line, url, "the snippets read it from $WEFT_API_KEY" if with_key else "", config)
    if not is_json():  # a log needs no snippets
        line("Try it in a shell:", "bold")
        line(curl_snippet(model, url, with_key=with_key))
        line()
        if _example(model)[0] not in ("/v1/rerank", "/classify"):  # OpenAI's client has neither
            line("or in Python (pip install openai):", "bold")
            line(openai_snippet(model, url, with_key=with_key))
            line()
    line("Ctrl-C finishes the running requests and stops; twice stops at once.", "dim")


def _print_models(console: Console, models: Models, url: str, config: ServerConfig) -> None:
    """Print the share of each model that is loaded on demand, and how many of them fit together."""
    line = _lines_to(console)
    line()
    line(f"weft serves {', '.join(models.names())} at {url}", "bold green")
    width = max(len(name) for name in models.names())
    shares = {model.name: model.resident.share for model in models.hosted if model.resident is not None}
    for model in models.hosted:
        weights, share = model.info.weights_bytes, shares[model.name]
        line(
            f"{model.name:{width}}  {format_bytes(share):>9}  some {format_bytes(weights)} of weights, and "
            f"{format_bytes(max(0, share - weights))} for KV and states"
        )
    line(
        f"{'together':{width}}  {format_bytes(models.budget or 0):>9}  "
        f"{in_words(list(shares.values()), models.budget or 0)}; each is loaded when it is asked for"
    )
    for name, info in ((model.name, model.info) for model in models.hosted if model.info.generates):
        line(f"{name:{width}}  {sampling_sentence(info.generation_defaults, info.default_sampling)}")
    words = "the header is 'Authorization: Bearer $WEFT_API_KEY'" if config.client_keys() else ""
    print_places(line, url, words, config)
    line("Ctrl-C finishes the running requests and stops; twice stops at once.", "dim")


def in_words(shares: Sequence[int], budget: int) -> str:
    """Return how many of the models can be in memory at once."""
    by_size = sorted(shares)
    most = max(count for count in range(1, len(shares) + 1) if sum(by_size[:count]) <= budget)
    return "all of them fit at once" if most == len(shares) else f"at most {most} of them at once"


def curl_snippet(model: ServedModel, url: str, *, with_key: bool) -> str:
    path, body = _example(model)
    key = ' -H "Authorization: Bearer $WEFT_API_KEY"' if with_key else ""
    socket = socket_path(url)
    where = "" if socket is None else f"--unix-socket {shlex.quote(socket)} "
    return (
        f"curl {where}{shlex.quote((url if socket is None else _AT_SOCKET) + path)} "
        f"-H 'Content-Type: application/json'{key} \\\n"
        f"  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )


def openai_snippet(model: ServedModel, url: str, *, with_key: bool) -> str:
    path, body = _example(model)
    key = 'os.environ["WEFT_API_KEY"]' if with_key else '"none"'
    arguments = ", ".join(f"{name}={value!r}" for name, value in body.items())
    call, shown = {
        "/v1/chat/completions": ("chat.completions", "choices[0].message.content"),
        "/v1/embeddings": ("embeddings", "data[0].embedding"),
    }.get(path, ("completions", "choices[0].text"))
    socket = socket_path(url)
    through = "" if socket is None else f", http_client=httpx.Client(transport=httpx.HTTPTransport(uds={socket!r}))"
    return "\n".join(
        (
            *(("import os",) if with_key else ()),
            *(("import httpx",) if through else ()),
            "from openai import OpenAI",
            f"client = OpenAI(base_url={(_AT_SOCKET if through else url) + '/v1'!r}, api_key={key}{through})",
            f"answer = client.{call}.create({arguments})",
            f"print(answer.{shown})",
        )
    )


def _example(model: ServedModel) -> tuple[str, dict[str, object]]:
    """Return path and body of an example request: for /v1/completions without a chat template, and for /v1/embeddings,
    /v1/rerank or /classify if the checkpoint was saved to embed, to score or to classify."""
    if not model.info.generates and model.info.score_labels > 1:
        return "/classify", {"model": model.name, "input": "Once upon a time"}
    if not model.info.generates and (model.info.score_labels or model.pooler.settings.late is not None):
        return "/v1/rerank", {"model": model.name, "query": "How tall is it?", "documents": ["8,849 m", "red"]}
    if not model.info.generates:
        return "/v1/embeddings", {"model": model.name, "input": "Once upon a time"}
    if model.renderer.template is None:
        return "/v1/completions", {"model": model.name, "prompt": "Once upon a time", "max_tokens": 64}
    messages = [{"role": "user", "content": "Hello! Who are you?"}]
    return "/v1/chat/completions", {"model": model.name, "messages": messages, "max_tokens": 64}
