"""The log of an HTTP process: lines for people, or JSON for each request.

The process that starts an engine sets it up first, before the modules of HTTP are imported.
"""

from __future__ import annotations

import datetime
import logging

import msgspec

from weft.server.config import ServerConfig

_LOOKS = frozenset({"/health", "/metrics", "/v1/cache", "/load"})


def set_up_logging(config: ServerConfig) -> None:
    level = config.log_level.upper()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True)
    logging.getLogger("weft").setLevel(level)
    access = logging.getLogger("uvicorn.access")
    access.setLevel(level)
    if config.access_log == "json":
        log_access_as_json()
    if config.log_level != "debug":
        access.addFilter(_is_no_look)


def _is_no_look(record: logging.LogRecord) -> bool:
    """False for a look that succeeded, and for a poll of the health: monitors and the page send one a second,
    which would fill the log."""
    match record.args:
        case (_, "GET", "/health" | "/ping", _, _):
            return False
        case (_, "GET", str(path), _, 200):
            return path.partition("?")[0] not in _LOOKS
    return True


class JsonAccessFormatter(logging.Formatter):
    """Of the records of ``uvicorn.access``: (client, method, path, HTTP version, status). No query string, no
    header and no body: a client may have put a key or a text there."""

    def format(self, record: logging.LogRecord) -> str:
        from weft.server.protocol import ignored_names

        assert isinstance(record.args, tuple)
        client, method, path, _, status = record.args
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "client": client,
            "method": method,
            "path": str(path).partition("?")[0],
            "status": status,
        }
        if names := ignored_names():
            line["ignored"] = names
        return msgspec.json.encode(line).decode()


def log_access_as_json() -> None:
    """From now on, in this process."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonAccessFormatter())
    access = logging.getLogger("uvicorn.access")
    access.handlers = [handler]
    access.propagate = False
