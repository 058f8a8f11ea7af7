"""The Mamba families are read as released, and what cannot be served is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.models.releases_mamba import MAMBA_RELEASES, NEMOTRON_3_NANO_30B, NEMOTRON_3_PUZZLE, Config
from tests.unit.models.test_families import changed
from weft.errors import CheckpointError
from weft.families import read_architecture, read_spec
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.combined import Parallel, SharedBlock
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.mamba import Mamba1, Mamba2, SelectiveMamba2
from weft.families.mixers.mixing import ChannelMix, TimeMix
from weft.families.more.xlstm import MatrixLstm
from weft.families.residuals import LayerNorms

NO_LIMIT = (0.0, float("inf"))


def test_mamba_and_falcon_mamba_are_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["mamba"])
    assert set(model.mixers) == {Mamba1(5120, 16, 160, 4, True, False)}
    assert set(model.feed_forwards) == {None}
    assert (model.layer_count, model.tied_embeddings, model.residual.float32) == (64, True, True)
    falcon = read_architecture(MAMBA_RELEASES["falcon_mamba"])
    assert set(falcon.mixers) == {Mamba1(8192, 16, 256, 4, True, False, "plain", 1e-6)}
    assert (falcon.family, falcon.tied_embeddings, falcon.dtype) == ("falcon_mamba", False, "bfloat16")


def test_mamba2_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["mamba2"])
    assert set(model.mixers) == {Mamba2(128, 64, 8, 128, 4, True, False, NO_LIMIT)}
    assert (set(model.feed_forwards), model.tied_embeddings) == ({None}, False)


def test_bamba_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["bamba"])
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == [9, 18, 27]
    assert model.mixers[9] == Attention(32, 8, 128, 128**-0.5, Rope(10000.0, 64))
    assert model.mixers[0] == Mamba2(128, 64, 1, 128, 4, True, False, NO_LIMIT)
    assert set(model.feed_forwards) == {Dense(14336)}


def test_falcon_h1_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["falcon_h1"])
    [mixer], [feed] = set(model.mixers), set(model.feed_forwards)
    assert isinstance(mixer, Parallel)
    assert mixer.attention == Attention(8, 2, 64, 64**-0.5 * 0.390625, Rope(1e11, 64))
    assert mixer.mamba.norm == "none"
    assert (mixer.mamba.heads, mixer.mamba.head_dim, mixer.mamba.state_dim) == (24, 64, 128)
    assert mixer.mamba.multipliers == (0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738)
    assert (mixer.attention_out, mixer.mamba_in) == (0.9375, 1.25)
    assert feed == Dense(2048, multipliers=(0.8838834764831844, 0.5859375))
    assert (model.embedding_multiplier, 1 / model.logits_divisor) == (5.656854249492381, 0.0390625)


@pytest.mark.parametrize(
    ("rms_norm", "before", "norm"), [(False, True, "none"), (True, True, "gate_last"), (True, False, "gate_first")]
)
def test_falcon_h1_says_where_its_gate_comes_in(rms_norm: bool, before: bool, norm: str) -> None:
    [mixer] = set(
        read_architecture(
            changed(MAMBA_RELEASES["falcon_h1"], mamba_rms_norm=rms_norm, mamba_norm_before_gate=before)
        ).mixers
    )
    assert isinstance(mixer, Parallel)
    assert mixer.mamba.norm == norm


def test_nemotron_h_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["nemotron_h"])
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == [7, 18, 29, 40]
    assert model.mixers[7] == Attention(32, 8, 128, 128**-0.5, None)
    assert model.mixers[0] == Mamba2(128, 64, 8, 128, 4, True, False, NO_LIMIT)
    assert [m is None for m in model.mixers] == [f is not None for f in model.feed_forwards]
    assert set(model.feed_forwards) == {None, Dense(21504, "relu2", gated=False)}


def test_nemotron_3_is_read_as_released() -> None:
    model = read_architecture(NEMOTRON_3_NANO_30B)
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == [5, 12, 19, 26, 33, 42]
    assert sum(isinstance(m, Mamba2) for m in model.mixers) == 23
    experts = Experts(
        128,
        6,
        1856,
        True,
        shared_width=3712,
        scoring="sigmoid",
        choice_bias=True,
        scale=2.5,
        normalizer_eps=1e-20,
        activation="relu2",
        gated=False,
    )
    assert model.feed_forwards.count(experts) == 23


def test_a_puzzle_has_sizes_by_layer() -> None:
    model = read_architecture(NEMOTRON_3_PUZZLE)
    mamba, wide = Mamba2(128, 64, 8, 96, 4, True, False, NO_LIMIT), model.feed_forwards[3]
    assert isinstance(wide, Experts)
    assert (wide.count, wide.per_token, wide.width, wide.shared_width, wide.latent_width) == (512, 12, 2048, 5376, 1024)
    narrow = replace(wide, per_token=4, width=1280)
    assert model.mixers[:5] == (mamba, None, mamba, None, Attention(32, 2, 128, 128**-0.5, None))
    assert (model.feed_forwards[:5], model.layer_count) == ((None, narrow, None, wide, None), 88)
    assert model.mtp is not None
    assert (model.mtp.attention, model.mtp.feed_forward) == (model.mixers[4], replace(wide, per_token=22, width=2688))
    for words, blocks in (("block_type is None", [{}]), ("moe_intermediate_size is 0", [
        {"block_type": "moe", "moe_intermediate_size": 0}]), ("must list the settings", [3])):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            read_architecture(NEMOTRON_3_PUZZLE | {"block_configs": blocks})


@pytest.mark.parametrize("names", [("mamba", "mlp", "attention"), ("linear_attention", "mlp", "full_attention")])
@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_nemotron_h_layers_mean_the_same_under_each_name(key: str, names: tuple[str, str, str]) -> None:
    release = MAMBA_RELEASES["nemotron_h"]
    table = dict(zip("M-*", names, strict=True))
    listed = [table[kind] for kind in release["hybrid_override_pattern"]]
    assert read_architecture(
        changed(release, hybrid_override_pattern=None, **{key: listed}, attention_head_dim=None, head_dim=128)
    ) == read_architecture(release)


def test_jamba_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["jamba"])
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == [4, 12, 20, 28]
    assert model.mixers[4] == Attention(32, 8, 128, 128**-0.5, None)
    assert model.mixers[0] == Mamba1(8192, 16, 256, 4, True, False, "weighted", 1e-6)
    assert model.feed_forwards[0::2] == (Dense(14336),) * 16
    assert model.feed_forwards[1::2] == (Experts(16, 2, 14336, False),) * 16


def test_zamba_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["zamba"])
    shared = [m for m in model.mixers if isinstance(m, SharedBlock)]
    assert [(m.block, m.use) for m in shared] == [(0, use) for use in range(13)]
    assert shared[0].attention == Attention(16, 16, 464, 232**-0.5, None)
    assert shared[0].feed_forward == Dense(14848, "gelu")
    assert model.mixers[0] == shared[0].mamba == Mamba1(7424, 16, 232, 4, True, False, heads=2)
    silent = {"model_type": "zamba", "num_key_value_heads": 16, "dtype": "bfloat16"}
    assert read_architecture(silent) == model


def test_zamba2_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["zamba2"])
    shared = [m for m in model.mixers if isinstance(m, SharedBlock)]
    assert [(m.block, m.use) for m in shared] == [(use % 2, use) for use in range(9)]
    assert shared[0].attention == Attention(32, 32, 160, 80**-0.5, None)
    assert shared[0].feed_forward == Dense(10240, "gelu")
    assert model.mixers[0] == shared[0].mamba == Mamba2(80, 64, 1, 64, 4, True, False, NO_LIMIT)
    assert (model.tied_embeddings, set(model.feed_forwards)) == (True, {None})
    default = changed(MAMBA_RELEASES["zamba2"], layers_block_type=None)
    assert read_architecture(default) == model


def test_xlstm_is_read_as_released() -> None:
    model = read_architecture(MAMBA_RELEASES["xlstm"])
    assert model.mixers == (MatrixLstm(8, 256, 512, 15.0, 1e-6, 1e-6),) * 32
    assert model.feed_forwards == (Dense(10944),) * 32
    assert (model.logits_cap, model.tied_embeddings, model.norm_eps) == (30.0, False, 1e-6)
    assert read_architecture({"model_type": "xlstm", "dtype": "float32"}) == model


def test_rwkv7_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(MAMBA_RELEASES["rwkv7"])
    assert model.mixers[0] == TimeMix(40, 64, 2560, 96, 96, 320, 0)
    assert set(model.mixers[2::2]) == {TimeMix(40, 64, 2560, 96, 96, 320, 64)}
    assert set(model.mixers[1::2]) == {ChannelMix(2560, 10240)}
    assert (model.layer_count, model.residual, model.norm_eps) == (64, LayerNorms(), 1e-5)
    silent = {"model_type": "rwkv7", "hidden_size": 1024, "num_hidden_layers": 2, "hidden_ratio": 3.5}
    assert read_architecture(silent).mixers[2:] == (TimeMix(16, 64, 1024, 64, 64, 160, 64), ChannelMix(1024, 3584))


def test_plamo2_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(MAMBA_RELEASES["plamo2"])
    window = Attention(
        16, 1, 128, 128**-0.5, Rope(10_000.0, 128), qk_norm=True, norm_by_head=True, window=2049
    )  # it sees 2048 tokens before itself
    mamba = SelectiveMamba2(32, 128, 64, 128, 4)
    assert model.mixers == (mamba, window) * 8
    assert (set(model.feed_forwards), model.tied_embeddings, model.max_positions) == ({Dense(8192)}, True, 10 << 20)
    full = {"full_attention_idx": [3], "rope_theta": 5e5, "rope_local_theta": 1e6}
    mixed = read_architecture(MAMBA_RELEASES["plamo2"] | full).mixers
    assert mixed[3] == replace(window, window=None, rope=Rope(5e5, 128))
    assert mixed[1] == replace(window, rope=Rope(1e6, 128))
    silent = read_architecture({"model_type": "plamo2", "mamba_enabled": False})
    assert set(silent.mixers) == {replace(window, heads=32, kv_heads=4)}
    assert (silent.layer_count, silent.vocab_size, silent.max_positions) == (32, 32_000, 10 << 20)
    few = read_architecture({"model_type": "plamo2", "mamba_step": 8, "num_hidden_layers": 3}).mixers
    assert [isinstance(mixer, Attention) for mixer in few] == [False, False, True]


def test_specs_have_the_bytes_per_token_and_per_sequence_of_the_real_models() -> None:
    sizes = {
        name: (spec.kv_bytes_per_token("bfloat16"), spec.state_bytes_per_sequence("bfloat16"))
        for name, spec in ((name, read_spec(config)) for name, config in MAMBA_RELEASES.items())
    }
    assert sizes["nemotron_h"] == (16384, 24 * (128 * 64 * 128 * 4 + (8192 + 2 * 8 * 128) * 3 * 2))
    assert sizes["jamba"] == (16384, 28 * (8192 * 16 * 4 + 8192 * 3 * 2))
    assert sizes["falcon_mamba"] == (0, 64 * (8192 * 16 * 4 + 8192 * 3 * 2))
    assert sizes["rwkv7"] == (0, 32 * (40 * 64 * 64 * 4 + 2 * 2560 * 2))
    assert sizes["falcon_h1"] == (36 * 2 * 2 * 64 * 2, 36 * (24 * 64 * 128 * 4 + (1536 + 256) * 3 * 2))
    assert sizes["zamba"] == (13 * 2 * 16 * 464 * 2, 76 * (7424 * 16 * 4 + 7424 * 3 * 2))
    assert sizes["xlstm"] == (0, 32 * 8 * (513 * 256 + 1) * 4)
    assert sizes["plamo2"] == (8 * 2 * 128 * 2, 8 * (32 * 128 * 64 * 4 + 4096 * 3 * 2))
    assert sizes["zamba2"] == (9 * 2 * 32 * 160 * 2, 54 * (80 * 64 * 64 * 4 + (5120 + 128) * 3 * 2))


def test_a_model_that_states_no_positions_is_served_far() -> None:
    assert read_spec(MAMBA_RELEASES["mamba"]).max_positions == 1 << 20
    assert read_spec(MAMBA_RELEASES["rwkv7"]).max_positions == 1 << 20


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mamba2", {"num_heads": 100}, ["num_heads", "100", "8192"]),
        ("mamba2", {"n_groups": 7}, ["n_groups", "7", "128"]),
        ("falcon_h1", {"mamba_d_ssm": 1500}, ["mamba_n_heads", "mamba_d_ssm", "1500"]),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, ["ssm_multipliers", "5 numbers"]),
        ("falcon_h1", {"lm_head_multiplier": 0.0}, ["lm_head_multiplier"]),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, ["hybrid_override_pattern", "'X'"]),
        ("nemotron_h", {"hybrid_override_pattern": None}, ["hybrid_override_pattern"]),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, ["mlp_hidden_act", "relu2"]),
        ("nemotron_h", {"sliding_window": 4096}, ["sliding_window"]),
        ("jamba", {"attn_layer_offset": 8}, ["attn_layer_offset", "8"]),
        ("jamba", {"num_experts_per_tok": 17}, ["num_experts_per_tok", "17", "16"]),
        ("zamba", {"attention_hidden_size": 3712}, ["attention_hidden_size", "3712", "7424"]),
        ("zamba", {"n_mamba_heads": 3}, ["n_mamba_heads", "3", "7424"]),
        ("xlstm", {"use_bias": True}, ["use_bias", "True", "only false"]),
        ("xlstm", {"weight_mode": "fused"}, ["weight_mode", "fused"]),
        ("xlstm", {"gate_soft_cap": 80.0}, ["gate_soft_cap", "80.0", "40"]),
        ("xlstm", {"num_heads": 5}, ["num_heads", "5", "2048"]),
        ("rwkv7", {"num_heads": 32}, ["num_heads", "32", "40"]),
        ("rwkv7", {"head_dim": 96}, ["head_dim", "96", "2560"]),
        ("rwkv7", {"norm_first": False}, ["norm_first"]),
        ("rwkv7", {"attn": {"layers": [1], "num_heads": 40}}, ["attn", "layers of attention"]),
        ("rwkv7", {"value_dim": [2560] * 31 + [1280]}, ["value_dim", "2560"]),
        ("rwkv7", {"hidden_act": "relu"}, ["hidden_act", "relu", "sqrelu"]),
        ("plamo2", {"linear_type": "fp8"}, ["linear_type", "fp8", "normal"]),
        ("plamo2", {"image_token_id": 7}, ["image_token_id", "7"]),
        ("plamo2", {"rms_norm_eps": 1e-5}, ["rms_norm_eps", "1e-05", "1e-06"]),
        ("plamo2", {"full_attention_idx": [16]}, ["full_attention_idx", "16"]),
        ("plamo2", {"mamba_step": 1}, ["mamba_step", "1"]),
        ("zamba2", {"use_long_context": True}, ["use_long_context"]),
        ("zamba2", {"hidden_act": "silu"}, ["hidden_act", "silu", "gelu"]),
        ("zamba2", {"layers_block_type": ["mamba"] * 3}, ["layers_block_type", "54"]),
        ("zamba2", {"layers_block_type": ["attention"] * 54}, ["layers_block_type", "attention", "hybrid"]),
    ],
)
def test_a_setting_that_cannot_be_served_is_named(name: str, changes: Config, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(changed(MAMBA_RELEASES[name], **changes))
    assert all(word in caught.value.message for word in ["config.json", *words])
