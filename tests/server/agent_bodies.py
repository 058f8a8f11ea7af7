"""Requests in the shapes that released agents send, in words of our own: every field, block and tool type of them.

    Claude Code 2.1.197 and 2.1.332, Codex 0.171.0, opencode 1.18.33, Qwen Code 0.15.10 and 0.24.4, pi 0.74.2 and
    1.6.0, Cline 3.0.65, Continue 1.5.47, OpenHands 1.16.0, Aider 0.86.2

``tests/clients/agents.py`` records what newer releases send, and names what is in no body here.
"""

from __future__ import annotations

from typing import Any

from tests.clients.recorder import fields

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
    "additionalProperties": False,
}
_MARK = {"type": "ephemeral"}
_ASKED = "Write a greeting. say:done"
_CALL = {"name": "write", "arguments": '{"path": "a.txt", "content": "hello"}'}


def _text(text: str, *, marked: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": _MARK} if marked else {})}


CLAUDE_CODE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 32_000,
    "stream": True,
    "metadata": {"user_id": "someone"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "system": [
        _text("x-anthropic-billing-header: cc_version=1;"),
        _text("You work in a terminal."),
        _text("You write files.", marked=True),
    ],
    "messages": [
        {"role": "user", "content": [_text("The folder is empty."), _text(_ASKED, marked=True)]},
        {"role": "system", "content": "The date is known."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a file", "signature": ""},
                _text("I write it."),
                {
                    "type": "tool_use",
                    "id": "call_1",
                    "name": "write",
                    "input": {"path": "a.txt", "content": "hello"},
                    "cache_control": _MARK,
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "written", "cache_control": _MARK},
                {"type": "tool_result", "tool_use_id": "call_2", "is_error": True, "content": [_text("no such call")]},
            ],
        },
    ],
    "tools": [
        {"name": "write", "description": "Write a file.", "input_schema": _SCHEMA},
        {"name": "found_later", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True},
    ],
}

CODEX: dict[str, Any] = {
    "model": "scripted",
    "stream": True,
    "store": False,
    "instructions": "You write code.",
    "include": ["reasoning.encrypted_content"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "a-key",
    "reasoning": {"summary": "auto", "effort": "medium"},
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "s", "turn_id": "t"},
    "tool_choice": "auto",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "developer",
            "content": [{"type": "input_text", "text": "No network."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _ASKED}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "AAAA"},
        {
            "type": "reasoning",
            "id": "rs_2",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "a file"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I write it.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "call_1", **_CALL},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "written"},
    ],
    "tools": [
        {"type": "function", "name": "write", "description": "d", "strict": False, "parameters": _SCHEMA},
        {
            "type": "namespace",
            "name": "agents",
            "description": "d",
            "tools": [
                {"type": "function", "name": "spawn", "description": "d", "strict": False, "parameters": _SCHEMA}
            ],
        },
        {"type": "web_search", "external_web_access": False},
    ],
}

_CHAT_TOOL = {"type": "function", "function": {"name": "write", "description": "d", "parameters": _SCHEMA}}
_CHAT_TOOL_STRICT = {"type": "function", "function": {**_CHAT_TOOL["function"], "strict": False}}  # type: ignore[dict-item]
_PAST_CALL = {
    "role": "assistant",
    "content": "I write it.",
    "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}],
}
_PAST_THOUGHT = {**_PAST_CALL, "reasoning_content": "a file"}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "written"}

OPENCODE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 4096,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "messages": [
        {"role": "system", "content": "You write code."},
        {"role": "user", "content": _ASKED},
        {"role": "user", "content": "Now."},
        _PAST_THOUGHT,
        _RESULT,
    ],
    "tools": [_CHAT_TOOL],
}

QWEN_CODE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 8000,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": [_text("You write code.")]},
        {"role": "user", "content": [_text("The folder is empty.")]},
        {"role": "assistant", "content": [_text("I see.")]},
        {"role": "user", "content": [_text(_ASKED)]},
        _PAST_CALL,
        {**_RESULT, "content": [_text("written")]},
    ],
    "tools": [_CHAT_TOOL],
}

PI: dict[str, Any] = {
    "model": "scripted",
    "max_completion_tokens": 32_000,
    "store": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "You write code."},
        {"role": "user", "content": [_text(_ASKED)]},
        _PAST_THOUGHT,
        _RESULT,
    ],
    "tools": [_CHAT_TOOL_STRICT],
}

CLINE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 32_000,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "messages": [
        {"role": "system", "content": "You write code."},
        {"role": "user", "content": _ASKED},
        _PAST_CALL,
        {**_RESULT, "content": '{"query": "edit:a.txt", "result": "written", "success": true}'},
    ],
    "tools": [_CHAT_TOOL],
}

CONTINUE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 4096,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "You write code."},
        {"role": "user", "content": _ASKED},
        _PAST_CALL,
        _RESULT,
    ],
    "tools": [_CHAT_TOOL],
}

OPENHANDS: dict[str, Any] = {
    "model": "scripted",
    "reasoning_effort": "high",
    "prompt_cache_key": "a-key",
    "messages": [
        {"role": "system", "content": [_text("You write code.")]},
        {"role": "user", "content": [_text(_ASKED)]},
        {**_PAST_CALL, "content": [_text("I write it.")]},
        {**_RESULT, "content": [_text("written")], "name": "write"},
    ],
    "tools": [_CHAT_TOOL],
}

AIDER: dict[str, Any] = {
    "model": "scripted",
    "stream": True,
    "temperature": 0,
    "messages": [{"role": "system", "content": "You edit files."}, {"role": "user", "content": _ASKED}],
}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "claude": (MESSAGES, CLAUDE_CODE),
    "codex": (RESPONSES, CODEX),
    "opencode": (CHAT, OPENCODE),
    "qwen": (CHAT, QWEN_CODE),
    "pi": (CHAT, PI),
    "cline": (CHAT, CLINE),
    "continue": (CHAT, CONTINUE),
    "openhands": (CHAT, OPENHANDS),
    "aider": (CHAT, AIDER),
}
KNOWN = frozenset(f"{path} {name}" for path, body in BODIES.values() for name in fields(body))
