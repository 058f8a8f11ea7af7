"""Gemma 3n, its text: several streams, of which each layer computes one (AltUp), and shared keys as in Gemma 4.

A layer predicts all streams from the streams before it, computes the first one, and corrects all of them by the
difference. Next to attention is a product of low rank (LAuReL). The first layers keep only the largest numbers of their
gates. A second embedding gives each token some numbers for each layer, which are added to the other streams.

Source: transformers ``Gemma3nTextConfig`` and ``Gemma3nTextModel`` (5.24); their defaults are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.families import gemma
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers.feed_forward import Dense
from weft.families.reading import Family, read_attention
from weft.families.residuals import ModelShape, PerLayer
from weft.families.tensors import Table, Tensor, norm_weight, product


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp(PerLayer):
    """Residual of ``count`` streams, of which blocks read and change the first one. ``rank``: width of the product next
    to attention."""

    count: int
    rank: int

    def mix_table(self, hidden: int) -> Table:
        """Return the tensors of a layer that predict and correct the streams, under ``altup``."""
        count = self.count
        products = {
            "router": ("modality_router", (count, hidden)),
            "predict": ("prediction_coefs", (count * count, count)),
            "correct": ("correction_coefs", (count, count)),
        }
        table: Table = {role: (Tensor(f"{name}.weight", dims, "plain"),) for role, (name, dims) in products.items()}
        table["scale"] = (Tensor("correct_output_scale", (hidden,), "plain"),)
        return table | norm_weight("router_norm", hidden)

    def low_rank_table(self, hidden: int) -> Table:
        """Return the tensors of the product next to attention, under ``laurel``."""
        return (
            product("left", hidden, ("linear_left", self.rank))
            | product("right", self.rank, ("linear_right", hidden))
            | norm_weight("norm", hidden, "post_laurel_norm")
        )

    def after_layer_table(self, hidden: int) -> Table:
        return self.own_table(hidden)

    def ends_table(self, hidden: int) -> Table:
        """Return the tensors that make the other streams of the first, and that join them after the last layer."""
        others = range(self.count - 1)
        table = product("expand", hidden, *((f"altup_projections.{other}", hidden) for other in others))
        for other in others:
            table |= product(f"join.{other}", hidden, (f"altup_unembed_projections.{other}", hidden))
        return table

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        yield from PerLayer.tables(self, model)
        yield "streams", self.ends_table(model.hidden)
        for _ in range(model.layers):
            yield "streams", self.mix_table(model.hidden)
            yield "streams", self.low_rank_table(model.hidden)


def _of_layers(keys: ConfigKeys, key: str, count: int) -> list[ConfigKeys]:
    """Return keys for each layer, which have one value of ``key``; it is a list, or the value of all layers."""
    stated = keys.get(key)
    if isinstance(stated, list) and len(stated) != count:
        fail(key, stated, f"it must be a number, or one for each of the {count} layers")
    return [keys.over({key: value}) for value in (stated if isinstance(stated, list) else [stated] * count)]


def _feeds(keys: ConfigKeys, count: int) -> list[Dense]:
    key = "activation_sparsity_pattern"
    if keys.get(key) is None:
        sparse = 10 if count > 10 else 0
        keys = keys.over({key: [0.95] * sparse + [0.0] * (count - sparse)})
    feeds = []
    for width, share in zip(_of_layers(keys, "intermediate_size", count), _of_layers(keys, key, count), strict=True):
        sparsity = share.number(key, 0.0)
        if not 0 <= sparsity < 1:
            fail(key, sparsity, "a share must be at least 0 and below 1")
        feeds.append(Dense(width.integer("intermediate_size"), "gelu_tanh", sparsity=sparsity))
    return feeds


def read_gemma3n(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        **gemma.DEFAULTS | {"hidden_size": 2048, "intermediate_size": 16_384, "num_key_value_heads": 2,
                            "max_position_embeddings": 32_768},
        num_hidden_layers=35, vocab_size=262_400, sliding_window=512, final_logit_softcapping=30.0)  # fmt: skip
    keys.only(
        hidden_activation="gelu_pytorch_tanh",
        altup_active_idx=0,
        altup_correct_scale=True,
        attn_logit_softcapping=None,
        use_bidirectional_attention=None,
    )
    kinds = gemma.kinds_of(keys, 5)
    plain = replace(read_attention(keys, rotary=False, scale=1.0, qk_norm=True), values_normed=True)
    of_kind = gemma.by_kind(keys, plain)
    mixers = gemma.sharing([of_kind[kind] for kind in kinds], kinds, keys.integer("num_kv_shared_layers", 15, least=0))
    vocab, known = keys.integer("vocab_size"), keys.integer("vocab_size_per_layer_input", 262_144)
    if known > vocab:
        fail("vocab_size_per_layer_input", known, f"vocab_size is {vocab}")
    residual = AltUp(
        out_norms=True,
        width=keys.integer("hidden_size_per_layer_input", 256),
        known=known if known < vocab else 0,
        count=keys.integer("altup_num_inputs", 4, least=2),
        rank=keys.integer("laurel_rank", 64),
    )
    return gemma.architecture(family, keys, mixers, _feeds(keys, len(kinds)), residual)


FAMILIES = (
    Family(
        "gemma3n",
        ("gemma3n", "gemma3n_text"),
        read_gemma3n,
        "gelu_pytorch_tanh",
        replace(
            gemma.NAMES,
            layer_reader="weft.models.blocks.altup:layer_reader",
            ends_reader="weft.models.blocks.altup:ends_reader",
        ),
    ),
)
