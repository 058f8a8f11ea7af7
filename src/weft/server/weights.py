"""Pausing the engines and replacing their weights, for programs that train: /pause, /resume, /update_weights.

    POST /pause            no engine computes a step; requests are accepted and wait
    POST /update_weights   other weights of the same shapes, from a directory that the engines can read
    POST /resume           computes waiting requests
    GET  /is_paused

    POST /reset_prefix_cache    /v1/cache/flush under vLLM's name

Fields go in the query or in a JSON body. ``weight_version`` is a name that the caller gives: /health, /metrics, the
header X-Weft-Weight-Version and the usage of answers show it from then on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from weft.engine.stats import Flushed
from weft.errors import RequestError
from weft.rpc.messages import PauseMode, WeightsOutcome
from weft.server.protocol import parse_body
from weft.server.replicas import WAIT_S, read_flag, read_timeout

VERSION_HEADER = "x-weft-weight-version"
VERSION_CHARS_MAX = 256
_MODES = ("keep", "wait", "abort")


class PauseBody(msgspec.Struct, frozen=True):
    """The body of /pause. ``mode``: treatment of running requests: keep, wait or abort. ``timeout``: longest wait of
    the mode wait, seconds. ``clear_cache``: whether the prefix cache is emptied too."""

    mode: str = "keep"
    timeout: float = WAIT_S
    clear_cache: bool = False


class UpdateWeightsBody(msgspec.Struct, frozen=True):
    """The body of /update_weights. ``path``: the directory of the checkpoint (``model_path`` works as well)."""

    path: str | None = None
    model_path: str | None = None
    weight_version: str = ""
    mode: str = "keep"
    timeout: float = WAIT_S
    update_info: Any = None


class PausedAnswer(msgspec.Struct):
    status: str
    flushed: Flushed | None = None


class IsPausedAnswer(msgspec.Struct):
    is_paused: bool


class UpdateAnswer(msgspec.Struct):
    """The answer of /update_weights. ``weights``: the digest of all bytes of the files. ``updates``: number of changes
    to other weights since the start."""

    status: str
    weight_version: str
    weights: str
    updates: int
    flushed: Flushed | None = None


class ResetAnswer(msgspec.Struct):
    success: bool


class PauseRequest(msgspec.Struct, frozen=True):
    """A checked call. ``directory``: of new weights, if the call has any."""

    mode: PauseMode
    timeout_s: float
    clears_cache: bool = False
    directory: str = ""
    version: str = ""


def read_pause(query: QueryParams, raw: bytes) -> PauseRequest:
    """Return the call; the query overrides the body. Raise RequestError that names the field."""
    body = parse_body(raw, PauseBody) if raw.strip() else PauseBody()
    clears_cache = read_flag(query, "clear_cache", body.clear_cache)
    return PauseRequest(_mode(query, body.mode), read_timeout(query, body.timeout), clears_cache)


def read_update(query: QueryParams, raw: bytes) -> PauseRequest:
    """Return the call; the query overrides the body. Raise RequestError that names the field."""
    body = parse_body(raw, UpdateWeightsBody) if raw.strip() else UpdateWeightsBody()
    if body.update_info is not None:
        raise RequestError(
            "update_info describes tensors that another process sends by NCCL or shared memory, which weft does not "
            "receive; write the checkpoint to a directory and give its path",
            param="update_info",
            code="unsupported_parameter",
        )
    path = query.get("path") or query.get("model_path") or body.path or body.model_path
    if not path:
        raise RequestError("path is missing: the directory of a checkpoint with the same shapes", param="path")
    directory = Path(path).expanduser()
    if not directory.is_absolute():
        raise RequestError(f"path is {path!r}; it must be absolute, as engines may run elsewhere", param="path")
    version = query.get("weight_version", body.weight_version)
    if len(version) > VERSION_CHARS_MAX or not version.isprintable() or not version.isascii():
        raise RequestError(
            f"weight_version has {len(version)} characters; it may have {VERSION_CHARS_MAX}, printable ASCII",
            param="weight_version",
        )
    return PauseRequest(
        _mode(query, body.mode), read_timeout(query, body.timeout), directory=str(directory), version=version
    )


def update_answer(outcome: WeightsOutcome) -> UpdateAnswer:
    weights = outcome.weights
    return UpdateAnswer("updated", weights.version, weights.digest, weights.updates, outcome.flushed)


def _mode(query: QueryParams, otherwise: str) -> PauseMode:
    mode = query.get("mode", otherwise)
    if mode not in _MODES:
        raise RequestError(f"mode is {mode!r}; it may be {', '.join(_MODES[:-1])} or {_MODES[-1]}", param="mode")
    return mode  # type: ignore[return-value]  # membership was checked above
