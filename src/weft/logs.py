"""The log of a process: lines of text, or one JSON object per line; on stderr, or in a file.

    weft serve -- set_up_logging --> WEFT_LOG_FORMAT, WEFT_LOG_FILE --> engines, ranks, HTTP workers: the same log

Each record is written with one call, so lines of several processes do not mix. A file is reopened when the system's
tools have moved it (``logrotate``). Records that belong to a request have its id, from the context of the task.
"""

from __future__ import annotations

import datetime
import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import msgspec

from weft.errors import ConfigError

FORMAT_VARIABLE, FILE_VARIABLE, LEVEL_VARIABLE = "WEFT_LOG_FORMAT", "WEFT_LOG_FILE", "WEFT_LOG_LEVEL"
FIELDS = "weft_fields"
"""Attribute of a record with further keys of its JSON object."""
_process = "server"
request_id_of_task: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task answers, for its records."""


def set_up_logging(level: str, *, form: str = "text", file: str | None = None) -> None:
    """Set up the log of a serving process, and of processes that it starts later. ``level``: of weft's records;
    libraries log from WARNING on. Raise ConfigError if ``file`` cannot be written."""
    os.environ |= {FORMAT_VARIABLE: form, LEVEL_VARIABLE: level}
    os.environ.pop(FILE_VARIABLE, None)
    if file is not None:
        os.environ[FILE_VARIABLE] = os.path.abspath(os.path.expanduser(file))
    _set_up(level, form, os.environ.get(FILE_VARIABLE))


def set_up_child_logging(process: str) -> None:
    """Set up the log of a process that a server started. ``process``: named in each JSON object."""
    global _process
    _process = process
    level, form = os.environ.get(LEVEL_VARIABLE, "info"), os.environ.get(FORMAT_VARIABLE, "text")
    _set_up(level, form, os.environ.get(FILE_VARIABLE))


def is_json() -> bool:
    """Return whether this process logs JSON objects."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def _set_up(level: str, form: str, file: str | None) -> None:
    handler = _handler(file)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("weft").setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_exception
    threading.excepthook = _log_thread_exception


def _handler(file: str | None) -> logging.Handler:
    if file is None:
        return logging.StreamHandler()
    try:
        return logging.handlers.WatchedFileHandler(file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--log-file {file} cannot be written: {error.strerror or error}", param="--log-file"
        ) from None


class TextFormatter(logging.Formatter):
    """A formatter of text lines: time, level and message, then the id of the request that the record belongs to."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = request_id_of_task.get()
        return line if not request_id or getattr(record, FIELDS, None) is not None else f"{line} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """A formatter of JSON objects with ``time`` (UTC), ``level``, ``process``, ``pid``, ``message``, ``request_id`` if
    the record belongs to a request, ``exception`` with the traceback, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": _process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if request_id := request_id_of_task.get():
            line["request_id"] = request_id
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``extra`` for a log call whose JSON object gets ``values``."""
    return {FIELDS: values}


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger("weft").critical("this process ends: %s", error, exc_info=(kind, error, traceback))


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread else "a thread"
        exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger("weft").error("%s ended: %s", name, args.exc_value, exc_info=exc_info)
