"""/openapi.json: the table of endpoints and the types of bodies, as OpenAPI 3.1.

    ENDPOINTS --types--> msgspec.json.schema_components --FIELDS: words, defaults, limits--> components
              --rows---> paths: parameters, body, answers, errors of each operation

The document depends only on weft's code, so it needs no key. Every limit has a number or a flag (law L11). A rule that
the schema cannot state is an error with a code. Unknown fields are ignored, so objects allow them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.request import LOGPROBS_MAX, MARKS_MAX, RANGES, STOP_CHARS_MAX, STOPS_MAX, SamplingParams
from weft.server.errors import ErrorBody
from weft.server.openapi.endpoints import ENDPOINTS, Endpoint
from weft.server.replicas import WAIT_MAX_S
from weft.server.responses.items import INCLUDES, METADATA_KEY_CHARS, METADATA_MAX, METADATA_VALUE_CHARS
from weft.text.tokenizer import BAD_WORD_CHARS_MAX, BAD_WORDS_MAX
from weft.version import weft_version

_REF = "#/components/schemas/{name}"
Schema = dict[str, Any]

ERRORS: dict[int, str] = {
    400: "A field is missing, of a wrong type, out of its range or not served (invalid_type, "
    "missing_required_parameter, unsupported_parameter, invalid_json, context_length_exceeded, "
    "invalid_grammar, too_many_logprobs), or the bytes are not HTTP (invalid_http).",
    401: "No key, or a wrong one (missing_api_key, invalid_api_key).",
    403: "A page of another site sent this (origin_not_allowed).",
    404: "The server has no such model or object (model_not_found), or nothing at this path (unknown_path).",
    405: "The path has other methods (method_not_allowed); Allow lists them.",
    408: "Head or body came too slowly (limits.header_timeout, limits.body_timeout, limits.min_body_rate).",
    409: "Running requests prevent it, or a replica is in another state; the message says more.",
    413: "The body is larger than limits.max_body_mb (body_too_large), or the text than "
    "limits.max_tokenize_chars "
    "(text_too_long).",
    414: "The request line is longer than limits.max_request_line.",
    415: "The body is not declared as JSON.",
    421: "The Host header has another name (host_not_allowed); --allowed-host adds one.",
    422: "Engines died twice while they computed this request (request_killed_engines): it is not tried again.",
    429: "A quota of the key is spent (rate_limit_exceeded), or one address has too many connections. "
    "Retry-After says when to try again.",
    431: "The headers are larger than limits.max_header_bytes or more than limits.max_headers.",
    500: "A bug; its traceback is in the server's log.",
    503: "The server starts, drains, sleeps (asleep), has a full queue (queue_full) or lost its engine. "
    "Retry-After says when to try again.",
}
COMMON_ERRORS = (400, 401, 403, 408, 414, 421, 429, 431, 500, 503)
BODY_ERRORS = (413, 415)


@functools.cache
def openapi_json() -> bytes:
    return msgspec.json.encode(openapi())


def openapi() -> Schema:
    types = [
        kind for row in ENDPOINTS for kind in (*_body_types(row), row.answer, row.events, row.error) if kind is not None
    ]
    schemas, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF)
    schema_of = dict(zip(map(id, types), schemas, strict=False))
    for body in _bodies(components):
        _describe(body, components[body])
    paths: dict[str, Schema] = {}
    for row in ENDPOINTS:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", row.path)
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "weft",
            "version": weft_version(),
            "license": {"name": "Apache-2.0"},
            "description": "An OpenAI-compatible server for hybrid language models. Null means "
            '"not given". Unknown fields are ignored; more than 256 of them are refused.',
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
        "tags": [{"name": name} for name in dict.fromkeys(row.group for row in ENDPOINTS)],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _error(status, text) for status, text in ERRORS.items()},
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of --api-key, if the server has any.",
                },
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(row: Endpoint, schema_of: dict[int, Schema]) -> Schema:
    operation: Schema = {
        "operationId": row.operation,
        "summary": row.text,
        "tags": [row.group],
        "responses": _responses(row, schema_of),
    }
    if row.parameters:
        operation["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "schema": parameter.schema,
                "description": parameter.text,
            }
            for parameter in row.parameters
        ]
    if row.body is not None:
        operation["requestBody"] = {
            "required": not row.body_is_optional,
            "content": {"application/json": {"schema": _body_schema(row, schema_of)}},
        }
    if row.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": row.form}}}
    if row.access == "open":
        operation["security"] = []
    if row.access == "operator":
        operation["description"] = "With --operator-key, only that key opens it."
    return operation


def _responses(row: Endpoint, schema_of: dict[int, Schema]) -> Schema:
    schema = {"type": "object"} if row.answer is None else schema_of[id(row.answer)]
    content: Schema = {row.media_type: {"schema": schema}}
    if row.events is not None:
        content[row.stream_type] = {
            "schema": {
                "type": "string",
                "description": "Lines, each with one JSON object, see x-event.",
                "x-event": schema_of[id(row.events)],
            }
        }
    answers: Schema = {"200": {"description": row.text, "content": content}}
    for status in sorted({*COMMON_ERRORS, *row.errors, *(BODY_ERRORS if row.body is not None else ())}):
        answers[str(status)] = (
            {"$ref": f"#/components/responses/{status}"}
            if row.error is None
            else _error(status, ERRORS[status], schema_of[id(row.error)])
        )
    if row.unhealthy_is_answer:
        answers["503"] = _error(503, "The same object, with the reason.", schema)
    return answers


def _error(status: int, text: str, other: Schema | None = None) -> Schema:
    """Return the schema of an error. ``other``: a second shape that the error may have."""
    schema: Schema = {"$ref": _REF.format(name="ErrorBody")}
    if other is not None:
        schema = {"anyOf": [other, schema]}
    answer: Schema = {"description": text, "content": {"application/json": {"schema": schema}}}
    if status in (429, 503):
        answer["headers"] = {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds."}}
    return answer


def _body_types(row: Endpoint) -> tuple[type, ...]:
    if row.body is None:
        return ()
    return row.body if isinstance(row.body, tuple) else (row.body,)


def _body_schema(row: Endpoint, schema_of: dict[int, Schema]) -> Schema:
    schemas = [schema_of[id(kind)] for kind in _body_types(row)]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _bodies(components: dict[str, Schema]) -> list[str]:
    """Return names of the types in requests: the bodies, and types that bodies refer to."""
    reached: list[str] = []
    waiting = [kind.__name__ for row in ENDPOINTS for kind in _body_types(row)]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.append(name)
            text = msgspec.json.encode(components[name]).decode()
            waiting += re.findall(r'"#/components/schemas/(\w+)"', text)
    return reached


def _describe(body: str, component: Schema) -> None:
    """Add words, defaults and limits to each field, in place."""
    for name, schema in component.get("properties", {}).items():
        words = words_of(body, name)
        if words is not None:
            component["properties"][name] = _described(schema, words)


def _described(schema: Schema, words: FieldWords) -> Schema:
    schema = {key: value for key, value in schema.items() if key != "default"}
    if words.whole is not None:
        schema = dict(words.whole)
    elif words.limits:
        schema = _limited(schema, words.limits)
    schema["description"] = words.text
    if words.has_default:
        schema["default"] = words.default
    return schema


def _limited(schema: Schema, limits: Schema) -> Schema:
    """Add limits to the arm of a schema that is not null."""
    if "anyOf" not in schema:
        return {**schema, **limits}
    arms = [arm if arm.get("type") == "null" else {**arm, **limits} for arm in schema["anyOf"]]
    return {**schema, "anyOf": arms}


_NOT_GIVEN = object()
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


@dataclass(frozen=True, slots=True)
class FieldWords:
    """Description and limits of a field. ``limits``: JSON Schema that is added to the field's own; ``whole``: replaces
    it. ``default``: value if a request has no such field; ``unless``: the setting that decides instead."""

    text: str
    default: Any = _NOT_GIVEN
    limits: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] | None = None

    @property
    def has_default(self) -> bool:
        return self.default is not _NOT_GIVEN


def _sampled(name: str, text: str) -> FieldWords:
    """Return a field of SamplingParams: its range and default are defined there."""
    low_high = RANGES.get(name)
    default = getattr(SamplingParams(), name)
    limits = {} if low_high is None else low_high.schema()
    return FieldWords(text, default, limits) if default is not None else FieldWords(text, limits=limits)


_INPUTS = {
    "anyOf": [
        {"type": "string"},
        {**_TOKENS, "minItems": 1},
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _TOKENS]}},
    ]
}
FIELDS: dict[str, FieldWords] = {
    "model": FieldWords("A name of the model, or default. Without this field: the served model."),
    "messages": FieldWords("The conversation.", limits={"minItems": 1}),
    "prompt": FieldWords("A text.", limits={}),
    "CompletionBody.prompt": FieldWords(
        "A text, token ids, or a list of either. Choice p * n + i is answer i to prompt p.", whole=_INPUTS
    ),
    "stream": FieldWords("Send the answer in pieces, as server-sent events.", False),
    "stream_options": FieldWords("Only with stream."),
    "include_usage": FieldWords("A last chunk has the usage.", False),
    "continuous_usage_stats": FieldWords("Every chunk has the usage.", False),
    "n": _sampled("n", "Answers per prompt, each with its own seed."),
    "temperature": _sampled("temperature", "0 is greedy. The checkpoint may set another default."),
    "top_p": _sampled("top_p", "Choose among the likeliest tokens that together reach this probability."),
    "top_k": _sampled("top_k", "Choose among this many of the likeliest tokens; 0 or -1: all."),
    "min_p": _sampled("min_p", "Drop tokens below this share of the likeliest one's probability."),
    "repetition_penalty": _sampled("repetition_penalty", "Above 1, tokens of prompt and answer get less likely."),
    "presence_penalty": _sampled("presence_penalty", "Above 0, tokens of the answer get less likely, once."),
    "frequency_penalty": _sampled("frequency_penalty", "Above 0, tokens of the answer get less likely, each time."),
    "logit_bias": FieldWords(
        "Token id to the number added to its logit.",
        limits={
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "propertyNames": {"pattern": "^[0-9]+$"},
        },
    ),
    "seed": _sampled("seed", "The same seed and request give the same text, whatever else runs."),
    "max_tokens": _sampled("max_tokens", "Longest answer; without it, the rest of the context."),
    "CompletionBody.max_tokens": FieldWords("Longest answer.", 16, {"minimum": 0}),
    "MessagesBody.max_tokens": FieldWords("Longest answer.", limits={"minimum": 1}),
    "max_completion_tokens": FieldWords("The newer name of max_tokens, which wins.", limits={"minimum": 0}),
    "min_tokens": _sampled("min_tokens", "Tokens before which no end token or stop string ends the answer."),
    "stop": FieldWords(
        "Texts that end the answer, which ends before them.",
        whole={
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                {
                    "type": "array",
                    "maxItems": STOPS_MAX,
                    "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                },
                {"type": "null"},
            ]
        },
    ),
    "stop_sequences": FieldWords(
        "Texts that end the answer.",
        limits={"maxItems": STOPS_MAX, "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX}},
    ),
    "stop_token_ids": FieldWords("End tokens besides the model's own.", limits={"items": _TOKENS["items"]}),
    "allowed_token_ids": FieldWords(
        "The only tokens of the answer.", limits={"minItems": 1, "items": _TOKENS["items"]}
    ),
    "bad_words": FieldWords(
        "Texts whose tokens the answer must not contain.",
        limits={
            "maxItems": BAD_WORDS_MAX,
            "items": {"type": "string", "pattern": "\\S", "maxLength": BAD_WORD_CHARS_MAX},
        },
    ),
    "truncate_prompt_tokens": FieldWords(
        "Cut the prompt to this many tokens; -1: to the room that the answer leaves in the context.",
        whole={"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}, {"type": "null"}]},
    ),
    "truncation_side": FieldWords("The side that is cut; right only in /v1/completions.", "left"),
    "include_stop_str_in_output": _sampled("include_stop_str_in_output", "End after the stop string."),
    "ignore_eos": _sampled("ignore_eos", "Go on after the model's own end tokens."),
    "skip_special_tokens": _sampled("skip_special_tokens", "Leave special tokens out of the text."),
    "prompt_logprobs": _sampled("prompt_logprobs", "Logprobs of the prompt; not in streams."),
    "logprobs": _sampled("logprobs", "Logprobs of the answer's tokens, with this many alternatives."),
    "ChatBody.logprobs": FieldWords("Logprobs of the answer's tokens.", False),
    "top_logprobs": FieldWords(
        "Alternatives for each token; needs logprobs.", 0, {"minimum": 0, "maximum": LOGPROBS_MAX}
    ),
    "priority": FieldWords("Lower runs earlier; then first come, first served.", 0),
    "cache_salt": FieldWords("Requests with different salts share no cached prefix."),
    "SessionBody.name": FieldWords("The name of the session."),
    "ForkBody.name": FieldWords("The name of the fork."),
    "response_id": FieldWords("A stored response: the session has its conversation."),
    "SessionBody.prompt": FieldWords("A text or token ids: the session has them."),
    "expires_after": FieldWords("Seconds after which the session is gone.", limits={"exclusiveMinimum": 0}),
    "filename": FieldWords("The name of the session.", limits={}),
    "session": FieldWords("The session that the request continues: its prompt begins with the session's tokens."),
    "id_slot": FieldWords("The slot that has the tokens of the request afterwards; -1: none."),
    "stream_interval": FieldWords("Tokens of a streamed event after the first; the server's setting by default."),
    "cache_boundaries": FieldWords(
        "Positions in the prompt, in tokens, where the cache should keep a state.",
        limits={"maxItems": MARKS_MAX, "items": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}},
    ),
    "cache_control": FieldWords("The cache should keep a state after this message."),
    "request_id": FieldWords("The answer's id ends with it."),
    "return_token_ids": FieldWords("Add the token ids of prompt and answer.", False),
    "return_tokens_as_token_ids": FieldWords("Write tokens in logprobs as token_id:17.", False),
    "add_special_tokens": FieldWords("Let the tokenizer add a BOS.", False),
    "CompletionBody.add_special_tokens": FieldWords("Let the tokenizer add a BOS.", True),
    "TokenizePromptBody.add_special_tokens": FieldWords("Let the tokenizer add a BOS.", True),
    "response_format": FieldWords("Form of the answer: an object of type text, json_object or json_schema."),
    "structured_outputs": FieldWords(
        "Form of the answer: an object with one of json, regex, choice, grammar and json_object."
    ),
    "guided_json": FieldWords("A JSON schema that the answer must match."),
    "guided_regex": FieldWords("A regex that the answer must match."),
    "guided_choice": FieldWords(
        "Texts, one of which is the answer.", limits={"minItems": 1, "items": {"type": "string", "minLength": 1}}
    ),
    "guided_grammar": FieldWords("A grammar that the answer must match: lark or GBNF."),
    "echo": FieldWords("Put the prompt in front of the answer.", False),
    "add_generation_prompt": FieldWords("Begin a new answer after the messages.", True),
    "continue_final_message": FieldWords("The answer continues the last message.", False),
    "chat_template_kwargs": FieldWords("Variables of the chat template."),
    "documents": FieldWords("Documents, if the chat template reads them."),
    "reasoning_effort": FieldWords("How much to reason, if the chat template reads it."),
    "thinking_token_budget": FieldWords("Most tokens of the reasoning; its end marker follows, then the answer."),
    "ChatBody.reasoning": FieldWords("How to reason: effort, max_tokens, enabled, exclude."),
    "ChatReasoning.max_tokens": FieldWords("Another name of thinking_token_budget."),
    "ReasoningOptions.max_tokens": FieldWords(
        "Most tokens of the reasoning; then its end marker and the answer follow."
    ),
    "enabled": FieldWords("Whether to reason, if the chat template can leave it out."),
    "exclude": FieldWords("Whether the reasoning is left out of the answer."),
    "tools": FieldWords("Functions and custom tools that the answer may call."),
    "tool_choice": FieldWords("auto, none, required, the tool to call, or allowed_tools."),
    "MessagesBody.tool_choice": FieldWords("An object of type auto, any, none or tool."),
    "parallel_tool_calls": FieldWords("The answer may call more than one function.", True),
    "enable_thinking": FieldWords("Variable of the template: false asks for no reasoning."),
    "ChatBody.thinking": FieldWords('{"type": "disabled"} is enable_thinking false, "enabled" is true.'),
    "TokenizeChatBody.thinking": FieldWords("As in a chat."),
    "include_reasoning": FieldWords("Send the reasoning too.", True),
    "prediction": FieldWords("The client's guess of the answer: drafts for speculation."),
    "options": FieldWords(
        "num_predict, temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty, "
        "frequency_penalty, seed and stop; num_ctx bounds the prompt. Others are named in "
        "X-Weft-Ignored."
    ),
    "OllamaChatBody.stream": FieldWords("Send the answer in pieces, as lines of JSON.", True),
    "OllamaGenerateBody.stream": FieldWords("Send the answer in pieces, as lines of JSON.", True),
    "OllamaChatBody.messages": FieldWords("The conversation; empty asks whether the model is ready."),
    "OllamaGenerateBody.prompt": FieldWords("A text; empty asks whether the model is ready."),
    "OllamaGenerateBody.system": FieldWords("The system prompt."),
    "OllamaMessage.thinking": FieldWords("The reasoning of an earlier answer."),
    "OllamaMessage.tool_name": FieldWords("The tool whose result this is."),
    "OllamaChatBody.format": FieldWords("Form of the answer: json, or a JSON schema."),
    "OllamaGenerateBody.format": FieldWords("Form of the answer: json, or a JSON schema."),
    "think": FieldWords("Whether to reason: true, false, low, medium or high."),
    "keep_alive": FieldWords("Accepted without effect on a server with one model."),
    "images": FieldWords("Pictures, in base64, of a model that reads them."),
    "OllamaGenerateBody.context": FieldWords("The context of an earlier answer, which goes on."),
    "raw": FieldWords("The prompt goes to the model without the chat template.", False),
    "verbose": FieldWords("Accepted; it changes nothing.", False),
    **{f"Ollama{body}Body.name": FieldWords("The same as model.") for body in ("Show", "Create", "Delete", "Pull")},
    "OllamaCreateBody.model": FieldWords("The new name; an existing name gets the new meaning."),
    "OllamaCreateBody.from": FieldWords("A served model, an adapter or a created name."),
    "OllamaCreateBody.files": FieldWords("The digest of an uploaded GGUF file by its name, instead of from."),
    "OllamaCreateBody.system": FieldWords("The system prompt of requests that have none."),
    "OllamaCreateBody.template": FieldWords("A chat template in Jinja, instead of the model's own."),
    "OllamaCreateBody.parameters": FieldWords("Defaults of the options of requests."),
    "OllamaCreateBody.messages": FieldWords("Messages that come before those of a request."),
    "OllamaCreateBody.license": FieldWords("Shown by /api/show."),
    "OllamaCreateBody.stream": FieldWords("Answer in lines of JSON.", True),
    "OllamaCopyBody.source": FieldWords("A served model, an adapter or a created name."),
    "OllamaCopyBody.destination": FieldWords("The new name."),
    "OllamaDeleteBody.model": FieldWords("A created name, or a pulled model."),
    "OllamaPullBody.model": FieldWords("owner/name, or owner/name:Q4_K_M for one GGUF file of it."),
    "OllamaPullBody.stream": FieldWords("Report the progress in lines of JSON.", True),
    "insecure": FieldWords("Accepted; it changes nothing: HF_ENDPOINT names the hub.", False),
    "EmbeddingBody.input": FieldWords("A text, token ids, or a list of either.", whole=_INPUTS),
    **{
        f"{body}.{name}": FieldWords(text, whole=_INPUTS if name == "input" else None)
        for body in ("ClassifyBody", "TaskBody")
        for name, text in (
            ("input", "A text, token ids, or a list of either."),
            ("messages", "A conversation, which the chat template writes, instead of input."),
            ("add_generation_prompt", "Begin an answer after the messages."),
            ("use_activation", "false: logits instead of probabilities, vectors as they are."),
        )
    },
    "TaskBody.task": FieldWords("What the answer has; by default what the checkpoint was trained for."),
    "OllamaEmbedBody.input": FieldWords("A text, token ids, or a list of either.", whole=_INPUTS),
    "encoding_format": FieldWords("float: numbers; base64: their float32 bytes.", "float"),
    "dimensions": FieldWords("The first of an embedding, normalised again.", limits={"minimum": 1}),
    "prompt_name": FieldWords("The name of a prompt of the checkpoint that comes before each text."),
    "EmbeddingBody.prompt": FieldWords("A text that goes before each text."),
    **{
        f"{body}.truncate_prompt_tokens": FieldWords(
            "A longer input loses its end, and the answer lists it in truncated; -1: the longest that is "
            "served. Without it a longer input is an error.",
            limits={"minimum": -1},
        )
        for body in ("EmbeddingBody", "CohereEmbedBody", "RerankBody", "ScoreBody", "ClassifyBody", "TaskBody")
    },
    "texts": FieldWords("The texts.", limits={"minItems": 1}),
    "CohereEmbedBody.inputs": FieldWords("Texts in parts, which are joined, instead of texts."),
    "input_type": FieldWords("The prompt of the checkpoint that comes before each text, if it has one of this name."),
    "embedding_types": FieldWords("Forms of the vectors; float by default."),
    "output_dimension": FieldWords("As dimensions, by Cohere's name.", limits={"minimum": 1}),
    "CohereEmbedBody.truncate": FieldWords("END: a longer text loses its end. NONE: it is an error.", "NONE"),
    "CohereEmbedBody.max_tokens": FieldWords("Longest text in tokens, with truncate END.", limits={"minimum": 1}),
    "TextInput.content": FieldWords("The parts."),
    "TextContent.type": FieldWords("The type of the part."),
    "TextContent.text": FieldWords("The text."),
    "query": FieldWords("The text by which the documents are ranked."),
    "RerankBody.documents": FieldWords(
        "Texts, or objects with a text.",
        whole={
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
                ]
            },
        },
    ),
    "top_n": FieldWords("How many results come back; by default all.", limits={"minimum": 1}),
    "return_documents": FieldWords("Whether a result has the text of its document.", True),
    "max_tokens_per_doc": FieldWords("As truncate_prompt_tokens, by Cohere's name.", limits={"minimum": 1}),
    "instruction": FieldWords("Instruction of a generative reranker; without it, that of Qwen3-Reranker."),
    "text_1": FieldWords("One text for all of text_2, or one for each."),
    "text_2": FieldWords("A text, or a list of texts."),
    "DecisionBody.input": FieldWords("The text, or messages of the user with its parts."),
    "DecisionBody.questions": FieldWords("Questions about the text.", limits={"minItems": 1, "maxItems": 200}),
    "SystemOneBody.state": FieldWords("The text, or JSON."),
    "SystemOneBody.questions": FieldWords("Questions by name: each has type, instructions and criteria."),
    "PredicateQuestion.type": FieldWords("The type of the question."),
    "ChoiceQuestion.type": FieldWords("The type of the question."),
    "ScoreQuestion.type": FieldWords("The type of the question."),
    "PredicateQuestion.instructions": FieldWords("The statement that may be true."),
    "ChoiceQuestion.instructions": FieldWords("The question whose answer is one of the choices."),
    "ScoreQuestion.instructions": FieldWords("The question whose answer is a level."),
    "choices": FieldWords("Values to choose from.", limits={"minItems": 2, "maxItems": 26}),
    "levels": FieldWords("Levels, the lowest first.", limits={"minItems": 2, "maxItems": 10}),
    "ChoiceOption.value": FieldWords("A text or a boolean; no two are the same."),
    "ChoiceOption.description": FieldWords("Meaning of the choice."),
    "ScoreLevel.label": FieldWords("Name of the level."),
    "ScoreLevel.description": FieldWords("Meaning of the level."),
    "truncate": FieldWords(
        "A longer input loses its end, and the answer lists it in truncated. Ollama's default is true.", False
    ),
    "store": FieldWords("Accepted and ignored: the answer's header X-Weft-Ignored says so.", False),
    "return_token_strs": FieldWords("Add the text of each token.", False),
    "tokens": FieldWords("Token ids.", limits={"items": _TOKENS["items"]}),
    "system": FieldWords("The system prompt: a text or text blocks."),
    "thinking": FieldWords("An object of type enabled, adaptive or disabled."),
    "output_format": FieldWords("An object of type json_schema: the form of the answer."),
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
        limits={
            "maxProperties": METADATA_MAX,
            "propertyNames": {"maxLength": METADATA_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE_CHARS},
        },
    ),
    "max_tool_calls": FieldWords("Accepted; it changes nothing."),
    "text": FieldWords("Form of the answer."),
    "format": FieldWords("An object of type text, json_object or json_schema."),
    "TextOptions.verbosity": FieldWords("Only medium.", whole={"enum": ["medium", None]}),
    "ResponsesBody.reasoning": FieldWords("How to reason."),
    "effort": FieldWords("How much to reason, if the chat template reads it."),
    "summary": FieldWords("Accepted without effect: the answer has the complete reasoning."),
    "generate_summary": FieldWords("The older name of summary."),
    "include": FieldWords(
        "message.output_text.logprobs adds logprobs; OpenAI's other names do nothing.",
        limits={"items": {"enum": sorted(INCLUDES)}},
    ),
    "background": FieldWords("Return at once, and compute the response in the background.", False),
    "truncation": FieldWords("auto drops the oldest turns of a conversation that is too long.", "disabled"),
    "ResponsesBody.top_logprobs": FieldWords(
        "Alternatives for each token.", 0, {"minimum": 0, "maximum": LOGPROBS_MAX}
    ),
    "include_obfuscation": FieldWords("Accepted: deltas are never padded."),
    "user": FieldWords("Accepted; it changes nothing."),
    "safety_identifier": FieldWords("Accepted; it changes nothing."),
    "prompt_cache_key": FieldWords("Accepted: every prefix is cached."),
    "prompt_cache_retention": FieldWords("Accepted; it changes nothing."),
    "prompt_cache_options": FieldWords("Accepted; it changes nothing."),
    "input_file_id": FieldWords("The id of the file with the lines of the batch."),
    "endpoint": FieldWords("The url of every line."),
    "completion_window": FieldWords("Lines that are not computed by then expire."),
    "role": FieldWords("Role of the message: system, developer, user, assistant or tool."),
    "content": FieldWords("A text or a list of parts."),
    "name": FieldWords("Who speaks, if the chat template reads it."),
    "tool_call_id": FieldWords("The call that a tool message answers."),
    "tool_calls": FieldWords("The calls of an assistant message."),
    "reasoning": FieldWords("The reasoning of an assistant message."),
    "reasoning_content": FieldWords("Another name of reasoning."),
    "level": FieldWords("Depth of the sleep; 2 drops the weights as well.", 1, {"minimum": 1, "maximum": 2}),
    "mode": FieldWords(
        "Treatment of running requests; without it they are a 409.", whole={"enum": ["wait", "abort", None]}
    ),
    "timeout": FieldWords("Longest wait of the mode wait, seconds.", 30, {"minimum": 0, "maximum": WAIT_MAX_S}),
    "lora_name": FieldWords(
        "The adapter's name in the field model of requests.", limits={"minLength": 1, "maxLength": 256}
    ),
    "UpdateWeightsBody.mode": FieldWords(
        "Treatment of running requests: they go on with the new weights, are waited for, or end.",
        "keep",
        whole={"enum": ["keep", "wait", "abort"]},
    ),
    "PauseBody.mode": FieldWords(
        "Treatment of running requests: they stay where they are, are waited for, or end.",
        "keep",
        whole={"enum": ["keep", "wait", "abort"]},
    ),
    "UpdateWeightsBody.path": FieldWords("The absolute path of a checkpoint with the shapes of the served one."),
    "model_path": FieldWords("The same as path."),
    "weight_version": FieldWords("A name for the weights, which answers and /health show from then on.", ""),
    "update_info": FieldWords("Not served: tensors that another process sends. Write them to a directory."),
    "clear_cache": FieldWords("Whether the prefix cache is emptied as well.", False),
    "lora_path": FieldWords("Its directory on the server, in peft's form, or owner/name on the hub."),
    "load_inplace": FieldWords("Other files may take a name that is in use; false refuses them.", True),
    "lora_int_id": FieldWords("Sent by vLLM's clients; unread."),
    "tags": FieldWords(
        "The parts to wake; without this field, all.",
        whole={
            "anyOf": [
                {"enum": ["weights", "kv_cache", None]},
                {"type": "array", "items": {"enum": ["weights", "kv_cache"]}},
            ]
        },
    ),
}

PROMPT_BODIES = frozenset({"TokenizeChatBody", "CountTokensBody", "ResponsePromptBody"})
"""Bodies that also take the fields of an answer, and read only those of a prompt."""
_OF_A_PROMPT = frozenset({"messages", "input", "model"})


def words_of(body: str, name: str) -> FieldWords | None:
    words = FIELDS.get(f"{body}.{name}", FIELDS.get(name))
    if words is not None and body in PROMPT_BODIES and name not in _OF_A_PROMPT:
        return FieldWords(words.text)  # this body's limits do not apply
    return words
