"""weft in one process, for programs: prompts in, completions out.

    Engine(model, **config fields)
      .generate(prompts)            many at once, batched, with a progress bar on long work
      .stream(prompt)               pieces of text as the engine computes them
      .chat(messages, tools=...)    the answer to a conversation; .stream_chat(...): in pieces
      .sessions                     conversations by name, which session= of these methods continues
      .embed(texts)                 embeddings; .score(pairs), .rerank(query, documents): relevance

It uses the same EngineCore as the server; the caller that waits for an answer runs the steps (``weft.api.calls``). Only
one thread may use an engine at a time: another gets a BusyError. Without ``sampling``, a request samples as the
checkpoint recommends; keywords such as ``max_tokens=64`` change single fields, and ``guided_json``, ``guided_regex``,
``guided_choice`` and ``guided_grammar`` make the answer match. A call that raises leaves nothing running.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from weft.adapters import Adapter, check_name, read_adapter
from weft.api.calls import Call, CallTable
from weft.api.chat import ChatWriter, PreparedChat
from weft.api.completion import ChatPiece, ChatReply, Completion, Prompt, prompt_list, sampling_from, token_ids
from weft.api.given_weights import written_weights
from weft.api.pooling import NOTHING, MakeRequest, PoolingCalls, RankedDocument, ranked
from weft.api.sessions import EngineSessions
from weft.assemble import ModelInfo, OnProgress, assemble
from weft.config import EngineConfig
from weft.engine.sleeper import Sleeper
from weft.engine.stats import EngineStats, Flushed, Part, check_level
from weft.errors import RequestError
from weft.models.hub import resolve_adapter
from weft.objects.conversations import continued_prompts
from weft.objects.sessions import StoredSession
from weft.request import PlacedPicture, Request, SamplingParams
from weft.text import prompt as text_prompt
from weft.text.choices import Piece
from weft.text.control_tokens import NO_CONTROL, ControlTokens, control_texts
from weft.text.dialect import answer_markers
from weft.text.pooling import Pooler
from weft.text.tokenizer import Tokenizer

SleepMode = Literal["wait", "abort"]


class Engine:
    """A model, its memory and its scheduler, in this process.

    ``config`` are the fields of ``weft.config.EngineConfig``, which are the flags of ``weft serve``:
    ``memory="4GiB"``, ``max_model_len=8192``, ``dtype="float32"``, ...

    ``sessions``: the file of ``Engine.sessions``; default: the file of the user's servers. A given file is opened at
    once, and from then on the states of its sessions are evicted last.

    Raises ConfigError, CheckpointError or UnknownArchitectureError, each naming the setting or file to change.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        on_progress: OnProgress | None = None,
        loras: Mapping[str, str | Path] | None = None,
        sessions: str | Path | None = None,
        **config: Any,
    ) -> None:
        if loras:
            config["lora"] = (*config.get("lora", ()), *(f"{name}={path}" for name, path in loras.items()))
        self._config = EngineConfig.of(model=model, **config)
        assembled = assemble(self._config, on_progress=on_progress)
        self._core = assembled.core
        self._sleeper = Sleeper(assembled.core)
        self.info: ModelInfo = assembled.info
        directory = Path(self.info.directory)
        self.tokenizer = Tokenizer.load(directory)
        trusting = self.info.trust_control_tokens
        self._chat = ChatWriter(
            directory,
            self.tokenizer,
            self.info.picture_tokens,
            context_tokens=self.info.sizes.max_model_len,
            trust_control_tokens=trusting,
        )
        self._calls = CallTable(assembled.core)
        self._numbers = itertools.count()
        control = NO_CONTROL if trusting else control_texts(self.tokenizer, "", answer_markers())
        pooler = Pooler(
            directory,
            self.tokenizer,
            name=self.info.name,
            score_labels=self.info.score_labels,
            causal=not self.info.sizes.whole_prompts,
            control=ControlTokens(control),
        )
        self._pooling = PoolingCalls(pooler, self._calls, self.tokenizer, limit=self.info.sizes.max_model_len)
        self._adapters = {adapter.name: adapter for adapter in self.info.adapters}
        self._sessions_file = sessions
        self._sessions = None if sessions is None else self._open_sessions()

    # ------------------------------------------------------------------ answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        cache_boundaries: Sequence[int] = (),
        prediction: Prompt = (),
        lora: str | Sequence[str | None] | None = None,
        session: str | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """Complete ``prompts`` (one text, one list of token ids, or a list of either).

        Returns completions in the order of the prompts, ``n`` for each. ``sampling``: parameters of all prompts, or one
        for each; ``fields`` change single values. ``cache_boundaries``: positions in each of the prompts, in tokens, at
        which the prefix cache should keep a state. ``prediction``: a guess of the answers, as text or token ids, which
        makes answers faster with ``speculate`` if it is right. ``lora``: name of the adapter for all prompts, or one
        for each. ``session``: name of the session whose tokens come before the prompts. Raises RequestError or
        ContextLengthError that names the field, and EngineUnavailableError if a step fails."""
        listed = prompt_list(prompts)
        if isinstance(sampling, Sequence):
            if len(sampling) != len(listed):
                raise RequestError(
                    f"sampling has {len(sampling)} sets of parameters for {len(listed)} prompts", param="sampling"
                )
            params = [self._sampling(chosen, fields) for chosen in sampling]
        else:
            params = [self._sampling(sampling, fields)] * len(listed)
        names = [lora] * len(listed) if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != len(listed):
            raise RequestError(f"lora has {len(names)} names for {len(listed)} prompts", param="lora")
        return self._calls.complete(
            [
                self._call(prompt, chosen, marks=cache_boundaries, prediction=prediction, lora=name, session=session)
                for prompt, chosen, name in zip(listed, params, names, strict=True)
            ],
            progress=progress,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        cache_boundaries: Sequence[int] = (),
        prediction: Prompt = (),
        lora: str | None = None,
        session: str | None = None,
        **fields: Any,
    ) -> Iterator[Piece]:
        """Yield pieces of the answer to ``prompt`` as the engine computes them. The last piece of each of the ``n``
        answers has a ``finish_reason``. The request starts when the first piece is requested, and raises its errors
        then, as ``generate`` does. Leaving the loop early cancels it."""
        params = self._sampling(sampling, fields)
        yield from self._calls.stream(
            self._call(prompt, params, marks=cache_boundaries, prediction=prediction, lora=lora, session=session)
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        thinking_token_budget: int | None = None,
        template: Mapping[str, Any] | None = None,
        prediction: Prompt = (),
        lora: str | None = None,
        session: str | None = None,
        **fields: Any,
    ) -> ChatReply:
        """Return the answer to a conversation. ``messages``, ``tools`` and ``tool_choice`` are as in the OpenAI API;
        the checkpoint's chat template renders them, with ``template`` as its extra variables.
        ``thinking_token_budget``: most tokens of the reasoning. ``prediction`` and ``lora``: see ``generate``;
        ``session``: name of the session whose messages come before. Raises RequestError also if the template refuses or
        is missing, takes no tools, if the reasoning cannot be bounded, and for ``n`` above 1."""
        params = self._sampling(sampling, fields)
        if params.n != 1:
            raise RequestError(
                f"chat answers once; n is {params.n}: use stream_chat, or generate with render_chat", param="n"
            )
        continued, lora = self._continued(session, lora)
        prepared = self._chat.prepare(
            messages,
            params,
            template,
            continued,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            thinking_token_budget=thinking_token_budget,
        )
        [completion] = self._calls.complete([self._chat_call(prepared, prediction, lora)], progress=False)
        return prepared.reply(completion)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        thinking_token_budget: int | None = None,
        template: Mapping[str, Any] | None = None,
        prediction: Prompt = (),
        lora: str | None = None,
        session: str | None = None,
        **fields: Any,
    ) -> Iterator[ChatPiece]:
        """Yield the answer of ``chat`` in pieces."""
        params = self._sampling(sampling, fields)
        continued, lora = self._continued(session, lora)
        prepared = self._chat.prepare(
            messages,
            params,
            template,
            continued,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            thinking_token_budget=thinking_token_budget,
        )
        yield from prepared.pieces(self._calls.stream(self._chat_call(prepared, prediction, lora)))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins."""
        return self._chat.tokens(messages, template, tools=tools)

    # ------------------------------------------------------------------ embeddings and scores

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_to: int | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of ``inputs`` (texts or token ids), float32 [inputs, width], pooled and normalised as
        the checkpoint says. ``prompt``: a text before each input; ``prompt_name``: the name of such a text in the
        checkpoint. ``dimensions``: keep only the first dimensions. ``truncate_to``: cut longer inputs at their end; by
        default an input that is too long raises ContextLengthError. Raises RequestError that names the field."""
        return self._pooling.embed(
            inputs,
            self._pooled_request(lora),
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            truncate_to=truncate_to,
            progress=progress,
        )

    def token_vectors(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_to: int | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[npt.NDArray[np.float32]]:
        """Return the vectors of the tokens of each input, float32 [vectors, width]. ``prompt_name`` of a model of late
        interaction is ``query`` or ``document`` (the default). Other arguments and errors as ``embed``."""
        return self._pooling.token_vectors(
            inputs,
            self._pooled_request(lora),
            prompt_name=prompt_name,
            dimensions=dimensions,
            truncate_to=truncate_to,
            progress=progress,
        )

    def classify(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        raw: bool = False,
        per_token: bool | None = None,
        truncate_to: int | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[npt.NDArray[np.float32]]:
        """Return the probabilities of the labels of the model's score head for each input, float32 [labels]. ``raw``:
        logits instead, such as those of a reward model. ``per_token``: at each token, [tokens, labels], or at each
        step tag of a process reward model; by default as the checkpoint was trained. Raises as ``embed``."""
        return self._pooling.classify(
            inputs, self._pooled_request(lora), raw=raw, per_token=per_token, truncate_to=truncate_to, progress=progress
        )

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        instruction: str | None = None,
        truncate_to: int | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[float]:
        """Return a score for each pair: the relevance of the second text to the first. The model needs a score head, or
        must be a generative reranker, or one of late interaction. ``instruction``: for a generative reranker. Raises as
        ``embed``."""
        return self._pooling.scores(
            pairs, self._pooled_request(lora), instruction=instruction, truncate_to=truncate_to, progress=progress
        )

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_to: int | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[RankedDocument]:
        """Rank ``documents`` by ``score`` with ``query``, the best first, at most ``top_n``."""
        return ranked(
            self.score(
                [(query, document) for document in documents],
                instruction=instruction,
                truncate_to=truncate_to,
                lora=lora,
                progress=progress,
            ),
            top_n,
        )

    def _pooled_request(self, lora: str | None) -> MakeRequest:
        return lambda pooled: msgspec.structs.replace(
            self._request(pooled.tokens, NOTHING, pooled.boundaries, (), (), lora, pools=True), pooling=pooled.pooling
        )

    def _sampling(self, sampling: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
        return sampling_from(sampling, fields, self.info.default_sampling, self.tokenizer)

    def _chat_call(self, prepared: PreparedChat, prediction: Prompt, lora: str | None) -> Call:
        encoded = prepared.encoded
        request = self._request(encoded.tokens, prepared.sampling, encoded.boundaries, encoded.marks, prediction, lora)
        request = msgspec.structs.replace(request, pictures=encoded.pictures)
        return Call(request, prepared.decoder, prepared.plan.stops)

    def _call(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        marks: Sequence[int],
        prediction: Prompt,
        lora: str | None,
        session: str | None,
    ) -> Call:
        continued, lora = self._continued(session, lora)
        tokens = (
            self.tokenizer.encode(prompt, add_special_tokens=continued is None)
            if isinstance(prompt, str)
            else token_ids(prompt)
        )
        if continued is not None:
            [whole] = continued_prompts(continued, [text_prompt.Prompt(tokens, marks=list(marks))])
            tokens, marks = whole.tokens, whole.marks
        return Call(self._request(tokens, sampling, (), marks, prediction, lora), self.tokenizer)

    def _continued(self, session: str | None, lora: str | None) -> tuple[StoredSession | None, str | None]:
        """Return the session of a request, and the adapter that answers it."""
        if session is None:
            return None, lora
        continued = self.sessions.find(session, lora)
        return continued, lora or continued.requested

    def _adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter called ``name``, or None without a name. Raise RequestError for an unknown name."""
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(f"lora is {name!r}; the adapters of this engine are {known}", param="lora")
        return self._adapters[name]

    def load_lora(self, name: str, path: str | Path) -> None:
        """Serve one more adapter, or other files under an existing name: answers in progress keep the adapter with
        which they began. Raises CheckpointError for files that cannot be served."""
        check_name(name)
        adapter = read_adapter(name, resolve_adapter(str(path)))
        with self._calls.turn.take():
            self._core.adapters.load(adapter)
        self._adapters[name] = adapter

    def unload_lora(self, name: str) -> None:
        """Remove the adapter for new requests; its memory is free once no answer needs it. Raises RequestError for a
        name that no adapter has."""
        adapter = self._adapter(name)
        assert adapter is not None
        del self._adapters[name]
        with self._calls.turn.take():
            self._core.adapters.drop(adapter.digest)

    def _request(
        self,
        tokens: list[int],
        sampling: SamplingParams,
        boundaries: Sequence[int],
        marks: Sequence[int],
        prediction: Prompt,
        lora: str | None,
        *,
        pools: bool = False,
    ) -> Request:
        if not pools and not self.info.generates:
            raise RequestError(
                f"{self.info.name} embeds or scores text and generates none: use embed, score or rerank", param="model"
            )
        guess = (
            self.tokenizer.encode(prediction, add_special_tokens=False)
            if isinstance(prediction, str)
            else token_ids(prediction)
            if prediction
            else []
        )
        return Request(
            request_id=f"call-{next(self._numbers)}",
            prompt_tokens=tokens,
            sampling=sampling,
            boundaries=list(boundaries),
            marks=list(marks),
            prediction=guess,
            adapter=self._adapter(lora),
        )

    # ------------------------------------------------------------------ sessions

    @property
    def sessions(self) -> EngineSessions:
        """Sessions: conversations by name. Raises ConfigError if the file cannot be opened."""
        if self._sessions is None:
            self._sessions = self._open_sessions()
        return self._sessions

    def _open_sessions(self) -> EngineSessions:
        return EngineSessions(
            self._core,
            self._calls,
            self.info,
            tokenizer=self.tokenizer,
            chat=self._chat,
            request=self._session_request,
            adapter=self._adapter,
            file=self._sessions_file,
            key_file=self._config.session_key,
        )

    def _session_request(self, tokens: list[int], pictures: list[PlacedPicture], lora: str | None) -> Request:
        request = self._request(tokens, SamplingParams(max_tokens=0, temperature=0.0), (), (), (), lora)
        return msgspec.structs.replace(request, pictures=pictures)

    # ------------------------------------------------------------------ the engine itself

    def stats(self) -> EngineStats:
        return self._core.stats()

    def flush_cache(self, *, store: bool = True) -> None:
        """Drop every cached prefix that no running answer reads; with ``store`` also those on disk."""
        with self._calls.turn.take():
            self._core.flush_cache(store=store)

    def sleep(self, level: int = 1, *, mode: SleepMode | None = None) -> Flushed:
        """Free the memory until ``wake_up``, and return the size of the dropped prefix cache. Level 1 keeps the weights
        in host memory (on a CPU they stay), level 2 drops them too and reads the checkpoint again on waking. Requests
        to a sleeping engine raise AsleepError.

        Raises BusyError while answers are in progress (half-read streams), unless ``mode`` is "wait", which finishes
        the answers first, or "abort", which ends them. Raises RequestError for another level or mode.
        """
        if mode not in (None, "wait", "abort"):
            raise RequestError(f"mode is {mode!r}; it may be 'wait' or 'abort'", param="mode")
        check_level(level)
        while mode == "wait" and self._core.live_count:
            self._calls.step()
        with self._calls.turn.take():
            flushed = self._sleeper.sleep(level, abort=mode == "abort")
        self._calls.step()
        return flushed

    def wake_up(self, tags: Sequence[Part] | None = None) -> bool:
        """Wake "weights", "kv_cache", or all; return whether the engine is awake now. Raises RequestError for another
        tag, CheckpointError if the checkpoint cannot be read again, and EngineUnavailableError for too little memory;
        the call can then be repeated."""
        with self._calls.turn.take():
            return not self._sleeper.wake_up(tags).level

    def update_weights(
        self,
        weights: str | Path | Iterable[tuple[str, Any]],
        *,
        version: str = "",
        mode: Literal["keep", "wait", "abort"] = "keep",
    ) -> None:
        """Replace the weights by those of a checkpoint directory with the same shapes, or by ``weights``: pairs of a
        name and a torch tensor; tensors without a pair stay. Cached results of the old weights are not used any more.
        ``version`` names the new weights in ``stats().weights``.

        With ``mode`` "keep", answers in progress continue with the new weights, and their tokens are computed again;
        "wait" finishes them first, "abort" ends them. Raises CheckpointError for weights that cannot be served; the
        engine then keeps the old weights. Raises AsleepError if the engine sleeps."""
        if mode not in ("keep", "wait", "abort"):
            raise RequestError(f"mode is {mode!r}; it may be 'keep', 'wait' or 'abort'", param="mode")
        while mode == "wait" and self._core.live_count:
            self._calls.step()
        with self._calls.turn.take(), written_weights(self._core, weights) as directory:
            self._sleeper.refit(str(directory), version, abort=mode == "abort")
        self._calls.step()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._sleeper.state.level)

    def close(self) -> None:
        """Cancel everything and free the memory. Idempotent."""
        with self._calls.turn.take():
            self._core.close()
            self._calls.forget()
        if self._sessions is not None:
            self._sessions.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
