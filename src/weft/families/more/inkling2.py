"""Inkling 2: Inkling's attention with clipped lengths, sinks of each token and a gate; attention residuals; loops.

    q, r = clip(scale q), clip(scale r)      k = clip(conv(k))      v = norm(conv(v))
    softmax over the scores and a sink that each token computes        out(o sigmoid(gate))
    full layers: q, k and v have inputs of their own, and the taps of conv are partly computed for each token
    experts: cap(gate) sigmoid(gate) cap(up), without shared ones
    loops: some layers run several times, with messages of the run before; each run has its own memory

Sources: transformers ``Inkling2TextConfig``, ``Inkling2LoopTextConfig`` and their models, whose defaults are used here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from weft import spec
from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mixers import Mixer
from weft.families.mixers.combined import Again
from weft.families.mixers.feed_forward import Experts, FeedForward
from weft.families.more.inkling import INKLING_NAMES, SLIDING, RelativeAttention, near_and_full, with_old_names
from weft.families.names import Names
from weft.families.reading import Family, build_architecture
from weft.families.residuals import AttentionResiduals, ModelShape
from weft.families.tensors import Table, Tensor, Units, exact, norm_weight, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class ClippedAttention(RelativeAttention):
    """Inkling 2's attention. ``clips``: largest lengths of a query's or key's head, and of its states. ``dynamic``:
    each token adds numbers of its own to the taps of the convolution of keys and values. ``inputs``: 3 if queries, keys
    and values read different mixes of the stream. ``gate_rank``: of the gates of messages, in layers of a loop."""

    reader = "weft.models.more.inkling2:read_clipped_attention"
    outputs = ("post_attention_convolution", "post_mlp_convolution")

    clips: tuple[float, float] = field(kw_only=True)
    dynamic: bool = field(kw_only=True)
    inputs: int = field(kw_only=True)
    gate_rank: int = 0

    @property
    def further_norms(self) -> int:
        return self.inputs - 1

    def convolutions(self) -> LayerSpec:
        of, kernel = self.attention, self.conv_kernel
        if not self.dynamic:
            return RelativeAttention.convolutions(self)
        around = spec.convolutions(kernel, mixer=self.stream, feed=self.stream)
        return spec.together("convolutions", around, spec.shifts(2 * of.kv_heads * of.head_dim, 0, kernel - 1))

    def table(self, hidden: int) -> Table:
        of, kernel = self.attention, self.conv_kernel
        queries, heads = Units(of.heads, of.head_dim), Units(of.heads)
        keys, biases = Units(of.kv_heads, of.head_dim, of.kv_copies), "relative_position_bias"
        table = product(
            "query",
            hidden,
            ("q_proj.linear", queries),
            ("o_proj.gate_proj", queries),
            (f"{biases}.linear", Units(of.heads, self.states)),
            ("sink_proj", heads),
        )
        for part in "kv":
            name = f"{part}_proj.sconv"
            own = ((f"{name}.weight_proj", Units(of.kv_heads, kernel, of.kv_copies)),) if self.dynamic else ()
            table |= product(part, hidden, (f"{part}_proj.linear", keys), *own)
            taps = Tensor(f"{name}.conv1d.weight", (keys, 1, kernel), "float32")
            table[f"{part}_conv"] = (
                Tensor(f"{name}.static_weight", (kernel, keys), "float32") if self.dynamic else taps,
            )
        return (
            table
            | {"q_scale": (Tensor("q_proj.norm.scale", (heads, of.head_dim), "plain"),)}
            | {"r_scale": (Tensor(f"{biases}.norm.scale", (heads, self.states), "plain"),)}
            | exact(f"{biases}.proj", dims=(self.states, self.extent))
            | product("out", queries, ("o_proj.linear", hidden))
        )

    def further_tables(self, hidden: int) -> list[Table]:
        return [self.gate_table(hidden, "")] * (4 * self.messaged)

    @property
    def messaged(self) -> bool:
        """Whether the layer reads messages of its run before."""
        return bool(self.gate_rank)

    def gate_table(self, hidden: int, name: str) -> Table:
        """Return the gate between an input and its message, which is called ``name``."""
        table = product("down", 2 * hidden, (f"{name}down_proj", self.gate_rank))
        for part in ("forget", "message"):
            table[part] = (Tensor(f"{name}{part}_gate_proj.weight", (hidden, self.gate_rank), "float32"),)
        return table


@dataclass(frozen=True, slots=True)
class Inkling2Residuals(AttentionResiduals):
    """Inkling 2's residual: the embedding is normed. ``looped``: the layers that run several times."""

    adapts_embedding = False
    looped: range = range(0)

    def messages_table(self, hidden: int, *, apart: bool = False) -> Table:
        """Return the queries of the messages of the looped layers, four of each: query, key, value, feed-forward.
        ``apart``: as released, those of keys and values in a tensor of their own."""
        count = len(self.looped)
        if not apart:
            return {"queries": (Tensor("message_input.query", (count, 4, hidden), "float32"),)}
        name = "middle_cycle_cross_pass"
        return exact(f"{name}_queries", f"{name}_kv_queries", dims=(2 * count, hidden))

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        yield from AttentionResiduals.tables(self, model)
        yield "norms", norm_weight("norm", model.hidden)
        if self.looped:
            yield "norms", self.messages_table(model.hidden)


