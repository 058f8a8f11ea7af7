"""/v1/embeddings, /v1/rerank and /v1/score: prompts without a generated answer, run by the shared ``Generation``.

    EmbeddingBody                      \\                                              / EmbeddingJob
    OllamaEmbedBody                     >-- PooledPrompt --Generation--> pooled rows --  OllamaEmbedJob
    RerankBody (Cohere, Jina), ScoreBody /                                            \\ RerankJob, ScoreJob

Fields are those of OpenAI's embeddings, of Cohere's and Jina's rerank, and of vLLM's score, with sentence-transformers'
``prompt_name``. An input that is too long is an error. ``truncate_prompt_tokens`` (Ollama's ``truncate``) cuts its end
instead, and ``truncated`` in the answer lists the inputs that were cut.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any, Literal

import msgspec

from weft.errors import RequestError
from weft.request import SamplingParams
from weft.server.generation import Generation, check_count
from weft.server.ollama.protocol import OllamaEmbedBody, OllamaEmbeddingsBody, read_options, served_name
from weft.server.protocol import Int, Priority, Salt, Unserved, prompts_of
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sse import Way
from weft.server.truncation import TO_THE_CONTEXT, checked_count
from weft.text.pooling import PooledPrompt
from weft.text.prompt import Prompt

_SPLIT = "an answer is one object, and is not streamed"
UNSERVED_IN_POOLING: Unserved = {"stream": (_SPLIT, (False,))}
UNSERVED_IN_RERANK: Unserved = {
    "stream": (_SPLIT, (False,)),
    "rank_fields": ("documents are texts here, not records", ([],)),
    "max_chunks_per_doc": ("a document is never cut", (1,)),
}
_YIELD_EVERY = 16
"""Short inputs that are tokenized, or vectors that are written, before other tasks get the event loop."""
_NO_ANSWER = SamplingParams(max_tokens=0, temperature=0.0)
_encoder = msgspec.json.Encoder()


class PoolingBody(msgspec.Struct, kw_only=True):
    """Fields of all pooling bodies. ``truncate_prompt_tokens``: a longer input loses its end; -1 is the longest that is
    served."""

    model: str | None = None
    user: str | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    truncate_prompt_tokens: Int | None = None

    @property
    def stream(self) -> bool:
        return False


class EmbeddingBody(PoolingBody, kw_only=True):
    """The body of /v1/embeddings. ``prompt``: text before every input; ``prompt_name``: the name of such a text in the
    checkpoint."""

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    prompt: str | None = None
    prompt_name: str | None = None


class RerankBody(PoolingBody, kw_only=True):
    """The body of /v1/rerank. ``documents``: texts, or objects with a ``text``."""

    query: str
    documents: list[Any]
    top_n: Int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Int | None = None
    instruction: str | None = None


class ScoreBody(PoolingBody, kw_only=True):
    """The body of /v1/score. Each side is one text or a list: one text is scored against all of the other side, lists
    in pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: Any = None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """One embedding. ``embedding``: numbers, or their float32 bytes in base64."""

    object: str = "embedding"
    index: int
    embedding: Any


