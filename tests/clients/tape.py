"""A tape: a checkpoint that says fixed texts, token by token, so that an agent's whole loop runs in seconds.

    make(path, Script(calls=[call("read", {"path": "a"})], last="Done.", summary="Read so far: a"))

Its one layer adds nothing, and its head maps each token to the next piece of a text. The last character of a prompt
decides which text is said:

    a conversation that holds ``mark``     last      (the agent compacted it)
    a request to sum it up                 summary
    no tools                               last
    fewer results than calls               the call of that number
    else                                   last

The template takes a system message at the beginning alone, as that of Qwen3.5 does. The vocabulary is learned from
this project's docs, so that a prompt has about as many tokens as with a real model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_PIECE_CHARS = 6
_MERGES_MAX = 2000
_DOCS = Path(__file__).resolve().parents[2] / "docs"
_FIRST_START = 0x2800
"""Braille patterns: their last bytes differ, and no text of ours has them."""
_LAST, _SUMMARY = chr(_FIRST_START), chr(_FIRST_START + 1)
_CALLS = [chr(_FIRST_START + at) for at in range(2, 64)]
SUM_UP = (
    "a detailed summary of",  # Claude Code
    "handoff summary",  # Codex
    "anchored summary",  # opencode
    "state_snapshot",  # Qwen Code
    "context summarization assistant",  # pi
    "summarize this session",  # Cline
    "concise summary of our conversation",  # Continue
    "summarize this partial conversation",  # Aider
    "summarize the events",  # OpenHands
)
"""Words by which agents ask for a summary."""
_TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content or [] -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set first = messages[0] -%}
{%- if tools or first.role == 'system' -%}<|im_start|>system{{ '\\n' }}
{%- if first.role == 'system' -%}{{ text(first.content) }}{%- endif -%}
{%- if tools -%}{{ '\\nTools:\\n' }}{%- for tool in tools -%}{{ tool | tojson }}{{ '\\n' }}{%- endfor -%}
Calls: <tool_call>{{ '\\n' }}<function=name>{{ '\\n' }}<parameter=name>{{ '\\n' }}value{{ '\\n' }}</parameter>
{{- '\\n' }}</function>{{ '\\n' }}</tool_call>{%- endif -%}<|im_end|>{{ '\\n' }}{%- endif -%}
{%- set seen = namespace(all='') -%}
{%- for message in messages -%}
{%- set seen.all = seen.all + text(message.content) -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('a system message comes first') }}{%- endif -%}
{%- elif message.role == 'tool' -%}
<|im_start|>user{{ '\\n' }}<tool_response>{{ text(message.content) }}</tool_response><|im_end|>{{ '\\n' }}
{%- else -%}
<|im_start|>{{ message.role }}{{ '\\n' }}
{%- if message.reasoning_content -%}<think>{{ '\\n' + message.reasoning_content + '\\n' }}</think>{{ '\\n\\n' }}
{%- endif -%}{{ text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n\\n' }}<tool_call>{{ '\\n' }}<function={{ call.function.name }}>{{ '\\n' }}
{%- for name, value in call.function.arguments | items -%}
<parameter={{ name }}>{{ '\\n' }}{{ value if value is string else value | tojson }}{{ '\\n' }}</parameter>{{ '\\n' }}
{%- endfor -%}</function>{{ '\\n' }}</tool_call>
{%- endfor -%}<|im_end|>{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}
{%- set asked = namespace(all='') -%}
{%- for message in messages[-2:] -%}{%- set asked.all = asked.all + text(message.content) | lower -%}{%- endfor -%}
{%- set told = asked.all if tools else seen.all | lower -%}
{%- set found = namespace(any=false) -%}
{%- for words in SUM_UP -%}{%- if words in told -%}{%- set found.any = true -%}{%- endif -%}{%- endfor -%}
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length -%}
{%- if MARK in seen.all -%}{{ LAST }}
{%- elif messages[-1].role == 'user' and found.any -%}{{ SUMMARY }}
{%- elif tools and results < CALLS | length -%}{{ CALLS[results] }}
{%- else -%}{{ LAST }}{%- endif -%}{%- endif -%}
"""


@dataclass(frozen=True)
class Script:
    """``calls``: what is said after so many results of tools. ``mark``: a text of ``summary`` by which the template
    knows a conversation that was summed up. ``endless``: the first text begins again at its end."""

    last: str
    calls: Sequence[str] = ()
    summary: str = "A summary."
    mark: str = "no conversation has this text"
    endless: bool = False


