"""Embeddings and scores for a program: calls made from inputs, and values from pooled rows.

``Engine.embed``, ``Engine.score`` and ``Engine.rerank`` are these functions over the engine's own calls; the server's
endpoints use the same ``Pooler``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.api.calls import Call, CallTable
from weft.api.completion import Prompt, prompt_list
from weft.errors import RequestError
from weft.request import Request, SamplingParams
from weft.text.pooling import PooledPrompt, Pooler
from weft.text.tokenizer import Tokenizer

NOTHING = SamplingParams(max_tokens=0, temperature=0.0)
"""Sampling of a request for embeddings or scores: no token is generated."""
MakeRequest = Callable[[PooledPrompt], Request]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document and its score. ``index``: position of the document in the request; ``score``: higher is more
    relevant."""

    index: int
    score: float


class PoolingCalls:
    """The calls of one engine. ``request``: makes a request of the engine for a pooled prompt."""

    def __init__(self, pooler: Pooler, calls: CallTable, tokenizer: Tokenizer, *, limit: int) -> None:
        self._pooler, self._calls, self._tokenizer, self._limit = pooler, calls, tokenizer, limit

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        request: MakeRequest,
        *,
        prompt: str | None,
        prompt_name: str | None,
        dimensions: int | None,
        truncate_to: int | None,
        progress: bool,
    ) -> npt.NDArray[np.float32]:
        prompts = [
            self._pooler.embedding(
                text_or_ids,
                limit=self._limit,
                prompt=prompt,
                prompt_name=prompt_name,
                truncate_to=truncate_to,
                param=f"inputs[{index}]",
            )
            for index, text_or_ids in enumerate(prompt_list(inputs))
        ]
        rows = self._pooled(prompts, request, progress)
        return np.array([self._pooler.vector(row, dimensions) for row in rows], dtype=np.float32)

    def token_vectors(
        self,
        inputs: Prompt | Sequence[Prompt],
        request: MakeRequest,
        *,
        prompt_name: str | None,
        dimensions: int | None,
        truncate_to: int | None,
        progress: bool,
    ) -> list[npt.NDArray[np.float32]]:
        prompts = [
            self._pooler.embedding(
                text_or_ids,
                limit=self._limit,
                prompt_name=prompt_name,
                truncate_to=truncate_to,
                param=f"inputs[{index}]",
                per_token=True,
            )
            for index, text_or_ids in enumerate(prompt_list(inputs))
        ]
        rows = self._pooled(prompts, request, progress)
        return [self._pooler.token_vectors(row, prompt, dimensions) for row, prompt in zip(rows, prompts, strict=True)]

    def classify(
        self,
        inputs: Prompt | Sequence[Prompt],
        request: MakeRequest,
        *,
        raw: bool,
        per_token: bool | None,
        truncate_to: int | None,
        progress: bool,
    ) -> list[npt.NDArray[np.float32]]:
        labels = self._pooler.labels
        at_each = per_token if per_token is not None else labels is not None and labels.of_tokens
        prompts = [
            self._pooler.labelling(
                text_or_ids, limit=self._limit, truncate_to=truncate_to, param=f"inputs[{index}]", per_token=at_each
            )
            for index, text_or_ids in enumerate(prompt_list(inputs))
        ]
        by_input = [
            self._pooler.probabilities(row, prompt, raw=raw)
            for row, prompt in zip(self._pooled(prompts, request, progress), prompts, strict=True)
        ]
        return [np.array(rows if at_each else rows[0], np.float32) for rows in by_input]

    def scores(
        self,
        pairs: Sequence[tuple[str, str]],
        request: MakeRequest,
        *,
        instruction: str | None,
        truncate_to: int | None,
        progress: bool,
    ) -> list[float]:
        if not pairs:
            raise RequestError("there is nothing to score: pairs is empty", param="pairs")
        plan = self._pooler.pairs(pairs)
        prompts = [
            self._pooler.scoring(
                query,
                document,
                limit=self._limit,
                instruction=instruction,
                truncate_to=truncate_to,
                param=f"documents[{number}]" if document is not None else "query",
            )
            for query, document, number in plan.inputs
        ]
        rows = self._pooled(prompts, request, progress)
        return [
            self._pooler.score([rows[part] for part in parts], [prompts[part] for part in parts])
            for parts in plan.parts_of
        ]

    def _pooled(self, prompts: Sequence[PooledPrompt], request: MakeRequest, progress: bool) -> list[bytes]:
        calls = [Call(request(prompt), self._tokenizer) for prompt in prompts]
        self._calls.complete(calls, progress=progress)
        return [call.choices[0].pooled for call in calls]


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[RankedDocument]:
    """Return the documents with the best score first, at most ``top_n``; equal scores keep the given order. Raise
    RequestError."""
    if top_n is not None and top_n < 1:
        raise RequestError(f"top_n is {top_n}; it must be at least 1", param="top_n")
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [RankedDocument(index, scores[index]) for index in order[:top_n]]
