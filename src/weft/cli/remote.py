"""A client of any OpenAI-compatible server, as small as the terminal needs: models, and a streamed chat.

``weft chat`` uses it for its own server and for others alike. Stopping an answer is always the same act:
closing the stream. Rejected: the ``openai`` package, a dependency ten times this size for two requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from weft.errors import ConfigError, EngineUnavailableError, UserError, WeftError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A part of a streamed answer. ``usage`` comes with the last one, where the server sends it;
    ``reasoning`` before the text, where the model reasons."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""


class RemoteModel:
    """One model on one server. ``url`` may end in /v1 or not, and ``host:port`` is http. Raises ConfigError
    where nothing answers, or ``url`` is none."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None,
                 transport: httpx.BaseTransport | None = None) -> None:
        self.url = _with_scheme(url.strip()).rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # An answer may take as long as it takes; only connecting has a limit.
        self._http = httpx.Client(base_url=self.url, headers=headers, transport=transport,
                                  timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S))
        self._model = model

    def close(self) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The name to ask for: the one given, or the first that the server lists."""
        if self._model is None:
            names = self.models()
            if not names:
                raise ConfigError(f"{self.url} lists no model; name one: weft chat MODEL --url {self.url}")
            self._model = names[0]
        return self._model

    def models(self) -> list[str]:
        return [row["id"] for row in self.get("/v1/models").json()["data"]]

    def get(self, path: str, *, timeout_s: float | None = None) -> httpx.Response:
        """Raises ConfigError where nothing answers, UserError or WeftError with the server's own sentence."""
        try:
            response = self._http.get(path, timeout=timeout_s or httpx.USE_CLIENT_DEFAULT)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        _raise_for(response)
        return response

    def post(self, path: str, params: dict[str, str] | None = None) -> httpx.Response:
        """Waits as long as the server takes. Raises as ``get``."""
        try:
            response = self._http.post(path, params=params)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        _raise_for(response)
        return response

    def stream_chat(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Iterator[AnswerDelta]:
        """Pieces of the answer to ``messages`` as they arrive. Closing the iterator cancels the request.

        Raises UserError with the server's own sentence where it refuses, EngineUnavailableError where the
        stream breaks off.
        """
        body = {"model": self.model, "messages": messages, "stream": True,
                "stream_options": {"include_usage": True}, **fields}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _raise_for(response)
                yield from _pieces(response.iter_lines())
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except httpx.TransportError as error:
            raise EngineUnavailableError(f"{self.url} broke off the answer: {_in_words(error)}") from None

    def _unreachable(self, error: Exception) -> ConfigError:
        return ConfigError(f"nothing answers at {self.url}: {_in_words(error)}; start a server with "
                           "`weft serve`, or name another with --url", param="--url")


def _with_scheme(url: str) -> str:
    """``localhost:8000`` is ``http://localhost:8000``. Raises ConfigError for what is no http URL."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(whole)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no URL: {error}; write http://HOST:PORT",
                          param="--url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url {url!r} is no http URL; write http://HOST:PORT", param="--url")
    return whole


def _in_words(error: Exception) -> str:
    """Without the number of the operating system's error."""
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    words = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return words[0].lower() + words[1:]


def _pieces(lines: Iterator[str]) -> Iterator[AnswerDelta]:
    for line in lines:
        if not line.startswith("data:"):  # blank lines between events, comments that keep the line open
            continue
        data = line[len("data:"):].strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise WeftError(_sentence(chunk, "the server ended the answer with an error"))
        choices = chunk.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        yield AnswerDelta(delta.get("content") or "", choices[0].get("finish_reason"),
                          chunk.get("usage") or {}, reasoning)


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        body = response.json()
    except ValueError:
        body = {}
    sentence = _sentence(body, f"{response.request.url} answered {response.status_code}")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        sentence += "; give the key with --api-key or WEFT_API_KEY"
    raise (UserError if response.is_client_error else WeftError)(sentence)


def _sentence(body: Any, otherwise: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else otherwise
