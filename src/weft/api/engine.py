"""weft in one process, for programs: prompts in, completions out.

    Engine(model, **config fields)
      .generate(prompts)            many at once, batched, with a progress bar on long work
      .stream(prompt)               pieces of text as they are made
      .chat(messages) / .stream_chat(messages)

                 text --Tokenizer--> Request --> EngineCore --TokenEvent--> Choice --> Piece --> Completion

The same EngineCore that the server runs, stepped by whoever waits for an answer. Calls may overlap (a stream
that is half read while another prompt is generated): each step serves every call, and each call gets its own
pieces. One thread at a time: a second one gets a BusyError (``weft.api.turn``).

Without ``sampling``, a request samples as the checkpoint's makers recommend (generation_config.json);
keywords such as ``max_tokens=64`` change single fields. ``guided_json`` (a JSON schema), ``guided_regex``,
``guided_choice`` and ``guided_grammar`` (lark or GBNF) make the answer match. A call that raises leaves
nothing running.
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from weft.api.progress import AnswerBar
from weft.api.turn import Turn
from weft.assemble import ModelInfo, OnProgress, assemble
from weft.config import EngineConfig
from weft.engine.choices import Choice, Piece
from weft.engine.sleep_state import Flushed, Part, check_level
from weft.engine.sleeper import Sleeper
from weft.engine.stats import EngineStats
from weft.errors import RequestError, WeftError
from weft.request import FinishReason, LostTokens, Request, SamplingParams, TokenEvent, TokenLogprobs
from weft.text.cache_marks import marked_characters
from weft.text.chat import ChatMessage, ChatTemplate, load_chat_template
from weft.text.grammars import KINDS, grammar_from
from weft.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids taken as they are."""

SleepMode = Literal["wait", "abort"]


class Completion(msgspec.Struct, kw_only=True):
    """One answer. ``prompt_index`` is the prompt's place in the call, ``index`` counts its ``n`` answers.

    ``tokens`` has the token that ended the answer, ``text`` does not show it. ``stop_reason``: the stop
    string or stop token id that ended it, None for the model's own end. ``logprobs``: one per token, when
    asked for; ``prompt_logprobs``: one per prompt token, None for the first. ``cached_tokens`` of the prompt
    were found in the prefix cache, ``lost_tokens`` nearly, and ``recomputed_tokens`` were computed again
    after preemptions.
    """

    prompt_index: int
    index: int
    prompt_tokens: list[int]
    text: str = ""
    tokens: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] = []
    cached_tokens: int = 0
    lost_tokens: LostTokens = LostTokens()
    recomputed_tokens: int = 0


