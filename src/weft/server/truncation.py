"""``truncate_prompt_tokens``: a prompt that may be cut, because the client said so.

    -1              to the tokens that the served context has besides the answer (max_tokens)
    K               to K tokens
    truncation_side left: the end of the prompt stays (the default); right: its beginning

Without the field a prompt that is too long is an error, never cut. Cache positions move with the cut; those
in the part that is cut off are dropped. A cut prompt has no text: ``echo`` decodes its tokens.

A conversation is cut on the left only: the answer begins where its text ends.

Rejected: whole messages as the unit (the client knows which message it can spare; templates differ in what
they accept).
"""

from __future__ import annotations

from weft.errors import RequestError
from weft.server.generation import Prompt
from weft.server.protocol import SamplingFields

TO_THE_CONTEXT = -1


def check_truncation(body: SamplingFields, *, is_chat: bool) -> None:
    """Raises RequestError that names the field."""
    count = body.truncate_prompt_tokens
    if count is not None and count != TO_THE_CONTEXT and count < 1:
        raise RequestError(f"truncate_prompt_tokens is {count}; it must be at least 1, or -1 for what the "
                           "context has room for", param="truncate_prompt_tokens")
    if is_chat and count is not None and body.truncation_side == "right":
        raise RequestError("truncation_side right belongs to /v1/completions: the answer of a chat begins "
                           "where the prompt ends", param="truncation_side")


def truncated(prompt: Prompt, body: SamplingFields, *, context_tokens: int, answer_tokens: int) -> Prompt:
    """``prompt``, cut if the request asks for it. ``answer_tokens``: what -1 leaves for the answer."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == TO_THE_CONTEXT:
        limit = max(context_tokens - answer_tokens, 1)
    excess = len(prompt.tokens) - limit
    if excess <= 0:
        return prompt
    if body.truncation_side == "right":
        return Prompt(prompt.tokens[:limit], None, [at for at in prompt.boundaries if at <= limit],
                      [at for at in prompt.marks if at <= limit])
    return Prompt(prompt.tokens[excess:], None, [at - excess for at in prompt.boundaries if at > excess],
                  [at - excess for at in prompt.marks if at > excess])
