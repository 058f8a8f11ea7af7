"""``generation_config.json``: the end tokens of a model, and its makers' sampling settings.

These are defaults: a request that names a value always wins. A field that cannot be read is left out rather than
refused, because files differ in age and completeness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.families import text_config
from weft.families.known_keys import GENERATION_CONFIG, unknown_line
from weft.files import read_json

_NEUTRAL: dict[str, object] = {
    "bad_words_ids": None,
    "constraints": None,
    "begin_suppress_tokens": None,
    "dola_layers": None,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_length": 20,
    "max_new_tokens": None,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": 1.0,
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""Keys that ``generate`` of transformers applies and weft does not, with the values that change nothing."""
_SAMPLING: dict[str, type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
"""Type of each sampling setting."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of a model. ``eos_ids``: tokens that end an answer. ``left_out``: keys that change answers in
    transformers and that weft does not apply. ``sampling``: settings that the checkpoint states, as keywords of
    ``SamplingParams``.
    """

    eos_ids: tuple[int, ...] = ()
    sampling: dict[str, float | int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    unknown: str | None = None
    """Line about keys that nothing here knows."""

    def note(self) -> str | None:
        """Return a line about keys that are left out; None if there are none."""
        named = f"Not applied of {GENERATION_CONFIG}: {', '.join(self.left_out)}." if self.left_out else None
        return " ".join(line for line in (named, self.unknown) if line) or None

    def ending(self, token: int | None) -> GenerationDefaults:
        """Return these defaults with one more end: the tokenizer's, since fine-tunes change its ``eos_token`` and
        leave generation_config.json as it was.
        """
        return self if token is None else replace(self, eos_ids=tuple(dict.fromkeys((*self.eos_ids, token))))


def read_generation_defaults(directory: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    """Read the defaults from generation_config.json, with the eos ids of config.json if it has none.

    Raises CheckpointError when generation_config.json is there but not JSON.
    """
    path = directory / GENERATION_CONFIG
    stated = read_json(path) if path.is_file() else {}
    eos = next(
        (ids for source in (stated, config, text_config(config)) if (ids := _ids(source.get("eos_token_id")))), ()
    )
    sampling = {name: value for name in _SAMPLING if (value := _number(stated, name)) is not None}
    if stated.get("do_sample") is False:  # greedy, even if a temperature is stated
        sampling["temperature"] = 0.0
    return GenerationDefaults(
        eos_ids=eos,
        sampling=sampling,
        unknown=unknown_line(GENERATION_CONFIG, stated, _NEUTRAL),
        left_out=(
            *(key for key, neutral in _NEUTRAL.items() if stated.get(key) not in (None, neutral, [])),
            *(key for key in _SAMPLING if stated.get(key) is not None and _number(stated, key) is None),
        ),
    )


def _ids(value: object) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in listed if isinstance(i, int) and not isinstance(i, bool)))


def _number(stated: Mapping[str, Any], name: str) -> float | int | None:
    value, kind = stated.get(name), _SAMPLING[name]
    return kind(value) if isinstance(value, (int, kind)) and not isinstance(value, bool) else None
