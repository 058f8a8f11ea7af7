"""One turn of a conversation, in no dialect: what chat completions, Responses and Messages share.

    ChatBody       \\                                        / ChatJob
    ResponsesBody   >--> ChatTurn --prepare_turn--> PreparedTurn --> ResponsesJob
    MessagesBody   /                                        \\ MessagesJob

A dialect is a mapping at the edge: its body becomes a ``ChatTurn``, and a job writes the pieces of the answer
in the dialect's own words. Everything between is here, once: the template, tokens, the grammar, sampling, the
reading of reasoning and calls, usage. The engine sees tokens and ``SamplingParams`` and never a dialect.

A field that every dialect takes is added to ``SamplingFields``. A field that shapes the prompt is added to
``ConversationFields``; each dialect maps its own name to it.

Rejected: the body of one dialect as the type of the others (each new field of chat would concern all of
them); a job base class with hooks (the streams of the dialects have nothing in common).
"""

from __future__ import annotations

import msgspec

from weft.server.generation import Generation, Prompt, Usage
from weft.server.protocol import SamplingFields, sampling_params
from weft.server.service import ServedModel, Service
from weft.server.structured import grammar_of
from weft.server.truncation import check_truncation, truncated
from weft.text.blocks import AnswerBlock, BlockEvent
from weft.text.chat_request import ConversationFields, KnownPrefix
from weft.text.choices import Piece
from weft.text.dialect import AnswerPlan
from weft.text.tokenizer import banned_sequences


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """``logprobs``: alternatives for each token, None for no logprobs. ``prompt_field`` and
    ``logprobs_field`` are the dialect's names, for errors. ``show_reasoning``: else the reasoning is left
    out of the answer. ``known``: tokens of an earlier turn, as in ``encode_prompt``. ``prediction``: the
    client's guess of the answer, a source of drafts."""

    conversation: ConversationFields
    fields: SamplingFields
    max_tokens: int | None
    n: int | None = None
    logprobs: int | None = None
    logprobs_field: str = "top_logprobs"
    prompt_logprobs: int | None = None
    prompt_field: str = "messages"
    add_special_tokens: bool = False
    show_reasoning: bool = True
    known: KnownPrefix | None = None
    prediction: str | None = None


class PreparedTurn:
    """A turn whose ``generation`` is ready to start. ``name`` is the model's, as the request called it."""

    def __init__(self, service: Service, model: ServedModel, turn: ChatTurn, prompt: Prompt,
                 plan: AnswerPlan) -> None:
        fields = turn.fields
        self.model = model
        self.prompt = prompt
        self.name = service.name_of(model, fields.model)
        sampling = sampling_params(
            fields, model.sampling_defaults, max_tokens=turn.max_tokens, grammar=plan.grammar, n=turn.n,
            logprobs=turn.logprobs, prompt_logprobs=turn.prompt_logprobs,
            banned=banned_sequences(fields.bad_words, model.tokenizer))
        self.generation = Generation(
            service, model, [prompt], [sampling], priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "", decoder=model.tokenizer.showing(plan.shown_ids),
            prompt_field=turn.prompt_field)
        self.generation.check_logprob_count(streamed=bool(fields.stream), field=turn.logprobs_field)
        self._readers = [plan.reader(eager=bool(fields.stream), shows_reasoning=turn.show_reasoning)
                         for _ in self.generation.choices]

    def read(self, piece: Piece) -> list[BlockEvent]:
        """What a piece of an answer brings; each piece is read once, in order."""
        return self._readers[piece.index].read(piece.text, piece.tokens, piece.finish_reason)

    def read_whole(self, piece: Piece) -> list[AnswerBlock]:
        """``piece``: all of an answer."""
        self.read(piece)
        return self._readers[piece.index].blocks

    def finish_reason(self, piece: Piece) -> str | None:
        """``tool_calls`` for an answer that ends with calls; after the piece was read."""
        return self._readers[piece.index].finish_reason(piece.finish_reason)

    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self._readers)

    def usage(self) -> Usage:
        return self.generation.usage(self.reasoning_tokens())


async def prepare_turn(service: Service, turn: ChatTurn) -> PreparedTurn:
    """Raises RequestError, UnknownModelError, EngineUnavailableError."""
    fields = turn.fields
    check_truncation(fields, is_chat=True)
    model = service.model_for(fields.model)
    request, prompt = await model.write_chat(turn.conversation)
    if fields.truncate_prompt_tokens is None:
        await model.check_text(prompt.text, param=turn.prompt_field)
    plan = request.plan(model.dialect, prompt.text, grammar_of(fields))
    encoded = await model.encode_chat(prompt, add_special_tokens=turn.add_special_tokens, known=turn.known)
    marks = encoded.marks + (fields.cache_boundaries or [])
    whole = Prompt(encoded.tokens, prompt.text, encoded.boundaries, marks)
    answer_tokens = max(fields.min_tokens or 0, 1) if turn.max_tokens is None else turn.max_tokens
    cut = truncated(whole, fields, context_tokens=model.info.max_model_len, answer_tokens=answer_tokens)
    if turn.prediction:
        await model.check_text(turn.prediction, param="prediction")
        prediction = await model.encode(turn.prediction, add_special_tokens=False)
        cut = msgspec.structs.replace(cut, prediction=prediction)
    return PreparedTurn(service, model, turn, cut, plan)
