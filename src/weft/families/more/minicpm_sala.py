"""MiniCPM-SALA: lightning attention, and attention over blocks that its own keys choose, without positions.

All lightning layers forget alike; their queries and keys are normed and turned.

Source: ``modeling_minicpm_sala.py`` of openbmb's repository MiniCPM-SALA, whose defaults are used here.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import Attention, KeyIndex
from weft.families.mixers.feed_forward import Dense
from weft.families.mixers.lightning import Lightning
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, read_attention
from weft.families.residuals import Residual
from weft.units import PAGE_TOKENS

_SPARSE = "minicpm4"
_LIGHTNING = ("lightning", "lightning_attn", "lightning-attn")
_SCALES = {"1/sqrt(d)": -0.5, "1/d": -1.0}
"""Values of ``lightning_scale``, and the power of ``head_dim`` that each is."""


def read_minicpm_sala(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=73_448,
        hidden_size=4096,
        intermediate_size=16_384,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=524_288,
    )
    count, width = keys.integer("num_hidden_layers"), keys.integer("hidden_size")
    kinds = keys.get("mixer_types")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_SPARSE, *_LIGHTNING) for kind in kinds):
        fail("mixer_types", kinds, f"it must list {_SPARSE} or lightning-attn for each of the {count} layers")
    full = _read_sala_attention(keys)
    lightning = _read_sala_lightning(keys, full)
    return build_architecture(
        family,
        keys,
        [full if kind == _SPARSE else lightning for kind in kinds],
        [Dense(keys.integer("intermediate_size"))] * count,
        embedding_multiplier=keys.number("scale_emb", 12.0),
        residual=Residual(scale=keys.number("scale_depth", 1.4) / count**0.5),
        logits_divisor=width / keys.integer("dim_model_base", 256),
    )


def _read_sala_attention(keys: ConfigKeys) -> Attention:
    for key in ("attn_use_rope", "attn_use_output_gate"):  # published defaults of these differ
        if not isinstance(keys.get(key), bool):
            fail(key, keys.get(key), "it must be true or false")
    keys.only(attention_bias=False)
    rotary = keys.boolean("attn_use_rope", False)
    full = read_attention(keys, rotary=rotary, gated=keys.boolean("attn_use_output_gate", True))
    if full.heads * full.head_dim != keys.integer("hidden_size"):
        fail("head_dim", full.head_dim, f"{full.heads} heads must fill hidden_size {keys.get('hidden_size')}")
    sparse = keys.inner("sparse_config")
    return full if sparse is None else replace(full, index=_read_key_index(sparse, rotary))


def _read_key_index(keys: ConfigKeys, rotary: bool) -> KeyIndex:
    """Read ``sparse_config``. Its ``topk`` does not count the window."""
    size, stride = keys.integer("kernel_size", 32), keys.integer("kernel_stride", 16)
    block, window = keys.integer("block_size", 64), keys.integer("window_size", 2048)
    dense, first = keys.integer("dense_len", 8192), keys.integer("init_blocks", 1)
    if rotary and keys.boolean("use_nope", False):
        fail("sparse_config.use_nope", True, "keys are scored as they are kept: turned, with attn_use_rope")
    if PAGE_TOKENS % stride or stride == 1:
        fail("sparse_config.kernel_stride", stride, f"it must be 2, 4, 8 or {PAGE_TOKENS}")
    if size != 2 * stride:
        fail("sparse_config.kernel_size", size, f"it must be twice kernel_stride {stride}")
    if block % stride:
        fail("sparse_config.block_size", block, f"it must be a multiple of kernel_stride {stride}")
    if window % block:
        fail("sparse_config.window_size", window, f"it must be a multiple of block_size {block}")
    if dense < 4 * size:
        fail("sparse_config.dense_len", dense, f"it must be at least four times kernel_size {size}")
    near = window // block
    chosen = keys.integer("topk", 64) + near
    if chosen <= first + near:
        fail("sparse_config.topk", chosen - near, f"it must be more than init_blocks {first}")
    return KeyIndex(stride, block, chosen, first, near, dense)


def _read_sala_lightning(keys: ConfigKeys, full: Attention) -> Lightning:
    heads, dim = full.heads, full.head_dim
    for key, served in (("lightning_nh", heads), ("lightning_nkv", heads), ("lightning_head_dim", dim)):
        if keys.integer(key, full.kv_heads if key == "lightning_nkv" else served) != served:
            fail(key, keys.get(key), f"{served} is served, as queries of attention have")
    keys.only(qk_norm=True, use_output_gate=True, use_output_norm=True, lightning_layerwise_decay=False)
    if heads & (heads - 1):
        fail("num_attention_heads", heads, "lightning attention is served with a power of two of them")
    scale = keys.get("lightning_scale", "1/sqrt(d)")
    if scale not in [*_SCALES]:
        fail("lightning_scale", scale, f"{' and '.join(_SCALES)} are served")
    rotary = keys.boolean("lightning_use_rope", True)
    rope = read_rope(keys, dim, theta=10_000.0, partial=1.0) if rotary else None
    return Lightning(heads, dim, 1.0, silu=False, qk_norm=True, rope=rope, scale=dim ** _SCALES[scale])


_NAMES = Names(
    {Attention: "self_attn", Lightning: "self_attn"},
    spelled={
        Attention: {"gate": "o_gate"},
        Lightning: {
            "names": (("q_proj", "k_proj", "v_proj"), "z_proj", "o_norm", "o_proj"),
            "norms": ("q_norm", "k_norm"),
            "eps": None,
        },
    },
)
FAMILIES = (Family("minicpm_sala", ("minicpm_sala",), read_minicpm_sala, names=_NAMES),)
