"""What every handler needs, in one value: the engine, the model's text side, the names, the doors.

The engine says which directory it serves; then the model's text side is loaded: tokenizer, chat template,
sampling defaults. So the server answers /health from its first second. Before that, while draining, and
after the engine's death, ``model_for`` raises a 503 that names the reason.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import msgspec

from weft.adapters import Adapter
from weft.default_sampling import OLLAMA_SAMPLING
from weft.errors import (
    ContextLengthError,
    EngineUnavailableError,
    RequestError,
    UnknownModelError,
    WeftError,
    maximum_context,
)
from weft.fleet.fleet import Fleet
from weft.fleet.live_request import UnreadAnswers
from weft.info import ModelInfo
from weft.planning.residency import Residency, Resident
from weft.server.access_log import log_request
from weft.server.adapter_names import AdapterNames
from weft.server.batches.files import open_file_store
from weft.server.config import ServerConfig
from weft.server.edge import HttpEdge, SharedCounts, Tally
from weft.server.metrics import EngineReport, FleetReport, Metrics, ModelMetrics
from weft.server.presets import Preset, Presets
from weft.server.protocol import LARGE_BODY_BYTES, BodyVerdict, did_you_mean, key_of_request, note_ignored
from weft.server.responses.background import ResponseRuns
from weft.server.responses.store import ResponseStore
from weft.server.tokenize_budget import TokenizeBudget
from weft.server.tracing import RequestTrace, RequestTracer
from weft.text.chat import read_chat_template
from weft.text.chat_request import (
    ChatRequest,
    ConversationFields,
    KnownPrefix,
    Prompt,
    TemplateSandbox,
    encode_prompt,
    read_chat,
    show_pictures,
)
from weft.text.control_tokens import NO_CONTROL, ControlTexts, ControlTokens, control_texts
from weft.text.dialect import Dialect, answer_markers, call_format
from weft.text.pooling import PooledPrompt, Pooler
from weft.text.template_worker import ChatPrompt
from weft.text.text_parts import next_cut
from weft.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from weft.text.tokenizer_file import tokenizer_digest, tokenizer_path
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
_CUT_TOKENS_MIN = 1024
_DRAIN_LOOK_S = 0.05
Encoded = TypeVar("Encoded")
KeepAlive: TypeAlias = float | msgspec.UnsetType | None
"""Seconds that a model stays in memory after a request, None for ever; UNSET: as the server says."""

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
            answer = msgspec.msgpack.decode(await self._lane.ask(raw, key_of_request()), type=BodyVerdict)
        except OSError:
            raise EngineUnavailableError("the body took too long to look through; try again later") from None
        if answer.is_too_large:
            raise TooManyValuesError(answer.message, param="limits.max_json_values", code="too_many_values")
        if answer.message:
            raise RequestError(answer.message, param=answer.param, code="invalid_json")


class ModelUse(Protocol):
    """Of a loaded model by one request; ``end`` is idempotent."""

    fleet: Fleet

    def end(self) -> None: ...


class LoadableModel(Protocol):
    """One of several models (``several``). ``fleet`` while it is loaded, ``served`` from its first load
    on."""

    name: str
    resident: Resident
    fleet: Fleet | None
    served: ServedModel | None
    created_s: int

    @property
    def state(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def info(self) -> ModelInfo: ...

    async def preview(self) -> ServedModel: ...

    async def enter(self, keep_alive_s: KeepAlive = msgspec.UNSET) -> ModelUse: ...

    def unload_soon(self) -> None: ...


class Models(Protocol):
    """Of a server with several (``several.SeveralModels``), as handlers see them."""

    adapters: AdapterNames
    residency: Residency
    on_fleet: Callable[[str, Fleet], None]
    other_names: Callable[[], Iterable[str]]

    @property
    def models(self) -> Mapping[str, LoadableModel]: ...

    @property
    def fleets(self) -> list[tuple[str, Fleet]]: ...

    def has(self, name: str) -> bool: ...

    def find(self, name: str | None) -> LoadableModel: ...

    def base_of(self, name: str) -> LoadableModel | None: ...

    def adapter_names(self, name: str) -> list[str]: ...

    async def model_for(self, name: str | None) -> ServedModel: ...

    def states(self) -> dict[str, int]: ...

    @property
    def serves_pulled(self) -> bool: ...

    @property
    def refused(self) -> Mapping[str, str]: ...

    @property
    def unserved(self) -> Mapping[str, str]: ...

    def forgets(self, name: str) -> bool: ...

    async def look(self) -> None: ...


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
    loadable: LoadableModel | None = None
    """Of a server with several models."""
    preset: Preset | None = None
    """How requests under this name begin."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Values of fields that a request leaves out, but for the API's own defaults."""
        return sampling_defaults(self.info, self.preset)

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Raises RequestError for an id that is no token of the model."""
        limit = self.info.vocab_size
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < limit:
                raise RequestError(f"{param} has token {token}; this model has tokens 0 to {limit - 1}", param=param)

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
                    f"{what} has {len(text)} characters, and its first {head} are {count} tokens; "
                    f"{maximum_context(limit)}",
                    param=param,
                    tokens=count,
                    limit=limit,
                )
            head *= 4

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._encode_long(
            functools.partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens), text
        )

    async def part_for_cut(self, text: str, tokens: int, *, at_start: bool) -> str:
        """Return the part of ``text`` that a cut to ``tokens`` tokens needs: all of a text that is not far longer, or
        else its start or end with twice as many. All tokens of the largest body take a minute and gigabytes."""
        chars = _HEAD_CHARS_PER_TOKEN * max(tokens, _CUT_TOKENS_MIN)
        while chars < len(text):
            part = text[:chars] if at_start else text[_cut_before(text, len(text) - chars) :]
            if len(await self.encode(part, add_special_tokens=False)) >= 2 * tokens:
                return part
            chars *= 4
        return text

    async def encode_chat(
        self, prompt: ChatPrompt, *, add_special_tokens: bool, known: KnownPrefix | None = None
    ) -> Prompt:
        """``known`` as in ``encode_prompt``."""
        encode = functools.partial(
            encode_prompt, self.tokenizer, prompt, add_special_tokens=add_special_tokens, known=known
        )
        if len(prompt.text) < LONG_TEXT_CHARS:
            return encode()
        return await self._encode_long(encode, prompt.text, whole=bool(prompt.ends or prompt.marks or prompt.pictures))

    async def pooled(self, make: Callable[[], PooledPrompt], *texts: str) -> PooledPrompt:
        """``make``: of ``pooler``, for ``texts``."""
        if sum(map(len, texts)) < LONG_TEXT_CHARS:
            return make()
        return await self._encode_long(make, "".join(texts), whole=True)

    async def _encode_long(self, encode: Callable[[], Encoded], text: str, *, whole: bool = False) -> Encoded:
        """Run ``encode`` in a thread, within the budget for ``text``. ``whole``: as of ``Tokenizer.memory_of``. Raises
        TextTooLongError, QueueFullError."""
        memory_bytes = await asyncio.to_thread(self.tokenizer.memory_of, text, whole=whole)
        with self.budget.spending(len(text), memory_bytes):
            return await asyncio.to_thread(encode)

    async def write_chat(
        self, conversation: ConversationFields, *, with_places: bool = True, begins: bool = True
    ) -> tuple[ChatRequest, ChatPrompt]:
        """The checked conversation, and its text as the model's template writes it. ``with_places``: also
        where the cache may keep a state; ``begins``: the name's messages too. Raises RequestError."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template, so it serves /v1/completions only; start "
                "the server with --chat-template FILE to give it one",
                param="messages",
            )
        if self.preset is not None and begins:
            messages = self.preset.begun(conversation.messages)
            conversation = msgspec.structs.replace(conversation, messages=messages)
        request = read_chat(
            conversation,
            template_variables=self.template.variables,
            reads=self.pictures.tokens if self.pictures is not None else (),
        )
        for name in request.left_out:
            note_ignored(name)
        chars_cut = _HEAD_CHARS_PER_TOKEN * self.info.sizes.max_model_len if with_places else 0
        prompt = await self.template.write(
            request.messages, key=key_of_request(), chars_cut=chars_cut, **request.rendering
        )
        if self.pictures is not None and request.pictures:
            prompt = show_pictures(prompt, await self.pictures.read(request.pictures), self.pictures.tokens)
        return request, prompt


