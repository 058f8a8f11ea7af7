"""/v2/embed: embeddings in the form of Cohere's API.

    {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]}
        --> {"embeddings": {"float": [[0.1, ...]]}, "texts": ["a"], "response_type": "embeddings_by_type", ...}

``input_type`` chooses a prompt of the checkpoint. A text that is too long is an error, as everywhere here, unless
``truncate`` is END: Cohere's API cuts it without a word.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from weft.errors import RequestError
from weft.server.pooling import PoolingBody, PoolingJob, check_dimensions, cut_of, embedding_prompts
from weft.server.protocol import Int, Unserved
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sse import Way
from weft.text.current_request import note_ignored

EmbeddingType = Literal["float", "base64", "ubinary", "binary"]
InputType = Literal["search_query", "search_document", "classification", "clustering"]
UNSERVED_IN_EMBED: Unserved = {
    "stream": ("an answer is one object, and is not streamed", (False,)),
    "images": ("this endpoint reads texts", ([],)),
}
_PROMPT_NAMES = {"search_query": "query", "search_document": "document"}
_encoder = msgspec.json.Encoder()


class TextContent(msgspec.Struct, kw_only=True):
    """A part of an input."""

    type: Literal["text"]
    text: str


class TextInput(msgspec.Struct, kw_only=True):
    """An input of parts, which are joined."""

    content: list[TextContent]


class CohereEmbedBody(PoolingBody, kw_only=True):
    """The body of /v2/embed."""

    texts: list[str] | None = None
    inputs: list[TextInput] | None = None
    input_type: InputType | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Int | None = None
    truncate: Literal["NONE", "END"] | None = None
    max_tokens: Int | None = None


class BilledUnits(msgspec.Struct, kw_only=True):
    input_tokens: int


class ApiVersion(msgspec.Struct, frozen=True, kw_only=True):
    version: str = "2"


class EmbedMeta(msgspec.Struct, kw_only=True):
    billed_units: BilledUnits
    api_version: ApiVersion = ApiVersion()


class CohereEmbeddings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer of /v2/embed. ``embeddings``: a list for each type, in the order of the texts. ``truncated``: the
    indices of texts that were cut."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: EmbedMeta
    response_type: Any
    truncated: list[int] = []


class CohereEmbedJob(PoolingJob):
    def __init__(self, *args: Any, texts: list[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._texts = texts

    async def written(self, rows: Sequence[bytes]) -> bytes:
        by_kind = {}
        for kind in dict.fromkeys(self.body.embedding_types or ["float"]):
            by_kind[kind] = await self.vectors(rows, self.body.output_dimension, functools.partial(_written, kind))
        return _encoder.encode(
            CohereEmbeddings(
                id=self.id,
                embeddings=by_kind,
                texts=self._texts,
                meta=EmbedMeta(billed_units=BilledUnits(input_tokens=self.usage().prompt_tokens)),
                response_type="embeddings_by_type",
                truncated=self.truncated(),
            )
        )


def _written(kind: EmbeddingType, index: int, vector: Any) -> Any:
    """Return ``vector`` in a form of JSON. A bit is 1 for a number that is not negative, eight to a byte, the first the
    highest."""
    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    numbers = vector.tolist()
    packed = [
        sum((number >= 0) << (7 - bit) for bit, number in enumerate(numbers[start : start + 8]))
        for start in range(0, len(numbers), 8)
    ]
    return [byte - 128 for byte in packed] if kind == "binary" else packed


async def prepare_cohere_embed(service: Service, body: CohereEmbedBody) -> CohereEmbedJob:
    """Prepare a request. Raise RequestError, ContextLengthError, UnknownModelError, EngineUnavailableError."""
    model = await service.model_for(body.model)
    texts, field = _texts_of(body)
    cut = cut_of(body, model)
    if body.max_tokens is not None and body.max_tokens < 1:
        raise RequestError(f"max_tokens is {body.max_tokens}; it must be at least 1", param="max_tokens")
    if body.truncate == "END":
        longest = model.info.sizes.max_model_len
        cut = min(cut or longest, body.max_tokens or longest)
    elif body.max_tokens is not None:
        raise RequestError("max_tokens cuts texts only with truncate END", param="max_tokens")
    if body.output_dimension is not None:
        check_dimensions(model, body.output_dimension)
    prompts = await embedding_prompts(
        model,
        texts,
        field=field,
        limit=model.info.sizes.max_model_len,
        truncate_to=cut,
        prompt_name=_prompt_name(model, body.input_type),
    )
    return CohereEmbedJob(service, model, body, body.model, prompts, field=field, texts=texts)


def _texts_of(body: CohereEmbedBody) -> tuple[list[str], str]:
    """Return the texts, and the field that has them. Raise RequestError unless there is one such field."""
    if (body.texts is None) == (body.inputs is None):
        raise RequestError("texts or inputs has the texts; give one of them", param="texts")
    if body.texts is not None:
        texts, field = body.texts, "texts"
    else:
        texts, field = ["".join(part.text for part in item.content) for item in body.inputs or ()], "inputs"
    if not texts:
        raise RequestError(f"{field} is an empty list", param=field)
    return texts, field


def _prompt_name(model: ServedModel, input_type: str | None) -> str | None:
    """Return the name of the checkpoint's prompt for ``input_type``. A type without a prompt is left out and reported
    as ignored."""
    if input_type is None:
        return None
    known = model.pooler.settings.prompts
    name = next((name for name in (input_type, _PROMPT_NAMES.get(input_type, "")) if name in known), None)
    if name is None:
        note_ignored("input_type")
    return name


COHERE_EMBED = Way(CohereEmbedBody, UNSERVED_IN_EMBED, prepare_cohere_embed)
