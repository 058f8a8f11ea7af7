"""The generation of one HTTP request: prompts x n sequences in the engine, from submit to the last piece.

    Generation.start()      submit all prompts; the engine accepts all or rejects one (then none run)
    Generation.listen()     calls back when pieces may have come; Generation.next_pieces() returns them
    Generation.pieces()     [Piece, ...] after each step, until every choice has finished
    Generation.whole()      one Piece for each choice, once all have finished
    Generation.close()      always, however it ended: sequences that still run are cancelled

Latencies are measured here, as the events of one sequence pass in order. A slow client gets fewer, larger pieces, not a
longer queue.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from secrets import token_hex

import msgspec
from msgspec import UNSET, UnsetType

from weft.errors import RequestError, WeftError
from weft.fleet.live_request import RequestStream
from weft.info import ModelInfo
from weft.request import LostTokens, Request, SamplingParams, TokenEvent
from weft.server.metrics import SequenceTimes
from weft.server.models import KeepAlive, ModelUse
from weft.server.protocol import NOT_STREAMED, Streaming
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sessions.slot_table import SlotContent
from weft.server.tracing import GenerationOutcome
from weft.text.choices import Choice, Piece, Stops, showing
from weft.text.current_request import API_KEY, note_ignored
from weft.text.prompt import Prompt


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of prompt tokens. ``cached_tokens`` is OpenAI's; the other fields are weft's: tokens that were computed
    again after preemptions, and lost tokens by reason (docs/words.md)."""

    cached_tokens: int = 0
    recomputed_tokens: int = 0
    lost_tokens: LostTokens = LostTokens()


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of generated tokens. The prediction tokens count verified drafts of all sources of speculation, right or
    wrong."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    """Version of the weights that computed the last token, if an update named it."""


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """``cache_write_tokens`` is always 0: every prefix is cached, at no cost."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``Usage`` under the names of /v1/responses and /v1/decisions, which counts the prompts of all questions."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int = 0
    output_tokens_details: OutputDetails
    total_tokens: int


