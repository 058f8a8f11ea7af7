"""Rotary frequencies against transformers' own, for each kind that is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from tests.unit.models.test_families import QWEN3_8B, changed
from weft.errors import CheckpointError
from weft.families import read_architecture
from weft.families.mixers.attention import Attention, Rope
from weft.models.rotary import RotaryTable

SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with all its settings": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_cos_and_sin_equal_transformers(kind: str) -> None:
    config = changed(QWEN3_8B, rope_scaling=SCALINGS[kind])
    mixer = read_architecture(config).mixers[0]
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    positions = torch.tensor([0, 1, 2, 63, 64, 1000, 8191, 32767, 40959])
    cos, sin = RotaryTable(mixer.rope).at(positions)
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**config))(torch.zeros(1), positions[None])
    for mine, other in zip((cos, sin), theirs, strict=True):
        assert torch.allclose(mine, other[0], atol=1e-6)
    if kind != "default":
        plain, _ = RotaryTable(read_architecture(QWEN3_8B).mixers[0].rope).at(positions)  # type: ignore
        assert not torch.allclose(cos, plain, atol=1e-2)


def test_the_theta_of_rope_parameters_counts_where_an_older_key_says_another() -> None:
    """vllm #42624: a save by older code left the class's default at top level."""
    config = changed(QWEN3_8B, rope_theta=10_000.0, rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    rope = read_architecture(config).mixers[0].rope  # type: ignore[union-attr]
    assert rope.theta == Qwen3Config(**config).rope_parameters["rope_theta"] == 5e6


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelled", ["type", "rope_type"])
def test_yarn_as_model_cards_write_it_gives_the_context_that_they_promise(name: str, spelled: str) -> None:
    """A card adds the scaling and leaves max_position_embeddings as it was; ``weft plan`` and the engine take
    their longest context from here."""
    scaling = {spelled: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    config = changed(QWEN3_8B, **{name: scaling})
    assert config["max_position_embeddings"] == 40960
    assert read_architecture(config).max_positions == 131072
    windows = changed(config, use_sliding_window=True, sliding_window=65536, max_window_layers=0)
    assert read_architecture(windows).mixers[0].window == 65536  # type: ignore[union-attr]
    longer = {**config, "max_position_embeddings": 200_000}
    assert read_architecture(longer).max_positions == 200_000, "a length that config.json states itself"
    for kind in ("default", "linear"):
        plain = changed(QWEN3_8B, **{name: scaling | {spelled: kind}})
        assert read_architecture(plain).max_positions == 40960, "the control"


def test_pad_positions_give_finite_angles() -> None:
    mixer = read_architecture(QWEN3_8B).mixers[0]
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    cos, sin = RotaryTable(mixer.rope).at(torch.tensor([-1]))
    assert cos.isfinite().all()
    assert sin.isfinite().all()


@pytest.mark.parametrize("kind", SCALINGS)
def test_what_is_gathered_is_what_is_computed_to_the_last_bit(kind: str) -> None:
    mixer = read_architecture(changed(QWEN3_8B, rope_scaling=SCALINGS[kind])).mixers[0]
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    table = RotaryTable(mixer.rope)
    generator = torch.Generator().manual_seed(0)
    positions = torch.empty(37, dtype=torch.int64)
    for most in (50, 1_000, 3_000, 9_000, 100_000, 3_000):
        positions.copy_(torch.randint(0, most, (37,), generator=generator))  # the same tensor asks again
        for mine, other in zip(table.at(positions), table.computed(positions), strict=True):
            assert torch.equal(mine, other)
    shifted = table.computed(positions + 1)
    assert not torch.equal(table.at(positions)[0], shifted[0]), "the control"
    assert all(part.isfinite().all() for part in table.at(torch.tensor([-1, 5])))


def test_text_turns_by_three_equal_positions_as_by_one() -> None:
    """To the last bit; a picture's rows turn by three, as transformers' Qwen3.5 has it."""
    config = Qwen3_5TextConfig(
        head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 6, 4],
        },
    )
    table = RotaryTable(Rope(theta=1e6, rotary_dim=32), sections=(6, 6, 4))
    positions = torch.tensor([0, 1, 7, 300, 5000])
    for mine, other in zip(table.at(positions.expand(3, -1)), table.at(positions), strict=True):
        assert torch.equal(mine, other)
    places = torch.stack((positions, positions + 3, positions + 9))
    theirs = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), places[:, None])
    for mine, other in zip(table.at(places), theirs, strict=True):
        assert torch.allclose(mine, other[0], atol=1e-6)
    wrong, _ = table.at(places[[0, 2, 1]])
    assert not torch.allclose(wrong, theirs[0][0], atol=1e-2), "the control: rows and columns changed places"


def test_windows_stay_where_a_scaling_makes_the_context_longer_than_them() -> None:
    """OLMo 3 turns its window layers plainly: their own length is the one that config.json states."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}
    config = changed(QWEN3_8B, model_type="olmo3", num_hidden_layers=4, sliding_window=64, max_position_embeddings=1)
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": yarn}
    found = read_architecture({**config, "rope_parameters": ropes})
    assert [mixer.window for mixer in found.mixers] == [64, 64, 64, None]  # type: ignore[union-attr]
    assert found.max_positions == 4096
    plain = read_architecture({**config, "rope_parameters": dict.fromkeys(ropes, ropes["sliding_attention"])})
    assert [mixer.window for mixer in plain.mixers] == [None] * 4, "the control"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("key", "value"), [("head_dim", 10**9), ("partial_rotary_factor", 1e308), ("partial_rotary_factor", -1.0)]
)
def test_heads_that_no_model_has_are_refused_before_a_table_is_made(key: str, value: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = {**QWEN3_8B, "head_dim": 128, "rope_parameters": rope}
    (config if key == "head_dim" else rope)[key] = value
    with pytest.raises(CheckpointError, match=f"config.json: {key} is .*: it must be"):
        read_architecture(config)
