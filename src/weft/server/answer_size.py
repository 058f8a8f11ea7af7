"""How many logprobs the server may have to write in one piece (law L11).

    answer:  n x max_tokens    x (logprobs + 1)           whole answers only: the token, its alternatives
    prompt:  n x prompt tokens x (prompt_logprobs + 1)    a stream has them in its first piece

Tokens cost the engine time step by step, and other requests run between the steps. The logprobs of a whole
answer become JSON at its end, on the event loop, which serves other clients only between two choices. A
stream writes the answer's logprobs step by step, so they count for whole answers only.

The sum is known before the first step, from the fields of the request. Without ``max_tokens`` an answer may
fill the context, so the rest of the context counts.

Laws: L11 (the message names the fields and the flag).

Rejected: building the answer in a thread (the interpreter's lock still delays the loop, and the memory has
no bound); a bound while the answer grows (the client pays for tokens and gets an error).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import RequestError
from weft.request import Request


def logprob_count(request: Request, context_tokens: int, *, streamed: bool) -> int:
    """The most logprobs of one piece of the answers to one prompt."""
    sampling, prompt_tokens = request.sampling, len(request.prompt_tokens)
    count = 0
    if sampling.logprobs is not None and not streamed:
        answer_tokens = sampling.max_tokens
        if answer_tokens is None:
            answer_tokens = context_tokens - prompt_tokens
        count += answer_tokens * (sampling.logprobs + 1)
    if sampling.prompt_logprobs is not None:
        count += prompt_tokens * (sampling.prompt_logprobs + 1)
    return sampling.n * count


def check_logprob_count(requests: Sequence[Request], *, context_tokens: int, limit: int, streamed: bool,
                        field: str) -> None:
    """``field``: the field of the request that asks for alternatives. Raises RequestError."""
    count = sum(logprob_count(request, context_tokens, streamed=streamed) for request in requests)
    if count <= limit:
        return
    if all(request.sampling.logprobs is None for request in requests):
        field = "prompt_logprobs"
    if streamed:
        raise RequestError(f"echo with {field}: the prompts have {count} logprobs, n x prompt tokens x "
                           f"({field} + 1); the limit is {limit} (limits.max_answer_logprobs)", param=field,
                           code="too_many_logprobs")
    raise RequestError(
        f"the answer may have {count} logprobs: n x max_tokens x ({field} + 1) for each prompt, and "
        f"n x prompt tokens x (prompt_logprobs + 1); the limit is {limit} (limits.max_answer_logprobs). "
        "Lower n, "
        f"max_tokens or {field}, or stream the answer", param=field, code="too_many_logprobs")
