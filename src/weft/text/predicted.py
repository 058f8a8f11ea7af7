"""The text of OpenAI's ``prediction``: the client's own guess of the answer.

    {"type": "content", "content": "..."}
    {"type": "content", "content": [{"type": "text", "text": "..."}, ...]}

A prediction changes no token of an answer. It is a source of drafts (``weft.speculation.prediction``): an
answer that mostly repeats it comes faster.
"""

from __future__ import annotations

from typing import Any

from weft.errors import RequestError

_FORM = '{"type": "content", "content": text or a list of text parts}'


def predicted_text(value: Any) -> str | None:
    """``value`` of the field ``prediction``; None without one. Raises RequestError that names the place."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong("prediction", f"it must be {_FORM}")
    if value.get("type") != "content":
        raise _wrong("prediction.type", f"it is {value.get('type')!r}; it must be 'content'")
    content = value.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong("prediction.content", "it must be text or a list of text parts")
    texts = []
    for at, part in enumerate(content):
        place = f"prediction.content[{at}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(place, f"it is {str(kind)[:100]!r}; parts of a prediction have the type 'text'")
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{place}.text", "it must be text")
        texts.append(part["text"])
    return "".join(texts)


def _wrong(place: str, why: str) -> RequestError:
    return RequestError(f"{place}: {why}", param=place, code="invalid_type")
