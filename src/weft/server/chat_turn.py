"""Chat requests of every dialect: checked, rendered, and ready to generate.

    ChatBody       \\                                        / ChatJob
    ResponsesBody   >--> ChatTurn --prepare_turn--> PreparedTurn --> ResponsesJob
    MessagesBody   /                      |                 \\ MessagesJob
                                      Generation

    prepare_turn    the model and its defaults, the prompt (``text.renderer``), the plan of the answer, the cut

A dialect only translates: its body becomes a ``ChatTurn``, and a job writes the pieces of the answer in the dialect's
format. Add a field that every dialect takes to ``SamplingFields``, and a field that shapes the prompt to
``ConversationFields``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weft.objects.conversations import continued_chat, known_prefix
from weft.server.generation import Generation, Usage
from weft.server.protocol import SamplingFields, Streaming, grammar_of, sampling_params
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sessions.continuing import session_of
from weft.server.truncation import fitted, tokens_after_cut
from weft.text.chat_request import ConversationFields
from weft.text.choices import Piece
from weft.text.current_request import note_ignored
from weft.text.dialect import AnswerBlock, AnswerReader, BlockEvent
from weft.text.prompt import KnownPrefix, Prompt, check_spans
from weft.text.tokenizer import banned_sequences


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request of any dialect. ``logprobs``: alternatives for each token, None for no logprobs. ``prompt_field``,
    ``logprobs_field`` and ``answer_field`` (of ``max_tokens``) are the dialect's names, for errors. ``show_reasoning``:
    if false the reasoning is left out of the answer. ``known``: tokens of an earlier turn, as in ``encode_prompt``.
    ``prediction``: the client's guess of the answer, a source of drafts. ``context_max``: ``num_ctx`` of
    ``fitted``. ``before``: tokens of earlier turns, before the conversation's tokens and with the first messages
    of the created name. ``own_sampling``: defaults of the API that differ from those of SamplingParams."""

    conversation: ConversationFields
    fields: SamplingFields
    max_tokens: int | None
    n: int | None = None
    logprobs: int | None = None
    logprobs_field: str = "top_logprobs"
    prompt_logprobs: int | None = None
    prompt_field: str = "messages"
    answer_field: str = "max_tokens"
    add_special_tokens: bool = False
    show_reasoning: bool = True
    known: KnownPrefix | None = None
    prediction: str | None = None
    context_max: int | None = None
    before: list[int] = []
    own_sampling: Mapping[str, float | int] = {}


class PreparedTurn(msgspec.Struct, frozen=True):
    """A turn whose ``generation`` is ready to start. ``name`` is the model's, as the request called it. ``readers``:
    one for each choice."""

    model: ServedModel
    name: str
    prompt: Prompt
    generation: Generation
    readers: list[AnswerReader]

    def read(self, piece: Piece) -> list[BlockEvent]:
        """Return the events of a piece of an answer; each piece is read once, in order."""
        return self.readers[piece.index].read(piece.text, piece.tokens, piece.finish_reason)

    def read_whole(self, piece: Piece) -> list[AnswerBlock]:
        """Return the blocks of ``piece``, which is all of an answer."""
        self.read(piece)
        return self.readers[piece.index].blocks

    def finish_reason(self, piece: Piece) -> str | None:
        """Return ``tool_calls`` for an answer that ends with calls, else the piece's reason. Call it after the piece
        was read."""
        return self.readers[piece.index].finish_reason(piece.finish_reason)

    def reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self.readers)

    def usage(self) -> Usage:
        return self.generation.usage(self.reasoning_tokens())


async def prepare_turn(service: Service, turn: ChatTurn) -> PreparedTurn:
    """Prepare a turn. Raise RequestError, UnknownModelError, EngineUnavailableError."""
    fields = turn.fields
    model = await service.model_for(fields.model)
    name, defaults = model.name_for(fields.model), model.sampling_defaults
    renderer, tokenizer = model.renderer, model.renderer.tokenizer
    if fields.session is not None:
        session = await session_of(service, fields, fields.session, model)
        conversation = continued_chat(session, turn.conversation)
        turn = msgspec.structs.replace(turn, conversation=conversation, known=known_prefix(session))
    sampling = sampling_params(
        fields,
        {**turn.own_sampling, **defaults},
        max_tokens=turn.max_tokens,
        grammar=grammar_of(fields, tokenizer.added_id),
        n=turn.n,
        logprobs=turn.logprobs,
        prompt_logprobs=turn.prompt_logprobs,
        banned=banned_sequences(fields.bad_words, tokenizer) if fields.bad_words else (),
    )
    request, prompt = await renderer.render(
        turn.conversation,
        field=turn.prompt_field,
        cut_to=tokens_after_cut(model, fields, is_chat=True),
        add_special_tokens=turn.add_special_tokens,
        known=turn.known,
        with_places=True,
        begins=not turn.before,
        salt=fields.cache_salt or "",
    )
    plan = renderer.dialect.plan_of(request, prompt.text or "", sampling.grammar)
    sampling = msgspec.structs.replace(sampling, grammar=plan.grammar)
    if request.thinking_token_budget is not None and not renderer.dialect.bounds_reasoning:
        note_ignored(turn.conversation.budget_field)
    if prompt.pictures:
        check_spans(request, prompt, model.info.sizes.max_model_len)
    if fields.cache_boundaries:
        prompt = msgspec.structs.replace(prompt, marks=prompt.marks + fields.cache_boundaries)
    if turn.before:
        prompt = _after(turn.before, model, prompt)
    answer_tokens = max(fields.min_tokens or 0, 1) if turn.max_tokens is None else turn.max_tokens
    prompt = fitted(prompt, fields, model, answer_tokens=answer_tokens, num_ctx=turn.context_max)
    if turn.prediction:
        await renderer.check_text(turn.prediction, param="prediction")
        prediction = await renderer.encode(turn.prediction, add_special_tokens=False)
        prompt = msgspec.structs.replace(prompt, prediction=prediction)
    generation = Generation(
        service,
        model,
        [prompt],
        [sampling],
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        shown_ids=plan.shown_ids,
        stops_of=plan.stops if sampling.stop else None,
        prompt_field=turn.prompt_field,
        answer_field=turn.answer_field,
        id_slot=fields.id_slot,
        stream=Streaming(bool(fields.stream), fields.stream_interval),
        logprobs_field=turn.logprobs_field,
    )
    readers = [plan.reader(eager=bool(fields.stream), shows_reasoning=turn.show_reasoning) for _ in generation.choices]
    return PreparedTurn(model, name, prompt, generation, readers)


def _after(before: list[int], model: ServedModel, prompt: Prompt) -> Prompt:
    """Return ``prompt``, which has no pictures, after earlier tokens, with one beginning-of-sequence token for both.
    Raise RequestError for ids that are not tokens."""
    model.check_ids(before, param="context")
    tokenizer = model.renderer.tokenizer
    begin = tokenizer.added_id(tokenizer.special_tokens.get("bos_token", ""))
    cut = int(begin is not None and prompt.tokens[:1] == [begin])
    boundaries, marks = (
        [len(before) + position - cut for position in places if position >= cut]
        for places in (prompt.boundaries, prompt.marks)
    )
    return Prompt(before + prompt.tokens[cut:], prompt.text, boundaries, marks)
