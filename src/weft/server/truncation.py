"""Prompts beyond a length: cut if the request asks for it, refused if a created name or an option sets a limit.

    truncate_prompt_tokens --tokens_after_cut--> how much of a long text has to be tokenized
                           --fitted------------> the prompt in tokens, cut
    num_ctx                --fitted------------> ContextLengthError

``num_ctx`` comes from a created name, or from Ollama's options.
"""

from __future__ import annotations

from weft.errors import ContextLengthError, RequestError
from weft.server.protocol import SamplingFields
from weft.server.served_model import ServedModel
from weft.text.prompt import Prompt

TO_THE_CONTEXT = -1


def fitted(
    prompt: Prompt, body: SamplingFields, model: ServedModel, *, answer_tokens: int, num_ctx: int | None = None
) -> Prompt:
    """Return ``prompt``, cut if the request asks for it. ``answer_tokens``: room that -1 leaves for the answer;
    ``num_ctx``: of the request's options, else the created name's. Raise ContextLengthError for a prompt that reaches
    it."""
    prompt = _cut(prompt, body, context_tokens=model.info.sizes.max_model_len, answer_tokens=answer_tokens)
    _check_context(model, prompt, num_ctx)
    return prompt


def _check_context(model: ServedModel, prompt: Prompt, num_ctx: int | None) -> None:
    limit = num_ctx if num_ctx is not None or model.preset is None else model.preset.context_max
    if limit is not None and len(prompt.tokens) >= limit:
        where = f"the name {model.name} has" if num_ctx is None else "options.num_ctx is"
        raise ContextLengthError(
            f"the maximum context length is {limit} tokens; the prompt has {len(prompt.tokens)} tokens and {where} "
            f"{'num_ctx ' if num_ctx is None else ''}{limit}; this server drops no part of a prompt: raise num_ctx or "
            "leave it out",
            param="options.num_ctx",
            tokens=len(prompt.tokens),
            limit=limit,
        )


def checked_count(count: int | None) -> int | None:
    """Return ``truncate_prompt_tokens``. Raise RequestError for an invalid count."""
    if count is not None and count != TO_THE_CONTEXT and count < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {count}; it must be at least 1, or -1 for the room of the context",
            param="truncate_prompt_tokens",
        )
    return count


def tokens_after_cut(model: ServedModel, body: SamplingFields, *, is_chat: bool) -> int | None:
    """Return the most tokens that ``truncate_prompt_tokens`` leaves; None without one. Raise RequestError that names
    the field."""
    count = checked_count(body.truncate_prompt_tokens)
    if count is None:
        return None
    if is_chat and body.truncation_side == "right":
        raise RequestError(
            "truncation_side right belongs to /v1/completions: the answer of a chat begins where the prompt ends",
            param="truncation_side",
        )
    longest = model.info.sizes.max_model_len
    return longest if count == TO_THE_CONTEXT else min(count, longest)


def _cut(prompt: Prompt, body: SamplingFields, *, context_tokens: int, answer_tokens: int) -> Prompt:
    """Return ``prompt``, cut on the left, or for completions also on the right. Cache positions move with the cut. It
    has no text then: ``echo`` decodes its tokens."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == TO_THE_CONTEXT:
        limit = max(context_tokens - answer_tokens, 1)
    excess = len(prompt.tokens) - limit
    if excess <= 0:
        return prompt
    if prompt.pictures:
        raise RequestError(
            f"truncate_prompt_tokens would cut {excess} tokens of a conversation with pictures, which is not supported",
            param="truncate_prompt_tokens",
            code="unsupported_parameter",
        )
    if body.truncation_side == "right":
        return Prompt(
            prompt.tokens[:limit],
            None,
            [position for position in prompt.boundaries if position <= limit],
            [position for position in prompt.marks if position <= limit],
        )
    return Prompt(
        prompt.tokens[excess:],
        None,
        [position - excess for position in prompt.boundaries if position > excess],
        [position - excess for position in prompt.marks if position > excess],
    )
