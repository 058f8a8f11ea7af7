"""The tokenizer of a GGUF file as the files of a checkpoint: tokenizer.json and tokenizer_config.json.

    tokenizer.ggml.model   gpt2     byte-level BPE: tokens, merges, and the name of a pre-tokenizer
                           llama    SentencePiece BPE: tokens with scores; all pairs that make one are merges
                           gemma4   the same with merges in the file, and runs of newlines cut out of text
                           rwkv     World: bytes of tokens, as rwkv_vocab_gguf.txt instead of tokenizer.json
                           plamo2   pieces with scores, as tokenizer.jsonl; not of PLaMo 3, whose file does not say
                                    around what runs a text is cut
    tokenizer.ggml.pre     "lfm2"   how text is cut before merges (``pre_tokenizers``)

A token of type *control* is special; of type *user-defined* it is cut out of text and stays visible. *Unused*
ones are padding of the embedding, which the original tokenizer does not have.

An answer ends at the tokens that the keys eos, eot and eom name. Tokens with a well-known name of an end of turn end
it as well, of any type but *unused*: converters leave the type of some out. Where answers are several messages
(gpt-oss, Solar Open), ``<|end|>`` only ends one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from weft.errors import CheckpointError
from weft.models.gguf.header import Header
from weft.pre_tokenizers import BYTE_LEVEL, PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_END_OF_MESSAGE = "<|end|>"
_ENDS_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    _END_OF_MESSAGE,
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<|eom_id|>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<|role_end|>",
)
_OF_SEVERAL_MESSAGES = {"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}
"""Ends of answers in vocabularies whose answers are several messages, each with an end of its own."""
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_SAMPLING_KEYS = "general.sampling."
_ONLY_WITH_OTHERS = ("mirostat_eta", "mirostat_tau", "penalty_last_n", "sequence", "xtc_threshold")
"""Settings of samplers, which have no effect unless another key turns the sampler on."""

_PRE_OF = {"gptoss": "gpt-4o"}
"""Pre-tokenizers of Ollama's architectures whose files name none: they are in Ollama's code."""


def write_tokenizer(header: Header, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, and chat_template.jinja if the file has a template.

    Raises CheckpointError naming the key for a tokenizer that is not supported.
    """
    vocabulary, kind = Vocabulary(header), header.keys.get("tokenizer.ggml.model")
    if kind == "rwkv":
        (directory / "rwkv_vocab_gguf.txt").write_text(vocabulary.world())
    else:
        plamo = kind == "plamo2" and header.keys.get("general.architecture") == "plamo2"
        name, text = (
            ("tokenizer.jsonl", vocabulary.scored())
            if plamo
            else ("tokenizer.json", json.dumps(vocabulary.tokenizer(), ensure_ascii=False))
        )
        (directory / name).write_text(text)
        (directory / "tokenizer_config.json").write_text(json.dumps(vocabulary.special_names(), ensure_ascii=False))
    template = header.keys.get("tokenizer.chat_template")
    if isinstance(template, str) and "{" in template:  # older files of RWKV have a name there
        (directory / "chat_template.jinja").write_text(template)


def generation_config(header: Header) -> dict[str, Any]:
    """Return the end tokens of answers, and the makers' sampling settings."""
    sampling = {
        ours: value
        for ours, theirs in _SAMPLING.items()
        if isinstance(value := header.keys.get(f"{_SAMPLING_KEYS}{theirs}"), (int, float))
    }
    # The reader of the file names the others.
    others = {
        key: value
        for key, value in header.keys.items()
        if key.startswith(_SAMPLING_KEYS)
        and value
        and key.removeprefix(_SAMPLING_KEYS) not in (*_SAMPLING.values(), *_ONLY_WITH_OTHERS)
    }
    return {"eos_token_id": Vocabulary(header).ends()} | sampling | others


