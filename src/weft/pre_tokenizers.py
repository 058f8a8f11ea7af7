"""How vocabularies of byte-level BPE cut text: pre-tokenizers by llama.cpp's names, and those of a tokenizer.json.

    tokenizer.ggml.pre  "deepseek-v3"  --> PRE_TOKENIZERS -->  cuts, in turn  --> pieces, which merges never join
    tokenizer.json      pre_tokenizer  --> pieces_of      -->  the same       --> the name, where a GGUF file is written

A cut is a regular expression, each of whose matches is a piece by itself, as is the text between two matches. Two cuts
have no expression here, since the tokenizers library has them: ``DIGITS`` and ``GPT2``.

Sources: the tokenizer.json of the releases that llama.cpp's names refer to, and llama.cpp where it names several. Where
both were at hand, they cut the same texts equally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DIGITS = "digits"
"""The cut that makes each digit a piece."""
GPT2 = "gpt2"
"""The cut of GPT-2, a part of the byte-level step. Other cuts come before it."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One pre-tokenizer. ``cuts``: applied in turn. ``whole``: a piece that is a token needs no merges. ``nfc``: text
    is composed first. ``bos``: put before the text if the file does not say.
    """

    cuts: tuple[str, ...]
    whole: bool = False
    nfc: bool = False
    bos: bool = False

    def content(self) -> dict[str, Any]:
        """Return ``pre_tokenizer`` of a tokenizer.json."""
        parts = [*map(_part, self.cuts), BYTE_LEVEL | {"use_regex": GPT2 in self.cuts}]
        parts = [part for part in parts if part]
        return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _part(cut: str) -> dict[str, Any]:
    if cut == GPT2:
        return {}
    return {"type": "Digits", "individual_digits": True} if cut == DIGITS else split(cut)


def split(expression: str) -> dict[str, Any]:
    """Return the part of a ``pre_tokenizer`` that makes each match of ``expression`` a piece."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def pieces_of(content: Mapping[str, Any]) -> tuple[tuple[str, ...], bool, bool]:
    """Return ``(cuts, whole, nfc)`` of a tokenizer.json of byte-level BPE, as ``PRE_TOKENIZERS`` has them."""
    pre = content.get("pre_tokenizer") or {}
    cuts: list[str] = []
    for part in pre.get("pretokenizers") or [pre]:
        match part.get("type"):
            case "Split":
                cuts.append(part["pattern"].get("Regex", part["pattern"].get("String")))
            case "Digits":
                cuts.append(DIGITS)
            case "ByteLevel" if part.get("use_regex", True):
                cuts.append(GPT2)
    normalizer = content.get("normalizer") or {}
    return (tuple(cuts), bool(content["model"].get("ignore_merges")), normalizer.get("type") == "NFC")


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_MARKS_OR_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{'|'.join(_CASED)}|\p{{N}}|{_MARKS_OR_SLASHES}|{_SPACES}"
"""Regular expression by which Mistral's vocabularies cut text, from Tekken on."""
_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_NO_HAN = r"\p{M}&&[^\p{Han}]]"
_KIMI_CASED = tuple(cased.replace(r"\p{M}]", _NO_HAN) for cased in _CASED)


def _words(digits: str, marks: str = _MARKS, letters: str = _LETTERS, spaces: str = _SPACES) -> str:
    """Return the expression that Llama 3 and most vocabularies after it share. ``digits``: one piece of a number."""
    return f"{_CONTRACTED}|{letters}|{digits}|{marks}|{spaces}"


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole=True, bos=True)
_QWEN2 = _words(r"\p{N}")
_ANY_CASE = "|".join(f"{cased}{_CONTRACTED}?" for cased in _CASED)
_GPT_4O = rf"{_ANY_CASE}|\p{{N}}{{1,3}}|{_MARKS_OR_SLASHES}|{_SPACES}"
_QWEN35 = _words(r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_K_EXAONE = _words(
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
)
_JAIS2 = _words(
    r"\p{N}{1,3}",
    spaces=r"\s*[\r\n]+|" + "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}",
)

KIMI = "|".join(
    [r"[\p{Han}]+", *(f"{cased}{_CONTRACTED}?" for cased in _KIMI_CASED), rf"\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"]
)
"""Regular expression of Kimi's vocabularies, from K2 on."""

_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_MARKED = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_KANJI_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_V3 = (r"\p{N}{1,3}", _KANJI_AND_KANA, _MARKED)
_HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_BICAMERAL = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄ"
    "ῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters of scripts with two cases."""
_ASIAN = "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_LLAMA3.cuts)),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(_LLAMA3.cuts, whole=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), PreTokenizer((_QWEN2,), nfc=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "kimi-k2": PreTokenizer((KIMI,), whole=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), PreTokenizer((_BAILING,))),
    "tekken": PreTokenizer((TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), PreTokenizer((_GPT_4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_BICAMERAL}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    "youtu": PreTokenizer(
        (
            f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_KANJI_AND_KANA}",
            rf"{_ANY_CASE}|\p{{N}}|{_MARKS_OR_SLASHES}|{_SPACES}",
        ),
        whole=True,
    ),
    # Groups of three digits, counted from the right.
    "afmoe": PreTokenizer((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _MARKED)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O))),
    "seed-coder": PreTokenizer((_words(r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "exaone-moe": PreTokenizer((_K_EXAONE,)),
    "jais-2": PreTokenizer((_JAIS2,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole=True),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    **dict.fromkeys(
        ("refact", "starcoder", "smollm", "codeshell", "command-r", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((DIGITS, GPT2)),
    ),
    **dict.fromkeys(
        ("gpt-2", "mpt", "olmo", "phi-2", "jais", "granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum",
         "trillion"),
        PreTokenizer((GPT2,)),
    ),
}  # fmt: skip
"""Pre-tokenizers by the names of ``tokenizer.ggml.pre``."""
