"""One line for each request that ended: path, times and counts.

    text   POST /v1/chat/completions 200 in 1.204 s, 127.0.0.1:51234, id 9f3c..., weft-recall, 812 prompt tokens (768
           cached), 64 output tokens at 57.1/s, queued 0.002 s, key 1
    JSON   the same as keys of an object

No line has a query string, a header, a key or a text: a client may have put a secret there. A refusal is named by its
``code``. Successful polls by monitors and by the page have no line, since they come once a second.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from weft.logs import fields_of
from weft.server.tracing import RequestTrace

_LOOKS = frozenset({"/metrics", "/v1/cache", "/load"})
_HEALTH = frozenset({"/health", "/ping"})
_log = logging.getLogger("weft.access")


def log_request(trace: RequestTrace, ignored: list[str]) -> None:
    """Write the log line of a request that has just ended. ``ignored``: fields of the body without an effect."""
    if not _log.isEnabledFor(logging.INFO) or (is_look(trace) and not _log.isEnabledFor(logging.DEBUG)):
        return
    fields = request_fields(trace, time.perf_counter())
    if ignored:
        fields["ignored"] = ignored
    _log.info("%s", _Words(fields), extra=fields_of(fields))


def is_look(trace: RequestTrace) -> bool:
    """Return whether the request is a poll of a monitor or of the page: for the health, or for figures, which it
    got."""
    if trace.method != "GET":
        return False
    return trace.path in _HEALTH or (trace.status == 200 and trace.path in _LOOKS)


def request_fields(trace: RequestTrace, ended_s: float) -> dict[str, Any]:
    """Return the keys of the line's object; phases that a request did not reach are left out."""
    fields: dict[str, Any] = {
        "request_id": trace.request_id,
        "client": trace.client,
        "method": trace.method,
        "path": trace.path,
        "status": trace.status,
        "duration_s": round(ended_s - trace.received_s, 6),
        "key": trace.key or None,
        "error": trace.error,
    }
    outcome = trace.outcome
    if outcome is not None:
        decode_s = 0.0 if outcome.first_s is None else outcome.last_s - outcome.first_s
        fields |= {
            "model": outcome.model,
            "adapter": outcome.adapter,
            "prompt_tokens": outcome.input_tokens,
            "cached_tokens": outcome.cached_tokens,
            "output_tokens": outcome.output_tokens,
            "tokens_per_s": round((outcome.output_tokens - 1) / decode_s, 1) if decode_s > 0 else None,
            "queue_s": None if outcome.began_s is None else round(outcome.began_s - outcome.arrived_s, 6),
            "first_token_s": None if outcome.first_s is None else round(outcome.first_s - trace.received_s, 6),
            "finish_reason": ",".join(outcome.finish_reasons),
        }
    return {name: value for name, value in fields.items() if value is not None}


class _Words:
    """The fields as a sentence, built only when a text log formats the record."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        fields = self._fields
        parts = [
            f"{fields['method']} {fields['path']} {fields.get('status', 'without an answer')} in "
            f"{fields['duration_s']:.3f} s",
            fields.get("client", ""),
            f"id {fields['request_id']}",
            fields.get("error", ""),
        ]
        if "model" in fields:
            rate = f" at {fields['tokens_per_s']}/s" if "tokens_per_s" in fields else ""
            parts += [
                fields["model"] + (f" with {fields['adapter']}" if "adapter" in fields else ""),
                f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached)",
                f"{fields['output_tokens']} output tokens{rate}",
                f"queued {fields['queue_s']:.3f} s" if "queue_s" in fields else "",
            ]
        parts += [fields.get("key", ""), f"ignored {', '.join(fields['ignored'])}" if "ignored" in fields else ""]
        return ", ".join(filter(None, parts))