class Vocabulary:
    """The keys ``tokenizer.ggml.*``, checked."""

    def __init__(self, header: Header) -> None:
        self.path, self.keys = header.path, header.keys
        tokens = self._get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            self._fail("tokens", "is not a list of texts")
        self.tokens: list[str] = tokens
        self.types: list[int] = self._numbers("token_type", "iu", [_NORMAL] * len(tokens))

    def tokenizer(self) -> dict[str, Any]:
        """Return the content of tokenizer.json."""
        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "gpt2": self._byte_level,
            "llama": lambda: self._sentence_piece(self._pairs()),
            "gemma4": lambda: self._sentence_piece(self._merges()),
        }
        kind = self._get("model")
        if kind not in makers:
            self._fail("model", f"is {kind!r}; weft reads {', '.join(makers)}, rwkv, and plamo2 of PLaMo 2")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "post_processor": None,
        } | makers[kind]()

    def scored(self) -> str:
        """Return the lines of PLaMo's tokenizer.jsonl, without the padding after them."""
        scores = self._numbers("scores", "f", None)
        kinds = {_UNKNOWN: "UNKNOWN", _CONTROL: "CONTROL", _BYTE: "BYTE"}
        rows = list(zip(self.tokens, scores, self.types, strict=True))
        while rows and rows[-1][2] == _UNUSED:
            rows.pop()
        return "".join(
            json.dumps([text, score, kinds.get(kind, "NORMAL")], ensure_ascii=False) + "\n"
            for text, score, kind in rows
        )

    def world(self) -> str:
        """Return the lines of a World vocabulary. A token of the file is text as Python prints it between quotes."""
        lines = []
        for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _NORMAL:
                continue
            try:
                token = text.encode("latin-1").decode("unicode_escape").encode("latin-1")
            except UnicodeError:
                self._fail("tokens", f"has {text!r}, which is not bytes as Python prints them")
            lines.append(f"{index} {token!r} {len(token)}\n")
        return "".join(lines)

    def special_names(self) -> dict[str, str]:
        named = {name: self._token(key) for name, key in _NAMED.items()}
        return {name: self.tokens[token] for name, token in named.items() if token is not None}

    def ends(self) -> list[int]:
        """Return the tokens that end an answer, the file's own one first."""
        stated = [*self._several("eos_token_ids"), *(self._token(f"{name}_token_id") for name in ("eos", "eot", "eom"))]
        known = {
            text: index
            for index, text in enumerate(self.tokens)
            if self.types[index] != _UNUSED and text in _ENDS_OF_TURN
        }
        if any(known.keys() >= texts for texts in _OF_SEVERAL_MESSAGES):
            known.pop(_END_OF_MESSAGE, None)
        return list(dict.fromkeys(token for token in (*stated, *known.values()) if token is not None))

    def _byte_level(self) -> dict[str, Any]:
        name = self._get("pre")
        if name in (None, "default"):
            name = _PRE_OF.get(str(self.keys.get("general.architecture")), name)
        if name not in PRE_TOKENIZERS:
            self._fail("pre", f"is {name!r}; the pre-tokenizers that weft knows are {', '.join(PRE_TOKENIZERS)}")
        pre = PRE_TOKENIZERS[name]
        return {
            "normalizer": {"type": "NFC"} if pre.nfc else None,
            "pre_tokenizer": pre.content(),
            "post_processor": self._ends_of_text(pre.bos) or BYTE_LEVEL | {"use_regex": True, "trim_offsets": False},
            "decoder": BYTE_LEVEL | {"use_regex": True},
            "model": self._bpe(self._merges(), ignore_merges=pre.whole),
        }

    def _merges(self) -> list[list[str]]:
        """Return the merges, without pairs whose parts are not tokens and so never meet."""
        merges = self._get("merges")
        if not isinstance(merges, list) or not all(isinstance(merge, str) and " " in merge for merge in merges):
            self._fail("merges", "is not a list of pairs")
        known, pairs = set(self.tokens), [merge.split(" ", 1) for merge in merges]
        return [[left, right] for left, right in pairs if {left, right, left + right} <= known]

    def _sentence_piece(self, merges: Sequence[Sequence[str]]) -> dict[str, Any]:
        prefix = self._get("add_space_prefix", True) is not False
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        texts = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        unknown = self._token("unknown_token_id")
        model = self._bpe(
            merges, byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else self.tokens[unknown]
        )
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), spaces],
            },
            "pre_tokenizer": None,
            "post_processor": self._ends_of_text(True),
            "decoder": {
                "type": "Sequence",
                "decoders": [*texts, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else [])],
            },
            "model": model,
        }

    def _pairs(self) -> list[list[str]]:
        """Return pairs as merges: SentencePiece joins the two neighbours whose token has the best score, in that
        order.
        """
        scores = self._numbers("scores", "f", None)
        known = {token: index for index, token in enumerate(self.tokens) if self.types[index] != _UNUSED}
        normal = [index for index, kind in enumerate(self.types) if kind == _NORMAL and len(self.tokens[index]) > 1]
        if normal and len({scores[index] for index in normal}) == 1:
            self._fail("scores", "has the same score for all tokens, which gives no order of merges")
        pairs = []
        for index in sorted(normal, key=lambda index: -scores[index]):
            text = self.tokens[index]
            cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            pairs += sorted(
                ([left, right] for left, right in cuts if left in known and right in known),
                key=lambda pair: (known[pair[0]], known[pair[1]]),
            )
        return pairs

    def _bpe(self, merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
        vocabulary = {token: index for index, token in enumerate(self.tokens) if self.types[index] != _UNUSED}
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        } | more

    def _added(self) -> list[dict[str, Any]]:
        # No merge of Gemma 4 crosses newlines, and llama.cpp takes a run of them as one piece.
        runs = self._get("model") == "gemma4"
        return [
            {
                "id": index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind not in (_USER_DEFINED, _NORMAL),
            }
            for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
            or (runs and kind == _NORMAL and text.count("\n") == len(text) > 1)
        ]

    def _ends_of_text(self, bos: bool) -> dict[str, Any] | None:
        """Return a post-processor for the tokens before and after each text; None if there are none."""
        adds = {"bos": self._get("add_bos_token", bos), "eos": self._get("add_eos_token", False)}
        ids = {name: self._token(f"{name}_token_id") for name, wanted in adds.items() if wanted}
        known = {name: token for name, token in ids.items() if token is not None}
        if not known:
            return None

        def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
            special = {
                name: {"SpecialToken": {"id": self.tokens[token], "type_id": type_id}} for name, token in known.items()
            }
            text = {"Sequence": {"id": sequence, "type_id": type_id}}
            return [
                *([special["bos"]] if "bos" in special else []),
                text,
                *([special["eos"]] if "eos" in special else []),
            ]

        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": [*around("A", 0), *around("B", 1)],
            "special_tokens": {
                self.tokens[token]: {"id": self.tokens[token], "ids": [token], "tokens": [self.tokens[token]]}
                for token in known.values()
            },
        }

    def _get(self, name: str, default: Any = None) -> Any:
        return self.keys.get(f"tokenizer.ggml.{name}", default)

    def _token(self, name: str) -> int | None:
        token = self._get(name)
        if token is not None and (not isinstance(token, int) or not 0 <= token < len(self.tokens)):
            self._fail(name, f"is {token!r}, and there are {len(self.tokens)} tokens")
        return token

    def _several(self, name: str) -> list[int]:
        """Return ids in a list, as Ollama's converter writes them; none without it."""
        stated = self._get(name)
        ids = stated.tolist() if isinstance(stated, np.ndarray) and stated.dtype.kind in "iu" else stated or []
        if not isinstance(ids, list) or not all(
            isinstance(token, int) and 0 <= token < len(self.tokens) for token in ids
        ):
            self._fail(name, f"is {stated!r:.100}, and there are {len(self.tokens)} tokens")
        return ids

    def _numbers(self, name: str, kinds: str, default: list[Any] | None) -> list[Any]:
        value = self._get(name, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in kinds:
            value = value.tolist()
        if not isinstance(value, list) or len(value) != len(self.tokens):
            self._fail(name, f"is not a list of numbers for each of the {len(self.tokens)} tokens")
        return value

    def _fail(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: tokenizer.ggml.{name} {reason}", param="model")
