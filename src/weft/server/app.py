"""The routes: the handler of each path. docs/server.md lists them for users.

Handlers are short: read the body, prepare a job, answer it. ``completions`` and ``chat`` have the jobs,
``gate`` has keys and origins, and ``errors`` has the form of failures.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.errors import WeftError
from weft.fleet.all_engines import AllEngines
from weft.fleet.fleet import Fleet
from weft.server import replicas, weights
from weft.server.adapters import AdapterHandlers
from weft.server.anthropic.answers import MESSAGES, conversation
from weft.server.anthropic.protocol import ANTHROPIC_VERSION, CountTokensBody, anthropic_card, anthropic_list
from weft.server.batches.routes import BatchHandlers, BatchRunner
from weft.server.cache import Looks, cache_reports
from weft.server.chat import CHAT, chat_conversation
from weft.server.cohere import COHERE_EMBED
from weft.server.completions import COMPLETIONS
from weft.server.decisions import DECISIONS, SYSTEM_ONE
from weft.server.edge import EdgeError
from weft.server.errors import error_response, on_bug, on_weft_error
from weft.server.gate import Gate
from weft.server.metrics import CONTENT_TYPE
from weft.server.models import ListedModel
from weft.server.ollama.answers import (
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    keep_alive_of,
    loaded_answer,
    model_card,
    running_cards,
    show_answer,
)
from weft.server.ollama.models import OllamaModelHandlers
from weft.server.ollama.protocol import PROTOCOL_VERSION, OllamaShowBody, served_name
from weft.server.openapi.endpoints import ENDPOINTS
from weft.server.page import page_routes
from weft.server.pooling import EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, RERANK, SCORE
from weft.server.pooling_tasks import CLASSIFY, POOLING
from weft.server.protocol import DetokenizeBody, TokenizeChatBody, did_you_mean, read_body, read_tokenize_body
from weft.server.responses.routes import ResponseHandlers
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sessions.routes import SessionHandlers, Sessions
from weft.server.sessions.slots import SlotHandlers
from weft.server.sse import (
    JSON_LINES,
    ClientGoneError,
    Handler,
    Job,
    Way,
    answer_job,
    json_response,
    read_raw,
    salt_of,
    unless_gone,
)
from weft.server.tenants import Keys
from weft.server.workers.forward import forwarded_operations
from weft.text.prompt import PictureSpan, picture_spans
from weft.version import weft_version

_CLIENT_CLOSED_REQUEST = 499
"""Status of a client that left, for the access log; no client reads it."""


def build_app(service: Service, forward: Handler | None = None) -> ASGIApp:
    """Return the application. ``forward``: the handler of an HTTP worker for requests that only the process with the
    engines can answer; None in that process."""
    config = service.config
    keys = Keys(
        config.client_keys(),
        config.operator_key,
        quotas=config.quotas(),
        tenant_by_key=config.tenant_by_key,
        counts=service.counts,
    )
    batches = None
    if service.files is not None:
        batches = BatchRunner(
            service,
            service.files,
            lines_max=config.max_batch_lines,
            age_s=config.file_limits().age_s,
            keys=keys.has_clients,
            tenant_of=keys.tenant_of,
        )
        service.background.append(batches)
    sessions = Sessions(service)
    if forward is None:  # the process with the engines
        service.background.append(sessions)
        service.pinned = sessions.named
    own = _Handlers(service)
    groups = (
        own,
        AdapterHandlers(service),
        ResponseHandlers(service, forward),
        SessionHandlers(service, sessions),
        SlotHandlers(service, sessions),
        replicas.ReplicaHandlers(service),
        BatchHandlers(service.files, batches),
        OllamaModelHandlers(service),
    )
    handlers = own.by_way() | {
        row.operation: getattr(group, row.operation)
        for group in groups
        for row in ENDPOINTS
        if hasattr(group, row.operation)
    }
    if forward is not None:
        handlers |= dict.fromkeys(forwarded_operations(), forward)
    routes = [*endpoint_routes(handlers), *page_routes()]
    app = Starlette(
        routes=routes,
        exception_handlers={
            WeftError: on_weft_error,
            HTTPException: on_http_error,
            ClientGoneError: _on_client_gone,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.body_checker = service.body_checker
    app.state.edge_limits = service.edge.limits
    return Gate(
        app,
        keys=keys,
        origins=config.origins(),
        on_end=service.request_ended,
        strict_fields=config.strict_fields,
        weight_version=service.weight_version,
    )


def endpoint_routes(handlers: Mapping[str, Handler]) -> list[Route]:
    """Return one route for each path of the table; ``handlers`` by operation."""
    routes = []
    for path, rows in itertools.groupby(ENDPOINTS, key=lambda row: row.path):
        by_method = {row.method: handlers[row.operation] for row in rows}
        if "GET" in by_method:
            by_method["HEAD"] = by_method["GET"]
        routes.append(Route(path, _by_method(path, by_method), methods=list(by_method)))
    return routes


def _by_method(path: str, handlers: Mapping[str, Handler]) -> Handler:
    async def answer(request: Request) -> Response:
        request.scope["state"]["trace"].route = path
        return await handlers[request.method](request)

    return answer


_WAYS = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "messages": MESSAGES,
    "embeddings": EMBEDDINGS,
    "cohere_embed": COHERE_EMBED,
    **dict.fromkeys(("rerank", "plain_rerank", "cohere_rerank"), RERANK),
    **dict.fromkeys(("score", "plain_score"), SCORE),
    "classify": CLASSIFY,
    "pooling": POOLING,
    "decisions": DECISIONS,
    "system_one": SYSTEM_ONE,
}
_OLLAMA_ANSWERS = {"ollama_chat": OLLAMA_CHAT, "ollama_generate": OLLAMA_GENERATE}
_OLLAMA_EMBEDDINGS = {"ollama_embed": OLLAMA_EMBED, "ollama_embeddings": OLLAMA_EMBEDDINGS}
"""Type of body by operation of ``openapi.endpoints``."""


class _Handlers:
    """The handlers. A public method is an operation of ``openapi.endpoints``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._looks: dict[str, Looks] = {}

    def by_way(self) -> dict[str, Handler]:
        """Return the handlers of the operations that have a ``Way``."""
        return {
            operation: functools.partial(generate, way=way)
            for generate, ways in (
                (self._generate, _WAYS),
                (self._generate_ollama, _OLLAMA_ANSWERS),
                (self._embed_ollama, _OLLAMA_EMBEDDINGS),
            )
            for operation, way in ways.items()
        }

    async def _embed_ollama(self, request: Request, way: Way) -> Response:
        body = await self._body(request, way, undeclared=True)
        return await answer_job(request, self._ollama_job(way, body), stream=False, keep_alive_s=0.0)

    async def _ollama_job(self, way: Way, body: Any) -> Job:
        stays_s = keep_alive_of(body.keep_alive, self._service.host_of(served_name(body.model)))
        job = await way.prepare(self._service, body)
        job.generation.keep_alive_s = stays_s
        return job

    async def _generate(self, request: Request, way: Way) -> Response:
        body = await self._body(request, way)
        return await answer_job(
            request,
            way.prepare(self._service, body),
            stream=bool(body.stream),
            keep_alive_s=self._service.config.sse_keep_alive,
        )

    async def _generate_ollama(self, request: Request, way: Way) -> Response:
        body = await self._body(request, way, undeclared=True)
        if loaded := await loaded_answer(self._service, body):
            return json_response(loaded)
        # JSON lines have no room for a comment that keeps a connection alive.
        return await answer_job(
            request,
            self._ollama_job(way, body),
            keep_alive_s=0.0,
            stream=body.stream is not False,
            media_type=JSON_LINES,
        )

    async def _body(self, request: Request, way: Way, *, undeclared: bool = False) -> Any:
        self._service.check_open()
        raw = await read_raw(request, undeclared=undeclared)
        body: Any = await read_body(raw, way.body, unserved=way.unserved)
        body.cache_salt = salt_of(request, body.cache_salt)
        return body

    async def ollama_tags(self, request: Request) -> Response:
        return json_response({"models": [model_card(model) for model in self._service.listed()]})

    async def ollama_ps(self, request: Request) -> Response:
        return json_response({"models": running_cards(self._service)})

    async def ollama_show(self, request: Request) -> Response:
        body = await read_body(await read_raw(request, undeclared=True), OllamaShowBody)
        return json_response(show_answer(await self._service.text_side(served_name(body.model or body.name or ""))))

    async def ollama_version(self, request: Request) -> Response:
        return json_response({"version": PROTOCOL_VERSION})

    async def count_tokens(self, request: Request) -> Response:
        self._service.check_open()
        body = await read_body(await read_raw(request), CountTokensBody)
        model = await self._service.model_for(body.model)
        _, prompt = await model.renderer.render(conversation(body))
        return json_response({"input_tokens": len(prompt.tokens)})

    async def models(self, request: Request) -> Response:
        cards = [_model_card(model) for model in self._service.listed()]
        is_anthropic = ANTHROPIC_VERSION in request.headers
        return json_response(anthropic_list(cards) if is_anthropic else {"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        listed = {model.name: model for model in self._service.listed()}
        if name not in listed:  # "default", or unknown
            name = self._service.own_name(name)
        card = _model_card(listed[name])
        return json_response(anthropic_card(card) if ANTHROPIC_VERSION in request.headers else card)

    async def tokenize(self, request: Request) -> Response:
        self._service.check_open()
        body = await read_tokenize_body(await read_raw(request))
        model = await self._service.model_for(body.model)
        if isinstance(body, TokenizeChatBody):
            add_special_tokens = bool(body.add_special_tokens)
            writing = model.renderer.write_chat(chat_conversation(body), with_places=False)
            chat, prompt = await unless_gone(writing, request.receive)
            encoded = await model.renderer.encode_chat(prompt, add_special_tokens=add_special_tokens)
            tokens, spans = encoded.tokens, picture_spans(chat, encoded)
        else:
            tokens = await model.renderer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
            spans = []
        return Response(
            await tokenize_answer(model, tokens, with_texts=bool(body.return_token_strs), spans=spans),
            media_type="application/json",
        )

    async def detokenize(self, request: Request) -> Response:
        self._service.check_open()
        body = await read_body(await read_raw(request), DetokenizeBody)
        model = await self._service.model_for(body.model)
        model.check_ids(body.tokens, param="tokens")
        text = await asyncio.to_thread(model.renderer.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        self._service.check_open()
        model = await self._service.model_for(request.query_params.get("model"))
        return json_response(model.renderer.tokenizer.special_tokens)

    async def health(self, request: Request) -> Response:
        status, body = self._service.health()
        return json_response(body, status)

    ping = post_ping = health

    async def version(self, request: Request) -> Response:
        return json_response({"version": weft_version()})

    async def openapi(self, request: Request) -> Response:
        from weft.server.openapi.document import openapi_json

        return Response(await asyncio.to_thread(openapi_json), media_type="application/json")

    async def load(self, request: Request) -> Response:
        models = self._service.models
        lengths = [fleet.queue_lengths() for _, fleet in models.fleets]
        running, waiting = (sum(counts) for counts in zip((0, models.waiting), *lengths, strict=True))
        return json_response({"server_load": self._service.active, "running": running, "waiting": waiting})

    async def cache(self, request: Request) -> Response:
        self._service.check_open()
        reports = {name: await self._cache_of(name, fleet) for name, fleet in self._service.models.fleets}
        first = self._service.models.first
        return json_response(reports[first.name] if first.stays else {"models": reports})

    async def _cache_of(self, name: str, fleet: Fleet) -> dict[str, Any]:
        looks = self._looks.get(name)
        if looks is None or looks.fleet is not fleet:  # the model was unloaded and loaded again meanwhile
            looks = self._looks[name] = Looks(fleet)
        shapes = await looks.shapes()
        stats = dict(fleet.engines.stats())
        text_of = functools.partial(self._text_of, name) if self._service.config.show_text else None
        return cache_reports(
            [(number, stats[number], shape) for number, shape in shapes if number in stats],
            several=fleet.has_several,
            router=fleet.router.counts(),
            text_of=text_of,
        )

    def _text_of(self, name: str, tokens: Sequence[int]) -> str:
        ids = [token for token in tokens if token >= 0]  # negative: rows of pictures
        return self._service.models.served_as(name).renderer.tokenizer.decode(ids, skip_special_tokens=False)

    async def flush_cache(self, request: Request) -> Response:
        self._service.check_open()
        store = replicas.read_flag(request.query_params, "store", True)
        await asyncio.gather(*(fleet.engines.flush_cache(store=store) for _, fleet in self._service.models.fleets))
        self._looks.clear()
        return await self.cache(request)

    def _engines(self, request: Request) -> AllEngines:
        """Return the engines of the model that the query names. Raise as ``Service.fleet_of``."""
        return self._service.fleet_of(request.query_params.get("model")).engines

    async def sleep(self, request: Request) -> Response:
        engines = self._engines(request)
        body = replicas.read_sleep(request.query_params, await read_raw(request))
        news = await engines.sleep(body.level, body.mode, body.timeout_s)
        self._looks.clear()
        return json_response(replicas.sleep_answer(news))

    async def wake_up(self, request: Request) -> Response:
        engines = self._engines(request)
        tags = replicas.read_tags(request.query_params, await read_raw(request))
        return json_response(replicas.wake_answer(await engines.wake_up(tags), tags))

    async def is_sleeping(self, request: Request) -> Response:
        engines = self._engines(request)
        return json_response(replicas.state_answer(engines.sleep_state))

    async def pause(self, request: Request) -> Response:
        engines = self._engines(request)
        body = weights.read_pause(request.query_params, await read_raw(request))
        outcome = await engines.pause(body.mode, body.timeout_s, flush=body.clears_cache)
        self._looks.clear()
        return json_response(weights.PausedAnswer("paused", outcome.flushed))

    async def resume(self, request: Request) -> Response:
        engines = self._engines(request)
        await engines.resume()
        return json_response(weights.PausedAnswer("resumed"))

    async def is_paused(self, request: Request) -> Response:
        engines = self._engines(request)
        return json_response(weights.IsPausedAnswer(engines.is_paused))

    async def update_weights(self, request: Request) -> Response:
        engines = self._engines(request)
        self._service.models.find(request.query_params.get("model")).check_refit()
        body = weights.read_update(request.query_params, await read_raw(request))
        outcome = await engines.update_weights(body.directory, body.version, body.mode, body.timeout_s)
        self._looks.clear()
        if self._service.workers is not None:
            await self._service.workers.agree_on_weights()
        return json_response(weights.update_answer(outcome))

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self.flush_cache(request)
        return json_response(weights.ResetAnswer(True))

    async def metrics(self, request: Request) -> Response:
        workers = self._service.workers
        text = self._service.metrics.text(self._service.fleet_reports(), None if workers is None else workers.folder)
        return Response(text, media_type=CONTENT_TYPE)


PIECE_TOKENS = 4096


async def tokenize_answer(
    model: ServedModel, tokens: list[int], *, with_texts: bool, spans: Sequence[PictureSpan] = ()
) -> bytes:
    """Return the answer as JSON, encoded PIECE_TOKENS at a time: encoding a long list at once would block the event
    loop. ``spans``: the positions of pictures."""

    def texts_of(part: Sequence[int]) -> list[str]:
        return [model.renderer.tokenizer.token_text(token) for token in part]

    texts = await _listed(tokens, texts_of) if with_texts else b"null"
    sizes = len(tokens), model.info.sizes.max_model_len
    return b"".join(
        (
            b'{"count":%d,"max_model_len":%d,"tokens":' % sizes,
            await _listed(tokens, list),
            b',"token_strs":',
            texts,
            b',"spans":' + msgspec.json.encode(spans) if spans else b"",
            b"}",
        )
    )


async def _listed(tokens: list[int], values_of: Callable[[Sequence[int]], Sequence[object]]) -> bytes:
    parts = []
    for start in range(0, len(tokens), PIECE_TOKENS):
        parts.append(msgspec.json.encode(values_of(tokens[start : start + PIECE_TOKENS]))[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _model_card(listed: ListedModel) -> dict[str, Any]:
    """Return the entry of a model. ``state`` is present only with several models, ``reason`` only for a failed one."""
    state = {} if listed.state is None else {"state": listed.state}
    state |= {"reason": listed.reason} if listed.reason else {}
    root = listed.name if listed.adapter is not None else listed.info.name
    return {
        "id": listed.name,
        "object": "model",
        "created": listed.created_s,
        "owned_by": "weft",
        "root": root,
        "parent": listed.parent,
        "max_model_len": listed.info.sizes.max_model_len,
        "vocab_size": listed.info.vocab_size,
        "chat_sampling": listed.chat_sampling,
        **state,
    }


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


_SERVED = re.compile(
    "|".join(re.sub(r"\\{.*?\\}", "[^/]+", re.escape(path)) for path in {row.path for row in ENDPOINTS})
)
_NOT_OF_OLLAMA = (
    ": of Ollama's API this server has neither /api/push nor /api/blobs; its models are chosen at the start"
)
_GENERATE = ", ".join(
    dict.fromkeys(
        row.path
        for row in ENDPOINTS
        if row.method == "POST"
        and row.path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
    )
)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers: Mapping[str, str] = error.headers or {}
    path = request.url.path
    if error.status_code == 404:
        why = (
            _NOT_OF_OLLAMA
            if path.startswith("/api/")
            else (_slip(path, str(request.base_url)) or did_you_mean(path, {row.path for row in ENDPOINTS}))
        )
        failure = EdgeError(
            404,
            f"there is nothing at {path[:200]}{why}. This server has /v1/models, {_GENERATE} "
            "and others, which /openapi.json lists",
            code="unknown_path",
        )
    elif error.status_code == 405:
        failure = EdgeError(
            405,
            f"{request.method} is not served at {path}; use {headers.get('Allow', 'another method')}",
            code="method_not_allowed",
        )
    else:
        failure = EdgeError(error.status_code, error.detail)
    return error_response(failure, request.scope, headers)


def _slip(path: str, base_url: str) -> str:
    twice = path.startswith("/v1/v1/")
    meant = path.removeprefix("/v1") if twice else f"/v1{path}"
    if not _SERVED.fullmatch(meant):
        return ""
    if twice and "/messages" not in path:
        return f": it has /v1 twice; the base URL is {base_url}v1"
    if "/messages" in path:
        return f" (did you mean {meant}?): the base URL of Anthropic's clients is {base_url}, without /v1"
    return f" (did you mean {meant}?): the base URL of OpenAI's clients is {base_url}v1, with /v1"
