"""A GGUF file of a checkpoint gives the checkpoint's logits; without one of the inverses it does not."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import CHECKPOINTS, VOCAB_SIZE, checkpoint, made_once, make_checkpoint
from tests.fixtures.mtp_heads import with_head
from tests.oracle.model_driver import ModelDriver
from tests.support.gguf_files import ARCHITECTURES, write_gguf
from tests.unit.text.test_plamo_vocabulary import ROWS as PLAMO_ROWS
from tests.unit.text.test_plamo_vocabulary import made as plamo_release
from weft.errors import CheckpointError
from weft.models.blocks.ngrams import NgramsBlock
from weft.models.blocks.streams import StreamsBlock
from weft.models.embedding import Embedding
from weft.models.gguf import parts
from weft.models.gguf.known_keys import NEUTRAL, is_harmless
from weft.models.hub import resolve_model
from weft.models.loading import LoadedModel, load_model
from weft.models.mtp import MtpHead
from weft.pre_tokenizers import PRE_TOKENIZERS
from weft.tensor.weights.quantized import QuantizedWeight
from weft.text.tokenizer import Tokenizer

TOLERANCE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "lfm2": {}, "lfm2_bias": {}, "lfm2_moe": {"routed_scaling_factor": 1.0}, "qwen3_5": {}, "qwen3_5_moe": {},
    "qwen3_next": {"mlp_only_layers": []}, "granite": {}, "granite_moe": {}, "granite_rope": {},
    "nemotron_h": {}, "nemotron_h_moe": {}, "nemotron_h_latent": {}, "falcon_h1": {},
    "falcon_h1_plain": {"projectors_bias": False, "mlp_bias": False}, "jamba": {}, "jamba_dense": {},
    "mamba": {}, "mamba_bias": {}, "falcon_mamba": {}, "mamba2": {}, "qwen3": {}, "qwen3_tied": {},
    "qwen3_moe": {"mlp_only_layers": []}, "llama": {}, "granite_attention": {}, "llama_scaled": {},
    "gpt_oss": {}, "kimi_k3": {}, "kimi_linear": {},
    "kimi_linear_groups": {"attention_bias": False, "norm_topk_prob": True},
    "ling": {}, "gigachat3_5": {
        "linear_sigmoid_gate_scale": 2.0, "layernorm_gating_weight": 2.0, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "mscale": 0.8,
                            "mscale_all_dim": 0.8, "original_max_position_embeddings": 512}},
    "gemma3": {"tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    "gemma3n": {"tie_word_embeddings": True},
    "gemma4": {"tie_word_embeddings": True}, "gemma4_moe": {"tie_word_embeddings": True},
    "rwkv7": {}, "rwkv7_wide": {"tie_word_embeddings": False}, "glm5_next": {
        "text_config": CHECKPOINTS["glm5_next"][1]["text_config"] | {"index_topk": 12}},
    "qwen4_exp": {"ple_layer_ids": [3], "indexer_budget": 16}, "qwen2": {}, "phi3": {}, "gemma": {
        "tie_word_embeddings": True}, "gemma2": {
        "query_pre_attn_scalar": 32, "layer_types": None, "tie_word_embeddings": True}, "glm4": {}, "olmo2": {},
    "olmoe": {}, "cohere": {"tie_word_embeddings": True}, "cohere_normed": {
        "tie_word_embeddings": True}, "cohere2": {"layer_types": None}, "exaone4": {
        "layer_types": None}, "starcoder2": {"sliding_window": None}, "stablelm": {}, "nemotron": {}, "seed_oss": {},
    "smollm3": {}, "exaone": {}, "glm": {"head_dim": 16}, "olmo": {}, "jais2": {}, "ministral3": {}, "phi": {},
    "glm4_moe": {}, "dots1": {"sliding_window": None, "layer_types": ["full_attention"] * 3}, "ernie4_5_moe": {},
    "minimax_m2": {}, "afmoe": {"layer_types": None, "num_hidden_layers": 4}, "granite_moe_dense": {},
    "deepseek_v2": {}, "deepseek_v3": {}, "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "arcee": {}, "ernie4_5": {}, "hunyuan": {}, "mixtral": {"sliding_window": None}, "qwen2_moe": {
        "mlp_only_layers": [], "use_sliding_window": False}, "hunyuan_moe": {}, "exaone_moe": {}, "gpt_neox": {},
    "glm_moe_dsa": {"index_topk": 12}, "gpt2": {"scale_attn_weights": True}, "gpt_bigcode": {
        "activation_function": "gelu"}, "bloom": {}, "mpt": {"attn_config": {"clip_qkv": 1.5}}, "falcon": {},
    "dbrx": {},
    "falcon_grouped": {"bias": False}, "olmo3": {}, "phi3_long": {},
    "phimoe": {"router_jitter_noise": 0.01, "rope_parameters": CHECKPOINTS["phimoe"][1]["rope_parameters"] | {
        "long_mscale": 1.243163121016122}},
    "apertus": {}, "mellum": {
        "mlp_layer_types": ["sparse"] * 3},
    "laguna": {"layer_types": ["full_attention", *["sliding_attention"] * 2], "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 3e4, "factor": 4.0, "attention_factor": 1.25,
                           "original_max_position_embeddings": 1024, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0}}},
    "laguna_elements": {"mlp_layer_types": ["dense", "sparse"], "layer_types": [
        "full_attention", "sliding_attention"]},
    "llama4": {"num_hidden_layers": 5, "no_rope_layers": None, "moe_layers": None, "floor_scale": 8192,
               "interleave_moe_layer_step": 2, "attn_scale": 0.1, "attention_chunk_size": 8192,
               "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}},
    "llama4_plain": {"use_qk_norm": True},
    "nemotron_h_puzzle": {"mamba_num_heads": 8, "mamba_head_dim": 16, "moe_latent_size": 24, "block_configs": [
        {"block_type": "linear_attention"},
        {"block_type": "moe", "moe_intermediate_size": 24, "num_experts_per_tok": 3}, {"block_type": "full_attention"},
        {"block_type": "moe", "moe_intermediate_size": 36, "num_experts_per_tok": 2}]},
    "plamo2": {"attention_window_size": 2048, "full_attention_idx": [0, 1, 2, 3], "rope_theta": 30_000.0},
    "plamo2_pages": {"attention_window_size": 2048, "rope_local_theta": 10_000.0}, "plamo3": {}, "plamo3_scaled": {
        "scale_embedding": False},
}  # fmt: skip
"""Checkpoints, and what of them a file has no key for, or the converter refuses."""
FORGOTTEN = [("qwen3_5", "log"), ("qwen3_5", "plus_one"), ("qwen3_5", "tiled"), ("qwen3_5_moe", "tiled"),
             ("qwen3_next", "ungrouped"), ("qwen3_next", "plus_one"), ("granite", "log"),
             ("granite_rope", "interleaved"), ("nemotron_h", "log"), ("falcon_h1", "multipliers"),
             ("jamba", "log"), ("mamba", "log"), ("mamba2", "log"), ("llama", "interleaved"),
             ("llama_scaled", "rope_freqs"), ("gpt_oss", "apart"), ("kimi_linear", "log"),
             ("kimi_linear", "turned"), ("ling", "log"), ("ling", "turned"), ("gemma3", "plus_one"),
             ("gigachat3_5", "plus_one"), ("gigachat3_5", "ungrouped"), ("gemma4", "rope_freqs"),
             ("rwkv7", "mixes"), ("glm5_next", "turned"), ("qwen4_exp", "plus_one"),
             ("qwen4_exp", "tiled"), ("gemma2", "plus_one"), ("nemotron", "plus_one"),
             ("mixtral", "interleaved"), ("smollm3", "interleaved"), ("gpt_neox", "ungrouped"),
             ("falcon_grouped", "ungrouped"), ("plamo3", "plus_one")]  # fmt: skip


@functools.cache
def original(name: str) -> Path:
    if name == "granite_attention":  # the architecture without Mamba, which has a name of its own
        return made_once(name, "granite_rope", layer_types=["attention"] * 4, mamba_conv_bias=True)
    if name == "llama_scaled":
        scaled = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        return made_once(name, "llama", rope_parameters=scaled, head_dim=64)
    if not CASES[name]:
        return checkpoint(name)
    return made_once(f"{name}_plainer", name, **CASES[name])


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of a prompt of 40 tokens and of one token more, in two steps."""
    tokens = torch.randint(3, VOCAB_SIZE, (41,), generator=torch.Generator().manual_seed(5)).tolist()
    driver = ModelDriver(loaded.model, sequences=1, length=48)
    with torch.inference_mode():
        return torch.cat([driver.step((0, part))[0].clone() for part in (tokens[:40], tokens[40:])])


