"""Differences of a decoder of softmax attention from Llama, as data: ``Decoder``, a reader of config.json.

    Family("arcee", ("arcee",), Decoder({...defaults...}, feed=plain_feed), "relu2")

``defaults`` are those of transformers' configuration class. ``renamed`` has the key of config.json for a name here:
``rms_norm_eps`` is ``layer_norm_eps`` in Cohere's. Further differences are fields of ``Attention`` and ``Residual``.
Families that need more are functions in the files of related families. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense, FeedForward
from weft.families.reading import WINDOW_KIND, build_architecture, read_attention, windowed
from weft.families.residuals import PLAIN, Residual

FULL_KIND = "full_attention"
Kinds = Callable[[ConfigKeys, int], list[str]]
"""Kinds of a number of layers, if ``layer_types`` is missing."""


def sizes(
    vocab: int, hidden: int, width: int, layers: int, heads: int, kv_heads: int, positions: int
) -> dict[str, int]:
    """Return the defaults that every family has. KV heads in the number of heads need none: each head then has one."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **({} if kv_heads == heads else {"num_key_value_heads": kv_heads}),
        "max_position_embeddings": positions,
    }


def every(count: int, *, last: bool = True, other: str = WINDOW_KIND) -> Kinds:
    """Return kinds with one full layer in each ``count`` layers: the last of them, or the first if ``last`` is
    False."""
    place = count - 1 if last else 0
    return lambda keys, layers: [FULL_KIND if layer % count == place else other for layer in range(layers)]


def patterned(keys: ConfigKeys, count: int) -> list[str]:
    """Return kinds by ``sliding_window_pattern``: the last layer of each group of that size is full."""
    return every(keys.integer("sliding_window_pattern", 4))(keys, count)


def swiglu(keys: ConfigKeys, layer: int) -> FeedForward:
    return Dense(keys.integer("intermediate_size"), bias=keys.boolean("mlp_bias", False))


def cut_rotary(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys`` of a model that cuts a part of each head off before it turns. Raises CheckpointError where the
    frequencies are spaced over the whole head."""
    stated = keys.get("rope_parameters") or {}
    if isinstance(stated, Mapping) and stated.get("rope_type") == "proportional":
        fail("rope_type", "proportional", "a part of each head turns here, by frequencies of its own")
    return keys


BIAS = "use_bias"


def all_biased(keys: ConfigKeys) -> Mapping[str, Any]:
    return {"bias": keys.boolean(BIAS, False)}


def ungated(activation: Any) -> Callable[[ConfigKeys, int], FeedForward]:
    """Return a reader of down(activation(up(x)))."""

    def read(keys: ConfigKeys, layer: int) -> FeedForward:
        width = keys.integer("intermediate_size")
        return Dense(width, activation, gated=False, bias=keys.boolean("mlp_bias", False))

    return read


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoder:
    """Reader of a decoder. ``theta``, ``partial``: defaults of the rotary embedding. ``attention``: fields of
    ``Attention`` in all layers; ``attention_of``: fields that keys decide. ``kinds``: which layers have a window if
    ``layer_types`` is missing; None: all have the one that ``sliding_window`` names. ``ropes``: by kind of layer the
    defaults of its rotary embedding, theta and partial, where each kind has its own. ``unturned``: kinds of layers
    without positions. ``feed``: reads the feed-forward of a layer. ``residual`` and ``more`` (further fields of
    ``Architecture``) read keys. ``only``: settings of which one value is served. ``keys_of``: changes keys that come
    in a form of their own."""

    defaults: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    theta: float = 10_000.0
    partial: float = 1.0
    attention: Mapping[str, Any] = field(default_factory=dict)
    attention_of: Callable[[ConfigKeys], Mapping[str, Any]] = lambda keys: {}
    kinds: Kinds | None = None
    ropes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unturned: tuple[str, ...] = ()
    feed: Callable[[ConfigKeys, int], FeedForward] = swiglu
    residual: Callable[[ConfigKeys], Residual] = lambda keys: PLAIN
    more: Callable[[ConfigKeys], Mapping[str, Any]] = lambda keys: {}
    only: Mapping[str, Any] = field(default_factory=dict)
    keys_of: Callable[[ConfigKeys], ConfigKeys] = lambda keys: keys

    def __call__(self, family: str, keys: ConfigKeys) -> Architecture:
        keys = self.keys(keys)
        keys.only(**self.only)
        attentions = self.attentions(keys)
        feeds = [self.feed(keys, layer) for layer in range(len(attentions))]
        return build_architecture(family, keys, attentions, feeds, residual=self.residual(keys), **self.more(keys))

    def keys(self, keys: ConfigKeys) -> ConfigKeys:
        """Return ``keys`` with the names here and the defaults."""
        here = {name: keys.get(theirs) for name, theirs in self.renamed.items() if keys.get(theirs) is not None}
        return self.keys_of(keys.over(here).with_defaults(**self.defaults))

    def attentions(self, keys: ConfigKeys) -> list[Attention]:
        """Return the attention of each layer."""
        plain = read_attention(keys, theta=self.theta, partial=self.partial, rotary=not self.ropes)
        plain = replace(plain, **self.attention, **self.attention_of(keys))
        count = keys.integer("num_hidden_layers")
        stated = keys.get("sliding_window") is not None
        window = windowed(plain, keys) if stated else plain
        if self.kinds is None:
            kinds = [WINDOW_KIND if stated else FULL_KIND] * count
        else:
            silent = [FULL_KIND] * count if keys.get("layer_types") is not None else self.kinds(keys, count)
            kinds = reading.kinds_with_windows(keys, (FULL_KIND, WINDOW_KIND), silent)
            if WINDOW_KIND in kinds and not stated:
                fail("sliding_window", None, f"layer_types has layers that are {WINDOW_KIND}")
        of_kind = {FULL_KIND: plain, WINDOW_KIND: window}
        for kind, (theta, partial) in self.ropes.items():
            rope = read_rope(keys, plain.head_dim, theta=theta, partial=partial, layer_kind=kind)
            of_kind[kind] = replace(of_kind[kind], rope=rope)
        of_kind |= {kind: replace(of_kind[kind], rope=None) for kind in self.unturned}
        return [of_kind[kind] for kind in kinds]
