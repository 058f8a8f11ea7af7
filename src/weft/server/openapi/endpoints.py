"""The table of endpoints: path, method, body and answer of each.

    Endpoint(operation, method, path, body, answer, ...)
        --app.build_app--> Route        operation -> the handler of that name
        --document.openapi--> an operation of /openapi.json

Both readers take every row, so no endpoint can be missing from the description. Rows of one path must follow one
another. To add an endpoint, write a row here, a handler in ``app``, and a row in ``document`` for each new field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from weft.server.adapters import LoadAdapterBody, UnloadAdapterBody
from weft.server.anthropic.protocol import CountTokensBody, MessagesBody
from weft.server.batches.files import FileObject
from weft.server.batches.routes import PURPOSES, BatchBody, BatchList, BatchObject, DeletedFile, FileList
from weft.server.chat import ChatChunk, ChatCompletion
from weft.server.cohere import CohereEmbedBody, CohereEmbeddings
from weft.server.completions import CompletionResponse
from weft.server.decisions import DecisionAnswers, DecisionBody, SystemOneAnswers, SystemOneBody
from weft.server.ollama import protocol as ollama
from weft.server.pooling import EmbeddingBody, EmbeddingList, RerankAnswer, RerankBody, ScoreBody, ScoreList
from weft.server.pooling_tasks import ClassificationList, ClassifyBody, PooledRows, TaskBody
from weft.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizePromptBody
from weft.server.replicas import (
    WAIT_MAX_S,
    WAIT_S,
    IsSleepingAnswer,
    ReplicaList,
    SleepAnswer,
    SleepBody,
    WakeAnswer,
    WakeBody,
)
from weft.server.responses.answers import ResponseObject
from weft.server.responses.items import ResponsesBody
from weft.server.sessions.routes import DeletedSession, ForkBody, SessionBody, SessionList, SessionObject
from weft.server.sessions.slots import ACTIONS, SlotAnswer, SlotBody, SlotCard
from weft.server.sse import EVENTS, JSON_LINES, PAGE_DEFAULT, PAGE_MAX, Page
from weft.server.weights import IsPausedAnswer, PauseBody, PausedAnswer, ResetAnswer, UpdateAnswer, UpdateWeightsBody
from weft.text.prompt import PictureSpan

Access = Literal["open", "client", "operator"]
"""Kinds of keys that open an endpoint, if the server has keys."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the path or the query. ``schema``: JSON Schema."""

    name: str
    place: Literal["path", "query"]
    schema: dict[str, Any]
    text: str


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "weft"
    root: str
    parent: str | None = None
    max_model_len: int
    vocab_size: int
    chat_sampling: dict[str, float | int]


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    spans: list[PictureSpan] = []


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class InputTokens(msgspec.Struct):
    input_tokens: int


class HealthAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer of /health. ``status``: ok, paused, sleeping, degraded, starting, draining or dead; ``reason`` for the
    last four. ``store``: present while the bucket of the store does not answer. ``weight_version``: see
    /update_weights."""

    status: str
    reason: str | None = None
    level: int | None = None
    missing: list[str] | None = None
    store: str | None = None
    weight_version: str | None = None


class VersionAnswer(msgspec.Struct):
    version: str


class LoadAnswer(msgspec.Struct):
    server_load: int
    running: int
    waiting: int


class Message(msgspec.Struct, kw_only=True):
    """An answer in Anthropic's dialect. ``content``: thinking, text and tool_use blocks."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool


class ItemList(Page[dict[str, Any]], kw_only=True):
    """A part of a list of items. ``data``: message, reasoning, function_call and function_call_output items."""


class ResponsePromptBody(ResponsesBody, kw_only=True):
    """The body of a response; only the fields that shape its prompt have an effect."""


class InputTokensAnswer(msgspec.Struct):
    object: str
    input_tokens: int


class ResponseStreamEvent(msgspec.Struct, kw_only=True):
    """An event of a stream of Responses. ``type``: response.created, response.output_text.delta and so on; the other
    fields go by it."""

    type: str
    sequence_number: int


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """A failure in Anthropic's dialect."""

    type: str = "error"
    error: MessagesErrorDetail
    request_id: str | None = None


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event of a stream of Messages. ``type``: message_start, content_block_start, content_block_delta,
    content_block_stop, message_delta, message_stop, ping or error; the other fields go by it."""

    type: str


class OllamaError(msgspec.Struct):
    """A failure in Ollama's dialect."""

    error: str


