"""Gemma as released: geometry, memory, and what is refused."""

from __future__ import annotations

import pytest

from tests.unit.models.releases_gemma import (
    GEMMA_3_4B,
    GEMMA_3N_E2B,
    GEMMA_4_12B,
    GEMMA_4_26B_A4B,
    GEMMA_4_E2B,
    GEMMA_RELEASES,
    RECURRENT_GEMMA_2B,
    Config,
    with_text,
)
from weft.errors import CheckpointError
from weft.families import read_architecture, read_spec
from weft.families.gemma3n import AltUp
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.more.recurrent_gemma import RgLru
from weft.families.residuals import PerLayer


def changed(name: str, **changes: object) -> Config:
    config = GEMMA_RELEASES[name]
    return with_text(config, **changes) if "text_config" in config else config | changes


def test_gemma_3_turns_its_windows_at_another_base_than_its_full_layers() -> None:
    model = read_architecture(GEMMA_3_4B)
    common = {"qk_norm": True}
    window = Attention(8, 4, 256, 256**-0.5, Rope(1e4, 256), window=1024, **common)
    assert set(model.mixers[:5]) == {window}
    assert model.mixers[5] == Attention(8, 4, 256, 256**-0.5, Rope(1e6, 256, "linear", 8.0, 131072), **common)
    assert set(model.feed_forwards) == {Dense(10240, "gelu_tanh")}
    assert (model.embedding_multiplier, model.rounded_multiplier) == (2560**0.5, True)
    assert model.tied_embeddings


def test_the_later_layers_of_gemma_4_read_the_last_layer_of_their_kind_that_has_keys() -> None:
    model = read_architecture(GEMMA_4_E2B)
    window, full = model.mixers[0], model.mixers[4]
    assert window == Attention(8, 1, 256, 1.0, Rope(1e4, 256), qk_norm=True, window=512, values_normed=True)
    assert full == Attention(
        8, 1, 512, 1.0, Rope(1e6, 512, "proportional", turning_dim=128), qk_norm=True, values_normed=True
    )
    sources = [mixer.kv_of for mixer in model.mixers if isinstance(mixer, Attention)]
    assert sources == [None] * 15 + [14 if (i + 1) % 5 == 0 else 13 for i in range(15, 35)]
    assert [i for i, mixer in enumerate(model.mixers) if isinstance(mixer, Attention) and mixer.shared] == [13, 14]
    assert model.feed_forwards[14:16] == (Dense(6144, "gelu_tanh"), Dense(12288, "gelu_tanh"))
    assert (model.residual, model.logits_cap) == (PerLayer(256, out_norms=True), 30.0)


def test_gemma_3n_cuts_the_gates_of_its_first_layers_and_shares_keys() -> None:
    model = read_architecture(GEMMA_3N_E2B)
    common = {"qk_norm": True, "values_normed": True}
    assert model.mixers[0] == Attention(8, 2, 256, 1.0, Rope(1e4, 256), window=512, **common)
    assert model.mixers[4] == Attention(8, 2, 256, 1.0, Rope(1e6, 256), **common)
    assert [getattr(mixer, "kv_of", 0) for mixer in model.mixers[18:25]] == [None, None, 18, 18, 18, 18, 19]
    assert model.feed_forwards[9:11] == (Dense(8192, "gelu_tanh", sparsity=0.95), Dense(8192, "gelu_tanh"))
    assert model.residual == AltUp(out_norms=True, width=256, known=262_144, count=4, rank=64)
    assert (model.logits_cap, model.embedding_multiplier, model.tied_embeddings) == (30.0, 2048**0.5, True)
    assert read_spec(GEMMA_3N_E2B).kv_bytes_per_token("bfloat16") == 5 * 2 * 2 * 256 * 2
    silent = read_architecture({"model_type": "gemma3n_text", "dtype": "bfloat16"})
    assert (silent.layer_count, silent.feed_forwards[9:11]) == (
        35,
        (Dense(16_384, "gelu_tanh", sparsity=0.95), Dense(16_384, "gelu_tanh")),
    )
    assert getattr(silent.mixers[20], "kv_of", None) == 18


