"""Typed reading of ``config.json``: each error names the key, its value, and the values that would be right.

Two things that every family shares are here: ``ConfigKeys``, a view over the parsed JSON that checks types and
ranges, and ``read_rope``, which folds the two spellings of rotary settings into one ``Rope``:

    old  {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.25}
    new  {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0, ...}}

Pure: no I/O, no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from weft.errors import CheckpointError
from weft.families.mixers.attention import Rope, RopeKind
from weft.spec import DTypeName

INTEGER_MAX = 2**31 - 1
"""Largest integer of a key: no size of a published model is larger, and products of two such sizes fit into 64
bits."""
_MOST = {"num_hidden_layers": 10_000}
_SHOWN_CHARS = 200


_DTYPES: dict[str, DTypeName] = {name: name for name in get_args(DTypeName)} | {"half": "float16", "float": "float32"}
"""Names of dtypes that torch has, and weft computes in."""
_STORED_ONLY = ("auto", "float64", "double", "float8_e4m3fn", "float8_e5m2")
"""Names of dtypes in which weights are only stored, and the one that leaves the choice to the tensors."""
HEAD_DIM_MAX = 1 << 16
"""Largest head size, numbers: a hundred times that of any model."""


def fail(key: str, value: object, reason: str) -> NoReturn:
    """Raise the CheckpointError of a setting, which names the key, its value and the reason."""
    shown = repr(value) if not isinstance(value, int) or abs(value) <= INTEGER_MAX else "a number too large"
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    raise CheckpointError(f"config.json: {key} is {shown}: {reason}", param="model")


def _is_number(value: object) -> bool:
    """Return whether it is a finite number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class ConfigKeys:
    """Reader of the keys of one configuration. ``fallback`` is the outer configuration of a multimodal wrapper (else
    the same mapping), which may have a key that the text part lacks (dtype, tied embeddings). ``seen``: the keys that
    were asked for."""

    def __init__(self, config: Mapping[str, Any], *, fallback: Mapping[str, Any], seen: set[str] | None = None) -> None:
        self._config = config
        self._fallback = fallback
        self.seen: set[str] = set() if seen is None else seen

    @property
    def outer(self) -> ConfigKeys:
        """Keys of the wrapper."""
        return ConfigKeys(self._fallback, fallback=self._fallback, seen=self.seen)

    def with_defaults(self, **defaults: Any) -> ConfigKeys:
        """Return these keys, with ``defaults`` for missing ones."""
        stated = {key: value for key, value in self._config.items() if value is not None or key not in defaults}
        return ConfigKeys(defaults | stated, fallback=self._fallback, seen=self.seen)

    def over(self, stated: Mapping[str, Any]) -> ConfigKeys:
        """Return these keys, with the values of ``stated`` first."""
        return ConfigKeys({**self._config, **stated}, fallback=self._fallback, seen=self.seen)

    def inner(self, key: str) -> ConfigKeys | None:
        """Return the keys of a part; None without it."""
        part = self.get(key)
        return ConfigKeys(part, fallback=part) if isinstance(part, Mapping) else None

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def only(self, place: str = "", /, **served: Any) -> None:
        """Refuse other values of these settings; silence means the served one. ``place``: prefix of the keys in
        errors."""
        for key, value in served.items():
            stated = self.get(key, value)
            if stated != value or isinstance(stated, bool) != isinstance(value, bool):
                shown = str(value).lower() if isinstance(value, bool) else value
                fail(f"{place}{key}", stated, f"only {shown} is served")

    def has(self, key: str) -> bool:
        """Return whether the configuration says anything about ``key``, null included."""
        self.seen.add(key)
        return key in self._config

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number; ``default`` None means that it is required. Raises CheckpointError below ``least``
        and for absurd sizes."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"config.json: {key} is missing", param="model")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            fail(key, value, f"it must be a whole number of at least {least}")
        if value > (most := _MOST.get(key, INTEGER_MAX)):
            fail(key, value, f"it must be at most {most}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not _is_number(value):
            fail(key, value, "it must be a number")
        return float(value)

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return the numbers of a list that is as long as ``default``."""
        value = self.get(key, default)
        if not (isinstance(value, (list, tuple)) and len(value) == len(default) and all(map(_is_number, value))):
            fail(key, value, f"it must be a list of {len(default)} numbers")
        return tuple(float(number) for number in value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            fail(key, value, "it must be true or false")
        return value

    def outer_boolean(self, key: str, default: bool) -> bool:
        """Return the wrapper's own value first, else as ``boolean``: for settings that belong to the head's owner."""
        value = self._fallback.get(key)
        return value if isinstance(value, bool) else self.boolean(key, default)

    def dtype(self) -> DTypeName | None:
        """Return the dtype that the configuration names; None where it names none that weights are computed in."""
        for config in (self._config, self._fallback):
            for key in ("dtype", "torch_dtype"):
                value = config.get(key)
                if value is None:
                    continue
                name = str(value).removeprefix("torch.")
                if name in _STORED_ONLY:
                    return None
                if name not in _DTYPES:
                    fail(key, value, f"the dtypes served are {', '.join(get_args(DTypeName))}")
                return _DTYPES[name]
        return None

    def limits(self, key: str, default: tuple[float, float]) -> tuple[float, float]:
        """Return a (low, high) pair; infinity may be spelled as JSON's Infinity, a string, or a tagged object."""
        value = self.get(key, default)
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            fail(key, value, "it must be a pair of numbers")
        try:
            low, high = (float(v["__float__"] if isinstance(v, Mapping) else v) for v in value)
        except (KeyError, TypeError, ValueError, OverflowError):
            fail(key, value, "it must be a pair of numbers")
        return low, high


def read_rope(
    keys: ConfigKeys, head_dim: int, *, theta: float, partial: float, layer_kind: str | None = None, scaled: bool = True
) -> Rope:
    """Return the rotary settings of ``keys``; ``theta`` and ``partial`` are the family's defaults. ``layer_kind``
    ("sliding_attention") selects a set where each kind of layer has its own. ``scaled`` False: the scaling of a single
    set is for other layers, and only its theta is used.

    Raises CheckpointError for a scaling that is not served or lacks a number, and for heads beyond HEAD_DIM_MAX.
    """
    if head_dim > HEAD_DIM_MAX:  # before a table of its angles is made
        fail("head_dim", head_dim, f"it must be at most {HEAD_DIM_MAX}")
    stated = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    if layer_kind is not None and isinstance(stated, Mapping):
        if any(isinstance(value, Mapping) for value in stated.values()):
            stated = stated.get(layer_kind) or {}
        elif not scaled:
            stated = {key: stated[key] for key in ("rope_theta",) if key in stated}
    if not isinstance(stated, Mapping) or any(isinstance(value, Mapping) for value in stated.values()):
        fail("rope_parameters", stated, "one flat set of rotary settings is served")
    inner = ConfigKeys(stated, fallback=stated)
    _refuse_shadowed(keys, inner)
    kind: Any = inner.get("rope_type", inner.get("type", "default"))
    # A rope that turns by places of pictures turns text by positions.
    # "dynamic" only changes the base beyond the longest context, which is not served.
    if kind == "dynamic" and inner.get("factor") is None:
        fail("rope_parameters", dict(stated), "rotary kind dynamic needs a factor")
    kind = {"su": "longrope", "mrope": "default", "dynamic": "default", "deepseek_yarn": "yarn"}.get(str(kind), kind)
    if kind not in get_args(RopeKind):
        fail("rope_type", kind, f"the rotary kinds served are {', '.join(get_args(RopeKind))}")
    partial = inner.number("partial_rotary_factor", keys.number("partial_rotary_factor", partial))
    if not 0.0 < partial <= 1.0:  # before it becomes an integer, which has no infinity
        fail("partial_rotary_factor", partial, "it must be above 0 and at most 1")
    if kind == "proportional":
        theta = inner.number("rope_theta", keys.number("rope_theta", theta))
        return Rope(
            theta, head_dim, "proportional", inner.number("factor", 1.0), turning_dim=2 * int(partial * head_dim // 2)
        )
    # Truncated, as transformers does.
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim > head_dim or rotary_dim % 2:
        fail("partial_rotary_factor", partial, f"it must leave an even part of head_dim {head_dim} to rotate")
    theta = inner.number("rope_theta", keys.number("rope_theta", theta))
    if kind == "default":
        return Rope(theta, rotary_dim)
    max_positions = keys.integer("max_position_embeddings", keys.get("model_max_length"))
    original = keys.integer(
        "original_max_position_embeddings", inner.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "longrope":
        return _longrope(inner, theta, rotary_dim, max_positions, original)
    longer = kind == "yarn" and original < max_positions  # then their ratio is the factor
    needed = ("factor",) if not longer else ()
    for name in (*needed, "low_freq_factor", "high_freq_factor") if kind == "llama3" else needed:
        if inner.get(name) is None:
            fail("rope_parameters", dict(stated), f"rotary kind {kind} needs a {name}")
    factor = inner.number("factor", max_positions / original)
    return Rope(
        theta,
        rotary_dim,
        kind,
        factor,
        original,
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=inner.boolean("truncate", True),
        attention_factor=_attention_factor(inner, factor) if kind == "yarn" else 1.0,
    )


def _refuse_shadowed(keys: ConfigKeys, inner: ConfigKeys) -> None:
    """Refuse a ``rope_scaling``, read as ``inner``, that was added to the ``rope_parameters`` of newer files and hides
    their numbers: transformers would turn by the family's own."""
    hidden = keys.get("rope_parameters")
    if not isinstance(keys.get("rope_scaling"), Mapping) or not isinstance(hidden, Mapping):
        return
    for name in ("rope_theta", "partial_rotary_factor"):
        if hidden.get(name) is not None and inner.get(name, keys.get(name)) is None:
            fail(
                "rope_scaling",
                keys.get("rope_scaling"),
                f"it hides {name} of rope_parameters: state all in rope_parameters",
            )


def _longrope(inner: ConfigKeys, theta: float, rotary_dim: int, most: int, original: int) -> Rope:
    """Return the rope of Phi 3. A model for more than ``original`` positions uses the long factors for texts of any
    length, because cached keys cannot be turned again when a text grows."""
    name = "long_factor" if most > original else "short_factor"
    divisors = inner.get(name)
    if not isinstance(divisors, list) or len(divisors) != rotary_dim // 2 or not all(map(_is_number, divisors)):
        fail(f"rope_parameters.{name}", divisors, f"it must list {rotary_dim // 2} numbers")
    if min(divisors) <= 0:
        fail(f"rope_parameters.{name}", divisors, "all must be above 0")
    if original < 2:  # its logarithm divides
        fail("original_max_position_embeddings", original, "it must be at least 2")
    factor = inner.number("factor", most / original)
    grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        theta,
        rotary_dim,
        "longrope",
        divisors=tuple(map(float, divisors)),
        attention_factor=inner.number("attention_factor", grown),
    )


def _attention_factor(inner: ConfigKeys, factor: float) -> float:
    """Return YaRN's softmax temperature, which is folded into cos and sin (Peng et al., 2023, section 3.4)."""
    if inner.get("attention_factor") is not None:
        return inner.number("attention_factor", 1.0)
    mscale, all_dim = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return temperature(mscale) / temperature(all_dim) if mscale and all_dim else temperature(1.0)