class OllamaLine(msgspec.Struct, kw_only=True):
    """An answer of Ollama's API, or a line of a stream; the last has ``done`` and the counts. Times are nanoseconds."""

    model: str
    created_at: str
    message: dict[str, Any] | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """Embeddings in Ollama's form. ``truncated``: the indices of inputs that were cut."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    truncated: list[int] | UnsetType = UNSET


class OllamaEmbedding(msgspec.Struct):
    embedding: list[float]


class OllamaModels(msgspec.Struct):
    models: list[dict[str, Any]]


class OllamaModel(msgspec.Struct, kw_only=True):
    modelfile: str
    details: dict[str, Any]
    capabilities: list[str]
    parameters: str
    template: str
    system: str | UnsetType = UNSET
    messages: list[dict[str, Any]] | UnsetType = UNSET
    license: str | UnsetType = UNSET
    modified_at: str
    model_info: dict[str, Any]


class OllamaStatus(msgspec.Struct, kw_only=True):
    """A step of a long call, or its end (``success``). ``digest``, ``total`` and ``completed``: of a file."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint. ``errors``: statuses in addition to those that every endpoint has (``document.COMMON_ERRORS``)."""

    operation: str
    method: str
    path: str
    group: str
    text: str
    body: Any = None
    body_is_optional: bool = False
    form: dict[str, Any] | None = None
    """Schema of a form (multipart/form-data) instead of a body."""
    answer: Any = None
    media_type: str = "application/json"
    events: Any = None
    stream_type: str = EVENTS
    parameters: tuple[Parameter, ...] = ()
    access: Access = "client"
    errors: tuple[int, ...] = ()
    error: Any = None
    """Shape of errors in addition to OpenAI's shape, which the edge and the gate use on every path."""
    unhealthy_is_answer: bool = False
    """Whether 503 has the same body as 200."""


_NAME = Parameter("name", "path", {"type": "string"}, "A name of the model.")
_MODEL = Parameter("model", "query", {"type": "string"}, "A name of the model.")
_LEVEL = Parameter(
    "level",
    "query",
    {"type": "integer", "minimum": 1, "maximum": 2, "default": 1},
    "Depth of the sleep; 2 drops the weights as well.",
)
_MODE = Parameter(
    "mode",
    "query",
    {"type": "string", "enum": ["wait", "abort"]},
    "Treatment of running requests; without it they are a 409.",
)
_TIMEOUT = Parameter(
    "timeout",
    "query",
    {"type": "number", "minimum": 0, "maximum": 86400, "default": 30},
    "Longest wait of the mode wait, seconds.",
)
_PAUSE_MODE = Parameter(
    "mode",
    "query",
    {"type": "string", "enum": ["keep", "wait", "abort"], "default": "keep"},
    "Treatment of running requests: they go on later, are waited for, or end.",
)
_CLEAR_CACHE = Parameter(
    "clear_cache", "query", {"type": "boolean", "default": False}, "Whether the prefix cache is emptied."
)
_PATH = Parameter("path", "query", {"type": "string"}, "The absolute path of a checkpoint with the same shapes.")
_VERSION = Parameter(
    "weight_version", "query", {"type": "string", "maxLength": 256}, "A name for the weights, which answers show."
)
_STORE = Parameter(
    "store", "query", {"type": "boolean", "default": True}, "Whether the records of the store are dropped too."
)
_TAGS = Parameter(
    "tags",
    "query",
    {"type": "array", "items": {"type": "string", "enum": ["weights", "kv_cache"]}},
    "The parts to wake; without it, all.",
)
_RESPONSE = Parameter("response_id", "path", {"type": "string"}, "The id of a response.")
_FOLLOWED = Parameter(
    "stream",
    "query",
    {"type": "string", "enum": ["true", "false"], "default": "false"},
    "true: the events of a response that was created with background and stream.",
)
_STARTING_AFTER = Parameter(
    "starting_after",
    "query",
    {"type": "integer", "minimum": 0},
    "Only events with larger sequence numbers, with stream.",
)
_ORDER = Parameter(
    "order", "query", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}, "desc: the last item first."
)
_AFTER = Parameter("after", "query", {"type": "string"}, "The id of the item before the page.")
_MODEL = Parameter("model", "query", {"type": "string"}, "The model; not needed if the server has only one.")
_REPLICA = Parameter(
    "replica", "path", {"type": "integer", "minimum": 0, "maximum": 999_999_999}, "The number of the replica."
)
_DRAIN_S = Parameter(
    "timeout",
    "query",
    {"type": "number", "minimum": 0, "maximum": WAIT_MAX_S, "default": WAIT_S},
    "Seconds that running requests get to finish; then they resume on another replica.",
)
_RESTART = Parameter("restart", "query", {"type": "boolean", "default": False}, "Start a new process.")

