"""Regexes of tokenizers that always end a word between a letter and a space.

    pattern   (?i:'s|'t|...) | [^\\r\\n\\p{L}\\p{N}]?\\p{L}+ | \\p{N}{1,3} | ... | \\s+
              each alternative is in _ALTERNATIVES                 --> a cut "x| y" needs no proof by encoding

No alternative of the list matches a letter and then a space: a space comes first, or there is no letter.
So the match with the letter ends before the space. ``\\s+`` matches any space, so the space begins the next
match. No alternative looks at what stands before it. A step that splits pieces further keeps the cut.

An added token is cut out of the text before the regex sees it. None may contain a space, or take spaces
beside itself.

Rejected: a parser of regexes. The list has the alternatives of GPT-2, cl100k, o200k, Llama and Qwen, which
most checkpoints have. Others are cut with a proof (``weft.text.text_parts``).
"""

from __future__ import annotations

from typing import Any

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_FIRST = r"[^\r\n\p{L}\p{N}]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ALTERNATIVES = frozenset({
    *_ENDINGS.split("|"), f"(?i:{_ENDINGS})", "'(?i:[sdmt]|ll|ve|re)",
    r" ?\p{L}+", rf"{_FIRST}?\p{{L}}+", rf"{_FIRST}?+\p{{L}}+", rf"{_FIRST}?[\p{{L}}\p{{M}}]+",
    rf"{_FIRST}?{_UPPER}*{_LOWER}+(?i:{_ENDINGS})?", rf"{_FIRST}?{_UPPER}+{_LOWER}*(?i:{_ENDINGS})?",
    r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+",
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"})
_ANY_SPACE = r"\s+"


def cuts_certainly(form: dict[str, Any]) -> bool:
    """``form``: a tokenizer.json, whose texts can be cut at ends of words."""
    for token in form.get("added_tokens") or ():
        if " " in token["content"] or any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
            return False
    steps = form.get("pre_tokenizer") or {}
    return any(_is_certain(step) for step in steps.get("pretokenizers", [steps]))


def _is_certain(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex"))  # GPT-2's, which is built in
    pattern = step.get("pattern", {}).get("Regex") if step.get("type") == "Split" else None
    if pattern is None:
        return False
    parts = alternatives(pattern)
    return _ANY_SPACE in parts and _ALTERNATIVES.issuperset(parts)


def alternatives(pattern: str) -> list[str]:
    """What stands between the bars of a regex outside of its brackets."""
    parts, part, depth, in_class, at = [], "", 0, False, 0
    while at < len(pattern):
        char = pattern[at]
        step = pattern[at:at + 2] if char == "\\" else char
        if char == "|" and not depth and not in_class:
            parts.append(part)
            step, part = "|", ""
        else:
            part += step
            in_class = (in_class or char == "[") and char != "]"
            depth += 0 if in_class else (char == "(") - (char == ")")
        at += len(step)
    return [*parts, part]