@functools.cache
def expected(name: str) -> torch.Tensor:
    return logits(load_model(original(name), "float32"))


def distance(name: str, file: Path) -> float:
    return (logits(load_model(resolve_model(file), "float32")) - expected(name)).abs().max().item()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", CASES)
def test_the_file_gives_the_logits_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    file = write_gguf(original(name), tmp_path / "model.gguf")
    loaded = load_model(resolve_model(file), "float32")
    assert (logits(loaded) - expected(name)).abs().max().item() < TOLERANCE
    assert not loaded.warnings, "a tensor is not used"


TWINS = (("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe"), ("qwen2", "qwen2vl"), ("llama", "internlm2"))
"""Checkpoints, and architectures whose files have the same text under another name."""


@pytest.mark.parametrize(("name", "architecture"), TWINS)
def test_a_file_of_another_name_has_the_same_text(
    name: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        if architecture.startswith("qwen3vl"):
            writer.add_num_deepstack_layers(3)
        if "vl" in architecture:
            writer.add_rope_dimension_sections([24, 20, 20, 0])

    monkeypatch.setitem(ARCHITECTURES, CHECKPOINTS[name][0], architecture)
    assert distance(name, write_gguf(original(name), tmp_path / "model.gguf", change=change)) == 0


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("counted", [0, 1])
def test_heads_that_the_converter_left_out_cost_no_layer(name: str, counted: int, tmp_path: Path) -> None:
    """llama.cpp 24737, 26916: fine-tunes without the head that ``nextn_predict_layers`` counts. ``counted``: the blocks
    of it in ``block_count``."""
    text = json.loads((original(name) / "config.json").read_text())
    layers = text.get("text_config", text)["num_hidden_layers"]
    keys = {"block_count": layers + counted, "nextn_predict_layers": 1}
    assert (
        distance(name, write_gguf(original(name), tmp_path / "model.gguf", change=lambda w: set_keys(w, **keys))) == 0
    )


@pytest.mark.parametrize(("name", "forgotten"), FORGOTTEN)
def test_a_file_without_one_change_of_the_converter_is_another_model(name: str, forgotten: str, tmp_path: Path) -> None:
    """The control: the inverse is then applied to what was never changed."""
    assert distance(name, write_gguf(original(name), tmp_path / "model.gguf", forget={forgotten})) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("nemotron_h", "attention.head_count_kv", [0] * 6, "attention.head_count_kv is 0: it must be from 1"),
        ("ling", "rope.scaling.type", "yarn", "rope.scaling.type is 'yarn'"),
        ("ling", "swiglu_clamp_exp", [0.0, 7.0], "swiglu_clamp_exp is"),
        ("gigachat3_5", "swiglu_clamp_exp", [1.5, 7.0], "swiglu_clamp_exp is"),
        ("kimi_linear", "expert_gating_func", 1, "expert_gating_func is 1"),
        ("kimi_linear", "attention.key_length_mla", 8, "it must be above rope.dimension_count 8"),
        ("lfm2_moe", "expert_gating_func", 1, "expert_gating_func is 1: experts chosen by sigmoid"),
        ("qwen3_moe", "expert_weights_norm", False, "expert_weights_norm is False: of this architecture only True"),
        ("qwen3_moe", "norm_top_k_prob", False, "norm_top_k_prob is False"),
        ("qwen3_5", "ssm.v_head_reordered", False, "ssm.v_head_reordered is False"),
        ("falcon_h1", "mlp_gate_multiplier", "0.17", "mlp_gate_multiplier is '0.17': weft does not know this key"),
        ("qwen3", "attention.sliding_window", 64, "attention.sliding_window is 64: of this architecture only 0"),
        ("gemma3", "attention.sliding_window_pattern", [True], "the file has 4 layers"),
        ("gemma4", "feed_forward_length", [96], "the file has 6 layers"),
        ("gemma3n", "activation_sparsity_scale", [0.5], "a number for each of the 6 layers"),
        ("gemma3n", "altup.num_inputs", None, "altup.num_inputs is missing"),
        ("glm5_next", "attention.indexer.kpool_select_tail", False, "attention sees the unfinished block"),
        ("glm5_next", "attention.indexer.types", [True, False] * 2, "an index of their own"),
        ("glm5_next", "attention.indexer.kpool", None, "attention.indexer.kpool is missing"),
        ("qwen4_exp", "attention.compress_ratios", [0, 4, 0, 2], "one ratio for all attention layers"),
        ("qwen4_exp", "ple.head_offsets", [0] * 8, "tables with rows, one after the other"),
        ("qwen4_exp", "ple.layers", [0, 2], "tables in front of one delta layer"),
        ("qwen4_exp", "ple.layers", [1], "tables in front of one delta layer"),
    ],
)
def test_a_key_that_is_not_served_is_one_line(name: str, key: str, value: Any, reason: str, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        full = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(full, None)
        if value is not None:
            {str: writer.add_string, int: writer.add_uint32, list: writer.add_array, bool: writer.add_bool}[
                type(value)
            ](full, value)

    file = write_gguf(original(name), tmp_path / "model.gguf", change=change)
    with pytest.raises(CheckpointError, match=reason) as error:
        resolve_model(file)
    assert str(error.value).startswith(f"{file}: ")


@torch.inference_mode()
def test_the_first_of_several_heads_is_read_and_gates_its_norms(tmp_path: Path) -> None:
    """GigaChat's: a head for each place of a draft, under one name in each block."""
    made = with_head(tmp_path / "made", "gigachat3_5")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"layernorm_gating_weight": 2.0}))  # of all files
    file = resolve_model(write_gguf(made, tmp_path / "model.gguf"))
    stored, read = (load_model(one, "float32", mtp=True).model.mtp for one in (made, file))
    assert isinstance(stored, MtpHead)
    assert isinstance(read, MtpHead)
    hidden_TD, tokens_T = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)), torch.arange(5)
    assert (stored.joined(hidden_TD, tokens_T) - read.joined(hidden_TD, tokens_T)).abs().max() < TOLERANCE
    assert stored.norm is not None
    assert read.norm is not None
    assert (stored.norm(hidden_TD) - read.norm(hidden_TD)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["glm5_next", "qwen4_exp"])
