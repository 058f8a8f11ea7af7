"""A tape: a checkpoint that says fixed texts, token by token, so that an agent's whole loop runs in seconds.

    make(path, {"\\n": first, "\\t": last}, calls=20)

Its one layer adds nothing, and its head maps each token to the next piece of a text. Which text is said depends on the
last character of the prompt. With tools and fewer results than ``calls`` a prompt ends with a line end, else with a
tab. The template takes a system message at the beginning alone, as that of Qwen3.5 does.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
_MARKS = ("<tool_call>", "</tool_call>")
_PIECE_CHARS = 6
_TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set first = messages[0] -%}
{%- if tools or first.role == 'system' -%}<|im_start|>system{{ '\\n' }}
{%- if first.role == 'system' -%}{{ text(first.content) }}{%- endif -%}
{%- if tools -%}{{ '\\nTools:\\n' }}{%- for tool in tools -%}{{ tool | tojson }}{{ '\\n' }}{%- endfor -%}
Calls: <tool_call>{{ '\\n' }}<function=name>{{ '\\n' }}<parameter=name>{{ '\\n' }}value{{ '\\n' }}</parameter>
{{- '\\n' }}</function>{{ '\\n' }}</tool_call>{%- endif -%}<|im_end|>{{ '\\n' }}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('a system message comes first') }}{%- endif -%}
{%- elif message.role == 'tool' -%}
<|im_start|>user{{ '\\n' }}<tool_response>{{ text(message.content) }}</tool_response><|im_end|>{{ '\\n' }}
{%- else -%}
<|im_start|>{{ message.role }}{{ '\\n' }}{{ text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n\\n' }}<tool_call>{{ '\\n' }}<function={{ call.function.name }}>{{ '\\n' }}
{%- for name, value in call.function.arguments | items -%}
<parameter={{ name }}>{{ '\\n' }}{{ value if value is string else value | tojson }}{{ '\\n' }}</parameter>{{ '\\n' }}
{%- endfor -%}</function>{{ '\\n' }}</tool_call>
{%- endfor -%}<|im_end|>{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length -%}
{{ '\\n' if tools and results < CALLS else '\\t' }}{%- endif -%}
"""


def call(name: str, arguments: Mapping[str, str]) -> str:
    """Return a call as the model of the tape writes it."""
    shown = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n\n<tool_call>\n<function={name}>\n{shown}</function>\n</tool_call>"


def make(path: Path, says: Mapping[str, str], *, calls: int = 1, positions: int = 262_144) -> Path:
    """Write the checkpoint. ``says``: a text for each last character of a prompt; ``calls``: results of tools before
    the last text. Raises ValueError for a text that has no new piece left."""
    seen = {*says, END}
    added, chains = [*_SPECIAL, *_MARKS], []
    for start, text in says.items():
        pieces = _pieces(text, seen)
        added += [piece for piece in pieces if piece not in added and len(piece.encode()) > 1]
        chains.append([start, *pieces, END])
    alphabet = _alphabet()
    ids = alphabet | {piece: 256 + at for at, piece in enumerate(added)}
    path.mkdir(parents=True, exist_ok=True)
    _save_model(path, ids, [[ids.get(piece, piece.encode()[0]) for piece in chain] for chain in chains], positions)
    _save_tokenizer(path, ids, added, alphabet)
    (path / "chat_template.jinja").write_text(_TEMPLATE.replace("CALLS", str(calls)))
    return path


def _alphabet() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _pieces(text: str, seen: set[str]) -> list[str]:
    """``text`` cut into pieces of which none was seen before: a piece decides what follows it."""
    pieces: list[str] = []
    for part in filter(None, re.split(f"({'|'.join(_MARKS)})", text)):
        rest = part
        while rest:
            longest = len(rest)
            least = longest if rest in _MARKS else min(_PIECE_CHARS, longest)
            size = next((size for size in range(least, longest + 1) if rest[:size] not in seen), 0)
            if size == 0:  # joined with the piece before it, so that both are a new one
                if not pieces or pieces[-1] in _MARKS:
                    raise ValueError(f"no new piece in {rest!r}")
                rest = pieces.pop() + rest
                size = len(rest)
            pieces.append(rest[:size])
            seen.add(rest[:size])
            rest = rest[size:]
    return pieces


def _save_model(path: Path, ids: Mapping[str, int], chains: list[list[int]], positions: int) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    width = -(-len(ids) // 64) * 64
    config = transformers.Qwen3Config(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        eos_token_id=ids[END],
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(width))
        head = torch.zeros(width, width)
        for chain in chains:
            for before, after in itertools.pairwise(chain):
                head[after, before] = 1
        model.lm_head.weight.copy_(head)
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)


def _save_tokenizer(path: Path, ids: Mapping[str, int], added: list[str], alphabet: Mapping[str, int]) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(alphabet), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(piece, special=piece in _SPECIAL, normalized=False) for piece in added])
    assert all(backend.token_to_id(piece) == ids[piece] for piece in added)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
