"""A model as requests see it: its renderer, pooler, sampling defaults, and its name in requests.

    directory, flags --load_served_model--> ServedModel

A ``ServedModel`` is a value. For an adapter or a created name there is a copy with that name (``Models.served_as``,
``Service.under``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.adapters import Adapter
from weft.errors import RequestError
from weft.info import ModelInfo
from weft.server.config import ServerConfig
from weft.server.presets import Preset
from weft.text.chat import read_chat_template
from weft.text.control_tokens import NO_CONTROL, ControlTexts, ControlTokens, control_texts
from weft.text.decisions import DecisionSettings, read_decision_settings
from weft.text.dialect import Dialect, answer_markers, call_format
from weft.text.pooling import Pooler
from weft.text.renderer import Renderer
from weft.text.template_sandbox import TemplateSandbox
from weft.text.tokenize_budget import TokenizeBudget
from weft.text.tokenizer import Tokenizer
from weft.text.tokenizer_file import tokenizer_digest, tokenizer_path
from weft.text.workers import BoundedWorker
from weft.units import parse_bytes

if TYPE_CHECKING:
    from weft.server.pictures import PictureReader


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    names: tuple[str, ...]
    renderer: Renderer
    created_s: int
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


def load_served_model(
    info: ModelInfo, config: ServerConfig, known: Sequence[Tokenizer] = (), worker: BoundedWorker | None = None
) -> ServedModel:
    """Load what requests need of a model. ``known``: loaded tokenizers, one of which may be the model's; ``worker``:
    the worker of a template, if there is one. Raise CheckpointError or ConfigError with the file."""
    directory = Path(info.directory)
    tokenizer = Tokenizer.load(directory, known)
    tokenizer.cache.bytes_max = parse_bytes(config.token_cache, flag="limits.token_cache")
    text = read_chat_template(directory, override=config.chat_template)
    template = text and _sandbox(*text, tokenizer, config, info, worker)
    names = config.served_model_name or (info.name,)
    renderer = Renderer(
        tokenizer,
        template,
        _dialect(template, tokenizer, config),
        info.sizes.max_model_len,
        _picture_reader(info, config, tokenizer),
        TokenizeBudget(config.max_tokenize_chars, parse_bytes(config.tokenize_memory, flag="limits.tokenize_memory")),
    )
    return ServedModel(
        info,
        tuple(dict.fromkeys(names)),
        renderer,
        int(time.time()),
        Pooler(
            directory,
            tokenizer,
            name=info.name,
            score_labels=info.score_labels,
            causal=not info.sizes.whole_prompts,
            control=ControlTokens(_control(tokenizer, "", info)),
        ),
        read_decision_settings(directory),
        bytes.fromhex(tokenizer_digest(tokenizer_path(directory)))[:16],
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
    """Return the process and the dialect of the template of a created name. Raise CheckpointError."""
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


def sampling_defaults(info: ModelInfo, preset: Preset | None) -> dict[str, Any]:
    """Return defaults: of the created name; where it has none, of the checkpoint, then of ``--default-sampling``."""
    return info.default_sampling if preset is None else {**info.default_sampling, **preset.defaults}
