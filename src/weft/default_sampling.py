"""Defaults of sampling values that a request leaves out.

    request  >  created name  >  checkpoint  >  --default-sampling  >  the API's own

Each value is looked up separately in this order. OpenAI's and Anthropic's APIs and the Python API have the defaults of
``SamplingParams``: temperature 1 over all tokens, which is too random for most small models. Ollama's API, the page,
`weft chat` and `weft generate` have Ollama's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from weft.errors import ConfigError, RequestError
from weft.request import RANGES, SamplingParams

FLAG = "--default-sampling"
OLLAMA_SAMPLING: Mapping[str, float | int] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Defaults that Ollama documents, without values that have no effect (min_p 0, repeat_penalty 1)."""
SAMPLING_SETS: Mapping[str, Mapping[str, float | int]] = {
    "ollama": OLLAMA_SAMPLING,
    "openai": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
"""Named values of ``--default-sampling``."""
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_ANY_VOCABULARY = 1 << 31
"""Stand-in for a vocabulary size, tokens: no value names a token."""


def read_default_sampling(text: str | None) -> dict[str, float | int]:
    """Return the fields of SamplingParams in ``ollama``, ``openai`` or ``NAME=VALUE,...``. Raises ConfigError."""
    chosen: dict[str, float | int] = {}
    for part in (text or "").split(","):
        name, sign, value = (word.strip() for word in part.partition("="))
        if not sign and name in SAMPLING_SETS:
            chosen |= SAMPLING_SETS[name]
        elif sign and name in _NAMES:
            chosen[name] = _number(name, value)
        elif text is not None:
            raise ConfigError(f"{FLAG} has {part.strip()!r}: {_hint(name)}", param=FLAG)
    try:
        SamplingParams(**chosen).check(vocab_size=_ANY_VOCABULARY)  # type: ignore[arg-type]
    except RequestError as error:
        raise ConfigError(f"{FLAG}: {error.message}", param=FLAG) from None
    return chosen


def sampling_in_words(values: Mapping[str, float | int]) -> str:
    """Return ``temperature 0.8, top_k 40``, in the order in which the fields are documented."""
    return ", ".join(f"{name} {values[name]:g}" for name in _NAMES if name in values)


def sampling_sentence(checkpoint: Mapping[str, float | int], known: Mapping[str, float | int]) -> str:
    """Return a sentence about the sampling of requests that name no values. ``known``: ``checkpoint`` and
    ``--default-sampling``."""
    added = {name: value for name, value in known.items() if name not in checkpoint}
    parts = [
        f"{sampling_in_words(values)} ({source})"
        for values, source in ((checkpoint, "checkpoint"), (added, FLAG))
        if values
    ]
    left = [name for name in OLLAMA_SAMPLING if name not in known]
    if left and known.get("temperature") != 0:  # greedy, whatever the other values are
        chat, plain = ({name: values[name] for name in left} for values in SAMPLING_SETS.values())
        parts.append(f"{sampling_in_words(chat)} in Ollama's API, the page and `weft chat`")
        parts.append(f"{sampling_in_words(plain)} in the other APIs")
    return f"sampling where a request does not say: {'; '.join(parts)}"


def _number(name: str, value: str) -> float | int:
    try:
        return int(value) if isinstance(RANGES[name].low, int) else float(value)
    except ValueError:
        kind = "a whole number" if isinstance(RANGES[name].low, int) else "a number"
        raise ConfigError(f"{FLAG}: {name} is {value!r}; it must be {kind}", param=FLAG) from None


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]}=VALUE? It" if near else "it"
    return f"{meant} may be {', '.join(SAMPLING_SETS)} or NAME=VALUE, with the names {', '.join(_NAMES)}"