class Generation:
    """The prompts of one request, from submit to the last piece. ``samplings``: one for each prompt (they differ where
    max_tokens depends on the prompt's length). ``shown_ids``: special tokens that stay in the text of an answer.
    ``stops_of``: returns the stop strings of an answer, as ``Choice`` takes them.
    ``prompt_field``, ``answer_field``, ``logprobs_field``: the request's names of the prompts, of max_tokens and of the
    alternatives, for errors. ``id_slot``: the slot that gets the tokens afterwards (``sessions.slots``). The
    constructor raises RequestError and ContextLengthError, so that no engine has to read a prompt that is far too long.

    Choices are numbered prompt by prompt: choice ``p * n + i`` is answer i to prompt p.
    """

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        prompts: Sequence[Prompt],
        samplings: Sequence[SamplingParams],
        *,
        priority: int,
        cache_salt: str,
        shown_ids: frozenset[int] = frozenset(),
        stops_of: Callable[[SamplingParams], Stops | None] | None = None,
        prompt_field: str = "prompt",
        answer_field: str = "max_tokens",
        id_slot: int | None = None,
        stream: Streaming = NOT_STREAMED,
        logprobs_field: str = "logprobs",
    ) -> None:
        self._service = service
        self._interval_tokens = stream.interval_tokens or service.config.stream_interval
        self._model = model
        self.keep_alive_s: KeepAlive = UNSET
        self.load_s = 0.0
        """Seconds that the request waited until the model was loaded."""
        self._use: ModelUse | None = None
        self._arrived_s = time.perf_counter()
        self._stream: RequestStream | None = None
        self._closed = False
        self._slot = None if id_slot is None or id_slot < 0 else (API_KEY.get(), id_slot, cache_salt)
        self._slot_tokens: list[int] = []
        """Tokens of the first answer; kept only if a slot is to get them."""
        self._error_type: str | None = None
        engine_id = token_hex(16)
        context_tokens = model.info.sizes.max_model_len
        key = API_KEY.get()
        self._requests: list[Request] = []
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            request = Request(
                request_id=f"{engine_id}-{number}",
                prompt_tokens=prompt.tokens,
                sampling=sampling,
                priority=priority,
                cache_salt=cache_salt,
                key=key,
                boundaries=prompt.boundaries,
                marks=prompt.marks,
                prediction=prompt.prediction,
                adapter=model.adapter,
                pictures=prompt.pictures,
                pooling=prompt.pooling,
            )
            check_generates(model.info, request)
            self._requests.append(within_context(request, context_tokens, answer_field))
        for request in self._requests:
            request.check(context_tokens, model.info.vocab_size, prompt_field=prompt_field)
        check_count(sum(sampling.n for sampling in samplings), model.info.sizes.queue_max)
        check_logprob_count(
            self._requests,
            context_tokens=context_tokens,
            streamed=stream.wanted,
            limit=service.config.max_answer_logprobs,
            field=logprobs_field,
        )
        self._metrics = service.metrics.of(model.base)  # the model's own name, not an adapter's
        self._times = [
            SequenceTimes(self._arrived_s, len(request.prompt_tokens))
            for request in self._requests
            for _ in range(request.sampling.n)
        ]
        self.prompts = prompts
        self.samplings = samplings
        self.choices: list[Choice] = []
        self._by_prompt: list[list[Choice]] = []
        self._by_event: dict[tuple[str, int], Choice] = {}
        decoder = showing(model.renderer.tokenizer, shown_ids)
        for request in self._requests:
            for index in range(request.sampling.n):
                stops = None if stops_of is None else stops_of(request.sampling)
                choice = Choice(len(self.choices), decoder, request.sampling, request.prompt_tokens, stops)
                self._by_event[request.request_id, index] = choice
                self.choices.append(choice)
            self._by_prompt.append(self.choices[-request.sampling.n :])
        self.unfinished = len(self.choices)
        """Choices that have not ended for a reader of pieces."""

    async def start(self) -> None:
        """Submit the prompts. Raise the engine's refusal, or EngineUnavailableError."""
        self._service.enter()
        try:
            model = self._service.models.find(self._model.base)
            self._use = await model.enter(self.keep_alive_s)
            if not model.stays:
                self.load_s = time.perf_counter() - self._arrived_s
            self._requests_in_flight = self._use.fleet.requests
            self._stream = await self._requests_in_flight.submit(self._requests)
        except BaseException:
            self.close()
            raise
        self._metrics.request_came(self.samplings[0])

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` each time that ``next_pieces`` may return pieces (``RequestStream.listen``)."""
        self._bounded_stream().listen(listener, self._interval_tokens)

    def next_pieces(self) -> list[Piece] | None:
        """Return the pieces of at most EVENTS_MAX events that wait, one for each choice: none where their text is held
        back. None where no event waits. Raise EngineUnavailableError when the engine died."""
        assert self._stream is not None
        try:
            events = self._stream.next_events()
            return self._pieces_of(events) if events else None
        except WeftError as error:
            self._error_type = type(error).__name__
            raise

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Yield lists of pieces, never empty. Raise EngineUnavailableError when the engine dies."""
        stream = self._bounded_stream()
        try:
            while self.unfinished:
                if pieces := self._pieces_of(await stream.events()):
                    yield pieces
        except WeftError as error:
            self._error_type = type(error).__name__
            raise

    def _bounded_stream(self) -> RequestStream:
        assert self._stream is not None
        self._stream.bound(self._service.unread, self._cancel_all)
        return self._stream

    def _pieces_of(self, events: list[TokenEvent]) -> list[Piece]:
        pieces: list[Piece] = []
        now = time.perf_counter()
        for event in joined_by_sequence(events):
            choice = self._by_event[event.request_id, event.index]
            if choice.finished:
                continue
            piece = choice.take(event)
            self._note_tokens(choice, event)
            self._metrics.event_came(self._times[choice.index], event, now)
            if piece is not None:
                pieces.append(piece)
            if choice.finished:
                self._note_end(choice, event)
                self.unfinished -= 1
                if event.finish_reason is None:
                    self._requests_in_flight.cancel(event.request_id, event.index)
        return pieces

    async def whole(self) -> list[Piece]:
        """Return one piece for each choice, in their order. Answers without stop strings are decoded at their end:
        decoding token by token would be most of the cost of an answer."""
        if any(sampling.stop for sampling in self.samplings):
            all_pieces = [piece async for pieces in self.pieces() for piece in pieces]
        else:
            all_pieces = await self._pieces_at_end()
        self.close()
        return sorted(merged(all_pieces), key=lambda piece: piece.index)

    async def _pieces_at_end(self) -> list[Piece]:
        assert self._stream is not None
        try:
            arrived = await self._stream.rest(len(self.choices))
            for arrived_s, event in arrived:
                choice = self._by_event[event.request_id, event.index]
                self._metrics.event_came(self._times[choice.index], event, arrived_s)
            pieces = []
            for event in joined_by_sequence([event for _, event in arrived]):
                choice = self._by_event[event.request_id, event.index]
                piece = choice.take(event)
                self._note_tokens(choice, event)
                if choice.finished:
                    self._note_end(choice, event)
                if piece is not None:
                    pieces.append(piece)
            return pieces
        except WeftError as error:
            self._error_type = type(error).__name__
            raise

    def close(self) -> None:
        """Cancel unfinished sequences. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._fill_slot()
        self._service.leave()
        try:
            self._cancel_rest()
        finally:
            if self._use is not None:
                self._use.end()

    def _note_tokens(self, choice: Choice, event: TokenEvent) -> None:
        if self._slot is not None and choice.index == 0:
            self._slot_tokens += event.tokens

    def _fill_slot(self) -> None:
        """Give the slot of the request the tokens, except the last one, which no step has read."""
        if self._slot is not None and self.choices[0].generated_tokens:
            owner, number, salt = self._slot
            content = SlotContent(self._model.name, salt, self.prompts[0].tokens, self._slot_tokens[:-1])
            self._service.slots.put(owner, number, content)

    def _cancel_all(self) -> None:
        for request in self._requests:
            self._requests_in_flight.cancel(request.request_id)

    def _cancel_rest(self) -> None:
        if self._stream is None:
            return
        self._stream.close()
        for request, choices in zip(self._requests, self._by_prompt, strict=True):
            if not all(choice.finished for choice in choices):
                self._requests_in_flight.cancel(request.request_id)
        self._requests_in_flight.close(self._stream)
        for choice, times in zip(self.choices, self._times, strict=True):
            if not choice.finished:
                self._metrics.sequence_ended(times, "abort", choice.generated_tokens)
        self._metrics.request_ended(max(choice.generated_tokens for choice in self.choices))

    def cached_tokens(self) -> int:
        """Return prompt tokens that were not computed, each prompt counted once."""
        return sum(max(choice.cached_tokens for choice in choices) for choices in self._by_prompt)

    def lost_tokens(self) -> LostTokens:
        """Return the lost tokens of the first sequence of each prompt: the other n - 1 wait for that sequence and reuse
        its prefix."""
        counts = [msgspec.structs.asdict(choices[0].lost_tokens) for choices in self._by_prompt]
        return LostTokens(**{reason: sum(count[reason] for count in counts) for reason in counts[0]})

    def usage(self, reasoning_tokens: int = 0) -> Usage:
        """Return the usage. With server.hide_cached_tokens the usage lacks the counts of the cache and of drafts: both
        tell about earlier requests."""
        prompt_tokens = sum(len(prompt.tokens) for prompt in self.prompts)
        generated = sum(choice.generated_tokens for choice in self.choices)
        of_prompt = PromptTokensDetails()
        of_answer = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        if not self._service.config.hide_cached_tokens:
            of_prompt = PromptTokensDetails(
                cached_tokens=self.cached_tokens(),
                lost_tokens=self.lost_tokens(),
                recomputed_tokens=sum(choice.recomputed_tokens for choice in self.choices),
            )
            of_answer = CompletionTokensDetails(
                reasoning_tokens=reasoning_tokens,
                accepted_prediction_tokens=sum(choice.accepted_drafts for choice in self.choices),
                rejected_prediction_tokens=sum(choice.rejected_drafts for choice in self.choices),
            )
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=generated,
            total_tokens=prompt_tokens + generated,
            prompt_tokens_details=of_prompt,
            completion_tokens_details=of_answer,
            weight_version=max(self.choices, key=lambda choice: choice.generated_tokens).weight_version or UNSET,
        )

    def outcome(self, *, stream: bool) -> GenerationOutcome:
        """Return the figures for a trace, after ``close``. Times cover all sequences together: from the first that
        began to the last that ended."""
        began = [
            min(times.arrived_s + times.queued_s, times.first_s) for times in self._times if times.first_s is not None
        ]
        sampling = self.samplings[0]
        return GenerationOutcome(
            model=self._model.name,
            adapter=None if self._requests[0].adapter is None else self._requests[0].adapter.name,
            arrived_s=self._arrived_s,
            began_s=min(began, default=None),
            first_s=min((times.first_s for times in self._times if times.first_s is not None), default=None),
            last_s=max(times.last_s for times in self._times),
            parameters={
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": sampling.seed,
                "choice.count": len(self.choices) if len(self.choices) > 1 else None,
                "stream": stream or None,
            },
            input_tokens=sum(len(prompt.tokens) for prompt in self.prompts),
            cached_tokens=self.cached_tokens(),
            output_tokens=sum(choice.generated_tokens for choice in self.choices),
            finish_reasons=[times.finish_reason or "abort" for times in self._times],
            error_type=self._error_type,
        )

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt that choice ``index`` answers."""
        return self.prompts[index // self.samplings[0].n]

    def _note_end(self, choice: Choice, event: TokenEvent) -> None:
        reason = "stop" if choice.stopped_by_text else str(event.finish_reason)
        self._metrics.sequence_ended(self._times[choice.index], reason, choice.generated_tokens)


def check_generates(info: ModelInfo, request: Request) -> None:
    """Raise RequestError for a request for text of a model that generates none."""
    if request.pooling is None and not info.generates:
        raise RequestError(
            f"{info.name} embeds or scores text and generates none: use /v1/embeddings, /v1/rerank or /pooling",
            param="model",
            code="unsupported_parameter",
        )


def within_context(request: Request, limit: int, field: str) -> Request:
    """Return ``request`` with ``max_tokens`` cut to the room that a context of ``limit`` tokens leaves; ``field`` is
    then reported as ignored, because agents send one number with each request. A prompt that leaves no room is returned
    as it is, for ``check_length``."""
    room, max_tokens = limit - len(request.prompt_tokens), request.sampling.max_tokens
    if max_tokens is None or max_tokens <= room or room < max(request.sampling.min_tokens, 1):
        return request
    note_ignored(field)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=room))


def check_count(sequences: int, queue_max: int) -> None:
    """Raise RequestError for more sequences than an empty queue could take: trying again later would not help."""
    if sequences > queue_max:
        raise RequestError(
            f"prompts x n is {sequences} sequences; at most {queue_max} can wait "
            "(limits.max_queued_requests). Send them in several requests",
            param="prompt",
        )


def joined_by_sequence(events: list[TokenEvent]) -> list[TokenEvent]:
    """Return one event for each sequence, in order of first appearance."""
    if len(events) < 2:
        return events
    by_sequence: dict[tuple[str, int], list[TokenEvent]] = {}
    for event in events:
        by_sequence.setdefault((event.request_id, event.index), []).append(event)
    return list(map(joined, by_sequence.values()))


def joined(events: list[TokenEvent]) -> TokenEvent:
    """Return one event equal to ``events`` of one sequence. Counts in a later event include those of an earlier one."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    logprobs = [entry for event in events for entry in event.logprobs or ()]
    prompt_logprobs = [entry for event in events for entry in event.prompt_logprobs or ()]
    return msgspec.structs.replace(
        last,
        tokens=[token for event in events for token in event.tokens],
        logprobs=logprobs or None,
        prompt_logprobs=prompt_logprobs or None,
        cached_tokens=max(event.cached_tokens for event in events),
        accepted_drafts=max(event.accepted_drafts for event in events),
        rejected_drafts=max(event.rejected_drafts for event in events),
        lost=next((event.lost for event in reversed(events) if event.lost is not None), None),
    )


def merged(pieces: list[Piece]) -> list[Piece]:
    """Return one piece per choice, in order of first appearance."""
    by_index: dict[int, Piece] = {}
    for piece in pieces:
        known = by_index.setdefault(piece.index, piece)
        if known is not piece:
            known.text += piece.text
            known.tokens += piece.tokens
            known.logprobs += piece.logprobs
            known.finish_reason, known.stop_reason = piece.finish_reason, piece.stop_reason
    return list(by_index.values())


def logprob_count(request: Request, context_tokens: int, *, streamed: bool) -> int:
    """Return the most logprobs of one piece of the answers to one prompt (law L11). A complete answer becomes JSON at
    its end, on the event loop. A stream writes the logprobs step by step, so only the prompt's logprobs count."""
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


def check_logprob_count(
    requests: Sequence[Request], *, context_tokens: int, limit: int, streamed: bool, field: str
) -> None:
    """Raise RequestError for too many logprobs. ``field``: the field of the request that asks for alternatives."""
    count = sum(logprob_count(request, context_tokens, streamed=streamed) for request in requests)
    if count <= limit:
        return
    if all(request.sampling.logprobs is None for request in requests):
        field = "prompt_logprobs"
    if streamed:
        raise RequestError(
            f"echo with {field}: the prompts have {count} logprobs, n x prompt tokens x "
            f"({field} + 1); the limit is {limit} (limits.max_answer_logprobs)",
            param=field,
            code="too_many_logprobs",
        )
    raise RequestError(
        f"the answer may have {count} logprobs: n x max_tokens x ({field} + 1) for each prompt, and "
        f"n x prompt tokens x (prompt_logprobs + 1); the limit is {limit} (limits.max_answer_logprobs). "
        "Lower n, "
        f"max_tokens or {field}, or stream the answer",
        param=field,
        code="too_many_logprobs",
    )
