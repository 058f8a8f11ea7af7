"""What each field of a request means, its default and its limits: one row a field.

    type in ``protocol``        JSON type               msgspec writes it
    ``weft.request.RANGES``     minimum, maximum        SamplingParams.check holds them
    FIELDS                      meaning, default, other limits

A name means the same in every body; ``Body.name`` overrides it for one. The limits here are those that the
code checks elsewhere, so they are written with the same constants. A field without a row fails a test.

Rejected: descriptions as ``msgspec.Meta`` of the types (the bodies would be unreadable, and a limit would be
checked in two places with two messages).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.request import LOGPROBS_MAX, MARKS_MAX, RANGES, STOP_CHARS_MAX, STOPS_MAX, SamplingParams
from weft.server.responses.protocol import (
    INCLUDES,
    METADATA_KEY_CHARS,
    METADATA_MAX,
    METADATA_VALUE_CHARS,
)
from weft.server.sleep import WAIT_MAX_S
from weft.text.tokenizer import BAD_WORD_CHARS_MAX, BAD_WORDS_MAX

_NOT_GIVEN = object()
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


@dataclass(frozen=True, slots=True)
class FieldWords:
    """``limits``: JSON Schema that is added to the field's own; ``whole``: instead of it. ``default``: what a
    request without the field gets; a text in ``unless`` says what decides instead."""

    text: str
    default: Any = _NOT_GIVEN
    limits: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] | None = None

    @property
    def has_default(self) -> bool:
        return self.default is not _NOT_GIVEN


def _sampled(name: str, text: str) -> FieldWords:
    """A field of SamplingParams: its range and default are defined there."""
    low_high = RANGES.get(name)
    default = getattr(SamplingParams(), name)
    limits = {} if low_high is None else low_high.schema()
    return FieldWords(text, default, limits) if default is not None else FieldWords(text, limits=limits)


FIELDS: dict[str, FieldWords] = {
    "model": FieldWords("A name of the model, or default. Without it: the model that is served."),
    "messages": FieldWords("The conversation.", limits={"minItems": 1}),
    "prompt": FieldWords("A text.", limits={}),
    "CompletionBody.prompt": FieldWords(
        "A text, token ids, or a list of either. Choice p * n + i is answer i to prompt p.",
        whole={"anyOf": [{"type": "string"}, {**_TOKENS, "minItems": 1},
                         {"type": "array", "minItems": 1,
                          "items": {"anyOf": [{"type": "string"}, _TOKENS]}}]}),
    "stream": FieldWords("Send the answer in pieces, as server-sent events.", False),
    "stream_options": FieldWords("Only with stream."),
    "include_usage": FieldWords("A last chunk has the usage.", False),
    "continuous_usage_stats": FieldWords("Every chunk has the usage.", False),
    "n": _sampled("n", "Answers per prompt, each with its own seed."),
    "temperature": _sampled("temperature", "0 is greedy. The checkpoint may set another default."),
    "top_p": _sampled("top_p", "Choose among the likeliest tokens that together reach this probability."),
    "top_k": _sampled("top_k", "Choose among this many of the likeliest tokens; 0 or -1: all."),
    "min_p": _sampled("min_p", "Drop tokens below this share of the likeliest one's probability."),
    "repetition_penalty": _sampled("repetition_penalty",
                                   "Above 1, tokens of prompt and answer get less likely."),
    "presence_penalty": _sampled("presence_penalty", "Above 0, tokens of the answer get less likely, once."),
    "frequency_penalty": _sampled("frequency_penalty",
                                  "Above 0, tokens of the answer get less likely, each time."),
    "logit_bias": FieldWords("Token id to what is added to its logit.",
                             limits={"additionalProperties": {"type": "number", "minimum": -100,
                                                              "maximum": 100},
                                     "propertyNames": {"pattern": "^[0-9]+$"}}),
    "seed": _sampled("seed", "The same seed and request give the same text, whatever else runs."),
    "max_tokens": _sampled("max_tokens", "Longest answer; without it, the rest of the context."),
    "CompletionBody.max_tokens": FieldWords("Longest answer.", 16, {"minimum": 0}),
    "MessagesBody.max_tokens": FieldWords("Longest answer.", limits={"minimum": 1}),
    "max_completion_tokens": FieldWords("The newer name of max_tokens, which wins.", limits={"minimum": 0}),
    "min_tokens": _sampled("min_tokens", "Tokens before which no end token or stop string ends the answer."),
    "stop": FieldWords("Texts that end the answer, which ends before them.",
                       whole={"anyOf": [
                           {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                           {"type": "array", "maxItems": STOPS_MAX,
                            "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX}},
                           {"type": "null"}]}),
    "stop_sequences": FieldWords("Texts that end the answer.",
                                 limits={"maxItems": STOPS_MAX,
                                         "items": {"type": "string", "minLength": 1,
                                                   "maxLength": STOP_CHARS_MAX}}),
    "stop_token_ids": FieldWords("End tokens besides the model's own.", limits={"items": _TOKENS["items"]}),
    "allowed_token_ids": FieldWords("The only tokens of the answer.",
                                    limits={"minItems": 1, "items": _TOKENS["items"]}),
    "bad_words": FieldWords("Texts whose tokens the answer must not contain.",
                            limits={"maxItems": BAD_WORDS_MAX,
                                    "items": {"type": "string", "pattern": "\\S",
                                              "maxLength": BAD_WORD_CHARS_MAX}}),
    "truncate_prompt_tokens": FieldWords(
        "Cut the prompt to this many tokens; -1: to what the context has room for beside the answer.",
        whole={"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
                         {"type": "null"}]}),
    "truncation_side": FieldWords("The side that is cut; right only in /v1/completions.", "left"),
    "include_stop_str_in_output": _sampled("include_stop_str_in_output", "End behind the stop string."),
    "ignore_eos": _sampled("ignore_eos", "Go on behind the model's own end tokens."),
    "skip_special_tokens": _sampled("skip_special_tokens", "Leave special tokens out of the text."),
    "prompt_logprobs": _sampled("prompt_logprobs", "Logprobs of the prompt; not in streams."),
    "logprobs": _sampled("logprobs", "Logprobs of the answer's tokens, with this many alternatives."),
    "ChatBody.logprobs": FieldWords("Logprobs of the answer's tokens.", False),
    "top_logprobs": FieldWords("Alternatives for each token; needs logprobs.", 0,
                               {"minimum": 0, "maximum": LOGPROBS_MAX}),
    "priority": FieldWords("Lower runs earlier; then first come, first served.", 0),
    "cache_salt": FieldWords("Requests with different salts share no cached prefix."),
    "cache_boundaries": FieldWords("Positions in the prompt, in tokens, where the cache should keep a state.",
                                   limits={"maxItems": MARKS_MAX,
                                           "items": {"type": "integer", "minimum": 1,
                                                     "maximum": 2**63 - 1}}),
    "cache_control": FieldWords("The cache should keep a state behind this message."),
    "request_id": FieldWords("The answer's id ends with it."),
    "return_token_ids": FieldWords("Add the token ids of prompt and answer.", False),
    "return_tokens_as_token_ids": FieldWords("Write tokens in logprobs as token_id:17.", False),
    "add_special_tokens": FieldWords("Let the tokenizer add a BOS.", False),
    "CompletionBody.add_special_tokens": FieldWords("Let the tokenizer add a BOS.", True),
    "TokenizePromptBody.add_special_tokens": FieldWords("Let the tokenizer add a BOS.", True),
    "response_format": FieldWords("What the answer must match: an object of type text, json_object or "
                                  "json_schema."),
    "structured_outputs": FieldWords("What the answer must match: an object with one of json, regex, choice, "
                                     "grammar and json_object."),
    "guided_json": FieldWords("A JSON schema that the answer must match."),
    "guided_regex": FieldWords("A regex that the answer must match."),
    "guided_choice": FieldWords("Texts, one of which is the answer.",
                                limits={"minItems": 1, "items": {"type": "string", "minLength": 1}}),
    "guided_grammar": FieldWords("A grammar that the answer must match: lark or GBNF."),
    "echo": FieldWords("Put the prompt in front of the answer.", False),
    "add_generation_prompt": FieldWords("Begin a new answer behind the messages.", True),
    "continue_final_message": FieldWords("The answer continues the last message.", False),
    "chat_template_kwargs": FieldWords("Variables of the chat template."),
    "documents": FieldWords("Documents, if the chat template reads them."),
    "reasoning_effort": FieldWords("How much to reason, if the chat template reads it."),
    "tools": FieldWords("Functions and custom tools that the answer may call."),
    "tool_choice": FieldWords("auto, none, required, the tool to call, or allowed_tools."),
    "MessagesBody.tool_choice": FieldWords("An object of type auto, any, none or tool."),
    "parallel_tool_calls": FieldWords("The answer may call more than one function.", True),
    "include_reasoning": FieldWords("Send the reasoning too.", True),
    "prediction": FieldWords("The client's guess of the answer: drafts for speculation."),
    "store": FieldWords("Accepted and ignored: the answer's header X-Weft-Ignored says so.", False),
    "return_token_strs": FieldWords("Add the text of each token.", False),
    "tokens": FieldWords("Token ids.", limits={"items": _TOKENS["items"]}),
    "system": FieldWords("The system prompt: a text or text blocks."),
    "thinking": FieldWords("An object of type enabled, adaptive or disabled."),
    "output_format": FieldWords("An object of type json_schema: what the answer must match."),
    "output_config": FieldWords("An object whose format is an output_format."),
    "metadata": FieldWords("Accepted; it changes nothing."),
    "service_tier": FieldWords("Accepted; it changes nothing."),
    "input": FieldWords("A text, or items: messages, reasoning, function calls and their outputs."),
    "instructions": FieldWords("The system prompt of this response."),
    "max_output_tokens": FieldWords("Longest answer, reasoning included.", limits={"minimum": 1}),
    "previous_response_id": FieldWords("The stored response that this one continues."),
    "ResponsesBody.store": FieldWords("Keep the response, so that another one can continue it."),
    "ResponsesBody.metadata": FieldWords(
        "Pairs of texts that the response carries.",
        limits={"maxProperties": METADATA_MAX,
                "propertyNames": {"maxLength": METADATA_KEY_CHARS},
                "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE_CHARS}}),
    "max_tool_calls": FieldWords("Accepted; it changes nothing."),
    "text": FieldWords("What the answer must match."),
    "format": FieldWords("An object of type text, json_object or json_schema."),
    "TextOptions.verbosity": FieldWords("Only medium.", whole={"enum": ["medium", None]}),
    "ResponsesBody.reasoning": FieldWords("How to reason."),
    "effort": FieldWords("How much to reason, if the chat template reads it."),
    "summary": FieldWords("Accepted: the answer has the reasoning itself."),
    "generate_summary": FieldWords("The older name of summary."),
    "include": FieldWords("message.output_text.logprobs adds logprobs; OpenAI's other names do nothing.",
                          limits={"items": {"enum": sorted(INCLUDES)}}),
    "background": FieldWords("The answer comes at once; the response is computed without its client.", False),
    "truncation": FieldWords("auto drops the oldest turns of a conversation that is too long.", "disabled"),
    "ResponsesBody.top_logprobs": FieldWords("Alternatives for each token.", 0,
                                             {"minimum": 0, "maximum": LOGPROBS_MAX}),
    "include_obfuscation": FieldWords("Accepted: deltas are never padded."),
    "user": FieldWords("Accepted; it changes nothing."),
    "safety_identifier": FieldWords("Accepted; it changes nothing."),
    "prompt_cache_key": FieldWords("Accepted: every prefix is cached."),
    "prompt_cache_retention": FieldWords("Accepted; it changes nothing."),
    "prompt_cache_options": FieldWords("Accepted; it changes nothing."),
    "input_file_id": FieldWords("The id of the file with the lines of the batch."),
    "endpoint": FieldWords("The url of every line."),
    "completion_window": FieldWords("Lines that are not computed by then expire."),
    "role": FieldWords("Of the message: system, developer, user, assistant or tool."),
    "content": FieldWords("A text or a list of parts."),
    "name": FieldWords("Who speaks, if the chat template reads it."),
    "tool_call_id": FieldWords("The call that a tool message answers."),
    "tool_calls": FieldWords("The calls of an assistant message."),
    "reasoning": FieldWords("The reasoning of an assistant message."),
    "reasoning_content": FieldWords("Another name of reasoning."),
    "level": FieldWords("What is given back; 2: the weights as well.", 1, {"minimum": 1, "maximum": 2}),
    "mode": FieldWords("What happens to running requests; without it they are a 409.",
                       whole={"enum": ["wait", "abort", None]}),
    "timeout": FieldWords("Seconds that mode wait waits.", 30, {"minimum": 0, "maximum": WAIT_MAX_S}),
    "tags": FieldWords("The parts to bring back; without it, all.",
                       whole={"anyOf": [{"enum": ["weights", "kv_cache", None]},
                                        {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}]}),
}


PROMPT_BODIES = frozenset({"TokenizeChatBody", "CountTokensBody", "ResponsePromptBody"})
"""Bodies that take the fields of an answer too, and read those of a prompt only."""
_OF_A_PROMPT = frozenset({"messages", "input", "model"})


def words_of(body: str, name: str) -> FieldWords | None:
    words = FIELDS.get(f"{body}.{name}", FIELDS.get(name))
    if words is not None and body in PROMPT_BODIES and name not in _OF_A_PROMPT:
        return FieldWords(words.text)  # its limits are not looked at
    return words
