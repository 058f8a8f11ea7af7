"""xLSTM: a matrix memory for each head, with gates that are exponentials; no attention.

Every layer is the same: a matrix memory (mLSTM), then a feed-forward. Gates pass a soft cap, and logits too.
Widths follow from factors on the hidden size. No length of text is stated: ``POSITIONS`` is the limit
unless ``--max-model-len`` says less.

Source: Beck et al., "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference" (2025); transformers
``xLSTMConfig`` and ``xLSTMForCausalLM``, whose defaults are used here.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mamba import POSITIONS
from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import Dense
from weft.families.names import Names
from weft.families.reading import Family, build_architecture
from weft.families.tensors import Table, Units, all_plain, norm_weight, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class MatrixLstm(Mixer):
    """Matrix memory of xLSTM (Beck et al., 2024). Its input gate is an exponential, its forget gate a
    sigmoid; both pass a soft cap of ``gate_cap``. ``norm_eps``: of the norm of each head's output;
    ``floor``: number added to the normaliser, relative to the largest input that the memory has."""

    reader = "weft.models.more.xlstm:read_matrix_lstm"

    heads: int
    key_dim: int
    value_dim: int
    gate_cap: float
    norm_eps: float
    floor: float

    def layer_spec(self) -> LayerSpec:
        return spec.matrix_lstm(self.heads, self.key_dim, self.value_dim)

    def table(self, hidden: int) -> Table:
        """Return the tensors. Files never quantise the gates, which decide how long the memory keeps a value."""
        heads, keys = Units(self.heads), Units(self.heads, self.key_dim)
        values = Units(self.heads, self.value_dim)
        table = (
            product("project", hidden, ("q", keys), ("k", keys), ("v", values), ("ogate_preact", values))
            | norm_weight("norm", values, "multihead_norm")
            | product("out", values, ("out_proj", hidden))
        )
        gates = product("gates", hidden, ("igate_preact", heads), ("fgate_preact", heads), bias=True)
        return table | all_plain(gates)


CAP_MAX = 40.0
"""Largest cap on gates: exponentials of an input gate, and sums of them over a text, are then far from the end of
float32."""


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


_NAMES = Names(
    {MatrixLstm: "mlstm_layer"},
    feed="ffn",
    mixer_norm="norm_mlstm",
    feed_norm="norm_ffn",
    final_norm="out_norm",
    stack="blocks",
    embeddings=("embeddings",),
    spelled={Dense: {"names": ("proj_up_gate", "proj_up", "proj_down")}},
)
FAMILIES = (Family("xlstm", ("xlstm",), read_xlstm, names=_NAMES),)
