"""The text side of a model: its tokenizer, chat template, sampling defaults, pictures, and its name in requests.

    messages --write_chat--> text --encode_chat--> Prompt          both: render
    directory, flags --load_served_model--> ServedModel

A ``ServedModel`` is a value. For an adapter or a created name there is a copy with that name (``Models.served_as``,
``Service.under``).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from weft.adapters import Adapter
from weft.errors import ContextLengthError, RequestError, maximum_context
from weft.info import ModelInfo
from weft.server.config import ServerConfig
from weft.server.presets import Preset
from weft.server.protocol import key_of_request, note_ignored
from weft.server.tokenize_budget import TokenizeBudget
from weft.text.chat import read_chat_template
from weft.text.chat_request import ChatRequest, ConversationFields, read_chat
from weft.text.control_tokens import NO_CONTROL, ControlTexts, ControlTokens, control_texts
from weft.text.decisions import DecisionSettings, read_decision_settings
from weft.text.dialect import Dialect, answer_markers, call_format
from weft.text.pooling import PooledPrompt, Pooler
from weft.text.prompt import KnownPrefix, Prompt, encode_prompt, show_pictures
from weft.text.template_sandbox import TemplateSandbox
from weft.text.template_worker import ChatPrompt
from weft.text.text_parts import next_cut
from weft.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from weft.text.tokenizer_file import tokenizer_digest, tokenizer_path
from weft.text.workers import BoundedWorker
from weft.units import parse_bytes

if TYPE_CHECKING:
    from weft.server.pictures import PictureReader

_HEAD_CHARS_PER_TOKEN = 16
"""Characters per token of the context. A longer text is first tokenized in part."""
_CUT_TOKENS_MIN = 1024
Encoded = TypeVar("Encoded")


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
    """None if the model reads only text."""
    pooler: Pooler
    decisions: DecisionSettings
    vocabulary: bytes
    """Digest of the tokenizer: with equal digests, equal token ids mean equal text."""
    adapter: Adapter | None = None
    """The adapter of requests under this name."""
    base: str = ""
    """The name of the model itself, whatever name a request used; empty before the model is served."""
    preset: Preset | None = None
    """System prompt, messages and parameters of a created name."""

    @property
    def name(self) -> str:
        return self.names[0]

    def name_for(self, requested: str | None) -> str:
        """Return the value of ``model`` in a response: the name that the request used, if it is one of ``names``."""
        return requested if requested is not None and requested in self.names else self.name

    def reads(self, variable: str) -> bool:
        """Return whether the chat template reads ``variable``."""
        return self.template is not None and variable in self.template.variables

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Values of fields that a request leaves out; the API's own defaults come after these."""
        return sampling_defaults(self.info, self.preset)

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Raise RequestError for an id that is not a token of the model."""
        limit = self.info.vocab_size
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < limit:
                raise RequestError(f"{param} has token {token}; this model has tokens 0 to {limit - 1}", param=param)

    async def check_text(self, text: str, *, param: str) -> None:
        """Raise ContextLengthError for a text that is far too long for the context. Only the beginning of the text is
        tokenized: tokenizing the largest body takes a minute and gigabytes."""
        limit = self.info.sizes.max_model_len
        head = _HEAD_CHARS_PER_TOKEN * limit
        while head < len(text):
            count = len(await self.encode(text[:head], add_special_tokens=False))
            if (
                count > 2 * limit
            ):  # twice the tokens, since the end of the part may be split into other tokens in the complete text
                what = "the prediction" if param == "prediction" else "the prompt"
                raise ContextLengthError(
                    f"{what} has {len(text)} characters, and its first {head} are {count} tokens; "
                    f"{maximum_context(limit)}",
                    param=param,
                    tokens=count,
                    limit=limit,
                )
            head *= 4

    async def encode(self, text: str, *, add_special_tokens: bool, salt: str | None = None) -> list[int]:
        """Tokenize ``text``. ``salt``: see ``Tokenizer.encode_with_boundaries``."""
        encode = functools.partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens, salt=salt)
        return encode() if len(text) < LONG_TEXT_CHARS else await self._encode_long(encode, text)

    async def part_for_cut(self, text: str, tokens: int, *, at_start: bool) -> str:
        """Return the part of ``text`` that a cut to ``tokens`` tokens needs: the start or end with twice the tokens, or
        all of a text that is not much longer. Tokenizing the largest body would take a minute and gigabytes."""
        chars = _HEAD_CHARS_PER_TOKEN * max(tokens, _CUT_TOKENS_MIN)
        while chars < len(text):
            part = text[:chars] if at_start else text[_cut_before(text, len(text) - chars) :]
            if len(await self.encode(part, add_special_tokens=False)) >= 2 * tokens:
                return part
            chars *= 4
        return text

    async def encode_chat(
        self, prompt: ChatPrompt, *, add_special_tokens: bool, known: KnownPrefix | None = None, salt: str | None = None
    ) -> Prompt:
        """Tokenize a rendered prompt. ``known`` and ``salt`` as in ``encode_prompt``."""
        encode = functools.partial(
            encode_prompt, self.tokenizer, prompt, add_special_tokens=add_special_tokens, known=known, salt=salt
        )
        if len(prompt.text) < LONG_TEXT_CHARS:
            return encode()
        return await self._encode_long(encode, prompt.text, whole=bool(prompt.ends or prompt.marks or prompt.pictures))

    async def pooled(self, make: Callable[[], PooledPrompt], *texts: str) -> PooledPrompt:
        """Return a prompt to be pooled. ``make``: a method of ``pooler``, bound to ``texts``."""
        if sum(map(len, texts)) < LONG_TEXT_CHARS:
            return make()
        return await self._encode_long(make, "".join(texts), whole=True)

    async def _encode_long(self, encode: Callable[[], Encoded], text: str, *, whole: bool = False) -> Encoded:
        """Run ``encode`` in a thread, within the budget for ``text``. ``whole``: see ``Tokenizer.memory_of``. Raise
        TextTooLongError, QueueFullError."""
        memory_bytes = await asyncio.to_thread(self.tokenizer.memory_of, text, whole=whole)
        with self.budget.spending(len(text), memory_bytes):
            return await asyncio.to_thread(encode)

    async def write_chat(
        self, conversation: ConversationFields, *, with_places: bool = True, begins: bool = True
    ) -> tuple[ChatRequest, ChatPrompt]:
        """Return the checked conversation, and its text as the model's template writes it. ``with_places``: also
        positions where the cache may keep a state; ``begins``: also the first messages of a created name. Raise
        RequestError."""
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

    async def render(
        self,
        conversation: ConversationFields,
        *,
        field: str = "messages",
        cut_to: int | None = None,
        add_special_tokens: bool = False,
        known: KnownPrefix | None = None,
        with_places: bool = False,
        begins: bool = True,
        salt: str | None = None,
    ) -> tuple[ChatRequest, Prompt]:
        """Return the checked conversation and its prompt in tokens. ``field``: the request's field, for the error of a
        text that is far too long. ``cut_to``: such a text is instead cut to an end of at least this number of tokens.
        ``known`` and ``salt``: see ``encode_prompt``; other arguments: see ``write_chat``. Raise RequestError,
        ContextLengthError."""
        request, prompt = await self.write_chat(conversation, with_places=with_places, begins=begins)
        if cut_to is None:
            await self.check_text(prompt.text, param=field)
        elif not prompt.pictures:
            prompt = prompt.last(await self.part_for_cut(prompt.text, cut_to, at_start=False))
        return request, await self.encode_chat(prompt, add_special_tokens=add_special_tokens, known=known, salt=salt)


def _cut_before(text: str, place: int) -> int:
    """Return the position at which to cut ``text`` near ``place``: between two words, so that the tokens after it are
    those of the complete text; ``place`` itself if no such position is near."""
    cut = next_cut(text[: place + _CUT_WITHIN_CHARS], place)
    return place if cut is None else cut


_CUT_WITHIN_CHARS = 4096


def load_served_model(
    info: ModelInfo, config: ServerConfig, known: Sequence[Tokenizer] = (), worker: BoundedWorker | None = None
) -> ServedModel:
    """Load the text side. ``known``: loaded tokenizers, one of which may be the model's; ``worker``: the worker of a
    template, if there is one. Raise CheckpointError or ConfigError with the file."""
    directory = Path(info.directory)
    tokenizer = Tokenizer.load(directory, known)
    tokenizer.cache.bytes_max = parse_bytes(config.token_cache, flag="limits.token_cache")
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
            causal=not info.sizes.whole_prompts,
            control=ControlTokens(_control(tokenizer, "", info)),
        ),
        read_decision_settings(directory),
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
    """Return the process that renders the template. Raise CheckpointError."""
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
    """Return the control tokens of a model; none if the operator trusts the texts of requests."""
    if info.trust_control_tokens:
        return NO_CONTROL
    pictures = [tokenizer.token_text(token) for token in info.picture_tokens]
    return control_texts(tokenizer, template, answer_markers(), pictures)


def _dialect(template: TemplateSandbox | None, tokenizer: Tokenizer, config: ServerConfig) -> Dialect:
    return Dialect(template, tokenizer, reasoning_parser=config.reasoning_parser, tool_parser=config.tool_parser)


def preset_style(
    config: ServerConfig, tokenizer: Tokenizer, info: ModelInfo, text: str
) -> tuple[TemplateSandbox, Dialect]:
    """Return renderer and dialect for the template of a created name. Raise CheckpointError."""
    template = _sandbox(text, "template", tokenizer, config, info)
    return template, _dialect(template, tokenizer, config)


def _picture_reader(info: ModelInfo, config: ServerConfig, tokenizer: Tokenizer) -> PictureReader | None:
    """Return the reader of pictures, if any. Raise CheckpointError for settings of pictures that are not served."""
    if not info.picture_tokens:
        return None
    from weft.images.worker import start_of  # imports numpy and Pillow, which text does not need
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


def sampling_defaults(info: ModelInfo, preset: Preset | None) -> dict[str, Any]:
    """Return defaults: of the created name; where it has none, of the checkpoint, then of ``--default-sampling``."""
    return info.default_sampling if preset is None else {**info.default_sampling, **preset.defaults}
