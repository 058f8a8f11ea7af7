"""A request and its results: the values that cross from a client into the engine and back.

They are msgspec Structs because the engine and the HTTP server are two processes: the same value is a Python argument,
a message (msgpack) and a record of the simulator. Everything is checked once, in ``SamplingParams.check``, with an
error that names the field, the value and the limit.
"""

from __future__ import annotations

import math
import numbers
from typing import Literal, NamedTuple

import msgspec

from weft.adapters import Adapter, salted
from weft.errors import ContextLengthError, RequestError, maximum_context
from weft.handoff import Handoff

FinishReason = Literal["stop", "length", "cancelled", "error"]

LOGPROBS_MAX = 20
STOPS_MAX = 64
STOP_CHARS_MAX = 4096
SEQUENCES_MAX = 64
MARKS_MAX = 32
"""Positions that one request can mark for the cache: equal to the most states that one run keeps."""
BANNED_TOKENS_MAX = 1 << 18
"""Tokens of all banned sequences of a request."""
_GREEDY_BELOW = 1e-5


class Range(NamedTuple):
    """Limits of a number in a request. Integer limits require an integer."""

    low: float
    high: float
    open_low: bool = False
    """Whether ``low`` itself is excluded."""

    def schema(self) -> dict[str, float]:
        """Return the range as keywords of JSON Schema."""
        return {"exclusiveMinimum" if self.open_low else "minimum": self.low, "maximum": self.high}


RANGES = {
    "n": Range(1, SEQUENCES_MAX),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, open_low=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, 100.0, open_low=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "min_tokens": Range(0, 2**31 - 1),
    "seed": Range(-(2**63), 2**64 - 1),
    "max_tokens": Range(0, 2**31 - 1),
    "logprobs": Range(0, LOGPROBS_MAX),
    "prompt_logprobs": Range(0, LOGPROBS_MAX),
}
"""Ranges of the numbers of ``SamplingParams``."""
_NULLABLE = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})


GRAMMAR_STEP_S = 0.01
"""Default seconds of a step that the grammars of all its answers may take."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that the text of an answer must match, in llguidance's form, as ``weft.text.grammars`` writes it.
    ``field``: the request's field, for errors."""

    grammar: str
    field: str = "grammar"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice of tokens and end of an answer. Field names are the common ones of other engines.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 and ``top_p`` 1 mean "all". With ``seed`` the text depends only on
    seed and request, not on the batch; without it the engine draws a seed per request. ``max_tokens`` None means "to
    the end of the context". ``logprobs`` n reports the chosen token and the n most likely ones (0: the chosen one only;
    None: nothing). ``prompt_logprobs`` the same for the prompt's own tokens. ``grammar``: a grammar for the answer,
    which ends when the grammar does. ``allowed_token_ids``: the only tokens of the answer, if set; it then ends early
    only if an end token is among them. ``banned_sequences``: token sequences that the answer must not contain.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocab_size: int) -> None:
        """Raise RequestError that names the first field that is out of its range."""
        for name, (low, high, open_low) in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _NULLABLE:
                _within(name, value, low, high, open_low=open_low)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", param="min_tokens"
            )
        if self.grammar is not None and self.ignore_eos:
            raise RequestError(
                f"ignore_eos cannot be combined with {self.grammar.field}: an answer that "
                "follows a grammar ends where the grammar does",
                param="ignore_eos",
            )
        if len(self.stop) > STOPS_MAX:
            raise RequestError(f"stop has {len(self.stop)} strings; the limit is {STOPS_MAX}", param="stop")
        if not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; it must be text, or a list of texts", param="stop")
        longest = max(map(len, self.stop), default=0)
        if longest > STOP_CHARS_MAX:
            raise RequestError(
                f"stop has a string of {longest} characters; the limit is {STOP_CHARS_MAX}", param="stop"
            )
        if any(not text for text in self.stop):
            raise RequestError("stop has an empty string, which would end every answer at once", param="stop")
        self._check_limits_of_tokens()
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids),
            *(("bad_words", sequence) for sequence in self.banned_sequences),
        ):
            _check_ids(name, ids, vocab_size)
        biases = self.logit_bias.values()
        plain = set(map(type, biases)) <= {int, float} and all(map(math.isfinite, biases))
        if plain and -100.0 <= min(biases, default=0.0) <= max(biases, default=0.0) <= 100.0:
            return
        for token, bias in self.logit_bias.items():
            if not (isinstance(bias, numbers.Real) and -100.0 <= bias <= 100.0):
                raise RequestError(
                    f"logit_bias of token {token} is {bias!r}; the range is -100 to 100", param="logit_bias"
                )

    def _check_limits_of_tokens(self) -> None:
        if self.allowed_token_ids and self.grammar is not None:
            raise RequestError(
                f"allowed_token_ids cannot be combined with {self.grammar.field}: both decide "
                "which tokens are possible",
                param="allowed_token_ids",
            )
        token_count = sum(map(len, self.banned_sequences))
        if token_count > BANNED_TOKENS_MAX:
            raise RequestError(
                f"bad_words are {token_count} tokens; the limit is {BANNED_TOKENS_MAX}", param="bad_words"
            )
        if not all(self.banned_sequences):
            raise RequestError("bad_words has a text without tokens", param="bad_words")
        banned = {sequence[0] for sequence in self.banned_sequences if len(sequence) == 1}
        if self.allowed_token_ids and banned.issuperset(self.allowed_token_ids):
            raise RequestError(
                "every token of allowed_token_ids is one of bad_words: no token is possible", param="allowed_token_ids"
            )


