"""Configurations of releases of common decoders: what sets each apart, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models.releases_dense import DENSE_RELEASES
from weft import spec
from weft.errors import CheckpointError
from weft.families import name_here, read_architecture
from weft.families.jetmoe import ExpertAttention
from weft.families.mixers.attention import Attention, Growth, Index, Rope, alibi_slopes
from weft.families.mixers.differential import DifferentialAttention
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.residuals import GatedNorms, GatedSums, LayerNorms, NormedEmbedding, Positions, Residual, Streams
from weft.families.sharding import possible_tps
from weft.families.tensors import NormGate
from weft.planning.roofline import model_load


def read(name: str, **changes: Any) -> Any:
    return read_architecture(DENSE_RELEASES[name] | changes)


def test_qwen2_has_biases_on_queries_keys_and_values_alone() -> None:
    model = read("qwen2")
    assert set(model.mixers) == {Attention(28, 4, 128, 128**-0.5, Rope(1e6, 128), bias=True, out_bias=False)}
    assert set(model.feed_forwards) == {Dense(18_944)}


def test_gemma2_caps_scores_and_logits_unless_they_are_null() -> None:
    model = read("gemma2")
    full = Attention(16, 8, 256, 256**-0.5, Rope(1e4, 256), cap=50.0)
    assert model.mixers[:2] == (replace(full, window=4096), full)
    assert (model.logits_cap, model.residual) == (30.0, Residual(out_norms=True))
    plain = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (plain.mixers[1], plain.logits_cap) == (replace(full, cap=0.0), 0.0)


def test_a_long_phi3_has_the_factors_of_long_texts() -> None:
    factors = {"type": "su", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    long = read("phi3", rope_scaling=factors, max_position_embeddings=131_072, original_max_position_embeddings=4096)
    rope = long.mixers[0].rope
    assert rope.divisors == (2.0,) * 64
    assert rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    short = read("phi3", rope_scaling=factors, max_position_embeddings=4096, original_max_position_embeddings=4096)
    assert (short.mixers[0].rope.divisors, short.mixers[0].rope.attention_factor) == ((1.0,) * 64, 1.0)
    with pytest.raises(CheckpointError, match=r"long_factor is None: it must list 64 numbers"):
        read("phi3", rope_scaling={"type": "longrope"}, original_max_position_embeddings=4096)


def test_hunyuan_turns_by_a_base_that_alpha_makes_and_norms_after() -> None:
    [mixer] = set(read("hunyuan").mixers)
    assert mixer.rope.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert mixer.qk_norm
    assert mixer.norm_after
    assert not mixer.usual
    [feed] = set(read("hunyuan_moe").feed_forwards)
    assert feed == Experts(64, 8, 3072, True, shared_width=3072)


def test_queries_of_ministral3_grow() -> None:
    [mixer] = set(read("ministral3").mixers)
    assert mixer.growth == Growth(0.1, 16_384)


def test_layers_of_command_a_and_exaone_without_a_window_have_no_positions() -> None:
    for name, out in (("cohere2", Residual(centred="weight", parallel="one")), ("exaone4", None)):
        model = read(name)
        assert [mixer.window for mixer in model.mixers[:4]] == [4096, 4096, 4096, None]
        assert [mixer.rope is None for mixer in model.mixers[:4]] == [False, False, False, True]
        assert out is None or model.residual == out
    small = read("exaone4", sliding_window=None, layer_types=None)
    assert {mixer.rope is None for mixer in small.mixers} == {False}


def test_deepseek_v3_is_latent_with_a_head_behind_and_v2_chooses_groups_by_their_best() -> None:
    model = read("deepseek_v3")
    assert isinstance(model.mixers[0], LatentAttention)
    assert model.mixers[0].scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)
    assert model.feed_forwards[2:4] == (
        Dense(18_432),
        Experts(
            256, 8, 2048, True, shared_width=2048, scoring="sigmoid", choice_bias=True, scale=2.5,
            normalizer_eps=1e-20, groups=8, groups_chosen=4),
    )  # fmt: skip
    assert model.mtp is not None
    grouped = read("deepseek_v2", topk_method="group_limited_greedy", n_group=8, topk_group=3)
    last = grouped.feed_forwards[-1]
    assert (last.groups, last.groups_chosen, last.group_best, last.scoring) == (8, 3, 1, "softmax")
    with pytest.raises(CheckpointError, match="topk_method is 'noaux_tc'"):
        read("deepseek_v2", topk_method="noaux_tc")


def test_layers_of_glm_5_see_what_the_last_full_one_chose_and_those_of_deepseek_v32_choose_themselves() -> None:
    model = read("glm_moe_dsa")
    assert model.indexed == (0, 1, 2, *range(6, 78, 4))
    assert [mixer.reuses_choice for mixer in model.mixers[2:7]] == [False, True, True, True, False]
    assert model.mixers[0].index == Index(32, 128, 1, 2048, "tokens", interleaved=True)
    assert model.mtp.attention.index == model.mixers[0].index, "the head after a layer without an index has one"
    assert read("glm_moe_dsa", index_topk_pattern="F" + "S" * 77).indexed == (0,)
    v32 = read("deepseek_v32")
    assert {mixer.index for mixer in v32.mixers} == {Index(64, 128, 1, 2048, "tokens")}
    plain = read("deepseek_v3").mixers[0]
    assert replace(v32.mixers[0], index=None, rope=plain.rope) == plain
    for key, value in (
        ("indexer_types", ["shared"] * 78),
        ("q_lora_rank", None),
        ("index_head_dim", 32),
        ("layer_types", ["full_attention"] * 78),
    ):
        with pytest.raises(CheckpointError, match=key):
            read("glm_moe_dsa", **{key: value})


def test_hy4_has_sinks_and_gates_and_streams_apart() -> None:
    model = read("hy_v4")
    assert model.indexed == (0, *range(1, 34, 4))
    first, third = model.mixers[0], model.mixers[2]
    assert first.index == Index(16, 128, 1, 2048, "tokens", turned_last=True, norm_eps=1e-5)
    assert (first.gated, first.sinks, first.interleaved, first.norm_eps) == (True, True, False, 1e-6)
    assert (third.index, third.reuses_choice) == (None, True)
    assert model.residual == Streams("apart", 4, eps=1e-6, weighed=True, magnitude=2.0)
    feed = model.feed_forwards[1]
    assert (feed.limit, feed.shared, model.feed_forwards[0]) == (10.0, Dense(768), Dense(6912))
    assert read("hy_v4", swiglu_limit=-1.0).feed_forwards[1].limit == 0.0
    larger = read("hy_v4", model_type="hy_v4_vl_text")
    assert {(mixer.norm_eps, mixer.interleaved) for mixer in larger.mixers} == {(1e-5, True)}
    assert larger.mixers[0].index.interleaved
    with pytest.raises(CheckpointError, match="rope_interleave is True"):
        read("hy_v4", rope_interleave=True)


def test_axk2_gates_norms_and_takes_the_gates_of_attention_from_queries() -> None:
    model = read("axk2")
    mixer = model.mixers[0]
    assert (mixer.query_gated, mixer.gate_width, mixer.index) == (True, 0, Index(16, 128, 1, 2048, "tokens"))
    assert model.residual == GatedNorms(gate=NormGate(16, 1.0), feeds=(False, *[True] * 47))
    gated = [name for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm",
                               "layers.1.post_attention_layernorm", "norm")
             if "norm.into" in model.residual.norm_table(2048, name)]  # fmt: skip
    assert gated == ["layers.0.input_layernorm", "layers.1.post_attention_layernorm"]
    assert (model.feed_forwards[1].others_zero, model.feed_forwards[1].groups) == (True, 1)
    assert read("axk2", n_group=8, topk_group=4).feed_forwards[1].groups_chosen == 4
    with pytest.raises(CheckpointError, match="q_lora_rank is None"):
        read("axk2", q_lora_rank=None)


def test_layers_of_dots3_choose_tokens_or_have_windows_and_sizes_of_their_own() -> None:
    model = read("dots3_note")
    assert model.indexed == (0, *range(1, 46, 4))
    chooses, window = model.mixers[1:3]
    assert chooses.index == Index(64, 128, 1, 2048, "tokens", interleaved=True)
    assert (chooses.heads, chooses.latent_dim, chooses.key_dim, chooses.window) == (128, 512, 192, None)
    assert (window.heads, window.latent_dim, window.key_dim, window.window, window.index) == (64, 1024, 256, 512, None)
    assert (chooses.rope, window.rope) == (Rope(8e7, 64), Rope(5e4, 64))
    assert (chooses.query_factor, window.latent_factor) == (5**0.5, 5**0.5)
    assert [type(feed) for feed in model.feed_forwards[:2]] == [Dense, Experts]
    whole = read("dots3_note", use_dsa=False, use_sliding_window=False, layer_types=None)
    assert {(mixer.index, mixer.window) for mixer in whole.mixers} == {(None, None)}
    for change, said in (
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"index_head_dim": 32}, "index_head_dim is 32"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling is .* only None is served"),
        ({"partial_rotary_factor": 0.5}, "qk_rope_head_dim 64 numbers turn"),
        ({"per_layer_config": {"2": 3}}, "per_layer_config is .* the sizes of layers"),
        ({"moe_layer_freq": [2.0] * 46}, "0 or 1 for each of the 46 layers"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read("dots3_note", **change)


def test_a_layer_of_longcat_is_two_whose_first_has_experts_that_are_added_after_the_second() -> None:
    model = read("longcat_flash")
    latent = LatentAttention(
        64, 512, 64, 128, 128, 192**-0.5, query_rank=1536, rope=Rope(1e7, 64), query_factor=2.0,
        latent_factor=12**0.5)  # fmt: skip
    assert model.mixers == (latent,) * 56
    experts = Experts(
        512, 12, 2048, False, shared_width=12_288, choice_bias=True, scale=6.0, identities=256, late=True)  # fmt: skip
    assert model.feed_forwards == (experts, Dense(12_288)) * 28
    assert (experts.choices, experts.table(6144)["router"][0].dims) == (768, (768, 6144))
    assert read("longcat_flash", mla_scale_q_lora=False).mixers[0].query_factor == 1.0
    here = name_here(DENSE_RELEASES["longcat_flash"])
    for stored, name in (
        ("model.layers.3.self_attn.0.q_a_proj.weight", "model.layers.6.self_attn.q_a_proj.weight"),
        ("model.layers.3.input_layernorm.1.weight", "model.layers.7.input_layernorm.weight"),
        ("model.layers.3.mlps.0.up_proj.weight", "model.layers.6.mlp.shared_experts.up_proj.weight"),
        ("model.layers.3.mlps.1.up_proj.weight", "model.layers.7.mlp.up_proj.weight"),
        ("model.layers.3.mlp.experts.1.up_proj.weight", "model.layers.6.mlp.experts.1.up_proj.weight"),
        ("model.layers.3.mlp.router.classifier.weight", "model.layers.6.mlp.gate.weight"),
        ("model.layers.3.mlp.router.e_score_correction_bias", "model.layers.6.mlp.gate.e_score_correction_bias"),
    ):
        assert here(stored) == name
    assert here("model.mtp.layers.0.self_attn.q_a_proj.weight") == "model.mtp.layers.0.self_attn.q_a_proj.weight"
    for change, said in (
        ({"router_bias": True}, "router_bias is True"),
        ({"zero_expert_type": "copy"}, "zero_expert_type is 'copy'"),
        ({"attention_method": "LSA"}, "attention_method is 'LSA': only MLA is served"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"moe_topk": 769}, "the router has 768 choices"),
        ({"num_hidden_layers": 28}, "num_hidden_layers is 28: only 56 is served"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read("longcat_flash", **change)


def test_minimax_m3_chooses_blocks_for_each_kv_head_after_three_full_layers() -> None:
    model = read("minimax_m3")
    assert model.indexed == tuple(range(3, 60))
    full = Attention(64, 4, 128, 128**-0.5, Rope(5e6, 64), qk_norm=True)
    assert model.mixers[2:4] == (full, replace(full, index=Index(4, 128, 128, 16, "maxima")))
    assert model.feed_forwards[2] == Dense(12_288, "clamped_swiglu")
    assert model.feed_forwards[3] == Experts(
        128, 4, 3072, True, shared_width=3072, scoring="sigmoid", choice_bias=True, scale=2.0,
        activation="clamped_swiglu")  # fmt: skip
    assert [model.mixers[3].index.blocks_of(tokens) for tokens in (128, 129)] == [1, 2]
    saved = read(
        "minimax_m3", hidden_act="silu", sparse_attention_config=None, moe_layer_freq=None, index_local_blocks=2,
        layer_types=["minimax_m3_sparse"] * 60)  # fmt: skip
    assert {mixer.index.near for mixer in saved.mixers} == {2}
    assert {type(feed) for feed in saved.feed_forwards} == {Experts}
    sparse = DENSE_RELEASES["minimax_m3"]["sparse_attention_config"]
    for changes, said in (
        (
            {"sparse_attention_config": sparse | {"sparse_score_type": "mean"}},
            "sparse_attention_config.sparse_score_type",
        ),
        ({"sparse_attention_config": sparse | {"sparse_disable_index_value": [0] * 60}}, "without values is served"),
        ({"sparse_attention_config": sparse | {"sparse_attention_freq": [1]}}, "0 or 1 for each of the 60 layers"),
        (
            {"sparse_attention_config": sparse | {"sparse_num_index_heads": 8}},
            "index_n_heads is 8: .* 4 chooses by one",
        ),
        ({"sparse_attention_config": sparse | {"sparse_local_block": 17}}, "index_topk_blocks is 16"),
        ({"sparse_attention_config": sparse | {"sparse_index_dim": 32}}, "its keys turn by 64 numbers"),
        ({"mlp_layer_types": ["sparse"]}, "dense or sparse of each of the 60 layers"),
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ({"hidden_act": "gelu"}, "only swigluoai is served"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read("minimax_m3", **changes)


def test_layers_of_llama4_with_positions_see_chunks_and_queries_of_the_others_grow() -> None:
    model = read("llama4")
    turned = [mixer.rope is not None for mixer in model.mixers[:4]]
    assert turned == [True, True, True, False]
    assert [mixer.chunk for mixer in model.mixers[:4]] == [8192, 8192, 8192, None]
    assert [mixer.norm_plain for mixer in model.mixers[:4]] == turned
    assert model.mixers[3].growth == Growth(0.1, 8192, first=1)
    assert set(model.feed_forwards) == {
        Experts(16, 1, 8192, False, shared_width=8192, scoring="sigmoid", weighs_input=True)
    }
    maverick = read("llama4", interleave_moe_layer_step=2, use_qk_norm=False, attn_temperature_tuning=4)
    assert maverick.feed_forwards[0] == Dense(16_384)
    assert isinstance(maverick.feed_forwards[1], Experts)
    assert not maverick.mixers[0].qk_norm
    assert maverick.mixers[3].growth is not None
    whole = read("llama4", attention_chunk_size=None, attn_temperature_tuning=False)
    assert ({mixer.chunk for mixer in whole.mixers}, whole.mixers[3].growth) == ({None}, None)


def test_layers_of_laguna_have_their_own_heads_positions_and_gates() -> None:
    model = read("laguna")
    assert [mixer.heads for mixer in model.mixers[:3]] == [48, 64, 64]
    assert [mixer.rope for mixer in model.mixers[:2]] == [Rope(5e5, 64), Rope(1e4, 128)]
    assert {(mixer.softplus_gate, mixer.head_gated, mixer.usual) for mixer in model.mixers} == {(True, True, False)}
    whole = read("laguna", gating="per-element").mixers[0]
    assert (whole.gated, whole.head_gated) == (True, False)


def test_kolibri_chooses_by_scores_and_afmoe_scales_its_embedding() -> None:
    [feed] = set(read("kolibri").feed_forwards)
    assert (feed.scoring, feed.choice_bias, feed.normalized) == ("late_sigmoid", True, True)
    model = read("afmoe")
    assert model.embedding_multiplier == pytest.approx(2048**0.5)
    assert [mixer.rope is None for mixer in model.mixers[:4]] == [False, False, False, True]
    assert model.feed_forwards[1:3] == (
        Dense(6144),
        Experts(
            128, 8, 1024, True, shared_width=1024, scoring="sigmoid", choice_bias=True, scale=2.826,
            normalizer_eps=1e-20),
    )  # fmt: skip


def test_heads_without_a_number_of_kv_heads_have_keys_of_their_own() -> None:
    pythia = {  # pythia-160m, whose config.json has no such key
        "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12, "rotary_emb_base": 10_000,
        "rotary_pct": 0.25, "use_parallel_residual": True, "vocab_size": 50_304}  # fmt: skip
    assert read_architecture(pythia).mixers[0].kv_heads == 12
    for model_type in ("olmo", "granite", "cohere", "nemotron", "phi3"):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 512}
        config = {"model_type": model_type, **sizes} | ({"hidden_act": "relu2"} if model_type == "nemotron" else {})
        assert read_architecture(config).mixers[0].kv_heads == 4, model_type


def test_the_heads_of_phi_have_a_bias_and_queries_of_gpt_neox_as_many_keys() -> None:
    assert (read("phi").head_bias, read("phi").residual) == (True, Residual(centred="bias", parallel="one"))
    neox = read("gpt_neox", num_key_value_heads=2)
    assert (neox.head_bias, neox.residual) == (False, Residual(centred="bias", parallel="two"))
    assert set(neox.mixers) == {Attention(32, 32, 128, 128**-0.5, Rope(1e4, 32), bias=True, grouped=True)}


def test_phimoe_weighs_near_scores_and_turns_by_the_factors_of_long_texts() -> None:
    model = read("phimoe")
    assert (model.head_bias, model.residual) == (True, Residual(centred="bias"))
    assert set(model.feed_forwards) == {Experts(16, 2, 6400, False, scoring="sparsemixer", band=0.02)}
    rope = model.mixers[0].rope
    assert (rope.divisors, rope.attention_factor) == ((1.5,) * 64, 1.243163121016122)
    short = read("phimoe", max_position_embeddings=4096).mixers[0].rope
    assert (short.divisors, short.attention_factor) == ((1.0,) * 64, 1.1)
    with pytest.raises(CheckpointError, match="rope_type is 'yarn'"):
        read("phimoe", rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 1"):
        read("phimoe", num_experts_per_tok=1)


def test_the_text_of_glm_4v_turns_the_part_that_it_states_and_always_has_biases() -> None:
    sections = {"rope_type": "default", "mrope_section": [8, 12, 12]}
    stated = {"partial_rotary_factor": 0.5, "rope_scaling": sections, "attention_bias": True}
    text = DENSE_RELEASES["glm4"] | stated | {"model_type": "glm4v_text", "head_dim": None}
    wrapper = {"model_type": "glm4v", "vision_config": {"model_type": "glm4v"}, "torch_dtype": "bfloat16"}
    model = read_architecture(wrapper | {"text_config": text})
    full = Attention(32, 2, 128, 128**-0.5, Rope(1e4, 64), bias=True, out_bias=False)
    assert (set(model.mixers), model.residual) == ({full}, Residual(out_norms=True))
    whole = read_architecture({key: value for key, value in text.items() if key != "partial_rotary_factor"})
    assert whole.mixers[0].rope == Rope(1e4, 128)
    for key, value in (("attention_bias", False), ("head_dim", 64)):
        with pytest.raises(CheckpointError, match=key):
            read_architecture(text | {key: value})


def test_falcons_have_one_norm_and_one_kv_head_or_two_norms_and_groups() -> None:
    small, large = read("falcon"), read("falcon_40b")
    assert set(small.mixers) == {Attention(71, 1, 64, 0.125, Rope(1e4, 64), grouped=True)}
    assert set(large.mixers) == {Attention(128, 8, 64, 0.125, Rope(1e4, 64), grouped=True)}
    assert (small.residual.parallel, large.residual.parallel) == ("one", "two")
    assert (possible_tps(small), possible_tps(large)) == ([1], [1, 2, 4, 8]), "groups are not cut"
    assert set(small.feed_forwards) == {Dense(18_176, "gelu", gated=False)}
    assert read("falcon_40b", num_ln_in_parallel_attn=1).residual.parallel == "one", "Falcon 2 11B"
    assert read("falcon", multi_query=False, parallel_attn=False).mixers[0].kv_heads == 71
    for name, changes in (
        ("falcon", {"alibi": True}),
        ("falcon", {"num_ln_in_parallel_attn": 2}),
        ("falcon_40b", {"parallel_attn": False}),
        ("falcon", {"activation": "relu"}),
    ):
        with pytest.raises(CheckpointError, match=next(iter(changes))):
            read(name, **changes)


def test_positions_of_gpt2_and_opt_are_rows_of_a_table_and_heads_of_gptj_turn_in_part() -> None:
    small, opt, coder, turned = read("gpt2"), read("opt"), read("gpt_bigcode"), read("gptj")
    assert set(small.mixers) == {Attention(12, 12, 64, 0.125, None, bias=True)} == set(opt.mixers)
    assert small.residual == Residual(centred="bias", positions=Positions(1024))
    assert opt.residual.positions == Positions(2050, 2), "rows of positions begin with the third"
    assert (small.max_positions, opt.max_positions) == (1024, 2048)
    assert [set(model.feed_forwards) for model in (small, opt)] == [
        {Dense(3072, activation, gated=False, bias=True)} for activation in ("gelu_tanh", "relu")
    ]
    assert set(coder.mixers) == {Attention(48, 1, 128, 128**-0.5, None, bias=True)}
    assert (set(turned.mixers), turned.head_bias) == ({Attention(16, 16, 256, 0.0625, Rope(1e4, 64))}, True)
    for name, key, value in (
        ("gpt2", "activation_function", "quick_gelu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("opt", "word_embed_proj_dim", 512),
        ("opt", "do_layer_norm_before", False),
        ("gptj", "rotary_dim", 300),
    ):
        with pytest.raises(CheckpointError, match=f"{key} is"):
            read(name, **{key: value})
    kinds = {"attention_types": [[["global", "local"], 2], [["global"], 1]], "num_layers": 5, "num_heads": 4}
    neo = read_architecture({"model_type": "gpt_neo", "hidden_size": 64, **kinds})
    assert [mixer.window for mixer in neo.mixers] == [None, 256, None, 256, None]
    with pytest.raises(CheckpointError, match="attention_types"):
        read_architecture({"model_type": "gpt_neo", "attention_types": [["far", 24]]})


def test_codegens_matrices_have_four_parts_or_eight_where_the_width_of_a_head_is_stated() -> None:
    first = read("codegen")
    assert set(first.mixers) == {Attention(32, 32, 80, 80**-0.5, Rope(1e4, 64), parts=4)}
    assert possible_tps(first) == [1, 2, 4], "a part is not cut"
    assert (first.residual, first.head_bias) == (Residual(centred="bias", parallel="one"), True)
    second = read("codegen", n_embd=2048, n_head=16, head_dim=128)  # codegen2-1B
    assert set(second.mixers) == {Attention(16, 16, 128, 128**-0.5, Rope(1e4, 64), parts=8)}
    for key, changes in (("head_dim", {"head_dim": 64}), ("n_head", {"n_head": 10})):
        with pytest.raises(CheckpointError, match=f"{key} is"):
            read("codegen", **changes)


def test_heads_of_bloom_and_mpt_have_a_slope_each_and_no_positions() -> None:
    bloom, mpt = read("bloom"), read("mpt")
    assert set(bloom.mixers) == {Attention(32, 32, 128, 128**-0.5, None, bias=True, grouped=True, alibi=8.0)}
    assert set(mpt.mixers) == {Attention(32, 32, 128, 128**-0.5, None, alibi=8.0)}
    assert (bloom.residual, mpt.residual) == (LayerNorms(), Residual(centred="weight"))
    assert alibi_slopes(8, 8.0) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(3, 8.0) == [2.0**-4, 2.0**-8, 2.0**-2]
    for name, key, changes in (
        ("bloom", "apply_residual", {"apply_residual_connection_post_layernorm": True}),
        ("mpt", "attn_config.alibi is", {"attn_config": {"alibi": False}}),
        ("mpt", "logit_scale", {"logit_scale": "inv_sqrt_d_model"}),
    ):
        with pytest.raises(CheckpointError, match=key):
            read(name, **changes)


def test_dbrx_has_a_limit_on_heads_and_experts_whose_weights_sum_to_1() -> None:
    model = read("dbrx")
    assert set(model.mixers) == {Attention(48, 8, 128, 128**-0.5, Rope(5e5, 128), clip=8.0)}
    assert set(model.feed_forwards) == {Experts(16, 4, 10_752, True)}
    assert (model.residual, model.norm_eps) == (Residual(centred="weight"), 1e-5)
    attended, feed = (DENSE_RELEASES["dbrx"][f"{part}_config"] for part in ("attn", "ffn"))
    raw = read("dbrx", ffn_config=feed | {"moe_normalize_expert_weights": None})
    assert set(raw.feed_forwards) == {Experts(16, 4, 10_752, False)}
    again = read("dbrx", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert again == model
    saved = read("dbrx", attn_config={"kv_n_heads": 8}, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    assert set(saved.mixers) == {Attention(48, 8, 128, 128**-0.5, Rope(700.0, 128))}
    for part, change, words in (
        ("attn", {"clip_qkv": 0}, "attn_config.clip_qkv is 0.0: it must be above 0"),
        ("attn", {"kv_n_heads": 7}, "num_key_value_heads is 7"),
        ("ffn", {"moe_top_k": 17}, "ffn_config.moe_top_k is 17: the model has 16 experts"),
        ("ffn", {"moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights is 2.0: only 1.0 is served"),
        ("ffn", {"ffn_act_fn": {"name": "gelu"}}, "ffn_act_fn is {'name': 'gelu'}: only silu is served"),
        ("ffn", {"ffn_act_fn": "gelu"}, "ffn_act_fn is 'gelu': only silu is served"),
        ("ffn", {"uniform_expert_assignment": True}, "uniform_expert_assignment is True: only false is served"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read("dbrx", **{f"{part}_config": {"attn": attended, "ffn": feed}[part] | change})
    with pytest.raises(
        CheckpointError, match=re.escape("attn_config.rope_theta is 500000.0: rope_parameters has 1000")
    ):
        read("dbrx", rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})


def test_attention_of_jetmoe_has_a_query_of_each_chosen_expert_for_each_kv_head() -> None:
    model = read("jetmoe")
    [mixer], [feed] = set(model.mixers), set(model.feed_forwards)
    assert mixer == ExpertAttention(16, 128, 8, 2, Rope(1e4, 128))
    assert mixer.attention == Attention(32, 16, 128, 128**-0.5, Rope(1e4, 128))
    assert feed == Experts(8, 2, 5632, True, sum_bias=True)
    assert (model.tied_embeddings, model.norm_eps) == (True, 1e-5)
    assert possible_tps(model) == [1, 2, 4, 8, 16]
    load = model_load(model, parameters=10**10, weight_bytes=2.0, eight_bit=False, kv_bytes=0.0, state_bytes=0.0)
    assert load.expert_params == 24 * 8 * 2048 * (3 * 5632 + 2 * 2048)
    assert load.expert_share == 0.25
    for change, words in (
        ({"activation_function": "gelu"}, "activation_function is 'gelu': only silu is served"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9: the model has 8 experts"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read("jetmoe", **change)


def test_minicpm3_turns_halves_and_scales_its_blocks_and_logits() -> None:
    model = read("minicpm3")
    assert isinstance(model.mixers[0], LatentAttention)
    assert (model.mixers[0].interleaved, model.mixers[0].value_dim) == (False, 64)
    assert (model.embedding_multiplier, model.logits_divisor) == (12.0, 10.0)
    assert model.residual.scale == pytest.approx(1.4 / 62**0.5)
    plain = read("minicpm3", scale_depth=None, dim_model_base=None)
    assert (plain.residual.scale, plain.logits_divisor) == (1.0, 1.0)
    assert read("sarvam_mla").mixers[0].rope.kind == "yarn"
    assert read("internlm3").mixers[0].rope.kind == "default"


def test_mimo_has_twice_the_kv_heads_and_sinks_where_it_has_a_window() -> None:
    full, window = read("mimo_v2_flash").mixers[:2]
    assert isinstance(full, Attention)
    assert isinstance(window, Attention)
    assert (full.kv_heads, full.window, full.sinks, full.rope) == (4, None, False, Rope(5e6, 64))
    assert (window.kv_heads, window.window, window.sinks, window.rope) == (8, 129, True, Rope(10_000.0, 64))
    assert {(one.value_dim, one.value_factor, one.head_dim) for one in (full, window)} == {(128, 0.707, 192)}
    feeds = read("mimo_v2_flash").feed_forwards
    assert isinstance(feeds[0], Dense)
    assert isinstance(feeds[1], Experts)
    assert (feeds[1].shared_width, feeds[1].scale) == (0, 1.0)


def test_experts_of_command_are_halved_next_to_a_shared_one_and_its_first_layers_may_turn() -> None:
    dense_first = {"first_k_dense_replace": 2, "num_shared_experts": 1}
    architecture = read("cohere2_moe", **dense_first)
    assert [mixer.rope is None for mixer in architecture.mixers[:6]] == [False, False, False, False, False, True]
    assert [mixer.window is None for mixer in architecture.mixers[:6]] == [True, True, False, False, False, True]
    apart = read("cohere2_moe", **dense_first, prefix_dense_sliding_window_pattern=2)
    assert [mixer.window is None for mixer in apart.mixers[:2]] == [False, True]
    assert [mixer.rope is None for mixer in apart.mixers[:2]] == [False, True]
    experts = architecture.feed_forwards[2]
    assert isinstance(experts, Experts)
    assert (experts.scale, experts.shared.multipliers) == (0.5, (1.0, 0.5))
    assert read("cohere2_moe").feed_forwards[0].scale == 1.0
    assert read("cohere2_moe", rms_norm_eps=1e-6).residual.centred == ""


def test_muse_glimmer_turns_windows_alone_and_scales_queries_and_logits() -> None:
    model = read("muse_glimmer")
    common = {"qk_norm": True, "norm_plain": True, "gated": True}
    window = Attention(32, 2, 128, 128**-0.5 * 3.87, Rope(5e5, 128), window=2048, **common)
    assert model.mixers[:4] == (window, window, window, replace(window, rope=None, window=None))
    assert (model.logits_divisor, model.logits_cap) == (pytest.approx(26**0.5), 20.0)
    assert model.residual == NormedEmbedding(out_norms=True, out_eps=1e-8)
    silent = dict.fromkeys(("layer_rope_theta", "layer_types", "qk_scale_factor", "output_multiplier"))
    assert read("muse_glimmer", **silent) == model
    still = read("muse_glimmer", layer_rope_theta=[0] * 52)
    assert {mixer.rope for mixer in still.mixers} == {None}
    for changes, words in (
        ({"layer_rope_theta": [1e4] * 52}, "layer_rope_theta is 10000.0: a layer turns by rope_theta 500000, or not"),
        ({"layer_rope_theta": [0, 0]}, "it must list a base for each of the 52 layers"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0: it must be above 0"),
        ({"output_multiplier": -1.0}, "output_multiplier is -1.0: it must be above 0"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read("muse_glimmer", **changes)


def test_muse_spark_norms_heads_and_each_expert_and_adds_by_learned_shares() -> None:
    model = read("muse_spark")
    common = {"qk_norm": True, "norm_plain": True, "gated": True, "out_normed": True}
    window = Attention(128, 16, 64, 64**-0.5 * 5.4730064863875, Rope(5e5, 64), window=2048, **common)
    assert model.mixers[:3] == (window, replace(window, rope=None, window=None), window)
    assert not window.usual
    experts = Experts(
        256, 8, 4096, True, scoring="sigmoid", choice_bias=True, normalizer_eps=1e-15, latent_width=4096,
        each_normed=True, score_factor=0.1767766952966369)  # fmt: skip
    assert set(model.feed_forwards) == {experts}
    assert model.residual == GatedSums(out_norms=True, out_eps=1e-8, temperature=0.3)
    assert (model.logits_divisor, model.logits_cap) == (pytest.approx(32**0.5), 20.0)
    silent = dict.fromkeys(key for key in DENSE_RELEASES["muse_spark"] if key not in ("model_type", "torch_dtype"))
    assert read("muse_spark", **silent) == model
    mixed = read("muse_spark", mlp_layer_types=["dense", *["sparse"] * 61])
    assert mixed.feed_forwards[:2] == (Dense(16_384), experts)
    for changes, words in (
        ({"mlp_layer_types": ["sparse"]}, "dense or sparse for each of the 62 layers"),
        ({"num_experts_per_tok": 257}, "the model has 256 experts"),
        ({"residual_gate_temperature": 0.0}, "residual_gate_temperature is 0.0: it must be above 0"),
        ({"attention_bias": True}, "attention_bias is True"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read("muse_spark", **changes)


def test_layers_of_compass_turn_by_their_kind_or_not_at_all() -> None:
    model = read("cohere_compass")
    window = Attention(64, 64, 128, 128**-0.5, Rope(5e4, 128), window=4096)
    assert model.mixers[2:4] == (window, replace(window, rope=None, window=None))
    assert (model.logits_divisor, model.residual) == (4.0, Residual(centred="weight", parallel="one"))
    assert read("cohere_compass", logit_scale=None).logits_divisor == 1.0
    both = {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 1e6), ("x", 1.0))
    }
    full = read("cohere_compass", layer_types=None, rope_parameters=both)
    assert set(full.mixers) == {replace(window, rope=Rope(1e6, 128), window=None)}
    part = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    for changes, words in (
        ({"rope_parameters": {"rope_theta": 1e4}}, "or null, for layers that are full_attention, sliding_attention"),
        ({"rope_parameters": part | {"full_attention": None}}, "with a partial_rotary_factor only proportional"),
        ({"head_dim": 64}, "head_dim is 64: it must be hidden_size / num_attention_heads = 128"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read("cohere_compass", **changes)


def test_command_r_plus_has_norms_of_each_head() -> None:
    normed = {"qk_norm": True, "norm_by_head": True, "norm_centred": "weight"}
    plus = read("cohere_plus")
    assert set(plus.mixers) == {Attention(96, 8, 128, 128**-0.5, Rope(75e6, 128), **normed)}
    assert plus.logits_divisor == pytest.approx(1.2)


def test_heads_of_diffllama_are_pairs_whose_tokens_keep_as_much_as_those_of_llama() -> None:
    model = read("diffllama")
    first, *_, last = model.mixers
    assert first == DifferentialAttention(16, 4, 64, Rope(10_000.0, 64), pytest.approx(0.2))
    assert last.first == pytest.approx(0.8 - 0.6 * math.exp(-4.5))
    assert first.attention == Attention(32, 4, 128, 0.125, Rope(10_000.0, 64))
    kept, as_llama = (layer.kv_bytes_per_token("bfloat16") for layer in (first.layer_spec(), spec.attention(8, 64)))
    assert kept == as_llama
    assert possible_tps(model) == [1, 2, 4, 8, 16]
    assert read("diffllama", attention_bias=True).mixers[3].bias
    with pytest.raises(CheckpointError, match="num_key_value_heads is 1: it must be even"):
        read("diffllama", num_key_value_heads=1)


def test_queries_and_keys_of_persimmon_have_norms_with_biases() -> None:
    normed = Attention(
        64, 64, 64, 0.125, Rope(25_000.0, 32), bias=True, grouped=True, qk_norm=True, norm_centred="bias"
    )
    model = read("persimmon")
    assert set(model.mixers) == {normed}
    assert set(model.feed_forwards) == {Dense(16_384, "relu2", gated=False, bias=True)}
    plain = replace(normed, qk_norm=False, norm_centred="")
    assert set(read("persimmon", qk_layernorm=False).mixers) == {plain}
    assert {mixer.norm_centred for mixer in read("phi", qk_layernorm=True).mixers} == {"bias"}


def test_logits_of_nanochat_have_a_cap_unless_it_is_null() -> None:
    assert read("nanochat").logits_cap == 15.0
    assert read("nanochat", final_logit_softcapping=None).logits_cap == 0.0


def test_files_of_exaone_and_sarvam_in_their_own_names_are_read() -> None:
    names = {"num_layers": 32, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}
    own = {key: value for key, value in DENSE_RELEASES["exaone"].items() if key not in ("rms_norm_eps", "hidden_act")}
    del own["num_hidden_layers"]
    assert read_architecture(own | names) == read("exaone")
    here = name_here(DENSE_RELEASES["exaone"])
    assert here("transformer.h.3.attn.attention.out_proj.weight") == "model.layers.3.self_attn.o_proj.weight"
    assert here("transformer.h.3.mlp.c_fc_1.weight") == "model.layers.3.mlp.up_proj.weight"
    there = name_here(DENSE_RELEASES["sarvam_moe"])
    assert there("model.layers.1.attention.dense.weight") == "model.layers.1.self_attn.o_proj.weight"
    assert there("model.layers.1.attention.query_key_value.weight").endswith("self_attn.query_key_value.weight")
    assert read("sarvam_moe", use_qkv_bias=True).mixers[0].bias


_BLOCK = {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 2.0}}


def test_layers_of_nemotron_nas_have_sizes_of_their_own() -> None:
    model = read("nemotron_nas")
    rope = Rope(500_000.0, 128, "llama3", 8.0, 8192)
    full = Attention(64, 8, 128, 128**-0.5, rope)
    assert model.mixers == (full, None) * 31 + (full,) * 18
    assert model.feed_forwards[:2] == (Dense(28_672), Dense(14_336))
    few = read("nemotron_nas", num_hidden_layers=1, block_configs=[_BLOCK | {"ffn": {"no_op": True}}])
    assert (few.mixers, few.feed_forwards) == ((full,), (None,))
    odd = read("nemotron_nas", num_hidden_layers=1, block_configs=[_BLOCK | {"ffn": {"ffn_mult": 0.4}}])
    assert odd.feed_forwards == (Dense(2304),)  # 2184, in whole multiples of 256


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("nemotron_nas", {"block_configs": [_BLOCK]}, "settings of each of the 80 layers"),
        *[
            ("nemotron_nas", {"num_hidden_layers": 1, "block_configs": [_BLOCK | block]}, said)
            for block, said in (
                ({"attention": {"replace_with_linear": True}}, "block_configs.attention.replace_with_linear is True"),
                ({"attention": {"n_heads_in_group": 8, "window_length": 9}}, "window_length is 9"),
                ({"attention": {"n_heads_in_group": 5}}, "n_heads_in_group is 5: it must divide .* 64"),
                ({"ffn": {}}, "ffn_mult is None: it must be above 0"),
                ({"ffn": 3}, "block_configs.ffn is 3: it must have the settings"),
            )
        ],
        ("llama4", {"attention_chunk_size": 1000}, "attention_chunk_size is 1000: it must be a multiple of 16"),
        (
            "llama4",
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48},
            "attention_chunk_size is None: layer_types has layers",
        ),
        ("llama4", {"moe_layers": [48]}, "moe_layers is .* it must list layers from 0 to 47"),
        ("llama4", {"no_rope_layers": [1, 2]}, "no_rope_layers is .* it must be 0 or 1 for each of the 48 layers"),
        ("laguna", {"gating": "none"}, "gating is 'none': true, per-head and per-element are served"),
        ("laguna", {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping is 3.0"),
        ("laguna", {"num_attention_heads_per_layer": [48]}, "a number of heads for each of the 40 layers"),
        ("laguna", {"num_attention_heads_per_layer": [12] * 40}, "num_key_value_heads 8 must divide it"),
        ("mellum", {"mlp_layer_types": ["sparse"]}, "it must say dense or sparse for each of the 28 layers"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv is 8.0: only None is served"),
        ("cohere", {"logit_scale": 0}, "logit_scale is 0.0: it must not be 0"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True: only false is served"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True: only false is served"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0: only None is served"),
        ("hunyuan_moe", {"moe_topk": [8]}, "moe_topk is .* one for each layer"),
        ("granite_swa", {"layer_rope_theta": [1.0]}, "it must list a base for each of the 24 layers"),
        ("gemma", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "only sigmoid is served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(name, **change)


def test_bitnet_is_refused_with_its_reason() -> None:
    with pytest.raises(CheckpointError, match="model_type is 'bitnet': it rounds activations to 8 bits") as error:
        read_architecture({"model_type": "bitnet", "hidden_size": 2560, "num_hidden_layers": 30, "hidden_act": "relu2"})
    assert "decision 0084" in str(error.value)