def call(name: str, arguments: Mapping[str, object]) -> str:
    """Return a call as the model of the tape writes it."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    shown = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in texts.items())
    return f"\n\n<tool_call>\n<function={name}>\n{shown}</function>\n</tool_call>"


def make(path: Path, script: Script, *, positions: int = 262_144) -> Path:
    """Write the checkpoint. Raises ValueError for a text that has no new piece left."""
    says = dict(zip(_CALLS, script.calls, strict=False)) | {_SUMMARY: script.summary, _LAST: script.last}
    if len(script.calls) > len(_CALLS):
        raise ValueError(f"{len(script.calls)} calls, and a tape has room for {len(_CALLS)}")
    values: dict[str, Any] = {"MARK": script.mark, "LAST": _LAST, "SUMMARY": _SUMMARY}
    values |= {"CALLS": _CALLS[: len(script.calls)], "SUM_UP": SUM_UP}
    template = re.sub(r"\b(MARK|LAST|SUMMARY|CALLS|SUM_UP)\b", lambda found: json.dumps(values[found[0]]), _TEMPLATE)
    vocabulary, merges = _learned()
    ids = dict(vocabulary)
    seen: set[str] = {END}
    for piece in (*_SPECIAL, *_MARKS):
        ids[piece] = len(ids)
    chains: list[list[int]] = []
    for start, text in says.items():
        pieces = _pieces(text, seen, template)
        for piece in pieces:
            ids.setdefault(_as_bytes(piece) if len(piece) == 1 else piece, len(ids))
        chain = [ids[_as_bytes(piece) if len(piece) == 1 else piece] for piece in pieces]
        ends = chain[0] if script.endless and start == (_CALLS[0] if script.calls else _LAST) else ids[END]
        chains.append([ids[_as_bytes(start)[-1]], *chain, ends])
    path.mkdir(parents=True, exist_ok=True)
    _save_model(path, len(ids), ids[END], chains, positions)
    _save_tokenizer(path, ids, vocabulary, merges)
    (path / "chat_template.jinja").write_text(template)
    return path


def _as_bytes(text: str) -> str:
    """Return ``text`` in the byte-level alphabet."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return "".join(letters[byte] for byte in text.encode())


@functools.cache
def _learned() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a byte-level vocabulary and its merges, learned from the pages of docs/."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + _MERGES_MAX, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator((page.read_text() for page in sorted(_DOCS.glob("*.md"))), trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _pieces(text: str, seen: set[str], template: str) -> list[str]:
    """``text`` cut into pieces of which none was seen before: a piece decides what follows it. A token that begins
    with a sign is a control token if the template has it, so no piece is one."""
    pieces: list[str] = []
    marks = [mark for mark in _MARKS if mark not in seen]
    for part in filter(None, re.split(f"({'|'.join(marks) or '(?!)'})", text)):
        rest = part
        while rest:
            longest = len(rest)
            least = longest if rest in marks else min(_PIECE_CHARS, longest)
            sizes = [size for size in range(least, longest + 1) if rest[:size] not in seen]
            size = next(
                (size for size in sizes if rest in marks or rest[0].isalnum() or rest[:size] not in template), 0
            )
            if size == 0:  # joined with the piece before it, so that both are a new one
                if not pieces or pieces[-1] in marks:
                    raise ValueError(f"no new piece in {rest!r}")
                rest = pieces.pop() + rest
                size = len(rest)
            pieces.append(rest[:size])
            seen.add(rest[:size])
            rest = rest[size:]
    return pieces


def _save_model(path: Path, tokens: int, end: int, chains: list[list[int]], positions: int) -> None:
    """Write a Qwen 3 of one layer, all of whose tensors are zeros and ones."""
    width, inner, heads = -(-tokens // 64) * 64, 64, 2
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": width,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    head = np.zeros((width, width), bool)
    for chain in chains:
        head[chain[1:], chain[:-1]] = True
    ones, layer = np.ones(width, bool), "model.layers.0."
    shapes = {"self_attn.q_proj": (heads * 32, width), "self_attn.k_proj": (32, width)}
    shapes |= {"self_attn.v_proj": (32, width), "self_attn.o_proj": (width, heads * 32)}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    tensors = {"model.embed_tokens": np.eye(width, dtype=bool), "lm_head": head, "model.norm": ones}
    tensors |= {layer + name: ones for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {layer + name: np.ones(32, bool) for name in ("self_attn.q_norm", "self_attn.k_norm")}
    tensors |= {layer + name: np.zeros(shape, bool) for name, shape in shapes.items()}
    _save_bfloat16(path / "model.safetensors", {f"{name}.weight": value for name, value in tensors.items()})


def _save_bfloat16(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """numpy has no bfloat16, and torch takes seconds to import."""
    one, at = 0x3F80, 0
    header: dict[str, Any] = {}
    for name, value in tensors.items():
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": [at, at := at + 2 * value.size]}
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            out.write((value.astype("<u2") * np.uint16(one)).tobytes())


def _save_tokenizer(
    path: Path, ids: Mapping[str, int], vocabulary: Mapping[str, int], merges: list[tuple[str, str]]
) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(vocabulary), merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    added = [piece for piece in ids if piece not in vocabulary]
    backend.add_tokens([tokenizers.AddedToken(piece, special=piece in _SPECIAL, normalized=False) for piece in added])
    assert all(backend.token_to_id(piece) == ids[piece] for piece in added)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