def test_a_shared_window_is_in_pages_and_all_others_are_rings() -> None:
    spec = read_spec(GEMMA_4_E2B)
    assert [i for i, layer in enumerate(spec.layers) if layer.kv_heads] == [4, 9, 13, 14]
    assert spec.kv_bytes_per_token("bfloat16") == 2 * 2 * (3 * 512 + 256)
    assert spec.state_bytes_per_sequence("bfloat16") == 11 * 2 * 256 * 512 * 2
    assert {layer.reads for layer in spec.layers[15:]} == {13, 14}


def test_sparse_gemma_4_has_experts_beside_its_feed_forward_and_values_that_are_keys() -> None:
    model = read_architecture(GEMMA_4_26B_A4B)
    full = model.mixers[5]
    assert isinstance(full, Attention)
    assert (full.heads, full.kv_heads, full.head_dim, full.values_are_keys) == (16, 2, 512, True)
    assert set(model.feed_forwards) == {
        Experts(128, 8, 704, True, shared_width=2112, activation="gelu_tanh", normed_apart=True)
    }
    saved = {
        "per_layer_config": {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)},
        "global_head_dim": None,
    }
    assert read_architecture(with_text(GEMMA_4_26B_A4B, **saved)) == model, "as transformers saves it"


def test_gemma_4_12b_has_one_embedding_and_windows_of_1024() -> None:
    model = read_architecture(GEMMA_4_12B)
    assert model.residual == PerLayer(0, out_norms=True)
    assert [getattr(mixer, "window", 0) for mixer in model.mixers[:6]] == [1024] * 5 + [None]
    assert model.max_positions == 262_144


def test_recurrent_gemma_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(RECURRENT_GEMMA_2B)
    attended = Attention(10, 1, 256, 256**-0.5, Rope(1e4, 128), window=2048, out_bias=True)
    assert model.mixers[:4] == (RgLru(10, 256, 4), RgLru(10, 256, 4), attended, RgLru(10, 256, 4))
    assert set(model.feed_forwards) == {Dense(7680, "gelu_tanh", bias=True)}
    assert (model.embedding_multiplier, model.logits_cap) == (50.5, 30.0), "50.596 rounded to bfloat16"
    spec = read_spec(RECURRENT_GEMMA_2B)
    assert spec.kv_bytes_per_token("bfloat16") == 8 * 2 * 256 * 2
    assert spec.state_bytes_per_sequence("bfloat16") == 18 * 2560 * (4 + 3 * 2)
    silent = {"model_type": "recurrent_gemma", "num_key_value_heads": 1, "intermediate_size": 15360, "dtype": "float32"}
    assert read_architecture(silent) == model


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("recurrent_gemma", {"block_types": ["mamba"]}, ["block_types", "mamba", "recurrent"]),
        ("recurrent_gemma", {"lru_width": 2561}, ["lru_width", "2561", "10"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ("gemma3", {"use_bidirectional_attention": 1}, ["use_bidirectional_attention", "true or false"]),
        ("gemma3n", {"altup_active_idx": 1}, ["altup_active_idx", "1", "only 0"]),
        ("gemma3n", {"altup_correct_scale": False}, ["altup_correct_scale", "only true"]),
        ("gemma3n", {"altup_num_inputs": 1}, ["altup_num_inputs", "at least 2"]),
        ("gemma3n", {"intermediate_size": [8192] * 3}, ["intermediate_size", "30 layers"]),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 30}, ["activation_sparsity_pattern", "below 1"]),
        ("gemma3n", {"vocab_size_per_layer_input": 300_000}, ["vocab_size_per_layer_input", "262400"]),
        ("gemma3n", {"num_kv_shared_layers": 28}, ["num_kv_shared_layers", "28"]),
        ("gemma4", {"is_causal": False}, ["is_causal", "Attention is served with causal attention"]),
        ("gemma4", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "all"]),
        ("gemma4", {"hidden_activation": "relu"}, ["hidden_activation", "relu", "gelu_pytorch_tanh"]),
        ("gemma4", {"num_kv_shared_layers": 33}, ["num_kv_shared_layers", "33"]),
        ("gemma4", {"vocab_size_per_layer_input": 1000}, ["vocab_size_per_layer_input", "1000", "262144"]),
        ("gemma4_moe", {"top_k_experts": 200}, ["top_k_experts", "200", "128"]),
    ],
)
def test_a_setting_that_cannot_be_served_is_named(name: str, changes: Config, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(changed(name, **changes))
    assert all(word in caught.value.message for word in ["config.json", *words])