def _cut_before(text: str, place: int) -> int:
    """Return where the end of ``text`` from ``place`` on begins: at a cut between two words, so that its tokens are
    those of the whole, or at ``place`` where none is near."""
    cut = next_cut(text[: place + _CUT_WITHIN_CHARS], place)
    return place if cut is None else cut


_CUT_WITHIN_CHARS = 4096


def load_served_model(
    info: ModelInfo, config: ServerConfig, known: Sequence[Tokenizer] = (), worker: BoundedWorker | None = None
) -> ServedModel:
    """``known``: tokenizers that may be its own; ``worker`` for a template, if it has one. Raises
    CheckpointError or ConfigError with the file."""
    directory = Path(info.directory)
    tokenizer = Tokenizer.load(directory, known)
    text = read_chat_template(directory, override=config.chat_template)
    template = text and _sandbox(*text, tokenizer, config, info, worker)
    names = config.served_model_name or (info.name,)
    return ServedModel(
        info,
        tuple(dict.fromkeys(names)),
        tokenizer,
        template,
        _dialect(template, tokenizer, config),
        int(time.time()),
        TokenizeBudget(config.max_tokenize_chars, parse_bytes(config.tokenize_memory, flag="limits.tokenize_memory")),
        _picture_reader(info, config, tokenizer),
        Pooler(
            directory,
            tokenizer,
            name=info.name,
            score_labels=info.score_labels,
            control=ControlTokens(_control(tokenizer, "", info)),
        ),
        _vocabulary(directory),
    )


