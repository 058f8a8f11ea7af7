"""Names under which a checkpoint stores the blocks of a family, as data for ``models.families``.

    layers.3.input_layernorm            Names.mixer_norm
    layers.3.self_attn                  Names.mixers[Attention]
    layers.3.post_attention_layernorm   Names.feed_norm
    layers.3.mlp                        Names.feed

A family whose layers need more than names has the name of the function that reads them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.families.mixers import BlockShape, Mixer

W_NAMES = ("w1", "w3", "w2")
"""Names of gate, up and down."""


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Names of a family's blocks. ``mixers``: name of each kind of mixer. ``spelled``: arguments for the reader of a
    kind of mixer or feed-forward. ``stack``: name of the list of layers. ``shared``: name of the shared expert, if it
    has a width. ``swiglu``: dense feed-forwards have the usual form. ``plus_one``: norms are stored as the distance
    from 1. ``norm_offsets``: by the last part of the name of a norm of the stream, the number from which its stored
    weight is the distance. ``embeddings``: names of the embedding; the first one in the files is used. ``positions``:
    name of the rows that are added to it; ``embedding_norm``: of its norm, "" without one. ``out_norms``: norms after
    mixer and feed-forward. ``mixes``: names of the mixes of several streams, or of attention
    residuals, around mixer and feed-forward; ``last_mix``: of the one after all layers.

    ``feed_reader`` and ``layer_reader``: "module:function" that reads a feed-forward, or all of a layer, instead of
    the usual way; ``ends_reader``: the one that reads blocks before the first layer and after the last one.
    ``mixer_norm``, ``feed_norm`` and ``final_norm`` are "" where there is none; ``feed`` where the tensors are
    directly under the name of the layer."""

    mixers: Mapping[type[Mixer], str] = field(default_factory=dict)
    feed: str = "mlp"
    mixer_norm: str = "input_layernorm"
    feed_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"
    stack: str = "layers"
    embeddings: tuple[str, ...] = ("embed_tokens",)
    positions: str = "embed_positions"
    embedding_norm: str = ""
    spelled: Mapping[type[BlockShape], Mapping[str, Any]] = field(default_factory=dict)
    shared: str | None = None
    swiglu: bool = True
    plus_one: bool = False
    norm_offsets: Mapping[str, float] = field(default_factory=dict)
    out_norms: tuple[str, str] = ("post_operator_norm", "post_ffn_norm")
    mixes: tuple[str, str] = ("", "")
    last_mix: str = ""
    feed_reader: str = ""
    layer_reader: str = ""
    ends_reader: str = ""