_DEFAULTS = {
    "vocab_size": 201_024,
    "unpadded_vocab_size": 200_058,
    "hidden_size": 4608,
    "num_hidden_layers": 48,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 48,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 128,
    "sliding_window_size": 1024,
    "log_scaling_n_floor": 128_000,
    "max_position_embeddings": 1_048_576,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2304,
}
_LOOP_DEFAULTS = _DEFAULTS | {
    "hidden_size": 2304,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "swa_num_attention_heads": 24,
    "log_scaling_n_floor": 8192,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1152,
}
_OLD_NAMES = INKLING_NAMES | {"intermediate_size": "moe_intermediate_size", "routed_scaling_factor": "route_scale"}
_LOOP_NAMES = {
    "loop_layer_index_start": "core_start",
    "loop_layer_index_end": "core_end",
    "loop_num_passes": "num_passes",
    "loop_gate_rank": "gate_rank",
}
"""Keys here, and their names in ``loop_config`` of releases."""


def read_inkling2(family: str, keys: ConfigKeys) -> Architecture:
    return _read(family, with_old_names(keys, _OLD_NAMES).with_defaults(**_DEFAULTS), range(0), 1)


def read_inkling2_loop(family: str, keys: ConfigKeys) -> Architecture:
    loop = keys.inner("loop_config")
    if loop is not None:
        keys = keys.over({here: loop.get(key) for here, key in _LOOP_NAMES.items() if loop.get(key) is not None})
    keys = with_old_names(keys, _OLD_NAMES).with_defaults(**_LOOP_DEFAULTS)
    first, end = keys.integer("loop_layer_index_start", 6), keys.integer("loop_layer_index_end", 18)
    every, count = keys.integer("n_layers_per_attn_res_block", 6), keys.integer("num_hidden_layers")
    for key, number in (("loop_layer_index_start", first), ("loop_layer_index_end", end)):
        if number % every:
            fail(key, number, f"it must be a multiple of n_layers_per_attn_res_block {every}")
    if not first < end <= count:
        fail("loop_layer_index_end", end, f"the loop begins with layer {first} of {count}")
    return _read(family, keys, range(first, end), keys.integer("loop_num_passes", 3))


def _read(family: str, keys: ConfigKeys, looped: range, runs: int) -> Architecture:
    keys.only(scoring_func="sigmoid")
    count = keys.integer("num_hidden_layers")
    kinds = reading.kinds_with_windows(
        keys, ("hybrid", SLIDING), ["hybrid" if layer % 6 == 5 else SLIDING for layer in range(count)]
    )
    rank = keys.integer("loop_gate_rank", 64) if looped else 0
    near, full = _attentions(keys)
    mixers: list[Mixer] = [near if kind == SLIDING else full for kind in kinds]
    for layer in looped:
        mixers[layer] = replace(near if kinds[layer] == SLIDING else full, gate_rank=rank)
    feeds: list[FeedForward | None] = [_experts(keys)] * count
    again = [Again(mixers[layer], layer) for layer in looped] * (runs - 1)
    mixers[looped.stop : looped.stop] = again
    feeds[looped.stop : looped.stop] = [None] * len(again)
    tokens, known = keys.integer("vocab_size"), keys.integer("unpadded_vocab_size")
    return build_architecture(
        family,
        keys,
        mixers,
        feeds,
        tied=False,
        logits_cap=keys.number("final_logit_softcapping", 30.0),
        residual=Inkling2Residuals(every=keys.integer("n_layers_per_attn_res_block", 6), eps=1e-6, looped=looped),
        head_tokens=known if known < tokens else 0,
    )


