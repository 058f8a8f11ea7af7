"""xLSTM: a matrix memory for each head, with gates that are exponentials; no attention.

Every layer is the same: a matrix memory (mLSTM), then a feed-forward. Gates pass a soft cap, and logits too.
Widths follow from factors on the hidden size. No length of text is stated: ``POSITIONS`` is what is served
unless ``--max-model-len`` says less.

Source: Beck et al., "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference" (2025); transformers
``xLSTMConfig`` and ``xLSTMForCausalLM``, whose defaults stand here.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Dense, MatrixLstm
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mamba import POSITIONS
from weft.families.reading import Family, build_architecture

CAP_MAX = 40.0
"""Exponentials of an input gate, and sums of them over a text, are then far from the end of float32."""


def read_xlstm(family: str, keys: ConfigKeys) -> Architecture:
    width = keys.integer("embedding_dim", keys.integer("hidden_size", 4096))
    count = keys.integer("num_blocks", keys.integer("num_hidden_layers", 32))
    for name, value in (("hidden_size", width), ("num_hidden_layers", count)):
        if keys.integer(name, value) != value:
            fail(name, keys.get(name), f"it must be {value}, as embedding_dim and num_blocks have it")
    keys = keys.over({"hidden_size": width, "num_hidden_layers": count}).with_defaults(vocab_size=50_304)
    keys.only(use_bias=False, add_out_norm=True)
    if keys.get("weight_mode", "single") != "single":
        fail("weight_mode", keys.get("weight_mode"), "checkpoints with each matrix by itself are served")
    heads, cap = keys.integer("num_heads", 8), keys.number("gate_soft_cap", 15.0)
    if not 0 < cap <= CAP_MAX:
        fail("gate_soft_cap", cap, f"it must be above 0 and at most {CAP_MAX:g}")
    key_width, value_width = (
        int(width * keys.number(f"{part}_dim_factor", default)) for part, default in (("qk", 0.5), ("v", 1.0))
    )
    if key_width % heads or value_width % heads or not key_width:
        fail("num_heads", heads, f"it must divide {key_width} numbers of keys and {value_width} of values")
    memory = MatrixLstm(
        heads, key_width // heads, value_width // heads, cap, keys.number("norm_eps", 1e-6), keys.number("eps", 1e-6)
    )
    step = keys.integer("ffn_round_up_to_multiple_of", 64)
    inner = int((width * keys.number("ffn_proj_factor", 2.667) + step - 1) // step) * step
    return build_architecture(
        family,
        keys,
        [memory] * count,
        [Dense(inner)] * count,
        eps=keys.number("norm_eps", 1e-6),
        max_positions=POSITIONS,
        logits_cap=keys.number("output_logit_soft_cap", 30.0),
    )


FAMILIES = (Family("xlstm", ("xlstm",), read_xlstm),)
