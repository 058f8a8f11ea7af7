"""What every handler needs, in one value: the engine, the model's text side, the names, the doors.

The engine says which directory it serves; then the model's text side is loaded: tokenizer, chat template,
sampling defaults. So the server answers /health from its first second. Before that, while draining, and
after the engine's death, ``model_for`` raises a 503 that names the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from weft.adapters import Adapter
from weft.errors import (
    ContextLengthError,
    EngineUnavailableError,
    QueueFullError,
    RequestError,
    UnknownModelError,
)
from weft.fleet.fleet import Fleet
from weft.info import ModelInfo
from weft.server.adapter_names import AdapterNames
from weft.server.batches.files import open_file_store
from weft.server.config import ServerConfig
from weft.server.edge import HttpEdge, SharedCounts, Tally
from weft.server.metrics import EngineReport, FleetReport, Metrics
from weft.server.protocol import LARGE_BODY_BYTES, BodyVerdict, did_you_mean
from weft.server.responses.background import ResponseRuns
from weft.server.responses.store import ResponseStore
from weft.server.tracing import RequestTracer
from weft.text.chat import read_chat_template
from weft.text.chat_request import (
    ChatRequest,
    ConversationFields,
    EncodedChat,
    KnownPrefix,
    TemplateSandbox,
    encode_prompt,
    read_chat,
    show_pictures,
)
from weft.text.dialect import Dialect
from weft.text.pooling import PooledPrompt, Pooler
from weft.text.template_worker import ChatPrompt
from weft.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker, WorkerLane
from weft.units import parse_bytes

if TYPE_CHECKING:
    from weft.server.pictures import PictureReader
    from weft.server.workers.supervisor import Workers

ANY_NAME = "default"
"""A name under which every server has its model."""
_NAMES_SHOWN = 20
_HEAD_CHARS_PER_TOKEN = 16
"""A text with more characters than this for each token of the context is first tokenized in part."""
_DRAIN_LOOK_S = 0.05
Encoded = TypeVar("Encoded")


class TextTooLongError(RequestError):
    """The text is over limits.max_tokenize_chars."""

    status = 413


_SECONDS = 30.0


class TooManyValuesError(RequestError):
    """The body is over limits.max_json_values."""

    status = 413


class BodyChecker:
    def __init__(self, values_max: int) -> None:
        function, start = JobFunction("weft.server.protocol:prepare_worker"), values_max.to_bytes(8, "little")
        self._lane = WorkerLane(lambda: BoundedWorker(function, start), _SECONDS)

    async def check(self, raw: bytes) -> None:
        """Returns at once for a small body.

        Raises TooManyValuesError, RequestError, EngineUnavailableError."""
        if len(raw) <= LARGE_BODY_BYTES:
            return
        try:
            answer = msgspec.msgpack.decode(await self._lane.ask(raw), type=BodyVerdict)
        except OSError:
            raise EngineUnavailableError("the body took too long to look through; try "
                                         "again later") from None
        if answer.is_too_large:
            raise TooManyValuesError(answer.message, param="limits.max_json_values", code="too_many_values")
        if answer.message:
            raise RequestError(answer.message, param=answer.param, code="invalid_json")


class TokenizeBudget:
    """How many characters are tokenized at once, over all requests (law L11): it takes a second of a core for
    each megabyte, and the engine needs the cores. Short texts are not counted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0

    @contextlib.contextmanager
    def spending(self, count: int) -> Iterator[None]:
        """Raises TextTooLongError, QueueFullError."""
        if count > self._limit:
            raise TextTooLongError(f"the text has {count} characters; the limit is {self._limit} "
                                   "(limits.max_tokenize_chars)", param="prompt", code="text_too_long")
        if self._spent + count > self._limit:
            raise QueueFullError(f"{self._spent} characters of other requests are being tokenized, and this "
                                 f"text has {count}; the limit is {self._limit} "
                                 "(limits.max_tokenize_chars). Try "
                                 "again later", param="limits.max_tokenize_chars", code="queue_full")
        self._spent += count
        try:
            yield
        finally:
            self._spent -= count


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: TemplateSandbox | None
    dialect: Dialect
    created_s: int
    budget: TokenizeBudget
    pictures: PictureReader | None
    """None where the model reads text only."""
    pooler: Pooler
    vocabulary: bytes
    """Identifies the tokenizer: equal token ids mean equal text under the same one."""
    adapter: Adapter | None = None
    """What requests under this name are computed with."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """What the checkpoint's makers sample with (generation_config.json)."""
        return self.info.generation_defaults

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Raises RequestError for an id that is no token of the model."""
        limit = self.info.vocab_size
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < limit:
                raise RequestError(f"{param} has token {token}; this model has tokens 0 to {limit - 1}",
                                   param=param)

    async def check_text(self, text: str, *, param: str) -> None:
        """Raises ContextLengthError for a text that is far too long for the context. It is found out from the
        beginning alone: all tokens of the largest body take a minute and gigabytes."""
        limit = self.info.sizes.max_model_len
        head = _HEAD_CHARS_PER_TOKEN * limit
        while head < len(text):
            count = len(await self.encode(text[:head], add_special_tokens=False))
            if count > 2 * limit:  # twice, as the end of the part may be other tokens in the whole
                what = "the prediction" if param == "prediction" else "the prompt"
                raise ContextLengthError(
                    f"{what} has {len(text)} characters, and its first {head} are {count} tokens; the "
                    f"longest context served is {limit} tokens (--max-model-len)", param=param,
                    code="context_length_exceeded")
            head *= 4

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._encode_long(
            functools.partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens), len(text))

    async def encode_chat(self, prompt: ChatPrompt, *, add_special_tokens: bool,
                          known: KnownPrefix | None = None) -> EncodedChat:
        """``known`` as in ``encode_prompt``."""
        encode = functools.partial(encode_prompt, self.tokenizer, prompt,
                                   add_special_tokens=add_special_tokens, known=known)
        return (encode() if len(prompt.text) < LONG_TEXT_CHARS
                else await self._encode_long(encode, len(prompt.text)))

    async def pooled(self, make: Callable[[], PooledPrompt], char_count: int) -> PooledPrompt:
        """``make``: of ``pooler``, for a text of so many characters."""
        return make() if char_count < LONG_TEXT_CHARS else await self._encode_long(make, char_count)

    async def _encode_long(self, encode: Callable[[], Encoded], char_count: int) -> Encoded:
        """In a thread, within the budget. Raises TextTooLongError, QueueFullError."""
        with self.budget.spending(char_count):
            return await asyncio.to_thread(encode)

    async def write_chat(self, conversation: ConversationFields, *,
                         with_places: bool = True) -> tuple[ChatRequest, ChatPrompt]:
        """The checked conversation, and its text as the model's template writes it. ``with_places``: also
        where the cache may keep a state. Raises RequestError."""
        if self.template is None:
            raise RequestError("this model has no chat template, so it serves /v1/completions only; start "
                               "the server with --chat-template FILE to give it one", param="messages")
        request = read_chat(conversation, template_variables=self.template.variables,
                            reads=self.pictures.tokens if self.pictures is not None else ())
        chars_cut = _HEAD_CHARS_PER_TOKEN * self.info.sizes.max_model_len if with_places else 0
        prompt = await self.template.write(request.messages, chars_cut=chars_cut, **request.rendering)
        if self.pictures is not None and request.pictures:
            prompt = show_pictures(prompt, await self.pictures.read(request.pictures), self.pictures.tokens)
        return request, prompt


def load_served_model(info: ModelInfo, config: ServerConfig) -> ServedModel:
    """Raises CheckpointError or ConfigError that name the file."""
    directory = Path(info.directory)
    tokenizer = Tokenizer.load(directory)
    text = read_chat_template(directory, override=config.chat_template)
    memory_bytes = parse_bytes(config.template_memory, flag="limits.template_memory")
    template = text and TemplateSandbox(
        text[0], special_tokens=tokenizer.special_tokens, origin=text[1], seconds=config.template_seconds,
        chars_max=config.template_chars, memory_bytes=memory_bytes)
    dialect = Dialect(template, tokenizer, reasoning_parser=config.reasoning_parser,
                      tool_parser=config.tool_parser)
    names = config.served_model_name or (info.name,)
    return ServedModel(info, tuple(dict.fromkeys(names)), tokenizer, template, dialect, int(time.time()),
                       TokenizeBudget(config.max_tokenize_chars), _picture_reader(info, config, tokenizer),
                       Pooler(directory, tokenizer, name=info.name, score_labels=info.score_labels),
                       _vocabulary(directory))


def _picture_reader(info: ModelInfo, config: ServerConfig, tokenizer: Tokenizer) -> PictureReader | None:
    """Raises CheckpointError for settings of pictures that are not served."""
    if not info.picture_tokens:
        return None
    from weft.images.worker import start_of  # with numpy and Pillow, which text never needs
    from weft.request import PICTURE_KINDS
    from weft.server.pictures import PictureReader

    limits, hosts, media = config.image_limits(), config.picture_hosts(), None
    if hosts:
        from weft.server.media import MediaFetcher

        media = MediaFetcher(hosts, bytes_max=limits.image_bytes, seconds=config.image_seconds,
                             videos=(limits.video_bytes, config.video_seconds))
    tokens = dict(zip(PICTURE_KINDS, map(tokenizer.token_text, info.picture_tokens), strict=False))
    return PictureReader(start_of(Path(info.directory), limits), tokens=tokens,
                         seconds={"image": config.image_seconds, "video": config.video_seconds},
                         memory_bytes=parse_bytes(config.image_memory, flag="limits.image_memory"),
                         pictures_max=config.images, media=media)


def _vocabulary(directory: Path) -> bytes:
    with (directory / "tokenizer.json").open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()[:16]


class Background(Protocol):
    """Work of the server's own, from the time when the model is ready until draining."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class Service:
    """``counts``: of all HTTP processes, where there are several."""

    def __init__(self, config: ServerConfig, engine: Fleet, counts: SharedCounts | None = None, *,
                 is_supervisor: bool = False) -> None:
        self.config = config
        self.engine = engine
        self.counts = counts
        self.workers: Workers | None = None
        self.edge = HttpEdge(config.edge_limits(), counts, is_inner=is_supervisor)
        self.body_checker = BodyChecker(config.max_json_values)
        self.metrics = Metrics(config.metrics_prefix, self.edge)
        engine.on_step_tokens = self.metrics.steps_ran
        self.model: ServedModel | None = None
        self.adapters = AdapterNames()
        path = config.response_path()
        self.files = open_file_store(config.file_directory(), config.file_limits(),
                                     is_default=config.file_store is None)
        self.background: list[Background] = []
        self.responses = None if path is None else ResponseStore(path, config.response_limits())
        self.response_runs = None if self.responses is None else ResponseRuns(self.responses)
        self.tracer = None if config.otlp_endpoint is None else RequestTracer(config.otlp_endpoint)
        self._active = Tally() if counts is None else counts.requests
        self._drains = Tally() if counts is None else counts.drains

    def enter(self) -> None:
        """A request begins to be answered; ``leave`` when it has ended, however it did."""
        self._active.add(1)

    def leave(self) -> None:
        self._active.add(-1)

    @property
    def active(self) -> int:
        """Requests that all HTTP processes answer."""
        return self._active.total()

    @property
    def draining(self) -> bool:
        return self._drains.total() > 0

    async def drain(self) -> None:
        """From now on no HTTP process takes new requests. Waits until none answers one."""
        self._drains.add(1)
        await asyncio.sleep(_DRAIN_LOOK_S)  # what another process has just begun is counted by then
        while self.active:
            await asyncio.sleep(_DRAIN_LOOK_S)

    async def close(self) -> None:
        """After the last request."""
        if self.response_runs is not None:
            await self.response_runs.close()
        if self.responses is not None:
            await self.responses.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def open(self, model: ServedModel) -> None:
        self.adapters.start_with(model.info.adapters, (*model.names, ANY_NAME))
        self.model = model
        self.metrics.name_model(model.name)

    def model_for(self, name: str | None) -> ServedModel:
        """The model a request means. Raises EngineUnavailableError, UnknownModelError."""
        self.check_open()
        assert self.model is not None
        if name is not None and name != ANY_NAME and name not in self.model.names:
            adapter = self.adapters.find(name)
            if adapter is not None:
                return replace(self.model, names=(name,), adapter=adapter)
            names = (*self.model.names, *self.adapters)
            served = ", ".join(repr(known) for known in (*names[:_NAMES_SHOWN], ANY_NAME))
            served += f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            close = did_you_mean(name, names)
            raise UnknownModelError(f"there is no model {name[:200]!r} here{close}; this server has {served}",
                                    param="model")
        return self.model

    def check_open(self) -> None:
        if self.draining:
            raise EngineUnavailableError("this server is shutting down and takes no new requests")
        self.engine.check_alive()
        if self.model is None:
            raise EngineUnavailableError("the server is starting: it reads the tokenizer")

    def name_of(self, model: ServedModel, asked: str | None) -> str:
        """What ``model`` says in a response: the name that the request used, if it is one of its own."""
        return asked if asked in model.names and asked is not None else model.name

    def fleet_report(self) -> FleetReport:
        """For /metrics."""
        fleet = self.engine
        return FleetReport([EngineReport(replica.number, replica.ready, replica.restart_count,
                                         replica.engine.stats, replica.host) for replica in fleet.replicas
                            if replica.state != "left"],
                           fleet.requests.resume_count, fleet.requests.deadly_count, fleet.router.counts(),
                           fleet.requests.handoff_count)

    def health(self) -> tuple[int, Mapping[str, Any]]:
        if self.engine.death is not None:
            return 503, {"status": "dead", "reason": self.engine.death.message}
        if self.model is None:
            return 503, {"status": "starting", "reason": self.engine.progress}
        if self.draining:
            return 503, {"status": "draining", "reason": "the server is shutting down"}
        if (ailment := self.engine.ailment) is not None:  # requests wait, and none of them fails
            return 200, {"status": "degraded", "reason": ailment}
        details = self._store_details()
        asleep = self.engine.engines.sleep_state
        if asleep.level:  # as it should be: a supervisor that starts it anew would undo it
            return 200, {"status": "sleeping", "level": asleep.level, "missing": list(asleep.missing),
                         **details}
        return 200, {"status": "ok", **details}

    def _store_details(self) -> dict[str, str]:
        """``/health`` needs no key, so this has the kind of a fault, and neither bucket nor address."""
        faults = {stats.store.store.bucket_fault.partition(":")[0]
                  for _, stats in self.engine.engines.stats() if stats.store is not None} - {""}
        return {"store": f"the bucket does not answer: {', '.join(sorted(faults))}"} if faults else {}
