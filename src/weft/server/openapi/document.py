"""/openapi.json: the table of endpoints and the types of bodies, as OpenAPI 3.1.

    ENDPOINTS --types--> msgspec.json.schema_components --fields: words, defaults, limits--> components
              --rows---> paths: parameters, body, answers, errors of each operation

The document depends on weft's code alone. It says nothing of this server or its model, so it needs no key.
Limits that a flag sets are named by their flag.

What the schema cannot say is an error with a code: a grammar that cannot be compiled, a prompt longer than
the context, two fields that exclude each other. Unknown fields are ignored, so objects allow them. Fields
that are known but not served are refused (docs/server.md lists them).

Laws: L11 (every limit has a number or a flag).

Rejected: a document that is written by hand (it drifts); 422 for a schema error (clients expect 400).
"""

from __future__ import annotations

import functools
import re
from importlib import metadata
from typing import Any

import msgspec

from weft.server.errors import ErrorBody
from weft.server.openapi.endpoints import ENDPOINTS, Endpoint
from weft.server.openapi.fields import FieldWords, words_of

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
    409: "Requests are in the way, or a replica is in another state; the message says more.",
    413: "The body is larger than limits.max_body_mb (body_too_large), or the text than "
         "limits.max_tokenize_chars "
         "(text_too_long).",
    414: "The request line is longer than limits.max_request_line.",
    415: "The body is not declared as JSON.",
    421: "The Host header has another name (host_not_allowed); --allowed-host adds one.",
    422: "Engines died twice while they computed this request (request_killed_engines): it is not tried "
         "again.",
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
    types = [kind for row in ENDPOINTS for kind in (*_body_types(row), row.answer, row.events, row.error)
             if kind is not None]
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
        "info": {"title": "weft", "version": metadata.version("weft"), "license": {"name": "Apache-2.0"},
                 "description": "An OpenAI-compatible server for hybrid language models. Null means "
                                "\"not given\". Unknown fields are ignored."},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
        "tags": [{"name": name} for name in dict.fromkeys(row.group for row in ENDPOINTS)],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _error(status, text) for status, text in ERRORS.items()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer",
                           "description": "A key of --api-key, if the server has any."},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}},
    }


def _operation(row: Endpoint, schema_of: dict[int, Schema]) -> Schema:
    operation: Schema = {"operationId": row.operation, "summary": row.text, "tags": [row.group],
                         "responses": _responses(row, schema_of)}
    if row.parameters:
        operation["parameters"] = [
            {"name": one.name, "in": one.place, "required": one.place == "path", "schema": one.schema,
             "description": one.text} for one in row.parameters]
    if row.body is not None:
        operation["requestBody"] = {"required": not row.body_is_optional,
                                    "content": {"application/json": {"schema": _body_schema(row, schema_of)}}}
    if row.form is not None:
        operation["requestBody"] = {"required": True,
                                    "content": {"multipart/form-data": {"schema": row.form}}}
    if row.access == "open":
        operation["security"] = []
    if row.access == "operator":
        operation["description"] = "With --operator-key, only that key opens it."
    return operation


def _responses(row: Endpoint, schema_of: dict[int, Schema]) -> Schema:
    schema = {"type": "object"} if row.answer is None else schema_of[id(row.answer)]
    content: Schema = {row.media_type: {"schema": schema}}
    if row.events is not None:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "Lines of data: and one "
                                                   "JSON object each, see x-event.",
                                                   "x-event": schema_of[id(row.events)]}}
    answers: Schema = {"200": {"description": row.text, "content": content}}
    for status in sorted({*COMMON_ERRORS, *row.errors, *(BODY_ERRORS if row.body is not None else ())}):
        answers[str(status)] = ({"$ref": f"#/components/responses/{status}"} if row.error is None else
                                _error(status, ERRORS[status], schema_of[id(row.error)]))
    if row.unhealthy_is_answer:
        answers["503"] = _error(503, "The same object, with the reason.", schema)
    return answers


def _error(status: int, text: str, other: Schema | None = None) -> Schema:
    """``other``: a second shape that it may have."""
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
    """Names of the types that come in requests: the bodies, and what they refer to."""
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
    """Words, defaults and limits for each field, in place."""
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
    """The limits belong to the arm that is not null."""
    if "anyOf" not in schema:
        return {**schema, **limits}
    arms = [arm if arm.get("type") == "null" else {**arm, **limits} for arm in schema["anyOf"]]
    return {**schema, "anyOf": arms}
