"""/classify and /pooling, in vLLM's form: labels of a text, and rows that a task names.

    task             data of an input                                    default for
    embed            the embedding                                       models that pool
    token_embed      the vector of each token                            models of late interaction
    classify         the probabilities of the labels                     models with a score head
    token_classify   those of each token                                 heads that were trained so

An input is a text, token ids, or a conversation (``messages``), which the chat template writes.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from weft.errors import RequestError
from weft.server.pooling import (
    UNSERVED_IN_POOLING,
    PooledList,
    PoolingBody,
    PoolingJob,
    check_dimensions,
    cut_of,
    embedding_prompts,
)
from weft.server.protocol import Int, prompts_of
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sse import Way
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields
from weft.text.pooling import PooledPrompt

Task = Literal["embed", "token_embed", "classify", "token_classify"]


class _TaskBody(PoolingBody, kw_only=True):
    """The fields that both endpoints share. ``use_activation``: false for logits instead of probabilities, and for
    vectors that are not normalised."""

    input: str | list[Any] | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None


class ClassifyBody(_TaskBody, kw_only=True):
    """The body of /classify."""


class TaskBody(_TaskBody, kw_only=True):
    """The body of /pooling. ``task``: by default that for which the checkpoint was trained."""

    task: Task | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    prompt_name: str | None = None


class Classification(msgspec.Struct, kw_only=True):
    """Labels of one input. ``label``: the most likely one; ``probs``: of all, in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(PooledList, kw_only=True, omit_defaults=True):
    """The answer of /classify."""

    data: list[Classification]


class PooledObject(msgspec.Struct, kw_only=True):
    """Rows of one input. ``data``: numbers, lists of them for each token, or their float32 bytes in base64."""

    index: int
    object: str = "pooling"
    data: Any


class PooledRows(PooledList, kw_only=True, omit_defaults=True):
    """The answer of /pooling."""

    data: list[PooledObject]


class ClassifyJob(PoolingJob):
    prefix = "classify"

    async def written(self, rows: Sequence[bytes]) -> bytes:
        pooler = self.model.pooler
        assert pooler.labels is not None, "a model without a score head was asked for labels"
        names, data = pooler.labels.names, []
        for index, (row, prompt) in enumerate(zip(rows, self.prompts, strict=True)):
            [probs] = pooler.probabilities(row, prompt, raw=self.body.use_activation is False)
            top = max(range(len(probs)), key=probs.__getitem__)
            data.append(Classification(index=index, label=names[top], probs=probs, num_classes=len(probs)))
        return self.listed(data)


class TaskJob(PoolingJob):
    prefix = "pool"

    def __init__(self, *args: Any, task: Task, **more: Any) -> None:
        super().__init__(*args, **more)
        self._task = task

    async def written(self, rows: Sequence[bytes]) -> bytes:
        """Write the rows. Those of tokens are made in a thread, so that other requests are served."""
        return await asyncio.to_thread(self._written, rows)

    def _written(self, rows: Sequence[bytes]) -> bytes:
        as_bytes = self.body.encoding_format == "base64"
        data = []
        for index, (row, prompt) in enumerate(zip(rows, self.prompts, strict=True)):
            values = self._values(row, prompt)
            if as_bytes:
                flat = values if self._task in ("embed", "classify") else [x for vector in values for x in vector]
                values = base64.b64encode(array("f", flat).tobytes()).decode()
            data.append(PooledObject(index=index, data=values))
        return self.listed(data)

    def _values(self, row: bytes, prompt: PooledPrompt) -> Any:
        pooler, dimensions, raw = self.model.pooler, self.body.dimensions, self.body.use_activation is False
        if self._task == "embed":
            return pooler.vector(row, dimensions, raw=raw).tolist()
        if self._task == "token_embed":
            return pooler.token_vectors(row, prompt, dimensions, raw=raw).tolist()
        labels = pooler.probabilities(row, prompt, raw=raw)
        return labels if self._task == "token_classify" else labels[0]


async def prepare_classify(service: Service, body: ClassifyBody) -> ClassifyJob:
    """Prepare a request. Raise RequestError, ContextLengthError, UnknownModelError, EngineUnavailableError."""
    model = await service.model_for(body.model)
    prompts = await _prompts(model, body, model.pooler.labelling)
    return ClassifyJob(service, model, body, body.model, prompts, field="input")


async def prepare_task(service: Service, body: TaskBody) -> TaskJob:
    """Prepare a request, as ``prepare_classify`` does."""
    model = await service.model_for(body.model)
    pooler, task = model.pooler, body.task or _usual_task(model)
    if body.dimensions is not None:
        if task not in ("embed", "token_embed"):
            raise RequestError(f"dimensions cuts vectors; the task {task} gives labels", param="dimensions")
        check_dimensions(model, body.dimensions)
    per_token = task in ("token_embed", "token_classify")
    if task in ("embed", "token_embed"):
        prompts = await _prompts(model, body, pooler.embedding, per_token=per_token, prompt_name=body.prompt_name)
    else:
        prompts = await _prompts(model, body, pooler.labelling, per_token=per_token)
    return TaskJob(service, model, body, body.model, prompts, field="input", task=task)


def _usual_task(model: ServedModel) -> Task:
    labels = model.pooler.labels
    if labels is not None:
        return "token_classify" if labels.of_tokens else "classify"
    return "embed" if model.pooler.settings.late is None else "token_embed"


async def _prompts(model: ServedModel, body: _TaskBody, method: Any, **more: Any) -> list[PooledPrompt]:
    """Return the prompt of each input, or that of the conversation. ``method``: of the model's pooler."""
    if (body.input is None) == (body.messages is None):
        raise RequestError("a request has input or messages, and one of them", param="input")
    if body.messages is not None:
        _, prompt = await model.renderer.render(
            ConversationFields(
                messages=body.messages,
                variables=body.chat_template_kwargs,
                add_generation_prompt=bool(body.add_generation_prompt),
            ),
            salt=body.cache_salt or "",
        )
        inputs: list[str | list[int]] = [prompt.tokens]
    else:
        assert body.input is not None, "neither input nor messages"
        inputs = prompts_of(body.input, field="input")
    return await embedding_prompts(
        model,
        inputs,
        field="input",
        limit=model.info.sizes.max_model_len,
        truncate_to=cut_of(body, model),
        method=method,
        **more,
    )


CLASSIFY = Way(ClassifyBody, UNSERVED_IN_POOLING, prepare_classify)
POOLING = Way(TaskBody, UNSERVED_IN_POOLING, prepare_task)