def _sandbox(
    text: str,
    origin: str,
    tokenizer: Tokenizer,
    config: ServerConfig,
    info: ModelInfo,
    worker: BoundedWorker | None = None,
) -> TemplateSandbox:
    """Raises CheckpointError."""
    return TemplateSandbox(
        text,
        special_tokens=tokenizer.special_tokens,
        origin=origin,
        seconds=config.template_seconds,
        chars_max=config.template_chars,
        memory_bytes=config.template_bytes(),
        worker=worker,
        control=_control(tokenizer, text, info),
        calls=call_format(text, tokenizer, config.tool_parser),
    )


def _control(tokenizer: Tokenizer, template: str, info: ModelInfo) -> ControlTexts:
    """The control tokens of a model, none where its operator trusts what requests say."""
    if info.trust_control_tokens:
        return NO_CONTROL
    pictures = [tokenizer.token_text(token) for token in info.picture_tokens]
    return control_texts(tokenizer, template, answer_markers(), pictures)


def _dialect(template: TemplateSandbox | None, tokenizer: Tokenizer, config: ServerConfig) -> Dialect:
    return Dialect(template, tokenizer, reasoning_parser=config.reasoning_parser, tool_parser=config.tool_parser)


def _preset_style(
    config: ServerConfig, tokenizer: Tokenizer, info: ModelInfo, text: str
) -> tuple[TemplateSandbox, Dialect]:
    """Of a created name's template. Raises CheckpointError."""
    template = _sandbox(text, "template", tokenizer, config, info)
    return template, _dialect(template, tokenizer, config)


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

        media = MediaFetcher(
            hosts,
            bytes_max=limits.image_bytes,
            seconds=config.image_seconds,
            videos=(limits.video_bytes, config.video_seconds),
        )
    tokens = dict(zip(PICTURE_KINDS, map(tokenizer.token_text, info.picture_tokens), strict=False))
    return PictureReader(
        start_of(Path(info.directory), limits),
        tokens=tokens,
        seconds={"image": config.image_seconds, "video": config.video_seconds},
        memory_bytes=parse_bytes(config.image_memory, flag="limits.image_memory"),
        pictures_max=config.images,
        media=media,
    )


def _vocabulary(directory: Path) -> bytes:
    return bytes.fromhex(tokenizer_digest(tokenizer_path(directory)))[:16]


