"""Seeded random mutations of schemas, grammars, templates and bodies end in a result or a clear error.

    corpus --cut, repeat, swap, nest, splice--> input --> the code that meets strangers

A budget of seconds for each kind, small in the suite; ``make fuzz`` gives ten minutes in all. A failure
prints the seed of its input, and ``WEFT_FUZZ_SEED`` begins there.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.hostile.test_media import fetched
from tests.support.pictures import drawn, encoded
from tests.unit.text.test_grammar_sandbox import new_compiler, reference_chain, rule_chain
from tests.unit.text.test_template_sandbox import PLAIN, sandbox, turns
from weft.errors import WeftError
from weft.families import read_architecture
from weft.images.decoding import FORMATS, ImageLimits
from weft.images.settings import ImageSettings
from weft.images.worker import read_picture
from weft.models.gguf.architectures import read_layout
from weft.models.gguf.header import read_header
from weft.models.gguf.view import our_tensors
from weft.models.gguf.vocabulary import Vocabulary
from weft.request import Grammar, SamplingParams
from weft.server.media import MediaFetcher
from weft.server.ollama.answers import _message
from weft.server.ollama.models import _messages, _parameters
from weft.server.ollama.protocol import (
    UNSERVED_IN_CREATE,
    UNSERVED_IN_OLLAMA,
    OllamaChatBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaPullBody,
    max_tokens,
    read_options,
    sampling_fields,
    served_name,
)
from weft.server.pooling import EmbeddingBody, RerankBody, ScoreBody
from weft.server.presets import Preset, check_preset_name
from weft.server.protocol import ChatBody, CompletionBody, grammar_of, parse_body, prompts_of, sampling_params
from weft.text.grammars import grammar_from
from weft.text.tools.definitions import read_choice, read_tools

SECONDS = float(os.environ.get("WEFT_FUZZ_SECONDS", "1"))
COUNT_MIN = 16
"""Texts on a machine that is too slow for the seconds."""
FIRST_SEED = int(os.environ.get("WEFT_FUZZ_SEED", "0"))
TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures" / "family_templates"
ODD = ("\x00", "\ud800", "\\", '"', "1e999", "-1", "9" * 400, "null", "{", "[", "🏔", "{{", "%}", "\n")
PAIRS = (("(", ")"), ("[", "]"), ('{"a":', "}"), ("{%if 1%}", "{%endif%}"))
INTERNALS = ("panic", "backtrace", "Traceback", ".rs:", "site-packages")

SCHEMAS = [
    json.dumps(schema)
    for schema in (
        reference_chain(40),
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"anyOf": [{"enum": ["x", 1, None]}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}]},
        {"type": "string", "pattern": "^a+(b|c){2,5}$", "maxLength": 9, "format": "date-time"},
    )
]
GRAMMARS = [
    rule_chain(40),
    'root ::= "<" num{1,3} ">" | "(" root ")"\nnum ::= [0-9a-f]+ # n\n',
    'start: (NAME "," )* %json {"type": "object"}\nNAME: /[a-z]{1,8}/ & ~/b.*/\n%ignore / /\n',
]
REGEXES = [r"(a|b)*\d{2,30}[^x-z]?", r"\p{L}+(\s|$)", r"((a{1,9}){1,9}){1,9}"]
BODIES = [json.dumps(body) for body in (
    {"model": "m", "prompt": ["a", [1, 2]], "n": 2, "temperature": 0.5, "stop": ["x"], "seed": 1,
     "logprobs": 2, "logit_bias": {"5": -1.5}, "guided_choice": ["a", "b"],
     "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]},
                  {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
     "tool_choice": "required", "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    {"input": ["a", [1, 2]], "dimensions": 2, "encoding_format": "base64", "truncate_prompt_tokens": -1},
    {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "max_tokens_per_doc": 3},
    {"text_1": "q", "text_2": ["a", "b"], "model": None})]  # fmt: skip


OLLAMA = [json.dumps(body) for body in (
    {"model": "m:latest", "messages": [{"role": "user", "content": "é", "images": ["AA=="]},
                                       {"role": "assistant", "tool_calls": [
                                           {"function": {"name": "f", "arguments": {"a": 1}}}]},
                                       {"role": "tool", "tool_name": "f", "content": "1"}],
     "options": {"num_predict": -1, "num_ctx": 9, "temperature": 0.5, "stop": ["x"], "num_gpu": 1},
     "format": {"type": "object"}, "keep_alive": "5m", "think": "high", "stream": False},
    {"model": "m", "prompt": "a", "system": "s", "raw": True, "format": "json", "options": {"stop": "x"}},
    {"model": "m", "input": ["a", [1, 2]], "truncate": True, "dimensions": 2, "keep_alive": -1},
    {"model": "a/b:q4", "from": "m", "system": "s", "template": "{{ messages }}", "license": ["a", "b"],
     "parameters": {"num_predict": 3, "stop": ["a", "b"], "seed": 1, "repeat_penalty": 1.1},
     "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]},
    {"source": "m", "destination": "a/b"}, {"name": "a/b", "model": None, "insecure": True})]  # fmt: skip


def no_token(text: str) -> int | None:
    """Stand for a vocabulary without added tokens."""
    return None


def mutations(corpus: list[str]) -> Iterator[tuple[int, str]]:
    """(seed, text) until the time is over; the corpus itself first."""
    end_s = time.monotonic() + SECONDS
    seed = FIRST_SEED
    while time.monotonic() < end_s or seed < FIRST_SEED + COUNT_MIN:
        draw = random.Random(seed)
        text = corpus[seed % len(corpus)]
        for _ in range(0 if seed < len(corpus) else draw.randint(1, 6)):
            text = _mutated(draw, text, corpus)
        yield seed, text
        seed += 1


def _mutated(draw: random.Random, text: str, corpus: list[str]) -> str:
    first, last = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    part = text[first:last][:60]
    match draw.randrange(7):
        case 0:
            return text[:first] + text[last:]
        case 1:
            return text[:first] + part * draw.choice((2, 50, 2000)) + text[last:]
        case 2:
            other = draw.choice(corpus)
            return text[:first] + other[draw.randrange(len(other) + 1) :]
        case 3:
            return text[:first] + draw.choice(ODD) + text[last if draw.random() < 0.5 else first :]
        case 4:
            depth = draw.choice((3, 100, 3000))
            opening, closing = draw.choice(PAIRS)
            return text[:first] + opening * depth + part + closing * depth + text[last:]
        case 5:
            return text[:first] + chr(draw.randrange(128)) + text[first + 1 :]
        case _:
            return text[:first] + text[last:] + part


def check(corpus: list[str], run: Callable[[str], Any]) -> None:
    """``run`` returns, or raises what a client may see."""
    count = refused = 0
    for seed, text in mutations(corpus):
        count += 1
        refusal = None
        try:
            run(text)
        except WeftError as error:
            refusal = error
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__} for {text[:300]!r}") from error
        if refusal is not None:
            refused += 1
            assert refusal.status in (400, 503), f"seed {seed}: {refusal.message}"
            assert not any(word in refusal.message for word in INTERNALS), f"seed {seed}: {refusal.message}"
    assert 0 < refused < count


@pytest.mark.parametrize(("kind", "corpus"), [("json", SCHEMAS), ("grammar", GRAMMARS), ("regex", REGEXES)])
def test_mutated_grammars_compile_or_are_refused(kind: str, corpus: list[str]) -> None:
    compiler = new_compiler(seconds=1, memory_bytes=128 << 20)

    def run(text: str) -> None:
        grammar: Grammar = grammar_from(kind, text, "f")
        matcher = compiler.build(grammar).matcher()
        matcher.compute_bitmask()

    try:
        check(corpus, run)
    finally:
        compiler.close()


def test_mutated_bodies_are_read_or_refused() -> None:
    def run(text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        if "messages" in text:
            chat = parse_body(raw, ChatBody)
            tools = read_tools(chat.tools)
            read_choice(chat.tool_choice, tools)
            sampling_params(chat, {}, n=chat.n, max_tokens=1, grammar=grammar_of(chat, no_token)).check(1000)
        elif '"input"' in text:
            prompts_of(parse_body(raw, EmbeddingBody).input, field="input")
        elif '"query"' in text or '"text_1"' in text:
            parse_body(raw, RerankBody if '"query"' in text else ScoreBody)
        else:
            body = parse_body(raw, CompletionBody)
            sampling_params(
                body,
                {},
                n=body.n,
                logprobs=body.logprobs,
                max_tokens=body.max_tokens,
                grammar=grammar_of(body, no_token),
            ).check(1000)

    check(BODIES, run)


def test_mutated_bodies_of_ollamas_api_are_read_or_refused() -> None:
    def read_chat(body: OllamaChatBody | OllamaGenerateBody) -> None:
        options = read_options(body.options)
        fields = sampling_fields(body, options, model=served_name(body.model))
        sampling_params(fields, {}, max_tokens=max_tokens(options), grammar=grammar_of(fields, no_token)).check(1000)
        for at, message in enumerate(body.messages if isinstance(body, OllamaChatBody) else ()):
            _message(at, message)

    def run(text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        if '"from"' in text:
            create = parse_body(raw, OllamaCreateBody, unserved=UNSERVED_IN_CREATE)
            name = check_preset_name(served_name(create.model or ""), param="model")
            system, messages = _messages(create)
            preset = Preset(
                name=name,
                model="m",
                created_s=0.0,
                system=system or "",
                parameters=_parameters(create.parameters),
                messages=messages or [],
            )
            SamplingParams(**preset.defaults).check(1000)
            read_again = msgspec.json.decode(msgspec.json.encode(preset), type=Preset)
            assert read_again.begun([]) == []
        elif '"messages"' in text:
            read_chat(parse_body(raw, OllamaChatBody, unserved=UNSERVED_IN_OLLAMA))
        elif '"input"' in text:
            prompts_of(parse_body(raw, OllamaEmbedBody).input, field="input")
        elif '"source"' in text:
            check_preset_name(parse_body(raw, OllamaCopyBody).destination, param="destination")
        elif '"name"' in text:
            check_preset_name(parse_body(raw, OllamaPullBody).name or "", param="model")
        else:
            read_chat(parse_body(raw, OllamaGenerateBody, unserved=UNSERVED_IN_OLLAMA))

    check(OLLAMA, run)


def test_mutated_templates_are_rendered_or_refused() -> None:
    def run(text: str) -> None:
        source = text.replace("\ud800", "")  # a file has none
        with sandbox(source, seconds=1.0, memory_bytes=64 << 20) as template:
            asyncio.run(template.write(turns("hi"), chars_cut=10_000))

    check([PLAIN, *(path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))[:6])], run)


def test_mutated_pictures_and_their_addresses_are_read_or_refused() -> None:
    """Files have a character for each byte."""
    settings, pixels = ImageSettings(), drawn("photo", 40, 30)
    fetcher = MediaFetcher(["*.example.org"], bytes_max=1 << 20, seconds=5, resolve=lambda host, port: [])
    addresses = ["https://a.example.org/x.png?y=1#z", "https://[2001:db8::1]:443/", "https://u@a.example.org\\"]
    files = [encoded(pixels, form).decode("latin-1") for form in FORMATS]
    urls = [f"data:image/png;base64,{base64.b64encode(encoded(pixels)).decode()}"]

    def run(text: str) -> None:
        if text[:2] == "ht":
            fetched(fetcher, text)
        elif text[:2] == "da":
            read_picture(text, settings, ImageLimits())
        else:
            read_picture(text.encode("latin-1", "replace"), settings, ImageLimits())

    check([*files, *urls, *addresses], run)


def gguf_corpus(directory: Path) -> list[str]:
    """Small files, a character for each byte: of three architectures, with vocabularies of six tokens."""
    import gguf
    import numpy as np

    texts = []
    for name, shapes in (
        ("lfm2", {"blk.0.attn_q.weight": (8, 8)}),
        ("jamba", {"blk.0.ffn_gate_inp.weight": (2, 8)}),
        ("qwen35", {"blk.0.ssm_a": (4,), "blk.1.attn_q.weight": (32, 8)}),
    ):
        writer = gguf.GGUFWriter(directory / "made.gguf", name)
        numbers = {
            "block_count": 2,
            "embedding_length": 8,
            "context_length": 64,
            "feed_forward_length": 16,
            "attention.head_count": 2,
            "attention.key_length": 4,
            "shortconv.l_cache": 3,
            "expert_count": 2,
            "expert_used_count": 1,
            "expert_feed_forward_length": 4,
            "expert_shared_feed_forward_length": 4,
            "ssm.time_step_rank": 4,
            "ssm.group_count": 2,
            "ssm.state_size": 4,
            "ssm.inner_size": 16,
            "ssm.conv_kernel": 4,
        }
        for key, value in numbers.items():
            writer.add_uint32(f"{name}.{key}", value)
        writer.add_array(f"{name}.attention.head_count_kv", [0, 1])
        writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tokenizer_model("llama" if name == "jamba" else "gpt2")
        writer.add_tokenizer_pre("lfm2")
        writer.add_token_list(["<s>", "a", "b", "ab", "<|im_end|>", "[PAD5]"])
        writer.add_token_types([3, 1, 1, 1, 3, 5])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0, 0.0, 0.0])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(4)
        for tensor, shape in {"token_embd.weight": (6, 8), **shapes}.items():
            writer.add_tensor(tensor, np.zeros(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        texts.append((directory / "made.gguf").read_bytes().decode("latin-1"))
    return texts


def test_mutated_gguf_files_become_a_configuration_or_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mutated.gguf"

    def run(text: str) -> None:
        file.write_bytes(text.encode("latin-1", "replace"))
        header = read_header(file)
        layout = read_layout(header)
        json.dumps(layout.config)
        for tensor in header.tensors.values():
            our_tensors(tensor, layout)
        json.dumps(Vocabulary(header).tokenizer())
        read_architecture(layout.config)

    check(gguf_corpus(tmp_path), run)