_SESSION = Parameter("name", "path", {"type": "string"}, "The name of a session.")
_SLOT = Parameter("id_slot", "path", {"type": "integer", "minimum": 0, "maximum": 63}, "The number of a slot.")
_ACTION = Parameter("action", "query", {"type": "string", "enum": list(ACTIONS)}, "The operation on the slot.")
_FILE = Parameter("file_id", "path", {"type": "string"}, "The id of a file.")
_DIGEST = Parameter("digest", "path", {"type": "string"}, "sha256: and 64 hexadecimal digits.")
_BATCH = Parameter("batch_id", "path", {"type": "string"}, "The id of a batch.")
_PAGE = Parameter(
    "limit",
    "query",
    {"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE_DEFAULT},
    "The most objects of one page.",
)
_PURPOSE = Parameter("purpose", "query", {"type": "string", "enum": list(PURPOSES)}, "Files of this purpose.")
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Batch lines, see docs/batches.md."},
        "purpose": {"type": "string", "enum": ["batch"], "description": "Purpose of the file."},
    },
}

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(operation="chat", method="POST", path="/v1/chat/completions", group="Generate",
             text="The answer to a conversation.", body=ChatBody, answer=ChatCompletion, events=ChatChunk,
             errors=(404, 413, 422)),
    Endpoint(operation="completions", method="POST", path="/v1/completions", group="Generate",
             text="The continuation of one prompt or several.", body=CompletionBody,
             answer=CompletionResponse, events=CompletionResponse, errors=(404, 413, 422)),
    Endpoint(operation="create_response", method="POST", path="/v1/responses", group="Generate",
             text="An answer as items: reasoning, message, function calls.", body=ResponsesBody,
             answer=ResponseObject, events=ResponseStreamEvent, errors=(404, 413, 422)),
    Endpoint(operation="response_input_tokens", method="POST", path="/v1/responses/input_tokens",
             group="Tokens", text="The length of the prompt of /v1/responses.", body=ResponsePromptBody,
             answer=InputTokensAnswer, errors=(404, 413)),
    Endpoint(operation="retrieve_response", method="GET", path="/v1/responses/{response_id}",
             group="Responses", text="A stored response of this key.", answer=ResponseObject,
             parameters=(_RESPONSE, _FOLLOWED, _STARTING_AFTER), events=ResponseStreamEvent, errors=(404,)),
    Endpoint(operation="delete_response", method="DELETE", path="/v1/responses/{response_id}",
             group="Responses", text="Deletes a stored response of this key.", answer=DeletedResponse,
             parameters=(_RESPONSE,), errors=(404,)),
    Endpoint(operation="cancel_response", method="POST", path="/v1/responses/{response_id}/cancel",
             group="Responses", text="Ends a response that is computed in the background.",
             answer=ResponseObject, parameters=(_RESPONSE,), errors=(404,)),
    Endpoint(operation="response_input_items", method="GET", path="/v1/responses/{response_id}/input_items",
             group="Responses", text="The input items of a response's own request.", answer=ItemList,
             parameters=(_RESPONSE, _PAGE, _ORDER, _AFTER), errors=(404,)),
    Endpoint(operation="save_session", method="POST", path="/v1/sessions", group="Sessions",
             text="Saves a conversation or a prompt under a name.", body=SessionBody, answer=SessionObject,
             errors=(404, 409, 413)),
    Endpoint(operation="list_sessions", method="GET", path="/v1/sessions", group="Sessions",
             text="The sessions of this key, the oldest first.", answer=SessionList, parameters=(_AFTER, _PAGE),
             errors=(404,)),
    Endpoint(operation="retrieve_session", method="GET", path="/v1/sessions/{name}", group="Sessions",
             text="A session of this key, with its messages and tokens.", answer=SessionObject,
             parameters=(_SESSION,), errors=(404, 409)),
    Endpoint(operation="delete_session", method="DELETE", path="/v1/sessions/{name}", group="Sessions",
             text="Deletes a session of this key.", answer=DeletedSession, parameters=(_SESSION,), errors=(404,)),
    Endpoint(operation="restore_session", method="POST", path="/v1/sessions/{name}/restore", group="Sessions",
             text="Brings the state of a session into memory.", answer=SessionObject, parameters=(_SESSION,),
             errors=(404, 409)),
    Endpoint(operation="fork_session", method="POST", path="/v1/sessions/{name}/fork", group="Sessions",
             text="A second name for a session; nothing is copied.", body=ForkBody, answer=SessionObject,
             parameters=(_SESSION,), errors=(404, 409)),
    Endpoint(operation="slots", method="GET", path="/slots", group="Sessions",
             text="The slots of this key that have tokens, for llama-server's clients.", answer=list[SlotCard]),
    Endpoint(operation="slot_action", method="POST", path="/slots/{id_slot}", group="Sessions",
             text="Saves, restores or erases a slot, for llama-server's clients.", body=SlotBody,
             body_is_optional=True, answer=SlotAnswer, parameters=(_SLOT, _ACTION), errors=(404, 409)),
    Endpoint(operation="list_files", method="GET", path="/v1/files", group="Batches",
             text="The files of this key, the newest first.", answer=FileList,
             parameters=(_AFTER, _PAGE, _PURPOSE), errors=(404,)),
    Endpoint(operation="upload_file", method="POST", path="/v1/files", group="Batches",
             text="Keeps the input of a batch.", form=_UPLOAD, answer=FileObject, errors=(404, 413, 415)),
    Endpoint(operation="retrieve_file", method="GET", path="/v1/files/{file_id}", group="Batches",
             text="A file of this key.", answer=FileObject, parameters=(_FILE,), errors=(404,)),
    Endpoint(operation="delete_file", method="DELETE", path="/v1/files/{file_id}", group="Batches",
             text="Deletes a file of this key.", answer=DeletedFile, parameters=(_FILE,), errors=(404,)),
    Endpoint(operation="file_content", method="GET", path="/v1/files/{file_id}/content", group="Batches",
             text="The bytes of a file.", answer=str, media_type="application/octet-stream",
             parameters=(_FILE,), errors=(404,)),
    Endpoint(operation="list_batches", method="GET", path="/v1/batches", group="Batches",
             text="The batches of this key, the newest first.", answer=BatchList,
             parameters=(_AFTER, _PAGE), errors=(404,)),
    Endpoint(operation="create_batch", method="POST", path="/v1/batches", group="Batches",
             text="Answers every line of a file, below other requests.", body=BatchBody, answer=BatchObject,
             errors=(404,)),
    Endpoint(operation="retrieve_batch", method="GET", path="/v1/batches/{batch_id}", group="Batches",
             text="A batch of this key.", answer=BatchObject, parameters=(_BATCH,), errors=(404,)),
    Endpoint(operation="cancel_batch", method="POST", path="/v1/batches/{batch_id}/cancel", group="Batches",
             text="Ends a batch; the answers so far become its files.", answer=BatchObject,
             parameters=(_BATCH,), errors=(404,)),
    Endpoint(operation="messages", method="POST", path="/v1/messages", group="Generate",
             text="The answer to a conversation, in Anthropic's dialect.", body=MessagesBody, answer=Message,
             events=MessageEvent, error=MessagesError, errors=(404, 413, 422)),
    Endpoint(operation="count_tokens", method="POST", path="/v1/messages/count_tokens", group="Tokens",
             text="The length of a conversation of /v1/messages.", body=CountTokensBody, answer=InputTokens,
             error=MessagesError, errors=(404, 413)),
    Endpoint(operation="ollama_chat", method="POST", path="/api/chat", group="Ollama",
             text="The answer to a conversation, in Ollama's dialect.", body=ollama.OllamaChatBody,
             answer=OllamaLine, events=OllamaLine, stream_type=JSON_LINES, error=OllamaError,
             errors=(404, 413, 422)),
    Endpoint(operation="ollama_generate", method="POST", path="/api/generate", group="Ollama",
             text="The answer to one prompt, in Ollama's dialect.", body=ollama.OllamaGenerateBody,
             answer=OllamaLine, events=OllamaLine, stream_type=JSON_LINES, error=OllamaError,
             errors=(404, 413, 422)),
    Endpoint(operation="embeddings", method="POST", path="/v1/embeddings", group="Embed and rank",
             text="The embeddings of texts or token ids.", body=EmbeddingBody, answer=EmbeddingList,
             errors=(404, 413, 422)),
    Endpoint(operation="cohere_embed", method="POST", path="/v2/embed", group="Embed and rank",
             text="The embeddings of texts, in Cohere's form.", body=CohereEmbedBody, answer=CohereEmbeddings,
             errors=(404, 413, 422)),
    Endpoint(operation="rerank", method="POST", path="/v1/rerank", group="Embed and rank",
             text="Documents, ranked by their relevance to a query.", body=RerankBody, answer=RerankAnswer,
             errors=(404, 413, 422)),
    Endpoint(operation="plain_rerank", method="POST", path="/rerank", group="Embed and rank",
             text="The same as /v1/rerank.", body=RerankBody, answer=RerankAnswer, errors=(404, 413, 422)),
    Endpoint(operation="cohere_rerank", method="POST", path="/v2/rerank", group="Embed and rank",
             text="The same as /v1/rerank.", body=RerankBody, answer=RerankAnswer, errors=(404, 413, 422)),
    Endpoint(operation="score", method="POST", path="/v1/score", group="Embed and rank",
             text="The relevance of one text to another, for pairs.", body=ScoreBody, answer=ScoreList,
             errors=(404, 413, 422)),
    Endpoint(operation="plain_score", method="POST", path="/score", group="Embed and rank",
             text="The same as /v1/score.", body=ScoreBody, answer=ScoreList, errors=(404, 413, 422)),
    Endpoint(operation="classify", method="POST", path="/classify", group="Embed and rank",
             text="The probabilities of the labels of a score head, in vLLM's form.", body=ClassifyBody,
             answer=ClassificationList, errors=(404, 413, 422)),
    Endpoint(operation="pooling", method="POST", path="/pooling", group="Embed and rank",
             text="Embeddings or labels, of a text or of each token, in vLLM's form.", body=TaskBody,
             answer=PooledRows, errors=(404, 413, 422)),
    Endpoint(operation="decisions", method="POST", path="/v1/decisions", group="Decide",
             text="The probability of each answer to questions about one text.", body=DecisionBody,
             answer=DecisionAnswers, errors=(404, 413, 422)),
    Endpoint(operation="system_one", method="POST", path="/v1/systemone", group="Decide",
             text="The same in the form of System One.", body=SystemOneBody, answer=SystemOneAnswers,
             errors=(404, 413, 422)),
    Endpoint(operation="ollama_embed", method="POST", path="/api/embed", group="Ollama",
             text="The embeddings of texts, in Ollama's dialect.", body=ollama.OllamaEmbedBody,
             answer=OllamaEmbeddings, error=OllamaError, errors=(404, 413, 422)),
    Endpoint(operation="ollama_embeddings", method="POST", path="/api/embeddings", group="Ollama",
             text="The embedding of one text, in Ollama's older dialect.", body=ollama.OllamaEmbeddingsBody,
             answer=OllamaEmbedding, error=OllamaError, errors=(404, 413, 422)),
    Endpoint(operation="ollama_tags", method="GET", path="/api/tags", group="Ollama",
             text="The names of the model, as Ollama lists them.", answer=OllamaModels, error=OllamaError),
    Endpoint(operation="ollama_show", method="POST", path="/api/show", group="Ollama",
             text="Kind and abilities of the model, for Ollama's clients.", body=ollama.OllamaShowBody,
             answer=OllamaModel, error=OllamaError, errors=(404,)),
    Endpoint(operation="ollama_ps", method="GET", path="/api/ps", group="Ollama",
             text="The model that is loaded, for Ollama's clients.", answer=OllamaModels, error=OllamaError),
    Endpoint(operation="ollama_version", method="GET", path="/api/version", group="Ollama",
             text="The version of Ollama's API that is served.", answer=VersionAnswer, error=OllamaError),
    Endpoint(operation="ollama_create", method="POST", path="/api/create", group="Ollama", access="operator",
             text="A name for a served model with a system prompt, parameters, a template and messages.",
             body=ollama.OllamaCreateBody, answer=OllamaStatus, events=OllamaStatus, stream_type=JSON_LINES,
             error=OllamaError, errors=(404,)),
    Endpoint(operation="ollama_has_blob", method="HEAD", path="/api/blobs/{digest}", group="Ollama",
             access="operator", text="Whether a file was uploaded: 200 or 404.", parameters=(_DIGEST,), answer=str,
             error=OllamaError, errors=(404,)),
    Endpoint(operation="ollama_upload_blob", method="POST", path="/api/blobs/{digest}", group="Ollama",
             access="operator", text="Keeps a file for /api/create, if its bytes have the digest.",
             parameters=(_DIGEST,), answer=str, error=OllamaError, errors=(413,)),
    Endpoint(operation="ollama_copy", method="POST", path="/api/copy", group="Ollama", access="operator",
             text="Another name for the same model.", body=ollama.OllamaCopyBody, answer=OllamaStatus,
             error=OllamaError, errors=(404,)),
    Endpoint(operation="ollama_delete", method="DELETE", path="/api/delete", group="Ollama",
             access="operator", text="Removes a created name, or a pulled model that no process has loaded.",
             body=ollama.OllamaDeleteBody, answer=OllamaStatus, error=OllamaError, errors=(404, 409)),
    Endpoint(operation="ollama_pull", method="POST", path="/api/pull", group="Ollama", access="operator",
             text="Fetches a model from the hub to this machine's disk.", body=ollama.OllamaPullBody,
             answer=OllamaStatus, events=OllamaStatus, stream_type=JSON_LINES, error=OllamaError,
             errors=(404, 409)),
    Endpoint(operation="models", method="GET", path="/v1/models", group="Models",
             text="The names of the model.", answer=ModelList),
    Endpoint(operation="model", method="GET", path="/v1/models/{name:path}", group="Models",
             text="The model under one of its names.", answer=ModelCard, parameters=(_NAME,), errors=(404,)),
    Endpoint(operation="tokenize", method="POST", path="/tokenize", group="Tokens",
             text="The token ids of a text or of a conversation.",
             body=(TokenizePromptBody, TokenizeChatBody), answer=TokenizeAnswer, errors=(404, 413)),
    Endpoint(operation="detokenize", method="POST", path="/detokenize", group="Tokens",
             text="The text of token ids.", body=DetokenizeBody, answer=DetokenizeAnswer, errors=(404,)),
    Endpoint(operation="tokenizer_info", method="GET", path="/tokenizer_info", group="Tokens",
             text="The texts of the tokens that the tokenizer adds by itself.", answer=TokenizerInfo,
             parameters=(_MODEL,), errors=(404,)),
    Endpoint(operation="health", method="GET", path="/health", group="Server", access="open",
             text="Whether the server answers requests: 200, or 503 with the reason.", answer=HealthAnswer,
             unhealthy_is_answer=True),
    Endpoint(operation="ping", method="GET", path="/ping", group="Server", text="The same as /health.",
             answer=HealthAnswer, unhealthy_is_answer=True),
    Endpoint(operation="post_ping", method="POST", path="/ping", group="Server", text="The same as /health.",
             answer=HealthAnswer, unhealthy_is_answer=True),
    Endpoint(operation="version", method="GET", path="/version", group="Server",
             text="The version of weft.", answer=VersionAnswer),
    Endpoint(operation="load", method="GET", path="/load", group="Server",
             text="Requests that are being answered, and sequences that run and wait.", answer=LoadAnswer),
    Endpoint(operation="metrics", method="GET", path="/metrics", group="Operate", access="operator",
             text="Counters and histograms for Prometheus.", answer=str, media_type="text/plain"),
    Endpoint(operation="cache", method="GET", path="/v1/cache", group="Operate", access="operator",
             text="Contents of the prefix cache, in sizes, counts and ages; of several replicas the sum, and "
                  "each one that answers."),
    Endpoint(operation="flush_cache", method="POST", path="/v1/cache/flush", group="Operate",
             access="operator", text="Drops every cached prefix that no running request reads, in memory and on disk.",
             parameters=(_STORE,)),
    Endpoint(operation="load_lora_adapter", method="POST", path="/v1/load_lora_adapter", group="Operate",
             access="operator", text="Serves an adapter under a name, or other files under a taken one.",
             body=LoadAdapterBody, answer=str, media_type="text/plain"),
    Endpoint(operation="unload_lora_adapter", method="POST", path="/v1/unload_lora_adapter", group="Operate",
             access="operator", text="Requests no longer find the adapter; running answers end with it.",
             body=UnloadAdapterBody, answer=str, media_type="text/plain", errors=(404,)),
    Endpoint(operation="replicas", method="GET", path="/v1/replicas", group="Operate", access="operator",
             text="The engine processes: state, restarts, load.", answer=ReplicaList),
    Endpoint(operation="restart_replicas", method="POST", path="/v1/replicas/restart", group="Operate",
             access="operator", text="Restarts all replicas, one after the other.", answer=ReplicaList,
             parameters=(_DRAIN_S, _MODEL), errors=(404, 409)),
    Endpoint(operation="drain_replica", method="POST", path="/v1/replicas/{replica}/drain", group="Operate",
             access="operator", text="Takes a replica out of service. Its requests go on elsewhere.",
             answer=ReplicaList, parameters=(_REPLICA, _DRAIN_S, _RESTART, _MODEL), errors=(404, 409)),
    Endpoint(operation="start_replica", method="POST", path="/v1/replicas/{replica}/start", group="Operate",
             access="operator", text="Starts a drained or dead replica again.", answer=ReplicaList,
             parameters=(_REPLICA, _MODEL), errors=(404, 409)),
    Endpoint(operation="sleep", method="POST", path="/sleep", group="Operate", access="operator",
             text="Frees memory until /wake_up. Fields may be in the query instead.", body=SleepBody,
             body_is_optional=True, answer=SleepAnswer, parameters=(_LEVEL, _MODE, _TIMEOUT, _MODEL),
             errors=(404, 409)),
    Endpoint(operation="wake_up", method="POST", path="/wake_up", group="Operate", access="operator",
             text="Allocates the memory again. Fields may be in the query instead.", body=WakeBody,
             body_is_optional=True, answer=WakeAnswer, parameters=(_TAGS, _MODEL), errors=(404, 409)),
    Endpoint(operation="is_sleeping", method="GET", path="/is_sleeping", group="Server",
             text="Whether the engine sleeps, and its missing parts.", answer=IsSleepingAnswer, parameters=(_MODEL,),
             errors=(404, 409)),
    Endpoint(operation="pause", method="POST", path="/pause", group="Operate", access="operator",
             text="Computes no further step until /resume; requests wait. Fields may be in the query instead.",
             body=PauseBody, body_is_optional=True, answer=PausedAnswer,
             parameters=(_PAUSE_MODE, _TIMEOUT, _CLEAR_CACHE, _MODEL), errors=(404, 409)),
    Endpoint(operation="resume", method="POST", path="/resume", group="Operate", access="operator",
             text="Goes on after /pause.", answer=PausedAnswer, parameters=(_MODEL,), errors=(404, 409)),
    Endpoint(operation="is_paused", method="GET", path="/is_paused", group="Server",
             text="Whether the engines are paused.", answer=IsPausedAnswer, parameters=(_MODEL,), errors=(404, 409)),
    Endpoint(operation="update_weights", method="POST", path="/update_weights", group="Operate", access="operator",
             text="Replaces the weights by those of a directory. Fields may be in the query instead.",
             body=UpdateWeightsBody, body_is_optional=True, answer=UpdateAnswer,
             parameters=(_PATH, _VERSION, _PAUSE_MODE, _TIMEOUT, _MODEL), errors=(404, 409)),
    Endpoint(operation="reset_prefix_cache", method="POST", path="/reset_prefix_cache", group="Operate",
             access="operator", text="The same as /v1/cache/flush, under vLLM's name.", answer=ResetAnswer,
             parameters=(_STORE,)),
    Endpoint(operation="openapi", method="GET", path="/openapi.json", group="Server", access="open",
             text="This description."),
)  # fmt: skip