def unknown_model(name: str, names: Sequence[str]) -> UnknownModelError:
    """``names``: what there is."""
    served = ", ".join(repr(known) for known in (*names[:_NAMES_SHOWN], ANY_NAME))
    served += f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return UnknownModelError(
        f"there is no model {name[:200]!r} here{did_you_mean(name, names)}; this server has {served}", param="model"
    )


def sampling_defaults(info: ModelInfo, preset: Preset | None) -> dict[str, Any]:
    """Return those of the created name, then of the checkpoint, then of ``--default-sampling``."""
    return info.default_sampling if preset is None else {**info.default_sampling, **preset.defaults}


@dataclass(frozen=True, slots=True)
class ListedModel:
    """As lists of models show it. ``parent``: the model of an adapter; ``state``: of a server with several
    models; ``reason``: why its last load failed."""

    name: str
    info: ModelInfo
    created_s: int
    parent: str | None = None
    state: str | None = None
    adapter: Adapter | None = None
    preset: Preset | None = None
    reason: str = ""

    @property
    def chat_sampling(self) -> dict[str, Any]:
        """Return the fields with which the page and `weft chat` sample. Stop strings stay the server's."""
        values = {**OLLAMA_SAMPLING, **sampling_defaults(self.info, self.preset)}
        return {name: value for name, value in values.items() if name != "stop"}


