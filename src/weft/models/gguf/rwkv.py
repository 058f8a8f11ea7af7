"""RWKV-7 in GGUF files.

    architecture    model_type    changes by the converter besides names
    rwkv7           rwkv7         six mixes in one tensor, r w k v a g; r_k flat; the first layer has its
                                  rates (a) again where later ones mix values (v): not read

Ranks of the products of low rank come from the tensors: the keys were computed by the converter, and are ignored. The
vocabulary is World's, with each token as Python prints its bytes (``vocabulary``).

Source: llama.cpp's ``conversion`` package.
"""

from __future__ import annotations

from weft.models.gguf import parts
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import FileLayout, Names

_LOW_RANK = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "g": "gate_low_rank_dim", "v": "v_low_rank_dim"}
_WHOLE: Names = {
    "token_embd": "model.embeddings",
    "token_embd_norm": "model.layers.0.pre_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NAMES: Names = {
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_ln": "attn.g_norm",
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_lerp_fused.weight": "attn.x_x",
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
    "channel_mix_lerp_k.weight": "ffn.x_k",
    "time_mix_k_k.weight": "attn.k_k",
    "time_mix_k_a.weight": "attn.k_a",
    "time_mix_r_k.weight": "attn.r_k",
}


def rwkv7(keys: GgufKeys) -> FileLayout:
    names = dict(_NAMES)
    for part in _LOW_RANK:
        names |= {
            f"time_mix_{part}1": f"attn.{part}_lora.lora.0",
            f"time_mix_{part}2": f"attn.{part}_lora.lora.2",
            f"time_mix_{part}0.weight": f"attn.{part}_lora.lora.2.bias",
        }
    last = keys.layers - 1  # the first layer has a copy instead of v
    ranks = {key: keys.tensor(f"blk.{last}.time_mix_{part}1.weight") for part, key in _LOW_RANK.items()}
    for key, tensor in ranks.items():
        if tensor is None or len(tensor.shape) != 2:
            keys.fail("block_count", last + 1, f"block {last} has no product of low rank for {key}")
    config = parts.base(
        keys,
        "rwkv7",
        norm_eps=keys.number("attention.layer_norm_epsilon"),
        head_dim=keys.integer("wkv.head_size", least=1),
        intermediate_size=keys.integer("feed_forward_length", least=1),
        **{key: tensor.shape[0] for key, tensor in ranks.items() if tensor is not None},
    )
    return FileLayout(config, _WHOLE, names)