def _attentions(keys: ConfigKeys) -> tuple[ClippedAttention, ClippedAttention]:
    """Return the attention of layers with a window, and that of full layers."""
    near, full = (
        fields | {"attention": replace(fields["attention"], scale=fields["attention"].head_dim ** -0.5)}
        for fields in near_and_full(keys)
    )
    clips = keys.number("qk_l2_clip_threshold", 22.627416997969522), keys.number("rel_l2_clip_threshold", 8.0)
    return (
        ClippedAttention(**near, clips=clips, dynamic=False, inputs=1),
        ClippedAttention(**full, clips=clips, dynamic=True, inputs=3),
    )


def _experts(keys: ConfigKeys) -> Experts:
    count = keys.integer("n_routed_experts")
    return Experts(
        count,
        reading.experts_per_token(keys, count),
        width=keys.integer("moe_intermediate_size"),
        normalized=True,
        normalizer_eps=1e-20,
        scoring="sigmoid",
        choice_bias=True,
        scale=keys.number("route_scale", 8.0),
        activation="situ",
        caps=(keys.number("mlp_gate_softcap", 4.0), keys.number("mlp_up_softcap", 25.0)),
    )


def _query_of_next(match: re.Match[str]) -> str:
    """Return the name of a query that is stored under the number of the layer before: the first layer has none."""
    return f"layers.{int(match[1]) + 1}.attention_input.query"


RELEASED = (
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"^model\.llm\.embed_norm\.", "model.language_model.embed_tokens.embed_norm."),
    (r"^model\.llm\.embed\.", "model.language_model.embed_tokens."),
    (r"^model\.llm\.", "model.language_model."),
    (r"\.controllers\.attn\.", ".q_message_gate."),
    (r"\.controllers\.(k|v|mlp)\.", r".\1_message_gate."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.attn\.", ".self_attn."),
    (r"self_attn\.wq_du\.", "self_attn.q_proj.linear."),
    (r"self_attn\.w([kv])_dv\.", r"self_attn.\1_proj.linear."),
    (r"self_attn\.([kv])_sconv\.", r"self_attn.\1_proj.sconv."),
    (r"self_attn\.rel_logits_proj\.", "self_attn.relative_position_bias."),
    (r"self_attn\.wr_du\.", "self_attn.relative_position_bias.linear."),
    (r"self_attn\.q_l2_clip\.", "self_attn.q_proj.norm."),
    (r"self_attn\.rel_l2_clip\.", "self_attn.relative_position_bias.norm."),
    (r"self_attn\.wo_ud\.", "self_attn.o_proj.linear."),
    (r"self_attn\.gate_attn\.", "self_attn.o_proj.gate_proj."),
    (r"self_attn\.attn_sink_proj\.", "self_attn.sink_proj."),
    (r"\.attn_sconv\.", ".post_attention_convolution."),
    (r"\.mlp_sconv\.", ".post_mlp_convolution."),
    (r"(convolution|sconv)\.weight$", r"\1.conv1d.weight"),
    (r"sconv\.static_w$", "sconv.static_weight"),
    (r"sconv\.weight_proj$", "sconv.weight_proj.weight"),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
    (r"attn_res\.attn_queries\.(\d+)", _query_of_next),
    (r"attn_res\.mlp_queries\.(\d+)", r"layers.\1.mlp_input.query"),
    (r"attn_res\.output_query", "final_input.query"),
    (r"_message_gate\.down_weight$", "_message_gate.down_proj.weight"),
    (r"_message_gate\.forget_weight$", "_message_gate.forget_gate_proj.weight"),
    (r"_message_gate\.gain_weight$", "_message_gate.message_gate_proj.weight"),
)
"""Patterns of names of releases, and those that transformers has in memory."""

_NAMES = Names(
    layer_reader="weft.models.more.inkling2:layer_reader",
    ends_reader="weft.models.more.inkling2:ends_reader",
    mixes=("attention_input", "mlp_input"),
)
FAMILIES = (
    Family("inkling2", ("inkling2", "inkling2_text"), read_inkling2, names=_NAMES, released=RELEASED),
    Family(
        "inkling2_loop", ("inkling2_loop", "inkling2_loop_text"), read_inkling2_loop, names=_NAMES, released=RELEASED
    ),
)