class PooledList(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer with an object for each input. ``truncated``: the indices of inputs that were cut."""

    object: str
    id: str
    created: int
    model: str
    data: list[Any]
    usage: PoolingUsage
    truncated: list[int] = []


class EmbeddingList(PooledList, kw_only=True, omit_defaults=True):
    """The answer of /v1/embeddings."""

    data: list[Any]


class RankedText(msgspec.Struct):
    text: str


class RankedResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer of /v1/rerank. ``results``: the best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: PoolingUsage
    truncated: list[int] = []


class ScoreObject(msgspec.Struct, kw_only=True):
    object: str
    index: int
    score: float


class ScoreList(PooledList, kw_only=True, omit_defaults=True):
    """The answer of /v1/score."""

    data: list[ScoreObject]


class PoolingJob(ABC):
    """The prompts of one request, in order; ``body`` has the fields that all of them share."""

    prefix = "embd"

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        body: Any,
        name: str | None,
        prompts: Sequence[PooledPrompt],
        *,
        field: str,
    ) -> None:
        self.service, self.body, self.model, self.prompts = service, body, model, prompts
        self.name = model.name_for(name)
        self.generation = Generation(
            service,
            model,
            [Prompt(prompt.tokens, boundaries=prompt.boundaries, pooling=prompt.pooling) for prompt in prompts],
            [_NO_ANSWER] * len(prompts),
            priority=getattr(body, "priority", None) or 0,
            cache_salt=body.cache_salt or "",
            prompt_field=field,
        )
        self.id, self.created = f"{self.prefix}-{token_hex(16)}", int(time.time())

    async def answer(self) -> bytes:
        await self.generation.whole()
        return await self.written([choice.pooled for choice in self.generation.choices])

    def listed(self, data: list[Any]) -> bytes:
        """Return the body of an answer that is a list."""
        return _encoder.encode(
            PooledList(
                object="list",
                data=data,
                usage=self.usage(),
                truncated=self.truncated(),
                id=self.id,
                created=self.created,
                model=self.name,
            )
        )

    @abstractmethod
    async def written(self, rows: Sequence[bytes]) -> bytes:
        """Return the body of the answer."""

    def truncated(self) -> list[int]:
        return [index for index, prompt in enumerate(self.prompts) if prompt.truncated]

    def usage(self) -> PoolingUsage:
        usage = self.generation.usage()
        return PoolingUsage(
            prompt_tokens=usage.prompt_tokens,
            total_tokens=usage.total_tokens,
            prompt_tokens_details=usage.prompt_tokens_details,
        )

    async def vectors(
        self, rows: Sequence[bytes], dimensions: int | None, write: Callable[[int, Any], Any]
    ) -> list[msgspec.Raw]:
        """Return each vector written by itself, so that other requests are served between two vectors."""
        written = []
        for index, row in enumerate(rows):
            if index % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
            vector = self.model.pooler.vector(row, dimensions)
            written.append(msgspec.Raw(_encoder.encode(write(index, vector))))
        return written


class EmbeddingJob(PoolingJob):
    async def written(self, rows: Sequence[bytes]) -> bytes:
        as_bytes = self.body.encoding_format == "base64"
        data = await self.vectors(
            rows,
            self.body.dimensions,
            lambda index, vector: EmbeddingObject(
                index=index, embedding=base64.b64encode(vector.tobytes()).decode() if as_bytes else vector.tolist()
            ),
        )
        return self.listed(data)


class OllamaEmbedJob(PoolingJob):
    async def written(self, rows: Sequence[bytes]) -> bytes:
        ended_s = time.perf_counter()
        dimensions = getattr(self.body, "dimensions", None)
        vectors = await self.vectors(rows, dimensions, lambda index, vector: vector.tolist())
        if isinstance(self.body, OllamaEmbeddingsBody):
            return _encoder.encode({"embedding": vectors[0]})
        answer = {
            "model": self.name,
            "embeddings": vectors,
            "total_duration": round((ended_s - self.generation.outcome(stream=False).arrived_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self.generation.usage().prompt_tokens,
        }
        return _encoder.encode({**answer, "truncated": self.truncated()} if self.truncated() else answer)


class PairsJob(PoolingJob):
    """A job that scores pairs. ``parts_of``: for each pair the prompts whose rows make its score."""

    def __init__(self, *args: Any, parts_of: Sequence[tuple[int, ...]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._parts_of = parts_of

    async def scores(self, rows: Sequence[bytes]) -> list[float]:
        """Return the scores of the pairs. Max-sims are computed in a thread, so that other requests are served."""
        pooler, scores = self.model.pooler, []
        for parts in self._parts_of:
            pair = [rows[part] for part in parts], [self.prompts[part] for part in parts]
            scores.append(
                pooler.score(*pair) if pooler.settings.late is None else await asyncio.to_thread(pooler.score, *pair)
            )
        return scores

    def truncated(self) -> list[int]:
        cut = set(super().truncated())
        return [index for index, parts in enumerate(self._parts_of) if cut.intersection(parts)]


class RerankJob(PairsJob):
    prefix = "rerank"

    def __init__(self, *args: Any, texts: Sequence[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._texts = texts

    async def written(self, rows: Sequence[bytes]) -> bytes:
        scores = await self.scores(rows)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: self.body.top_n]
        shows = self.body.return_documents is not False
        results = [
            RankedResult(
                index=index, relevance_score=scores[index], document=RankedText(self._texts[index]) if shows else None
            )
            for index in order
        ]
        return _encoder.encode(
            RerankAnswer(id=self.id, model=self.name, results=results, usage=self.usage(), truncated=self.truncated())
        )


class ScoreJob(PairsJob):
    prefix = "score"

    async def written(self, rows: Sequence[bytes]) -> bytes:
        scores = await self.scores(rows)
        return self.listed(
            [ScoreObject(object="score", index=index, score=score) for index, score in enumerate(scores)]
        )


async def prepare_embeddings(service: Service, body: EmbeddingBody) -> EmbeddingJob:
    """Prepare a request. Raise RequestError, ContextLengthError, UnknownModelError, EngineUnavailableError."""
    model = await service.model_for(body.model)
    prompts = await embedding_prompts(
        model,
        prompts_of(body.input, field="input"),
        field="input",
        limit=model.info.sizes.max_model_len,
        truncate_to=cut_of(body, model),
        prompt=body.prompt,
        prompt_name=body.prompt_name,
    )
    if body.dimensions is not None:
        check_dimensions(model, body.dimensions)
    return EmbeddingJob(service, model, body, body.model, prompts, field="input")


async def prepare_ollama_embed(service: Service, body: OllamaEmbedBody | OllamaEmbeddingsBody) -> OllamaEmbedJob:
    """Prepare a request, as ``prepare_embeddings`` does. ``options.num_ctx`` limits the tokens of an input."""
    model = await service.model_for(served_name(body.model))
    options, whole = read_options(body.options), model.info.sizes.max_model_len
    limit = min(whole, options.num_ctx or whole)
    truncate = None
    if isinstance(body, OllamaEmbedBody):
        inputs, field = prompts_of(body.input, field="input"), "input"
        truncate = limit if body.truncate else None
        if body.dimensions is not None:
            check_dimensions(model, body.dimensions)
    else:
        inputs, field = [body.prompt], "prompt"
    prompts = await embedding_prompts(model, inputs, field=field, limit=limit, truncate_to=truncate)
    return OllamaEmbedJob(service, model, body, served_name(body.model), prompts, field=field)


async def embedding_prompts(
    model: ServedModel,
    inputs: Sequence[str | list[int]],
    *,
    field: str,
    limit: int,
    truncate_to: int | None,
    method: Callable[..., PooledPrompt] | None = None,
    **more: Any,
) -> list[PooledPrompt]:
    """Return the prompt of each input. ``method``: of the model's pooler, which makes it (``embedding``), with ``more``
    as its arguments."""
    check_count(len(inputs), model.info.sizes.queue_max)
    prompts = []
    for index, text_or_ids in enumerate(inputs):
        if index % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        name = field if len(inputs) == 1 else f"{field}[{index}]"
        if isinstance(text_or_ids, str):
            if truncate_to is None:
                await model.renderer.check_text(text_or_ids, param=name)
            else:
                text_or_ids = await model.renderer.part_for_cut(text_or_ids, truncate_to, at_start=True)
        else:
            model.check_ids(text_or_ids, param=name)
        make = functools.partial(
            method or model.pooler.embedding, text_or_ids, limit=limit, truncate_to=truncate_to, param=name, **more
        )
        prompts.append(
            await model.renderer.bounded(make, text_or_ids if isinstance(text_or_ids, str) else "", whole=True)
        )
    return prompts


async def prepare_rerank(service: Service, body: RerankBody) -> RerankJob:
    """Prepare a request, as ``prepare_embeddings`` does."""
    model = await service.model_for(body.model)
    texts = [_text_of(index, document) for index, document in enumerate(body.documents)]
    if not texts:
        raise RequestError("documents is an empty list", param="documents")
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n is {body.top_n}; it must be at least 1", param="top_n")
    cut = cut_of(body, model)
    if body.max_tokens_per_doc is not None:
        if body.max_tokens_per_doc < 1:
            raise RequestError(
                f"max_tokens_per_doc is {body.max_tokens_per_doc}; it must be at least 1", param="max_tokens_per_doc"
            )
        cut = min(cut or model.info.sizes.max_model_len, body.max_tokens_per_doc)
    pairs = [(body.query, text) for text in texts]
    prompts, parts_of = await _scored(model, pairs, body, cut, fields=("query", "documents"))
    return RerankJob(service, model, body, body.model, prompts, field="documents", texts=texts, parts_of=parts_of)


async def prepare_score(service: Service, body: ScoreBody) -> ScoreJob:
    """Prepare a request, as ``prepare_embeddings`` does."""
    model = await service.model_for(body.model)
    sides = [[side] if isinstance(side, str) else side for side in (body.text_1, body.text_2)]
    if not all(sides) or (len(sides[0]) != len(sides[1]) and len(sides[0]) != 1):
        raise RequestError(
            f"text_1 has {len(sides[0])} texts and text_2 has {len(sides[1])}; give one text_1 for all of "
            "text_2, or one for each",
            param="text_1",
        )
    first = sides[0] * (len(sides[1]) if len(sides[0]) == 1 else 1)
    prompts, parts_of = await _scored(
        model, list(zip(first, sides[1], strict=True)), body, cut_of(body, model), fields=("text_1", "text_2")
    )
    return ScoreJob(service, model, body, body.model, prompts, field="text_2", parts_of=parts_of)


async def _scored(
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    body: RerankBody | ScoreBody,
    document_cut: int | None,
    *,
    fields: tuple[str, str],
) -> tuple[list[PooledPrompt], list[tuple[int, ...]]]:
    """Return the prompts of ``pairs``, and which of them make the score of each pair."""
    limit = model.info.sizes.max_model_len
    plan = model.pooler.pairs(pairs)
    check_count(len(plan.inputs), model.info.sizes.queue_max)
    await model.renderer.check_text(pairs[0][0], param=fields[0])
    prompts = []
    for index, (query, text, number) in enumerate(plan.inputs):
        if index % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        name = fields[0] if text is None else f"{fields[1]}[{number}]"
        said, cut = (query, cut_of(body, model)) if text is None else (text, document_cut)
        assert said is not None, "an input without a text"
        if cut is None:
            await model.renderer.check_text(said, param=name)
        else:
            said = await model.renderer.part_for_cut(said, cut, at_start=True)
        query, text = (said, None) if text is None else (query, said)
        make = functools.partial(
            model.pooler.scoring, query, text, limit=limit, instruction=body.instruction, truncate_to=cut, param=name
        )
        prompts.append(await model.renderer.bounded(make, query or "", text or "", whole=True))
    return prompts, plan.parts_of


def check_dimensions(model: ServedModel, dimensions: int) -> None:
    """Raise RequestError for dimensions out of range, before anything is computed."""
    width = model.pooler.width(model.info.hidden_size)
    if not 1 <= dimensions <= width:
        raise RequestError(
            f"dimensions is {dimensions}; it must be at least 1 and at most {width}, the width of {model.name}",
            param="dimensions",
        )


def cut_of(body: PoolingBody, model: ServedModel) -> int | None:
    """Return the length to which longer inputs are cut, None if they are errors."""
    count = checked_count(body.truncate_prompt_tokens)
    return model.info.sizes.max_model_len if count == TO_THE_CONTEXT else count


def _text_of(index: int, document: Any) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise RequestError(
            f"documents[{index}]: expected a text, or an object with one under text",
            param="documents",
            code="invalid_type",
        )
    return text


EMBEDDINGS = Way(EmbeddingBody, UNSERVED_IN_POOLING, prepare_embeddings)
RERANK = Way(RerankBody, UNSERVED_IN_RERANK, prepare_rerank)
SCORE = Way(ScoreBody, UNSERVED_IN_POOLING, prepare_score)
OLLAMA_EMBED = Way(OllamaEmbedBody, {}, prepare_ollama_embed)
OLLAMA_EMBEDDINGS = Way(OllamaEmbeddingsBody, {}, prepare_ollama_embed)