@torch.inference_mode()
def test_a_head_behind_the_last_block_is_that_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Of Qwen4 the file has what it joins in one matrix, and one layer of n-grams."""
    made = with_head(tmp_path / "made", name)
    if name == "qwen4_exp":
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | {"ple_layer_ids": [1]}))
        [file] = made.glob("*.safetensors")
        save_file({key: x for key, x in load_file(file).items() if "layers.2.ple." not in key}, file)
    written = resolve_model(write_gguf(made, tmp_path / "model.gguf"))
    stored, read = (load_model(one, "float32", mtp=True).model.mtp for one in (made, written))
    assert isinstance(stored, MtpHead)
    assert isinstance(read, MtpHead)
    noise = torch.Generator().manual_seed(3)
    hidden_TN, tokens_T = torch.randn(5, stored.width, generator=noise), torch.arange(5)
    joined_TN = stored.joined(hidden_TN, tokens_T)
    assert (joined_TN - read.joined(hidden_TN, tokens_T)).abs().max() < TOLERANCE
    for one, other in zip(stored.layer.blocks, read.layer.blocks, strict=True):
        if isinstance(one, StreamsBlock) and isinstance(other, StreamsBlock):
            assert (one.mix.enter(joined_TN)[0] - other.mix.enter(joined_TN)[0]).abs().max() < TOLERANCE
    for expected, found in zip(stored.best(hidden_TN), read.best(hidden_TN), strict=True):
        assert torch.allclose(expected.float(), found.float(), atol=TOLERANCE)


def test_tables_of_ngrams_stay_in_their_blocks(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "qwen4_exp", ple_layer_ids=[1], ple_embed_dim=256)
    kinds = {"per_layer_token_embd": gguf.GGMLQuantizationType.Q4_0}
    blocks, values = (
        load_model(
            resolve_model(write_gguf(made, tmp_path / f"{widened}.gguf", types=kinds, widened=widened)), "float32"
        )
        for widened in (False, True)
    )
    assert (logits(blocks) - logits(values)).abs().max() < TOLERANCE
    before = next(block for block in blocks.model.layers[0].blocks if isinstance(block, NgramsBlock))
    assert isinstance(before.table, Embedding)
    assert isinstance(before.table.table, QuantizedWeight)


@pytest.mark.parametrize("values", [None, [0.5] * 2, [1, 2, 3]])
def test_numbers_of_layers_that_are_no_list_of_them_are_one_line(values: Any, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["xielu.alpha_p"]
        if values:
            writer.add_array("xielu.alpha_p", values)

    directory = resolve_model(write_gguf(original("apertus"), tmp_path / "model.gguf", change=change))
    with pytest.raises(CheckpointError, match="must list a float32 number for each of the 3 layers") as error:
        load_model(directory, "float32")
    assert "xielu.alpha_p is" in str(error.value)


@pytest.mark.parametrize("name", ["plamo2", "plamo3"])
def test_pieces_of_plamo_2_are_read(name: str, tmp_path: Path) -> None:
    """Files of PLaMo 3 do not say around which runs a text is cut."""
    rows = [*PLAMO_ROWS, *([f"[PAD{number}]", -1000.0, "UNUSED"] for number in range(VOCAB_SIZE - len(PLAMO_ROWS)))]
    kinds = {"UNKNOWN": 2, "CONTROL": 3, "UNUSED": 5, "BYTE": 6}

    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("model", "tokens", "scores", "token_type", "merges"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
        writer.add_tokenizer_model("plamo2")
        writer.add_token_list([row[0] for row in rows])
        writer.add_token_scores([float(row[1]) for row in rows])
        writer.add_token_types([kinds.get(row[2], 1) for row in rows])

    file = write_gguf(original(name), tmp_path / "model.gguf", change=change)
    if name == "plamo3":
        with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model is 'plamo2'"):
            resolve_model(file)
        return
    tokenizer = Tokenizer.load(resolve_model(file))
    (tmp_path / "release").mkdir()
    text = "ab   東京é <|plamo:op|>\n\n aaaa"
    assert tokenizer.encode(text) == plamo_release(tmp_path / "release").encode(text)


def set_keys(writer: gguf.GGUFWriter, **values: Any) -> None:
    """In place of what the writer has; names follow that of the architecture, or begin with tokenizer."""
    for name, value in values.items():
        key = name if name.startswith(("tokenizer.", "general.")) else f"{writer.arch}.{name}"
        writer.kv_data[0].pop(key, None)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        if value is not None:
            add.get(type(value), writer.add_string)(key, value)


OLLAMA: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "qwen3_5": (
        {"rope.dimension_sections": [11, 11, 10], "mrope_sections": [11, 11, 10], "rope.mrope_section": [11, 11, 10],
         "rope.mrope_interleaved": True, "ssm.v_head_reordered": True, "vision.block_count": 2, "image_token_id": 7,
         "attention.head_count_kv": 2},
        {"ssm_dt.bias": "ssm_dt"}),
    "qwen3_moe": ({"expert_feed_forward_length": None, "norm_top_k_prob": True}, {}),
    "nemotron_h_latent": ({}, {"ffn_latent_down": "ffn_latent_in", "ffn_latent_up": "ffn_latent_out"}),
    "lfm2": ({"attention.key_length": 16, "attention.value_length": 16}, {"token_embd_norm": "output_norm"}),
    "llama": ({"attention.head_dim": 16, "attention.layer_norm_epsilon": 1e-5}, {}),
    "gemma3": ({"rope.freq_base_swa": None, "rope.local.freq_base": 10_000.0, "mm.tokens_per_image": 256}, {}),
    "gemma3n": ({"attention.shared_kv_layers": None, "num_kv_shared_layers": 2, "attention.key_length": None,
                 "head_dim": 16, "laurel_rank": 20, "rope.freq_base_swa": None, "rope.freq_base_local": 10_000.0,
                 "altup.correct_scale": True, "altup.lr_multiplier": 1.0}, {}),
}  # fmt: skip
"""Keys and names of tensors as Ollama's converter writes them, where it differs from llama.cpp's."""


@pytest.mark.parametrize("name", OLLAMA)
def test_a_file_of_ollama_is_the_same_model(name: str, tmp_path: Path) -> None:
    """llama.cpp 25334 and 22954: files of Qwen3.5 with towers inside, which llama.cpp refuses."""
    keys, names = OLLAMA[name]

    def change(writer: gguf.GGUFWriter) -> None:
        ends = {"tokenizer.ggml.eos_token_ids": [1, 2], "tokenizer.ggml.add_padding_token": False}
        set_keys(writer, **keys, **ends)
        writer.add_tensor("v.patch_embed.weight", np.zeros((4, 4), np.float32))

    def renamed(tensor: str) -> str:
        return functools.reduce(lambda one, pair: one.replace(*pair), names.items(), tensor)

    file = write_gguf(original(name), tmp_path / "model.gguf", change=change, renamed=renamed)
    loaded = load_model(resolve_model(file), "float32")
    assert (logits(loaded) - expected(name)).abs().max().item() < TOLERANCE
    assert {1, 2} <= set(loaded.generation_defaults.eos_ids)
    assert loaded.warnings == ("Skipped the vision tower (1 tensor, 64 B): weft serves the text part of this model.",)


def test_the_base_of_window_layers_is_read_by_the_name_of_ollama(tmp_path: Path) -> None:
    other = {"rope.freq_base_swa": None, "rope.local.freq_base": 500.0}
    file = write_gguf(original("gemma3"), tmp_path / "model.gguf", change=lambda writer: set_keys(writer, **other))
    assert (logits(load_model(resolve_model(file), "float32")) - expected("gemma3")).abs().max() > 100 * TOLERANCE


def as_ollama_writes(file: Path, path: Path, *, first: bool) -> Path:
    """Rewrite llama.cpp's file of GPT-OSS as Ollama's converter has it. ``first``: as the one of 2025-08 had it, which
    joins q, k and v, and gate and up row by row, and has the columns of a byte next to each other."""
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(path, "gptoss")
    for key, field in reader.fields.items():
        left_out = key.endswith(("scaling.type", "expert_feed_forward_length", "ggml.pre"))
        if not key.startswith(("GGUF.", "general.architecture")) and not left_out:
            kinds = field.types
            name = key.replace("gpt-oss.", "gptoss.")
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    writer.add_string("tokenizer.ggml.pre", "default")
    stored = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    if first:
        for layer in range(4):
            for end in ("weight", "bias"):
                rows = [stored.pop(f"blk.{layer}.attn_{part}.{end}") for part in "qkv"]
                stored[f"blk.{layer}.attn_qkv.{end}"] = np.concatenate([x for x, _ in rows]), rows[0][1]
                gate, up = (stored.pop(f"blk.{layer}.ffn_{part}_exps.{end}") for part in ("gate", "up"))
                both = np.stack((gate[0], up[0]), axis=2)
                joined = both.reshape(both.shape[0], -1, *both.shape[3:])
                stored[f"blk.{layer}.ffn_gate_up_exps.{end}"] = joined, gate[1]
    names = {"attn_output": "attn_out", "attn_sinks.weight": "attn_sinks", "post_attention_norm": "ffn_norm"}
    for name, (values, kind) in stored.items():
        in_pairs = first and kind.name == "MXFP4"
        if in_pairs:
            blocks = values.reshape(-1, 17)
            codes = np.concatenate((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), axis=1)
            blocks[:, 1:] = codes[:, 0::2] | codes[:, 1::2] << 4
        name = functools.reduce(lambda one, pair: one.replace(*pair), names.items(), name)
        writer.add_tensor(name, values, raw_dtype=kind)
        if in_pairs:
            writer.tensors[-1][name].dtype = 4  # type: ignore[assignment]  # ggml has no type of this number
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("first", [False, True], ids=["of today", "the first"])
def test_gpt_oss_as_ollama_writes_it_is_the_same_model(first: bool, tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "made", "gpt_oss", intermediate_size=64)
    parts_of = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(4) for part in ("gate", "up", "down")]
    blocks = dict.fromkeys(parts_of, gguf.GGMLQuantizationType.MXFP4)
    file = write_gguf(made, tmp_path / "model.gguf", types=blocks)
    directory = resolve_model(as_ollama_writes(file, tmp_path / "ollama.gguf", first=first))
    loaded = load_model(directory, "float32")
    assert torch.equal(logits(loaded), logits(load_model(resolve_model(file), "float32")))
    assert not loaded.warnings
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 8.0)
    cut = json.loads((directory / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"][0]
    assert (cut["pattern"]["Regex"],) == PRE_TOKENIZERS["gpt-4o"].cuts


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scale_linear": 2.0}, ("linear", 2.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("default", None)),
        ({"rope.scaling.factor": 1.0}, ("default", None)),
        ({}, ("default", None)),
    ],
)
def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(
    keys: dict[str, Any], scaling: tuple[str, float | None], tmp_path: Path
) -> None:
    file = write_gguf(original("qwen3"), tmp_path / "model.gguf", change=lambda writer: set_keys(writer, **keys))
    rope = json.loads((resolve_model(file) / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope.get("factor")) == scaling


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces is True"),
        ({"tokenizer.ggml.normalizer.lowercase": True}, "normalizer.lowercase is True: weft does not know this key"),
        ({"general.type": "adapter"}, "general.type is 'adapter'; models are served"),
        ({"tokenizer.ggml.eos_token_ids": [1, 1 << 20]}, "eos_token_ids is"),
    ],
)
def test_a_key_of_the_tokenizer_that_is_not_served_is_one_line(
    keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    file = write_gguf(original("qwen3"), tmp_path / "model.gguf", change=lambda writer: set_keys(writer, **keys))
    with pytest.raises(CheckpointError, match=reason):
        resolve_model(file)


@pytest.mark.parametrize(("name", "centred"), [("qwen3", False), ("lfm2", True)])
def test_a_file_that_is_not_causal_is_an_embedder(name: str, centred: bool, tmp_path: Path) -> None:
    """LFM2.5-Embedding's GGUF says no more than this."""
    keys = {"attention.causal": False}
    file = write_gguf(original(name), tmp_path / "model.gguf", change=lambda writer: set_keys(writer, **keys))
    model = load_model(resolve_model(file), "float32").model
    assert not model.spec.causal
    assert any(getattr(mixer, "centred", False) for mixer in model.architecture.mixers) is centred


ASKED = re.compile(r"""(?:keys|self)\.(?:get|integer|number|boolean|integers|by_layer)\(\s*"([a-z0-9_.]+)\"""")


def test_no_key_of_gguf_is_unknown_to_some_list() -> None:
    """Keys of the package that no served architecture has are refused where one does; the others are named."""
    of_others = {"altup.active_idx", "altup.num_inputs", "classifier.output_labels", "decoder_block_count",
                 "decoder_start_token_id", "expert_chunk_feed_forward_length", "experts_per_group",
                 "interleave_moe_layer_step", "time_decay_extra_dim", "time_mix_extra_dim", "{dense}_feat_in",
                 "{dense}_feat_out"}  # fmt: skip
    asked = {key for keys in (Path(parts.__file__).parent).glob("*.py") for key in ASKED.findall(keys.read_text())}
    names = {
        value.removeprefix("{arch}.")
        for kind in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM, gguf.Keys.KDA, gguf.Keys.WKV)
        for name, value in vars(kind).items()
        if isinstance(value, str) and value.startswith("{arch}.")
    }
    assert len(names) > 80
    assert not {name for name in names if not is_harmless(name)} - NEUTRAL.keys() - asked - of_others
