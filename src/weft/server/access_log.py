"""The access log as JSON, for programs that collect logs (``--access-log json``).

    {"time": "2026-01-31T12:00:00.250Z", "client": "127.0.0.1:40512", "method": "POST",
     "path": "/v1/completions", "status": 200}

One line a request, on stderr like every log. ``ignored`` lists fields of the body that had no effect. The
path has no query string: a client may have put a key or a text there. Headers and bodies are never logged.

Rejected: other fields by the name of the header (a header may carry a key).
"""

from __future__ import annotations

import datetime
import logging

import msgspec

from weft.server.ignored_fields import ignored_names


class JsonAccessFormatter(logging.Formatter):
    """Of the records of ``uvicorn.access``: (client, method, path, HTTP version, status)."""

    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.args, tuple)
        client, method, path, _, status = record.args
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {"time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"), "client": client,
                "method": method, "path": str(path).partition("?")[0], "status": status}
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
