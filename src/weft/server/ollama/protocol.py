"""The bodies of Ollama's API, and the meaning of its ``options`` here.

    {"model", "messages" | "prompt", "options": {"num_predict", "temperature", ...}, "format", "think", ...}
        --sampling_fields--> SamplingFields     what every dialect that generates takes

An option with no counterpart (``num_gpu``, ``mirostat``) has no effect, and X-Weft-Ignored names it. ``num_ctx`` bounds
the prompt: a longer one is an error, where Ollama drops its beginning silently.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.errors import RequestError, WeftError
from weft.server.presets import NO_LIMIT, SAMPLING_NAMES, OllamaOptions
from weft.server.protocol import Int, SamplingFields, Unserved, check_known

PROTOCOL_VERSION = "0.12.0"
"""The version of Ollama whose fields are served. Clients refuse a server with an old version."""
_TAG = ":latest"
UNSERVED_IN_OLLAMA: Unserved = {
    "suffix": ("filling in the middle is not served", ("",)),
    "template": ("a template is chosen at the start, with --chat-template, or for a name, by /api/create", ("",)),
    "logprobs": ("use /v1/chat/completions", (False,)),
    "top_logprobs": ("use /v1/chat/completions", (0,)),
}

UNSERVED_IN_CREATE: Unserved = {
    "modelfile": ("send from, system, parameters, template and messages instead", ("",)),
    "path": ("a Modelfile's path is not read; send from, system, parameters, template and messages", ("",)),
    "adapters": ("an adapter is served with --lora or /v1/load_lora_adapter; from may name it", ({}, [])),
    "quantize": ("a name has no weights of its own; `weft quantize` makes another checkpoint", ("",)),
    "quantization": ("a name has no weights of its own; `weft quantize` makes another checkpoint", ("",)),
    "draft_files": ("drafts come from the text or the model itself: --speculate", ({}, [])),
    "remote_host": ("a name refers to a model of this server", ("",)),
}


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message. ``tool_calls``: their arguments are objects."""

    role: str
    content: str | None = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """Fields of both endpoints that generate. ``stream`` is true by default. ``think``: a boolean, or low, medium or
    high. ``format``: "json", or a JSON schema."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    cache_salt: str | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: list[OllamaMessage] = []
    tools: list[Any] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """The body of /api/generate. ``raw``: the prompt goes to the model as it is, without the chat template.
    ``context``: of an earlier answer, which this one continues."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    context: list[Int] | None = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """The body of /api/embed. ``truncate``: whether an input that is too long loses its end; by default such an input
    is an error here."""

    model: str
    input: str | list[Any]
    truncate: bool | None = None
    dimensions: Int | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    cache_salt: str | None = None


class OllamaEmbeddingsBody(msgspec.Struct, kw_only=True):
    """The body of the older endpoint: one prompt."""

    model: str
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    cache_salt: str | None = None


class OllamaShowBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaCreateBody(msgspec.Struct, kw_only=True):
    """The body of /api/create. ``parameters``: defaults of the requests' ``options``. ``template``: Jinja. ``files``:
    the digest of an uploaded GGUF file, by its name."""

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[OllamaMessage] | None = None
    license: str | list[str] | None = None
    stream: bool | None = None

    @property
    def has_beginning(self) -> bool:
        """Whether the body has settings in addition to the weights."""
        return any((self.system, self.template, self.parameters, self.messages, self.license))


class OllamaCopyBody(msgspec.Struct, kw_only=True):
    source: str
    destination: str


class OllamaDeleteBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None


class OllamaPullBody(msgspec.Struct, kw_only=True):
    """The body of /api/pull. ``insecure``: accepted without effect; HF_ENDPOINT names the hub."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None


def read_options(options: dict[str, Any] | None, *, prefix: str = "options") -> OllamaOptions:
    """Return the options, checked. ``prefix``: the field of the request that has the options. 2.0 counts as 2: some
    clients have only one type of number. Raise RequestError that names the option."""
    known = OllamaOptions.__struct_fields__
    options = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in (options or {}).items()
        if value is not None
    }
    check_known([f"{prefix}.{name}" for name in options], [f"{prefix}.{name}" for name in known])
    try:
        return msgspec.convert({name: options[name] for name in known if name in options}, OllamaOptions)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$.")
        name = f"{prefix}.{place.rstrip('`')}"
        raise RequestError(
            f"{name}: {said.replace('`', '').replace(' | null', '')}", param=name, code="invalid_type"
        ) from None


def sampling_fields(body: OllamaBody, options: OllamaOptions, *, model: str) -> SamplingFields:
    """Return the fields of every dialect. Raise RequestError for an invalid ``format``."""
    return SamplingFields(
        model=model,
        stream=body.stream is not False,
        stop=options.stop,
        cache_salt=body.cache_salt,
        response_format=_response_format(body.format),
        **{ours: getattr(options, theirs) for theirs, ours in SAMPLING_NAMES.items()},
    )


def max_tokens(options: OllamaOptions) -> int | None:
    return None if options.num_predict in NO_LIMIT else options.num_predict


def served_name(name: str) -> str:
    """Return the name of the model, without a tag: clients add a tag to names that have none."""
    return name.removesuffix(_TAG)


def _response_format(answer_format: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if answer_format is None or answer_format == "":
        return None
    if answer_format == "json":
        return {"type": "json_object"}
    if isinstance(answer_format, str):
        raise RequestError(f'format is {answer_format[:50]!r}; it is "json" or a JSON schema', param="format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer_format}}


def error_line(error: WeftError) -> bytes:
    """Return a failure in the shape that Ollama's clients read."""
    return msgspec.json.encode({"error": error.message})