def _check_ids(name: str, ids: tuple[object, ...], vocab_size: int) -> None:
    """Raise RequestError for an id that is not a token, and for more ids than there are tokens. Millions of ids must
    not block the event loop: Python iterates over them only to find a wrong one for the message."""
    if len(ids) > vocab_size:
        raise RequestError(f"{name} names {len(ids)} tokens; this model has {vocab_size}", param=name)
    whole = [token for token in ids if type(token) is int]
    if len(whole) == len(ids) and min(whole, default=0) >= 0 and max(whole, default=0) < vocab_size:
        return
    for token in ids:
        if not (isinstance(token, numbers.Integral) and 0 <= int(token) < vocab_size):
            raise RequestError(f"{name} names token {token!r}; this model has tokens 0 to {vocab_size - 1}", param=name)


_WHOLE = int, numbers.Integral
_REAL = float, int, numbers.Real
"""Types of numbers. Python's own types come first, because a check against abstract types is slow."""


def _within(
    name: str, value: float, low: float, high: float, param: str | None = None, *, open_low: bool = False
) -> None:
    """Raise RequestError for a number out of its limits. Integer limits require an integer."""
    whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, _WHOLE if whole else _REAL):
        raise RequestError(f"{name} is {value!r}; it must be a {'whole ' if whole else ''}number", param=param or name)
    too_low = value <= low if open_low else value < low
    if math.isnan(value) or too_low or value > high:
        bound = "above" if open_low else "at least"
        raise RequestError(f"{name} is {value}; it must be {bound} {low} and at most {high}", param=param or name)


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that another engine began. ``answers``: index -> the tokens so far of each answer that has not ended. A
    missing index gets no sequence."""

    answers: dict[int, list[int]]

    def check(self, count: int, new_tokens_max: int, vocab_size: int) -> None:
        """Raise RequestError for an index outside of ``count`` answers, a token that the model does not have, and an
        answer that has ``new_tokens_max`` tokens already."""
        for index, tokens in self.answers.items():
            if not 0 <= index < count:
                raise RequestError(
                    f"resumption names answer {index}; the request has answers 0 to {count - 1}", param="resumption"
                )
            if tokens and len(tokens) >= new_tokens_max:
                raise RequestError(
                    f"answer {index} resumes with {len(tokens)} tokens and may have {new_tokens_max}",
                    param="resumption",
                )
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise RequestError(
                    f"answer {index} resumes with a token outside of 0 to {vocab_size - 1}", param="resumption"
                )


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """A result of the prompt instead of an answer, from the hidden rows after the final norm. ``kind``: the first row,
    the last row, the mean of all rows from position ``skip`` on, or the row of each token. ``score``: apply the
    checkpoint's score head to the last row, or to each. ``tokens``: the last row's log-probabilities of these tokens,
    over the whole vocabulary. ``unseen``: number of last tokens that attention sees no keys of (expansions of a query),
    in a model that is not causal."""

    kind: Literal["first", "last", "mean", "token"] = "last"
    skip: int = 0
    unseen: int = 0
    score: bool = False
    tokens: tuple[int, ...] = ()

    def check(self, sampling: SamplingParams, prompt_tokens: int, vocab_size: int) -> None:
        """Raise RequestError if this result is incompatible with ``sampling`` or the prompt."""
        if sampling.max_tokens != 0 or sampling.n != 1 or sampling.prompt_logprobs is not None:
            raise RequestError(
                "a request that pools its prompt has no answer and no logprobs: max_tokens 0, n 1", param="pooling"
            )
        scores = self.score and self.kind not in ("last", "token")
        if self.kind != "last" and (scores or self.tokens or not 0 <= self.skip < prompt_tokens):
            raise RequestError(
                f"the {self.kind} row or rows leave out {self.skip} of {prompt_tokens} tokens; one "
                "must be left, and scores are of the last one or of each",
                param="pooling",
            )
        if not 0 <= self.unseen < prompt_tokens:
            raise RequestError(f"pooling hides {self.unseen} of {prompt_tokens} tokens", param="pooling")
        if not all(0 <= token < vocab_size for token in self.tokens):
            raise RequestError(f"pooling names a token outside of 0 to {vocab_size - 1}", param="pooling")


PictureKind = Literal["image", "video"]
PICTURE_KINDS: tuple[PictureKind, ...] = ("image", "video")


class PlacedPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture or a video in a prompt (``weft.pictures``). ``digest``: SHA-256 of its pixels and of the
    processor's settings. ``places``: (first position, count) of its rows in the prompt, ascending, one for
    each tile. ``data``: the encoder's input."""

    digest: bytes
    places: list[tuple[int, int]]
    data: bytes

    @property
    def row_count(self) -> int:
        return sum(count for _, count in self.places)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request in tokens. ``priority``: lower runs earlier (as in other engines), then first come first served.
    ``arrival_s``: a reading of the engine's clock, set when the request is accepted. ``key``: the API key whose share
    of the engine the request uses; ``priority`` orders the requests of one key. ``cache_salt`` keeps cached prefixes of
    different tenants apart (law L10). ``boundaries``: positions in the prompt up to which another prompt is likely to
    be equal (the ends of the system prompt and of messages); they are hints, and ignored if out of range. ``marks``:
    positions that the client set; they have priority and are checked (``check_marks``). ``resumption``: set if the
    request continues after its engine ended. ``prediction``: the client's guess of the answer, in tokens. It changes no
    token of the answer. ``pictures``: in order; the prompt has the token of the picture's kind at each of its rows.
    ``adapter``: None for the base model. ``pooling``: set for a result of the prompt without an answer. ``handoff``:
    the computed records of the prompt go to another engine."""

    request_id: str
    prompt_tokens: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    key: str = ""
    boundaries: list[int] = []
    marks: list[int] = []
    resumption: Resumption | None = None
    prediction: list[int] = []
    pictures: list[PlacedPicture] = []
    adapter: Adapter | None = None
    pooling: Pooling | None = None
    handoff: Handoff | None = None

    @property
    def salt(self) -> str:
        """Salt that separates cached prefixes from those of other tenants and adapters."""
        plain = self.adapter is None and not self.cache_salt.startswith("\0")
        return self.cache_salt if plain else salted(self.adapter, self.cache_salt)

    def check(self, limit: int, vocab_size: int, *, prompt_field: str = "prompt") -> None:
        """Check everything that needs no engine. ``limit``: the served context in tokens; ``prompt_field``: see
        ``check_length``. Raise RequestError, ContextLengthError."""
        self.sampling.check(vocab_size)
        self.check_length(limit, prompt_field=prompt_field)
        self.check_marks()
        if self.pooling is not None:
            self.pooling.check(self.sampling, len(self.prompt_tokens), vocab_size)
        self.check_prediction(limit, vocab_size)

    def check_length(self, limit: int, *, prompt_field: str = "prompt") -> None:
        """Check the prompt's length. ``limit``: the served context in tokens; ``prompt_field``: the request's field of
        the prompt. Raise RequestError for an empty prompt, ContextLengthError if no room is left for the answer."""
        count, sampling = len(self.prompt_tokens), self.sampling
        if not count:
            raise RequestError("the prompt is empty: it needs at least one token", param=prompt_field)
        least = max(sampling.min_tokens, 1) if sampling.max_tokens is None else sampling.max_tokens
        if count + least > limit:
            limiting_field = "max_tokens" if sampling.max_tokens is not None else "min_tokens"
            named = sampling.max_tokens is not None or sampling.min_tokens > 0
            answer = f"{least} ({limiting_field})" if named else f"at least {least}"
            raise ContextLengthError(
                f"{maximum_context(limit)}; the prompt has {count} tokens and the answer {answer}: "
                f"{count + least} in all",
                param=prompt_field if count + 1 > limit else limiting_field,
                tokens=count,
                limit=limit,
            )

    def check_prediction(self, limit: int, vocab_size: int) -> None:
        """Check the prediction. ``limit``: the served context in tokens. Raise RequestError for a longer prediction, or
        a token outside the vocabulary."""
        for token in (min(self.prediction, default=0), max(self.prediction, default=0)):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"prediction has token {token}; this model has tokens 0 to {vocab_size - 1}", param="prediction"
                )
        if len(self.prediction) > limit:
            raise RequestError(
                f"prediction has {len(self.prediction)} tokens; {maximum_context(limit)}", param="prediction"
            )

    def check_marks(self) -> None:
        """Raise RequestError for too many marks, or a mark outside of the prompt."""
        if len(self.marks) > MARKS_MAX:
            raise RequestError(
                f"cache_boundaries (and cache_control) mark {len(self.marks)} positions; the "
                f"limit is {MARKS_MAX} in a request",
                param="cache_boundaries",
            )
        for mark in self.marks:
            _within("a position in cache_boundaries", mark, 1, len(self.prompt_tokens), "cache_boundaries")


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position, from the softmax of the raw logits: the token, its logprob, its rank
    (0 is the most likely), and the top n as (token, logprob)."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class LostTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that were cached in part and had to be computed, by reason (law L8). ``no_checkpoint``: the KV was
    cached, but no snapshot was kept there; ``evicted_state``, ``evicted_kv``: a state or KV was evicted; ``not_ready``:
    another request was still computing them. With a store: ``stored``: reading would take longer than computing;
    ``damaged``: the stored bytes were wrong; ``store_busy``: the store was too slow. Other salts are not counted."""

    no_checkpoint: int = 0
    evicted_state: int = 0
    evicted_kv: int = 0
    not_ready: int = 0
    stored: int = 0
    damaged: int = 0
    store_busy: int = 0


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The result of one step for one sequence of a request (``index`` counts the n sequences). The first six fields are
    set in every event, so that an engine can pass them by position, which is faster. ``tokens``: the new ids, stop
    token included; ``finish_reason``: set on the last event. ``stop_reason``: the stop token id, if it was one of
    ``stop_token_ids``. Stop *strings* are matched on the side that detokenizes, which then cancels the sequence.
    """

    request_id: str
    index: int
    tokens: list[int]
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again after preemptions, so far."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    own_fault: bool = False
    """Whether the sequence caused the error (its grammar exceeded the limits), which would come again, and the engine
    is fine."""
    queued_s: float | None = None
    """Seconds from acceptance to the first run; set on the first event of a sequence."""
    lost: LostTokens | None = None
    """Lost tokens; set on the first event of a sequence that has some."""
    accepted_drafts: int = 0
    """Right drafts so far; the last event of a sequence has the final count."""
    rejected_drafts: int = 0
    weight_version: str = ""
    """Version of the weights that computed the tokens, if an update named it."""
    pooled: bytes | None = None
    """Result of ``Request.pooling``, float32, little-endian; on the last event."""


_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def split_seed(seed: int, branch: int) -> int:
    """Return the 64-bit seed number ``branch`` (from 0) of ``seed``; any integers.

        sequence seed = split_seed(request seed, index)     independent of n and of other requests
        request seed  = the request's, or split_seed(engine seed, number of the request since the start)

    It is a hash, so nothing is drawn at random. Index 0 of n = 3 has the same text as n = 1. The engine gives the same
    texts for the same requests in the same order. The mix is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast
    Splittable Pseudorandom Number Generators, OOPSLA 2014) of the seed plus a multiple of its golden gamma.
    """
    mixed = (seed + (branch + 1) * _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