class _Call:
    """One request while it is answered: where its events go."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.choices = [Choice(index, tokenizer, request.sampling, request.prompt_tokens)
                        for index in range(request.sampling.n)]
        self.pieces: deque[Piece] = deque()
        self.error: WeftError | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(choice.finished for choice in self.choices)


class Engine:
    """A model, its memory and its scheduler, in this process.

    ``config`` are the fields of ``weft.config.EngineConfig``, which are the flags of ``weft serve``:
    ``memory="4GiB"``, ``max_model_len=8192``, ``dtype="float32"``, ...

    Raises ConfigError, CheckpointError or UnknownArchitectureError, each naming what to change.
    """

    def __init__(self, model: str | None = None, *, on_progress: OnProgress | None = None,
                 **config: Any) -> None:
        assembled = assemble(EngineConfig(model=model, **config), on_progress=on_progress)
        self._core = assembled.core
        self._sleeper = Sleeper(assembled.core)
        self.info: ModelInfo = assembled.info
        directory = Path(self.info.directory)
        self.tokenizer = Tokenizer.load(directory)
        self._template: ChatTemplate | None = load_chat_template(
            directory, special_tokens=self.tokenizer.special_tokens)
        self._calls: dict[str, _Call] = {}
        self._left: deque[_Call] = deque()
        self._turn = Turn()
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ answers

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling: SamplingParams | Sequence[SamplingParams] | None = None, *, progress: bool = True,
                 cache_boundaries: Sequence[int] = (), **fields: Any) -> list[Completion]:
        """Complete ``prompts`` (one text, one list of token ids, or a list of either).

        Returns completions in the order of the prompts, ``n`` for each. ``sampling`` holds the parameters,
        of all or one for each prompt; ``fields`` change single ones. ``cache_boundaries``: positions in each
        of the prompts, in tokens, at which the prefix cache should keep a state. Raises RequestError or
        ContextLengthError naming the field, and EngineUnavailableError when a step fails.
        """
        listed = _prompt_list(prompts)
        if isinstance(sampling, Sequence):
            if len(sampling) != len(listed):
                raise RequestError(f"sampling has {len(sampling)} sets of parameters for {len(listed)} "
                                   "prompts", param="sampling")
            params = [self._sampling(one, dict(fields)) for one in sampling]
        else:
            params = [self._sampling(sampling, fields)] * len(listed)
        return self._complete([self._request(prompt, one, marks=cache_boundaries)
                               for prompt, one in zip(listed, params, strict=True)], progress=progress)

    def _complete(self, requests: list[Request], *, progress: bool) -> list[Completion]:
        done = [[Completion(prompt_index=number, index=index, prompt_tokens=request.prompt_tokens)
                 for index in range(request.sampling.n)] for number, request in enumerate(requests)]
        waiting = deque(enumerate(requests))
        running: dict[int, _Call] = {}
        bar = AnswerBar(len(requests) if progress else 0)
        try:
            while waiting or running:
                while waiting and self._has_room(waiting[0][1].sampling.n):
                    number, request = waiting.popleft()
                    running[number] = self._submit(request)
                self._step()
                for number, call in list(running.items()):
                    _collect(call, done[number])
                    if call.done:
                        del running[number]
                if bar.due:
                    generated = self._core.stats().generation_tokens
                    bar.show(len(requests) - len(waiting) - len(running), generated)
        finally:
            bar.close()
            self._drop(running.values())
        return [completion for group in done for completion in group]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, *,
               cache_boundaries: Sequence[int] = (), **fields: Any) -> Iterator[Piece]:
        """Pieces of the answer to ``prompt`` as they are made; the last piece of each of the ``n`` answers
        has a ``finish_reason``. The request starts, and what is wrong with it raises as in ``generate``,
        when the first piece is asked for; leaving the loop early cancels it."""
        yield from self._stream(self._request(prompt, self._sampling(sampling, fields),
                                              marks=cache_boundaries))

    def _stream(self, request: Request) -> Iterator[Piece]:
        call = self._submit(request)
        try:
            while call.pieces or not call.done:
                if not call.pieces:
                    self._step()
                while call.pieces:
                    yield call.pieces.popleft()
            if call.error is not None:
                raise call.error
        finally:
            self._drop([call])

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None = None, *,
             template: Mapping[str, Any] | None = None, **fields: Any) -> Completion:
        """The answer to a conversation: ``messages`` as in the OpenAI API, rendered by the checkpoint's chat
        template with ``template`` as its extra variables. Raises RequestError as well where the template
        refuses, where the checkpoint has none, or for ``n`` above 1."""
        params = self._sampling(sampling, fields)
        if params.n != 1:
            raise RequestError(f"chat answers once; n is {params.n}: use stream_chat, or generate with "
                               f"render_chat", param="n")
        tokens, boundaries, marks = self._encode_chat(messages, template)
        request = self._request(tokens, params, boundaries, marks)
        [completion] = self._complete([request], progress=False)
        return completion

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None = None, *,
                    template: Mapping[str, Any] | None = None, **fields: Any) -> Iterator[Piece]:
        """``stream`` for a conversation."""
        tokens, boundaries, marks = self._encode_chat(messages, template)
        yield from self._stream(self._request(tokens, self._sampling(sampling, fields), boundaries, marks))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *,
                    template: Mapping[str, Any] | None = None) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        return self._encode_chat(messages, template)[0]

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]],
                     template: Mapping[str, Any] | None) -> tuple[list[int], list[int], list[int]]:
        """Token ids; the positions in them up to which another conversation is likely to be the same; and
        those behind which the messages set a ``cache_control``."""
        if self._template is None:
            raise RequestError("this model has no chat template: use generate", param="messages")
        try:
            turns = msgspec.convert(list(messages), list[ChatMessage])
        except msgspec.ValidationError as error:
            raise RequestError(f"messages: {error}", param="messages") from None
        text = self._template.render(turns, variables=template)
        ends = self._template.boundaries(turns, text, variables=template)
        marks = marked_characters(self._template, turns, text, variables=template)
        tokens, positions = self.tokenizer.encode_with_boundaries(text, [*ends, *marks],
                                                                  add_special_tokens=False)
        return tokens, positions[:len(ends)], [at for at in positions[len(ends):] if at]

    # ------------------------------------------------------------------ the engine itself

    def stats(self) -> EngineStats:
        return self._core.stats()

    def flush_cache(self) -> None:
        """Drop every prefix that no running answer reads."""
        with self._turn.take():
            self._core.flush_cache()

    def sleep(self, level: int = 1, *, mode: SleepMode | None = None) -> Flushed:
        """Give the memory back until ``wake_up``; returns what the prefix cache held and lost. Level 1 keeps
        the weights in host memory (on a CPU, where they are), level 2 drops them too and reads the checkpoint
        again on waking. Requests that come meanwhile raise AsleepError.

        With answers in progress (streams that are half read) it raises BusyError, unless ``mode`` is "wait",
        which computes them to their end first, or "abort", which ends them. Raises RequestError for another
        level or mode.
        """
        if mode not in (None, "wait", "abort"):
            raise RequestError(f"mode is {mode!r}; it may be 'wait' or 'abort'", param="mode")
        check_level(level)
        while mode == "wait" and self._core.live_count:
            self._step()
        with self._turn.take():
            flushed = self._sleeper.sleep(level, abort=mode == "abort")
        self._step()
        return flushed

    def wake_up(self, tags: Sequence[Part] | None = None) -> bool:
        """Bring back "weights", "kv_cache", or all; whether the engine is awake now. Raises RequestError for
        another tag, CheckpointError where the checkpoint cannot be read again, and EngineUnavailableError
        where there is not enough memory; it can be tried again then."""
        with self._turn.take():
            return not self._sleeper.wake_up(tags).level

    @property
    def is_sleeping(self) -> bool:
        return bool(self._sleeper.state.level)

    def close(self) -> None:
        """Cancel everything and free the memory. Idempotent."""
        with self._turn.take():
            self._core.close()
            self._calls.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _sampling(self, sampling: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
        asked = {f"guided_{kind}": (kind, fields.pop(f"guided_{kind}", None)) for kind in KINDS}
        grammars = [grammar_from(kind, value, name) for name, (kind, value) in asked.items()
                  if value is not None]
        if len(grammars) > 1:
            raise RequestError(f"{grammars[0].field} and {grammars[1].field} both say what the answer must "
                               "match; one can", param=grammars[1].field)
        if grammars:
            fields["grammar"] = grammars[0]
        for name in ("stop", "stop_token_ids"):
            if name in fields:
                value = fields[name]
                fields[name] = (value,) if isinstance(value, str | int) else tuple(value)
        if sampling is not None:
            if not isinstance(sampling, SamplingParams):
                raise RequestError(f"sampling is a {type(sampling).__name__}; it must be SamplingParams, or "
                                   "keywords", param="sampling")
            return msgspec.structs.replace(sampling, **fields)
        return SamplingParams(**{**self.info.generation_defaults, **fields})

    def _request(self, prompt: Prompt, sampling: SamplingParams, boundaries: Sequence[int] = (),
                 marks: Sequence[int] = ()) -> Request:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return Request(request_id=f"call-{next(self._numbers)}", prompt_tokens=tokens, sampling=sampling,
                       boundaries=list(boundaries), marks=list(marks))

    def _has_room(self, sequences: int) -> bool:
        """Whether the queue takes so many more; an idle engine is always tried, so that a request that can
        never fit raises."""
        return not self._calls or self._core.stats().waiting + sequences <= self._core.sizes.queue_max

    def _submit(self, request: Request) -> _Call:
        with self._turn.take():
            self._core.submit(request)
            call = self._calls[request.request_id] = _Call(request, self.tokenizer)
        return call

    def _step(self) -> None:
        with self._turn.take():
            for event in self._core.step():
                self._take(event)
            self._cancel_left()

    def _take(self, event: TokenEvent) -> None:
        call = self._calls.get(event.request_id)
        if call is None:  # dropped: only the answers to its cancellation still come
            return
        choice = call.choices[event.index]
        ended_before = choice.finished
        try:
            piece = choice.take(event)
        except WeftError as error:
            error.__cause__ = self._core.failure
            call.error = error
            piece = None
        if piece is not None:
            call.pieces.append(piece)
        if choice.finished and not ended_before and event.finish_reason is None:
            self._core.cancel(event.request_id, event.index)
        if call.done:
            del self._calls[event.request_id]

    def _drop(self, calls: Iterable[_Call]) -> None:
        """Nobody waits for ``calls`` any more. The last one out lets the engine give back its memory."""
        self._left.extend(calls)
        if self._turn.mine or (self._turn.taken and not self._left):
            return  # whoever is in the middle of a step does the rest
        with self._turn.take(wait=True):
            self._cancel_left()
            while not self._calls and self._core.has_work:
                self._core.step()

    def _cancel_left(self) -> None:
        while self._left:
            request_id = self._left.popleft().request.request_id
            if self._calls.pop(request_id, None) is not None:
                self._core.cancel(request_id)


def _collect(call: _Call, completions: list[Completion]) -> None:
    """Move what ``call`` has into its completions. Raises what ended it early."""
    while call.pieces:
        piece = call.pieces.popleft()
        completion, choice = completions[piece.index], call.choices[piece.index]
        completion.text += piece.text
        completion.tokens += piece.tokens
        completion.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = piece.finish_reason, piece.stop_reason
            completion.cached_tokens = choice.cached_tokens
            completion.lost_tokens = choice.lost_tokens
            completion.recomputed_tokens = choice.recomputed_tokens
            completion.prompt_logprobs = choice.prompt_logprobs
    if call.error is not None:
        raise call.error


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(f"a prompt is text or a list of token ids; {prompt!r:.60} is neither",
                           param="prompt") from None


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"a prompt is text or a list of token ids, not {type(prompts).__name__}",
                           param="prompt")
    listed = list(prompts)
    if listed and all(isinstance(item, numbers.Integral) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]