class Background(Protocol):
    """Work of the server's own, from the time when the model is ready until draining."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class Service:
    """``counts``: of all HTTP processes, where there are several. ``engine``: of the one model, or
    ``several`` models."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Fleet | None,
        counts: SharedCounts | None = None,
        *,
        is_supervisor: bool = False,
        several: Models | None = None,
    ) -> None:
        self.config = config
        self._engine = engine
        self.several = several
        self.counts = counts
        self.workers: Workers | None = None
        self.edge = HttpEdge(config.edge_limits(), counts, is_inner=is_supervisor)
        processes = 1 if counts is None else counts.processes
        self.unread = UnreadAnswers(config.max_unread_mb * 1_000_000 // processes)
        self.body_checker = BodyChecker(config.max_json_values)
        self.metrics = Metrics(config.metrics_prefix, self.edge)
        if engine is not None:
            engine.on_step_tokens = lambda replica, sizes: self.metrics.steps_ran(
                "" if self.model is None else self.model.name, replica, sizes
            )
        if several is not None:
            several.on_fleet = self._follow
            several.other_names = lambda: self.names.all()
        self.model: ServedModel | None = None
        self.adapters = AdapterNames() if several is None else several.adapters
        self.names = Presets(config.presets())
        path = config.response_path()
        self.files = open_file_store(
            config.file_directory(), config.file_limits(), is_default=config.file_store is None
        )
        self.background: list[Background] = []
        self.responses = None if path is None else ResponseStore(path, config.response_limits())
        self.response_runs = None if self.responses is None else ResponseRuns(self.responses)
        self.tracer = None if config.otlp_endpoint is None else RequestTracer(config.otlp_endpoint)
        self._active = Tally() if counts is None else counts.requests
        self._drains = Tally() if counts is None else counts.drains

    @property
    def engine(self) -> Fleet:
        """Of the one model. Raises RequestError where there are several."""
        if self._engine is None:
            raise RequestError(
                "this is served with one model only, and this server has several: they are "
                "loaded and unloaded as requests need them",
                code="several_models",
            )
        return self._engine

    @property
    def fleets(self) -> list[tuple[str, Fleet]]:
        """The name and the engines of each model that is loaded."""
        if self.several is not None:
            return self.several.fleets
        return [("" if self.model is None else self.model.name, self.engine)]

    @property
    def death(self) -> WeftError | None:
        """Why this server computes nothing any more."""
        return None if self._engine is None else self._engine.death

    def _follow(self, name: str, fleet: Fleet) -> None:
        fleet.on_step_tokens = functools.partial(self.metrics.steps_ran, name)

    def metrics_of(self, model: ServedModel) -> ModelMetrics:
        """Under the name of the model itself, not of an adapter."""
        base = self.model if model.loadable is None else model.loadable
        return self.metrics.of("" if base is None else base.name)

    def request_ended(self, trace: RequestTrace, ignored: list[str]) -> None:
        """Log, count and trace a request."""
        log_request(trace, ignored)
        self.metrics.request_ended(trace)
        if self.tracer is not None:
            self.tracer.ended(trace)

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
        self.metrics.of(model.name)

    async def model_for(self, name: str | None) -> ServedModel:
        """The model a request means; of several, it is loaded if it never was. Raises EngineUnavailableError,
        UnknownModelError, QueueFullError."""
        self.check_open()
        own, preset = self.meant(name)
        model = self.known_model(own) if self.several is None else await self.several.model_for(own)
        return model if preset is None else await self.under(preset, model)

    async def under(self, preset: Preset, model: ServedModel) -> ServedModel:
        """``model`` as requests under the name use it, which stands for it. Raises RequestError."""
        named = replace(model, names=(preset.name,), preset=preset)
        style = await self.names.style(
            preset, model.vocabulary, functools.partial(_preset_style, self.config, model.tokenizer, model.info)
        )
        return named if style is None else replace(named, template=style[0], dialect=style[1])

    def meant(self, name: str | None) -> tuple[str | None, Preset | None]:
        """The server's own name for what a request means, and how it begins if users created the name. Raises
        UnknownModelError for a created one whose model is not here."""
        if self.is_own(name):
            return name, None
        preset = self.names.all().get(str(name))
        if preset is None:
            return name, None
        if not self.is_own(preset.model):
            raise UnknownModelError(
                f"the name {name!r} was created from {preset.model!r}, which this server does not have", param="model"
            )
        return preset.model, preset

    def is_own(self, name: str | None) -> bool:
        """The server has it by itself: a model or an adapter, no created name."""
        if name is None or name == ANY_NAME:
            return True
        if self.several is not None:
            return self.several.has(name)
        return self.model is not None and (name in self.model.names or self.adapters.find(name) is not None)

    def known_model(self, name: str | None) -> ServedModel:
        """The one model, or an adapter of it; of several, one that was loaded. Raises UnknownModelError."""
        if self.several is not None:
            served = self.several.find(name).served
            assert served is not None
            return served
        assert self.model is not None
        if name is not None and name != ANY_NAME and name not in self.model.names:
            adapter = self.adapters.find(name)
            if adapter is not None:
                return replace(self.model, names=(name,), adapter=adapter)
            raise unknown_model(name, [*self.model.names, *self.adapters, *self.names.all()])
        return self.model

    def listed(self) -> list[ListedModel]:
        """Every name that requests may use: models, their adapters, then created ones. Raises
        EngineUnavailableError, PresetStoreError."""
        self.check_open()
        own = {one.name: one for one in self._own_listed()}
        return [
            *own.values(),
            *(
                replace(own[one.model], name=one.name, created_s=int(one.created_s), parent=one.model, preset=one)
                for one in self.names.all().values()
                if one.model in own and one.name not in own
            ),
        ]

    def _own_listed(self) -> list[ListedModel]:
        if self.several is None:
            model = self.known_model(None)
            own = [ListedModel(name, model.info, model.created_s) for name in model.names]
            return [
                *own,
                *(
                    ListedModel(name, model.info, model.created_s, model.name, adapter=self.adapters.find(name))
                    for name in self.adapters
                ),
            ]
        models = self.several.models.values()
        return [
            *(ListedModel(one.name, one.info, one.created_s, None, one.state, reason=one.reason) for one in models),
            *(
                ListedModel(name, one.info, one.created_s, one.name, one.state, self.adapters.find(name))
                if (why := self.several.refused.get(name)) is None
                else ListedModel(name, one.info, one.created_s, one.name, "failed", reason=why)
                for one in models
                for name in self.several.adapter_names(one.name)
            ),
        ]

    def own_name(self, name: str | None) -> str:
        """Of the model, adapter or created name that a request means. Raises UnknownModelError."""
        own, preset = self.meant(name)
        if preset is not None:
            return preset.name
        if self.several is not None:
            model = self.several.find(own)
            return model.name if own in (None, ANY_NAME) else str(own)
        return self.name_of(self.known_model(own), own)

    async def text_side(self, name: str | None) -> ServedModel:
        """To look at; of several models without loading it. Raises UnknownModelError."""
        self.check_open()
        own, preset = self.meant(name)
        model = self.known_model(own) if self.several is None else await self.several.find(own).preview()
        return model if preset is None else await self.under(preset, model)

    def check_open(self) -> None:
        if self.draining:
            raise EngineUnavailableError("this server is shutting down and takes no new requests")
        if self._engine is not None:
            self._engine.check_alive()
        if self.model is None and self.several is None:
            raise EngineUnavailableError("the server is starting: it reads the tokenizer")

    def name_of(self, model: ServedModel, asked: str | None) -> str:
        """What ``model`` says in a response: the name that the request used, if it is one of its own."""
        return asked if asked in model.names and asked is not None else model.name

    def fleet_reports(self) -> list[FleetReport]:
        """For /metrics, of each model."""
        if self.several is None:
            return [_report(*self.fleets[0])]
        budget = self.several.residency.budget
        return [_report(name, model.fleet, model.resident, budget) for name, model in self.several.models.items()]

    def health(self) -> tuple[int, Mapping[str, Any]]:
        if self.several is not None:
            return self._health_of(self.several)
        if self.engine.death is not None:
            return 503, {"status": "dead", "reason": self.engine.death.message}
        if self.model is None:
            return 503, {"status": "starting", "reason": self.engine.progress}
        if self.draining:
            return 503, {"status": "draining", "reason": "the server is shutting down"}
        if (reason := self.engine.degraded_reason) is not None:  # requests wait, and none of them fails
            return 200, {"status": "degraded", "reason": reason}
        details = self._store_details() | self._weights_details()
        asleep = self.engine.engines.sleep_state
        if asleep.level:  # as it should be: a supervisor that starts it anew would undo it
            return 200, {"status": "sleeping", "level": asleep.level, "missing": list(asleep.missing), **details}
        return 200, {"status": "paused" if self.engine.engines.is_paused else "ok", **details}

    def _health_of(self, several: Models) -> tuple[int, Mapping[str, Any]]:
        """Counts without names: no key is needed to read them."""
        if self.draining:
            return 503, {"status": "draining", "reason": "the server is shutting down"}
        ailing = sum(fleet.degraded_reason is not None for _, fleet in several.fleets)
        degraded = {"reason": f"engines of {ailing} of the models restart"} if ailing else {}
        return 200, {
            "status": "degraded" if ailing else "ok",
            **degraded,
            "models": several.states(),
            **self._store_details(),
        }

    def weight_version(self) -> str:
        """The name that the last update gave the weights; empty for those of the start."""
        return "" if self._engine is None else self._engine.weight_version

    def _weights_details(self) -> dict[str, str]:
        version = self.weight_version()
        return {"weight_version": version} if version else {}

    def _store_details(self) -> dict[str, str]:
        """``/health`` needs no key, so this has the kind of a fault, and neither bucket nor address."""
        faults = {
            stats.store.store.bucket_fault.partition(":")[0]
            for _, fleet in self.fleets
            for _, stats in fleet.engines.stats()
            if stats.store is not None
        } - {""}
        return {"store": f"the bucket does not answer: {', '.join(sorted(faults))}"} if faults else {}


def _report(name: str, fleet: Fleet | None, resident: Resident | None = None, budget: int | None = None) -> FleetReport:
    if fleet is None:
        return FleetReport(name, [], 0, 0, resident=resident, budget=budget)
    return FleetReport(
        name,
        [
            EngineReport(replica.number, replica.ready, replica.restart_count, replica.engine.stats, replica.host)
            for replica in fleet.replicas
            if replica.state != "left"
        ],
        fleet.requests.resume_count,
        fleet.requests.deadly_count,
        fleet.router.counts(),
        fleet.requests.handoff_count,
        resident,
        budget,
    )
