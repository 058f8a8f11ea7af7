"""LongCat Flash: pairs of layers of latent attention. Experts of the first join the stream after the second.

A layer of config.json and of the files is two layers here, each with attention and a dense feed-forward. The dense
feed-forward of the first is the shared expert of its ``Experts``, as both read the same rows. Some choices of the
router give the input back. A bias on the choice is added to shares of a softmax.

Source: transformers ``LongcatFlashConfig`` and ``LongcatFlashModel`` (5.24); their defaults are used here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.deepseek import LATENT_NAMES, query_rank, turned_latent
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.reading import Family, build_architecture

_DEFAULTS = {
    "vocab_size": 131_072, "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "ffn_hidden_size": 12_288, "moe_topk": 12,
    "n_routed_experts": 512, "zero_expert_num": 256, "expert_ffn_hidden_size": 2048, "routed_scaling_factor": 6.0,
}  # fmt: skip
_RENAMED = {"ffn_hidden_size": "intermediate_size", "expert_ffn_hidden_size": "moe_intermediate_size",
            "moe_topk": "num_experts_per_tok", "n_routed_experts": "num_local_experts"}  # fmt: skip
"""Further names that transformers' class has for a key."""


def read_longcat(family: str, keys: ConfigKeys) -> Architecture:
    """Read LongCat Flash. Its head for further tokens (``model.mtp``) is not read."""
    keys = keys.over({key: keys.get(other) for key, other in _RENAMED.items() if not keys.has(key)})
    keys = keys.with_defaults(**_DEFAULTS, **query_rank(keys, 1536))
    keys.only(zero_expert_type="identity", router_bias=False)
    if str(method := keys.get("attention_method", "MLA")).upper() != "MLA":
        fail("attention_method", method, "only MLA is served")
    pairs = keys.integer("num_layers")
    keys.only(num_hidden_layers=2 * pairs)
    attention = _attention(keys)
    count, chosen = keys.integer("n_routed_experts"), keys.integer("moe_topk", least=2)  # transformers fails with 1
    identities = keys.integer("zero_expert_num", least=0)
    if chosen > count + identities:
        fail("moe_topk", chosen, f"the router has {count + identities} choices")
    dense = Dense(keys.integer("ffn_hidden_size"))
    experts = Experts(
        count,
        chosen,
        keys.integer("expert_ffn_hidden_size"),
        normalized=False,
        shared_width=dense.width,
        choice_bias=True,
        scale=keys.number("routed_scaling_factor", 6.0),
        identities=identities,
        late=True,
    )
    return build_architecture(family, keys, [attention] * (2 * pairs), [experts, dense] * pairs)


def _attention(keys: ConfigKeys) -> LatentAttention:
    """Return the attention: outputs of the norms inside have constant factors, sqrt(hidden / rank)."""
    latent, hidden = turned_latent(keys, theta=1e7), keys.integer("hidden_size")
    if latent.query_rank is None:
        fail("q_lora_rank", None, "queries have a bottleneck here")
    keys.only(qk_head_dim=latent.key_dim, head_dim=latent.shared_dim)
    factors: dict[str, Any] = {
        f"{part}_factor": (hidden / rank) ** 0.5 if keys.boolean(f"mla_scale_{key}_lora", True) else 1.0
        for part, key, rank in (("query", "q", latent.query_rank), ("latent", "kv", latent.latent_dim))
    }
    return replace(latent, **factors)


_PARTS = re.compile(
    r"(?<!mtp\.)layers\.(\d+)\.(?:(self_attn|input_layernorm|post_attention_layernorm|mlps)\.([01])|(mlp))\."
)


def _here(stored: re.Match[str]) -> str:
    """Return the beginning of a name here, of that in the files."""
    number, part, place, experts = stored.groups()
    layer = 2 * int(number) + int(place or 0)
    if part == "mlps":
        return f"layers.{layer}.mlp.{'' if int(place) else 'shared_experts.'}"
    return f"layers.{layer}.{experts or part}."


FAMILIES = (
    Family(
        "longcat_flash",
        ("longcat_flash",),
        read_longcat,
        names=replace(LATENT_NAMES, layer_reader="weft.models.blocks.early:paired_layers"),
        released=((_PARTS.pattern, _here), (r"\.router\.classifier\.", ".gate."), (r"\.router\.e_", ".gate.e_")),
    ),
)
