"""Configurations of releases of common decoders: what sets each apart, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models.releases_dense import DENSE_RELEASES
from weft.errors import CheckpointError
from weft.families import read_architecture
from weft.families.mixers.attention import Attention, Growth, Rope
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.residuals import Residual


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
    assert (model.logits_cap, model.residual, model.why_no_gpu) == (
        30.0,
        Residual(out_norms=True),
        "caps the scores of attention",
    )
    plain = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (plain.mixers[1], plain.logits_cap, plain.why_no_gpu) == (replace(full, cap=0.0), 0.0, "")


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


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is True: only false is served"),
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
