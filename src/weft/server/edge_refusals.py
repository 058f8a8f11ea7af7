"""What a connection answers when it refuses a request, each with the flag that raises the limit.

    limit crossed --> EdgeError(status, message, flag, code) --raw_answer--> bytes of a whole HTTP answer

``connection`` decides when a limit is crossed; this file has the words. The codes are those in docs/server.md
and the labels of ``http_refusals_total``. A refusal goes out before the request reaches the application, so
``raw_answer`` writes the HTTP answer itself, in the shape of the path's dialect.

Laws: L11 (the message names the flag).

Rejected: an answer through the application (it would wait for a body that is too large or never comes).
"""

from __future__ import annotations

from http import HTTPStatus

from weft.server.edge import EdgeLimits
from weft.server.errors import EdgeError, dialect_body, error_headers
from weft.server.ids import random_id


def not_http() -> EdgeError:
    return EdgeError(400, "the bytes received are not an HTTP/1.1 request", code="invalid_http")


def header_timed_out(limits: EdgeLimits) -> EdgeError:
    return EdgeError(408, f"no complete request header came in {limits.header_s:g} s (limits.header_timeout)",
                     param="limits.header_timeout", code="request_timeout")


def body_timed_out(limits: EdgeLimits, received_bytes: int, elapsed_s: float) -> EdgeError:
    return EdgeError(
        408, f"the body has {received_bytes} bytes after {elapsed_s:.0f} s; it must be complete in "
             f"{limits.body_s:g} s (limits.body_timeout) and bring {limits.body_rate_min} bytes a second "
             "(limits.min_body_rate)", param="limits.body_timeout", code="request_timeout")


def body_too_large(limits: EdgeLimits, size_bytes: int) -> EdgeError:
    return EdgeError(413, f"the body has {size_bytes} bytes or more; the limit is {limits.body_bytes} bytes "
                          "(limits.max_body_mb)", param="limits.max_body_mb", code="body_too_large")


def request_line_too_long(limits: EdgeLimits) -> EdgeError:
    return EdgeError(414, f"the request line has more than {limits.request_line_bytes} bytes "
                          "(limits.max_request_line)", param="limits.max_request_line",
                          code="request_line_too_long")


def too_many_pipelined() -> EdgeError:
    return EdgeError(429, "too many requests are pipelined", code="too_many_pipelined")


def headers_too_large(limits: EdgeLimits) -> EdgeError:
    return EdgeError(
        431, f"the headers have more than {limits.header_bytes} bytes (limits.max_header_bytes) or "
             f"{limits.header_count} fields (limits.max_headers)", param="limits.max_header_bytes",
        code="headers_too_large")


def raw_answer(refusal: EdgeError, path: str = "") -> bytes:
    """The whole HTTP answer to a request at ``path``, if so much of it came; the connection closes behind
    it."""
    request_id = random_id()
    body = dialect_body(refusal, path, request_id)
    headers = {**error_headers(refusal), "content-type": "application/json",
               "content-length": str(len(body)), "connection": "close",
               "x-content-type-options": "nosniff", "x-request-id": request_id}
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
             *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
