"""What the user asks of the HTTP side. Flag = field = keyword, as in ``weft.config.EngineConfig``.

Tuples are flags that may be given several times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.errors import ConfigError

DEFAULT_PORT = 8000
PORTS_TRIED = 20
"""Without --port, this many ports from DEFAULT_PORT on are tried."""
PORT_MAX = 65535


def _flag(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = _flag("127.0.0.1", "Address to listen on; 0.0.0.0 for every network this machine is in.")
    port: int | None = _flag(None, "Port to listen on; 0 takes any free one. Default: 8000, or the next one "
                                   "that is free.")
    api_key: tuple[str, ...] = _flag((), "Key that clients must send as 'Authorization: Bearer KEY'; may be "
                                         "given several times. Guards everything but /health.")
    served_model_name: tuple[str, ...] = _flag(
        (), "Name(s) that requests may use for the model, besides 'default'; may be given several times. "
            "Default: the model's own.")
    chat_template: str | None = _flag(None, "File with the chat template to use instead of the checkpoint's.")
    metrics_prefix: str = _flag("weft", "Prefix of metric names; with 'vllm', published dashboards load as "
                                        "they are.")
    drain_timeout: float = _flag(30.0, "Seconds that running requests get to finish after the first Ctrl-C.")
    max_body_mb: int = _flag(64, "Largest request body in MB.")
    sse_keep_alive: float = _flag(0.0, "Seconds of silence after which a stream gets a comment line; "
                                       "0: never.")
    exit_on_engine_death: bool = _flag(False, "End the server with code 1 when its engine process dies, "
                                              "instead of answering 503 until it is stopped.")
    log_level: Literal["debug", "info", "warning", "error"] = _flag(
        "info", "What is logged; info has one line per request.")

    def check(self) -> None:
        """Raises ConfigError that names the flag. (Whether the address can be bound shows when it is.)"""
        if self.port is not None and not 0 <= self.port <= PORT_MAX:
            raise ConfigError(f"--port {self.port}: ports are 0 to {PORT_MAX}", param="--port")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"--drain-timeout {self.drain_timeout}: it must be 0 or more",
                              param="--drain-timeout")
        if not self.sse_keep_alive >= 0:
            raise ConfigError(f"--sse-keep-alive {self.sse_keep_alive}: it must be 0 or more",
                              param="--sse-keep-alive")
        if self.max_body_mb < 1:
            raise ConfigError(f"--max-body-mb {self.max_body_mb}: it must be at least 1",
                              param="--max-body-mb")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key is empty: leave it out to serve without a key", param="--api-key")
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name is empty", param="--served-model-name")
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(f"--metrics-prefix {self.metrics_prefix!r}: use letters, digits and _, and "
                              "start with a letter", param="--metrics-prefix")
