"""A small client of any OpenAI-compatible server, for the terminal, and a temporary server.

    with own_server(config, on_wait=...) as url:   # http://127.0.0.1:PORT

The server is ``weft serve`` itself, so chat and eval exercise the code that a user would deploy. It is in a session of
its own: Ctrl-C in the terminal stops an answer, not the server. Its log is shown only if it fails to start. An answer
is always stopped by closing the stream.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from weft.cli.flags import ENV_PREFIX, arguments_of, variables_of
from weft.config import EngineConfig
from weft.errors import ConfigError, EngineUnavailableError, UserError, WeftError
from weft.server.running import socket_path

CONNECT_TIMEOUT_S = 10.0
_REFUSED = (400, 413, 422)
"""Statuses of a refused conversation, where the answer names no field."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A part of a streamed answer. ``usage`` comes with the last one, where the server sends it;
    ``reasoning`` before the text, where the model reasons."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""


class RemoteModel:
    """One model on one server. ``url`` may end in /v1 or not, ``host:port`` is http, and ``unix:PATH`` a Unix socket.
    ``certificate``: the file of the only certificate that the server may show, for any host name. Raises ConfigError if
    nothing answers, and if ``url`` is not a URL."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        certificate: str | None = None,
    ) -> None:
        self.url = _with_scheme(url.strip()).rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        socket_file = socket_path(self.url)
        # Only connecting has a time limit; an answer may take any time.
        self._http = httpx.Client(
            base_url=self.url if socket_file is None else "http://localhost",
            headers=headers,
            transport=transport if socket_file is None else httpx.HTTPTransport(uds=socket_file),
            verify=True if certificate is None else _trust_only(certificate),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        )
        self._model = model

    def close(self) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """Name of the model in requests: as given, or the first that the server lists."""
        if self._model is None:
            self._model = self.card()["id"]
        return self._model

    def card(self) -> dict[str, Any]:
        """Return the server's entry of the model; empty if a server other than weft does not list the name. Raise
        ConfigError if nothing answers or no model is listed, UserError for a name that a weft server does not have.
        """
        cards: list[dict[str, Any]] = self.get("/v1/models").json()["data"]
        if self._model is None:
            if not cards:
                raise ConfigError(f"{self.url} lists no model; name one: weft chat MODEL --url {self.url}")
            return cards[0]
        listed = next((card for card in cards if card["id"] == self._model), None)
        if listed is not None:
            return listed
        if not any(card.get("owned_by") == "weft" for card in cards):
            return {}  # other servers may take any name, or names that they do not list
        own: dict[str, Any] = self.get(f"/v1/models/{quote(self._model)}").json()
        return own

    def names(self) -> list[str]:
        """Return the names that the server lists. Raises as ``get``."""
        return [card["id"] for card in self.get("/v1/models").json()["data"]]

    def choose(self, name: str) -> dict[str, Any]:
        """Use the model ``name`` from now on, and return its card. Raise as ``card``, without any change."""
        before, self._model = self._model, name
        try:
            return self.card()
        except WeftError:
            self._model = before
            raise

    def get(self, path: str, *, timeout_s: float | None = None) -> httpx.Response:
        """Send a GET request. Raise ConfigError where nothing answers, UserError or WeftError with the server's
        message."""
        return self._request("GET", path, timeout=timeout_s or httpx.USE_CLIENT_DEFAULT)

    def post(self, path: str, params: dict[str, str] | None = None) -> httpx.Response:
        """Send a POST request, and wait as long as the server takes. Raise as ``get``."""
        return self._request("POST", path, params=params)

    def send(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send a POST request with a JSON body. Raise as ``get``."""
        return self._request("POST", path, json=body)

    def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **more)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        _raise_for(response)
        return response

    def stream_chat(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> Iterator[AnswerDelta]:
        """Yield pieces of the answer to ``messages`` as they arrive. Closing the iterator cancels the request.

        Raise UserError with the server's message if it refuses, EngineUnavailableError if the stream breaks off.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
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
        return ConfigError(
            f"nothing answers at {self.url}: {_in_words(error)}; start a server with "
            "`weft serve`, or name another with --url",
            param="--url",
        )


def _trust_only(certificate: str) -> ssl.SSLContext:
    """Return a context that accepts a server with only this certificate. Without the file, the context accepts
    certificates that the system trusts."""
    context = ssl.create_default_context()
    with suppress(OSError):
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate need not be self-signed
    return context


def _with_scheme(url: str) -> str:
    """Return ``http://localhost:8000`` for ``localhost:8000``. Raise ConfigError unless it is an http URL or a Unix
    socket."""
    if socket_path(url):
        return url
    whole = url if "://" in url else f"http://{url}"
    try:
        parsed = httpx.URL(whole)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is not a URL: {error}; write http://HOST:PORT", param="--url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url {url!r} is not an http URL; write http://HOST:PORT", param="--url")
    return whole


def _in_words(error: Exception) -> str:
    """Return the error's text without the error number of the operating system."""
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        why = str(error).rpartition("failed: ")[2].partition(" (_ssl")[0]
        return f"its certificate is not trusted ({why}); the variable SSL_CERT_FILE names a file with its authority"
    words = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return words[0].lower() + words[1:]


def _pieces(lines: Iterator[str]) -> Iterator[AnswerDelta]:
    for line in lines:
        if not line.startswith("data:"):  # blank lines between events, comments that keep the line open
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise WeftError(_sentence(chunk, "the server ended the answer with an error"))
        choices = chunk.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        yield AnswerDelta(
            delta.get("content") or "", choices[0].get("finish_reason"), chunk.get("usage") or {}, reasoning
        )


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
    error = body.get("error") if isinstance(body, dict) else None
    param, code = (error.get("param"), error.get("code")) if isinstance(error, dict) else (None, None)
    if param is None and response.status_code in _REFUSED:
        param = "messages"
    raise (UserError if response.is_client_error else WeftError)(sentence, param=param, code=code)


def _sentence(body: Any, otherwise: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else otherwise


HOST = "127.0.0.1"
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.05
_ERROR_MARK = "error: "
"""Beginning of a command's error line on stderr (``weft.cli.main.say_error``)."""


@contextmanager
def own_server(config: EngineConfig, *, on_wait: Callable[[float], None] = lambda seconds: None) -> Iterator[str]:
    """Serve ``config`` on a free local port, and yield the URL. ``on_wait`` gets the seconds so far.

    Raises the error that the server printed (UserError, WeftError) when it does not start.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "weft",
        "serve",
        f"--host={HOST}",
        f"--port={port}",
        "--log-level=warning",
        *arguments_of(config),
    ]
    # The config includes the variables already; they must not be applied a second time.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)} | variables_of(config)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        with _ending_by_exception():
            try:
                _wait_until_ready(child, f"http://{HOST}:{port}", log, on_wait)
                yield f"http://{HOST}:{port}"
            finally:
                stop_process(child)


def _wait_until_ready(child: subprocess.Popen[bytes], url: str, log: IO[str], on_wait: Callable[[float], None]) -> None:
    import httpx

    begin = time.monotonic()
    while True:
        if child.poll() is not None:
            raise _failure(child.returncode, log)
        try:
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        on_wait(time.monotonic() - begin)
        time.sleep(_POLL_S)


def _failure(code: int, log: IO[str]) -> WeftError:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    said = next((line[len(_ERROR_MARK) :] for line in reversed(lines) if line.startswith(_ERROR_MARK)), None)
    if said is not None:
        return (UserError if code == 2 else WeftError)(said)
    last = " | ".join(lines[-3:]) or "no output"
    return WeftError(f"the server ended with code {code} while starting: {last}")


def stop_process(child: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End ``child`` and its children, which have their own process group."""
    if child.poll() is None:
        child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout_s)
    with suppress(ProcessLookupError):  # all of them are gone
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _ending_by_exception() -> Iterator[None]:
    """Raise an exception when the terminal closes or SIGTERM comes, so that unwinding the stack stops the child too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Waiting:
    """A progress line about a wait. Call it with the seconds so far, or with the present action; ``done`` ends it and
    may be called twice."""

    def __init__(self, what: str, status: Status) -> None:
        self._what = what
        self._status = status

    def __call__(self, seconds: float) -> None:
        self._status.update(f"{self._what} ({seconds:.0f} s)")

    def say(self, line: str) -> None:
        self._status.update(escape(line))

    def done(self) -> None:
        self._status.stop()


@contextmanager
def waiting(what: str) -> Iterator[Waiting]:
    with Console(stderr=True).status(what) as status:
        yield Waiting(what, status)
