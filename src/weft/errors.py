"""The error tree.

There are three kinds of failure in weft; only the first is an exception that a user may see:

* a *user error* (this file) names the value, the limit and the flag or field that changes it;
* *pressure* (memory is short) is a return value: "wait" or "skip", never an exception (law L3);
* a *bug* is an ``assert``.

Every user error has its HTTP form, so that the server, the CLI and the Python API print the same message: ``status`` is
the HTTP status, ``kind`` the OpenAI error type, ``param`` the field of the request, or the flag, with the error.
"""

from __future__ import annotations

import math
import re


class WeftError(Exception):
    """Base of everything weft raises on purpose."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class UserError(WeftError):
    """A user's request that cannot be done as stated."""

    status = 400
    kind = "invalid_request_error"


class ConfigError(UserError):
    """A flag or config field has a value that cannot work; ``param`` is the flag."""


class CheckpointError(UserError):
    """A checkpoint directory is unreadable: the message names the file, and the tensor or key in it."""


class UnknownArchitectureError(CheckpointError):
    """config.json names an architecture that weft does not serve; the message lists the served ones."""


class RequestError(UserError):
    """A request has a wrong field; ``param`` names it."""


class ContextLengthError(RequestError):
    """The prompt, with the requested answer, is longer than the served context; the message has both numbers.
    ``tokens``: of the prompt, a lower bound; ``limit``: of the context. An API whose clients look for other words
    writes its own message."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = "context_length_exceeded",
        tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.tokens, self.limit = tokens, limit


def maximum_context(limit: int) -> str:
    """Return the words by which clients of OpenAI's API recognise this error."""
    return f"this model's maximum context length is {limit} tokens (--max-model-len)"


class QueueFullError(UserError):
    """The bounded waiting queue is full (law L11); retry later. Names ``limits.max_queued_requests``."""

    status = 503
    kind = "service_unavailable"


class NotFoundError(UserError):
    """The request names something that does not exist."""

    status = 404
    kind = "not_found_error"


class UnknownModelError(NotFoundError):
    """The request names a model that this server does not serve; the message lists the served ones."""


class UnknownReplicaError(NotFoundError):
    """The server has no replica of this number; the message lists the numbers it has."""


class AuthenticationError(UserError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"


class EngineUnavailableError(WeftError):
    """The engine process is starting, draining or gone; the request was not computed."""

    status = 503
    kind = "service_unavailable"


class ModelLoadError(EngineUnavailableError):
    """The model of the request, one of several, does not load. ``retry_after_s``: when it is tried again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, param="model", code="model_load_failed")
        self.retry_after_s = max(1, math.ceil(retry_after_s))


class RankLostError(EngineUnavailableError):
    """A rank of the engine died, hangs, or differs; the engine cannot go on. The message names the rank."""


class DeadlyRequestError(WeftError):
    """Engines died while they computed this request. The status is one that clients do not retry."""

    status = 422
    kind = "invalid_request_error"


class SlowClientError(WeftError):
    """The client reads its stream so slowly that unread answers exceed ``limits.max_unread_mb``."""

    status = 408
    kind = "invalid_request_error"


class AsleepError(EngineUnavailableError):
    """The engine sleeps, or is about to; the message says how to wake it."""


class BusyError(UserError):
    """Live requests prevent the operation; the message gives their number and the options."""

    status = 409
    kind = "conflict_error"


_MESSAGE_CHARS_MAX = 600
_INTERNALS = re.compile(r"panic|\bbacktrace\b|thread '.*' |(?:^|[\s(])/?(?:[\w.-]+/)+[\w.-]+\.(?:rs|py|so)\b")


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust gave up on its input. Its exception derives from BaseException, so a
    handler of Exception does not catch it."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def presentable(message: str, *, otherwise: str) -> str:
    """Return a library's message about a client's input in a form that the client may see: cut, and without a dump of
    state. ``otherwise`` replaces messages with a panic, a backtrace or the path of a source file."""
    said = message.split("\n<state>")[0].strip()
    if not said or _INTERNALS.search(said):
        return otherwise
    return said if len(said) <= _MESSAGE_CHARS_MAX else said[:_MESSAGE_CHARS_MAX] + " ..."
