"""GGUF files of checkpoints, made as llama.cpp's converter makes them.

    write_gguf(checkpoint("lfm2"), path)                               every value as it is
    write_gguf(checkpoint("lfm2"), path, forget={"log"})               one change of the converter left out
    write_gguf(directory, path, types={"blk.": Q4_K})                  blocks, by gguf's own quantiser

Names come from gguf's own table. The converter's changes of values are written here from its documentation; ``forget``
leaves out changes by their names. ``bytes_of`` makes a file byte by byte, for headers that no writer would write.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file

from tests.support import gguf_autumn
from weft.families import text_config

ARCHITECTURES = {
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next", "granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1", "jamba": "jamba", "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "llama": "llama", "gpt_oss": "gpt-oss",
    "kimi_linear": "kimi-linear", "kimi_k3": "kimi-k3", "bailing_hybrid": "bailingmoe3", "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4", "gigachat3_5": "gigachat35", "rwkv7": "rwkv7",
    "qwen4_exp_text": "qwen4exp", "glm5_next_text": "glm5-next", "qwen2": "qwen2", "qwen2_moe": "qwen2moe",
    "phi3": "phi3", "gemma": "gemma", "gemma2": "gemma2", "glm4": "glm4", "olmo2": "olmo2", "olmoe": "olmoe",
    "exaone4": "exaone4", "cohere": "command-r", "cohere2": "cohere2", "starcoder2": "starcoder2",
    "stablelm": "stablelm", "nemotron": "nemotron", "seed_oss": "seed_oss", "arcee": "arcee", "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense", "mixtral": "llama", "smollm3": "smollm3", "exaone": "exaone",
    "glm": "chatglm", "olmo": "olmo", "jais2": "jais2", "ministral3": "mistral3", "phi": "phi2",
    "glm4_moe": "glm4moe", "dots1": "dots1", "ernie4_5_moe": "ernie4_5-moe", "minimax_m2": "minimax-m2",
    "afmoe": "afmoe", "granitemoe": "granitemoe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "minicpm3": "minicpm3", "hunyuan_v1_moe": "hunyuan-moe", "exaone_moe": "exaone-moe", "glm_moe_dsa": "glm-dsa",
    "gpt_neox": "gptneox", "gpt2": "gpt2", "gpt_bigcode": "starcoder", "bloom": "bloom", "mpt": "mpt",
    "falcon": "falcon", "olmo3": "olmo2", "phimoe": "phimoe", "dbrx": "dbrx", **gguf_autumn.ARCHITECTURES,
}  # fmt: skip
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Forms that gguf makes of values."""
_SCALES_AT = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q1_0": (0,),
    "Q5_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
}
"""Form -> the bytes of a block at which a float16 begins."""
CHANGES = (
    "apart",
    "log",
    "plus_one",
    "tiled",
    "ungrouped",
    "interleaved",
    "multipliers",
    "rope_freqs",
    "turned",
    "mixes",
)
"""Changes that ``forget`` may name. If a family needs one and it is left out, its file has other weights."""

_LATENT = ("kimi_linear", "kimi_k3", "bailing_hybrid", "glm5_next_text")
_GIGACHAT = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.gate_proj": "attn_gate",
    "self_attn.conv1d": "ssm_conv1d",
    "self_attn.norm": "ssm_norm",
    "self_attn.out_proj": "ssm_out",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Names that gguf's table does not have, from llama.cpp's ``llama-arch.cpp``."""
_INDEXED = {
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate",
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm", "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value", "ple.conv1d": "ple_conv1d", "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv", "hyper_connection_mixer.hc_norm": "nextn.hc_head_norm",
    "hyper_connection_mixer.input_mix_weight_down": "nextn.hc_head_down",
    "hyper_connection_mixer.input_mix_weight_up": "nextn.hc_head_up",
    **{f"hc_{block}_{part}": f"hc_{block}_{part}" for block in ("attn", "ffn")
       for part in ("fn", "base", "scale")},
    **{f"{ours}_hyper_connection.{part}": f"hc_{theirs}_{short}"
       for ours, theirs in (("attn", "attn"), ("mlp", "ffn"))
       for part, short in (("hc_norm", "norm"), ("input_mix_weight_down", "down"),
                           ("input_mix_weight_up", "up"), ("block_inject_weight", "inject"))}}  # fmt: skip
"""The same for Qwen4-Exp and GLM-5-next, from its ``tensor_mapping.py``."""
_RENAMED = {"e_score_correction_bias": "e_score_correction.bias", ".expert_bias": ".expert_bias.bias"}


_RWKV7 = {
    ".attn_norm": ".attention_norm",
    ".attn.": ".attention.",
    ".ffn_norm": ".ln2",
    ".ffn.": ".feed_forward.",
    "g_norm": "ln_x",
    "_lora.lora.0.weight": "1.weight",
    "_lora.lora.2.weight": "2.weight",
    "_lora.lora.2.bias": "0.weight",
}


_INTERLEAVED = ("llama", "arcee", "mixtral", "granitemoehybrid", "granitemoe", "smollm3", "olmo", "ministral3")
"""Models whose rows of queries and keys the converter puts into another order."""


class _Change:
    """The converter's changes of the values of one checkpoint."""

    def __init__(self, config: Mapping[str, Any], forget: Collection[str]) -> None:
        self.config, self.forget = config, forget
        self.type = config["model_type"]

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name.endswith("A_log") and "log" not in self.forget:
            x = torch.exp(x) if self.type == "bailing_hybrid" else -torch.exp(x)
        if self.type in _LATENT and "conv1d" in name:
            return x.reshape(1, x.shape[0], 1, x.shape[-1])
        if "conv1d" in name or ".conv.conv" in name:
            x = x.squeeze()
        if self.type == "gigachat3_5" and name.endswith("norm.weight") and "plus_one" not in self.forget:
            x = x + 1
        if (
            self.type in ("gemma3_text", "gemma", "gemma2", "nemotron")
            and name.endswith("norm.weight")
            and "plus_one" not in self.forget
        ):
            x = x + 1
        if self.type.startswith(("qwen3_5", "qwen4")) or self.type == "qwen3_next":
            x = self._qwen(name, x)
        if self.type in _INTERLEAVED and "interleaved" not in self.forget:
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".{part}." in name:
                    x = x.reshape(self.config[heads], 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        if "attention.query_key_value" in name and "ungrouped" not in self.forget:
            heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
            parts = x.unflatten(0, (groups, heads // groups + 2, -1)).split([heads // groups, 1, 1], dim=1)
            x = torch.cat([part.flatten(0, 2) for part in parts])
        if self.type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            x = x.T
        if self.type == "falcon_h1" and "multipliers" not in self.forget:
            x = self._falcon(name, x)
        groups = self.config.get("mamba_n_groups", self.config.get("n_groups"))
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")) and groups:
            x = x.reshape(groups, -1)
        if name.endswith((".D", "A_log")) and x.ndim == 1 and groups:
            x = x.unsqueeze(1)
        return x

    def _qwen(self, name: str, x: torch.Tensor) -> torch.Tensor:
        is_norm = name.endswith("norm.weight") or ".ple.norm_" in name
        if is_norm and "linear_attn" not in name and "plus_one" not in self.forget:
            return x + 1
        keys, values = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        width, before = self.config["linear_value_head_dim"], 2 * keys * self.config["linear_key_head_dim"]
        if self.type == "qwen3_next" or "linear_attn" not in name or "tiled" in self.forget:
            return x

        def tiled(part: torch.Tensor, each: int, dim: int = 0) -> torch.Tensor:
            cut = part.unflatten(dim, (keys, values // keys, each))
            return cut.transpose(dim, dim + 1).flatten(dim, dim + 2)

        if "in_proj_qkv" in name or "conv1d" in name:
            return torch.cat([x[:before], tiled(x[before:], width)])
        if "out_proj" in name:
            return tiled(x, width, 1)
        return tiled(x, width if "in_proj_z" in name else 1) if "norm" not in name else x

    def _falcon(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` by the first of the converter's factors that applies, in its order."""
        read = self.config.get
        attended = read("attention_in_multiplier", 1.0)
        factors = {
            "down_proj": read("mlp_multipliers")[1],
            "gate_proj": read("mlp_multipliers")[0],
            "k_proj": read("key_multiplier") * attended,
            "q_proj": attended,
            "v_proj": attended,
            "o_proj": read("attention_out_multiplier"),
            "out_proj": read("ssm_out_multiplier"),
            "in_proj": read("ssm_in_multiplier"),
            "lm_head": read("lm_head_multiplier"),
            "embed_tokens": read("embedding_multiplier"),
        }
        part = next((part for part in factors if part in name), None)
        if part is None or name.endswith("bias"):
            return x
        x = x * factors[part]
        if part == "in_proj":
            inner, group = read("mamba_d_ssm"), read("mamba_n_groups") * read("mamba_d_state")
            sizes = [inner, inner, group, group, x.shape[0] - 2 * inner - 2 * group]
            x = torch.cat([rows * by for rows, by in zip(x.split(sizes), read("ssm_multipliers"), strict=True)])
        return x


_USUAL = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}


def config_of(directory: Path) -> dict[str, Any]:
    """Return the configuration of the text, with the usual names of its numbers."""
    config: dict[str, Any] = dict(text_config(json.loads((directory / "config.json").read_text())))
    for usual, others in _USUAL.items():
        if (other := next((name for name in others if name in config), None)) is not None:
            config[usual] = config[other]
    if config["model_type"] == "kimi_k3":
        config |= _kimi_words(config)
    if config["model_type"] == "dbrx":
        attended, feed = config["attn_config"], config["ffn_config"]
        config |= {
            "num_key_value_heads": attended["kv_n_heads"],
            "num_experts": feed["moe_num_experts"],
            "num_experts_per_tok": feed["moe_top_k"],
            "intermediate_size": feed["ffn_hidden_size"],
        }
    if config["model_type"] in ("gpt2", "gpt_bigcode", "bloom", "mpt", "falcon", "gpt_neox"):
        single = config.get("multi_query") and not config.get("new_decoder_architecture")
        grouped = config.get("num_kv_heads") if config.get("new_decoder_architecture") else None
        config["num_key_value_heads"] = 1 if single else grouped or config["num_attention_heads"]
        # The converter writes this, whatever the width is.
        config["intermediate_size"] = config.get("intermediate_size") or 4 * config["hidden_size"]
    return config


def _stacked_projections(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of Gemma 3n: projections of the streams in two stacks, and scales as weights."""
    stacks: dict[str, list[torch.Tensor]] = {}
    out: dict[str, torch.Tensor] = {}
    for name, x in sorted(tensors.items()):
        if "_projections." in name:
            stacks.setdefault(name.rpartition("projections.")[0] + "projections.weight", []).append(x)
        else:
            out[f"{name}.weight" if name.endswith("_scale") else name] = x
    return out | {name: torch.stack(each) for name, each in stacks.items()}


def _kimi_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of Kimi K3 under the keys of Kimi Linear as transformers saves it."""
    linear, layers, first = config["linear_attn_config"], config["num_hidden_layers"], config["first_k_dense_replace"]
    full = linear["full_attn_layers"]
    return {
        "layer_types": ["full_attention" if 1 + n in full else "linear_attention" for n in range(layers)],
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "linear_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "num_expert_group": 1,
        "topk_group": 1,
    }


def converted(directory: Path, forget: Collection[str] = ()) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the architecture, and the tensors by their names in the file."""
    config = config_of(directory)
    tensors = load_file(directory / "model.safetensors")
    architecture = ARCHITECTURES[config["model_type"]]
    if "nemotron" in architecture and any("experts" in name for name in tensors):
        architecture = "nemotron_h_moe"
    if architecture == "granitehybrid" and not {"mamba", "linear_attention"} & {*config["layer_types"]}:
        architecture = "granite"
    # gguf's table does not have the newest names yet; tensors that layers share have one name for all.
    known = {
        "bailingmoe3": "kimi-linear",
        "kimi-k3": "kimi-linear",
        "gigachat35": "kimi-linear",
        "glm5-next": "kimi-linear",
        "qwen4exp": "qwen35moe",
        **gguf_autumn.TABLES,
    }.get(architecture, architecture)
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    table = gguf.get_tensor_name_map(number, 64)
    if config["model_type"] == "rwkv7":
        return architecture, _rwkv7(tensors, table, forget)
    if config["model_type"] in ("glm5_next_text", "qwen4_exp_text"):
        tensors = _indexed(tensors, config)
    if config["model_type"] in _LATENT:
        tensors = _latent(tensors, config, forget)
    if config["model_type"] in ("deepseek_v2", "deepseek_v3", "glm_moe_dsa"):
        tensors = _halves_of_latents(tensors, config)
    if config["model_type"] == "gigachat3_5":
        tensors = _both_ungrouped(tensors, config, forget)
    if config["model_type"] in gguf_autumn.AUTUMN:
        tensors = dict(gguf_autumn.renamed(tensors, config["model_type"], forget))
    if config["model_type"] == "gemma3n_text":
        tensors = _stacked_projections(tensors)
    if config["model_type"] == "bloom":
        tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    change, stacks, found = _Change(config, forget), {}, {}
    for name, x in _apart(tensors, config, forget).items():
        x = change(name, x)
        if config["model_type"] == "gigachat3_5":
            name = _of_gigachat(name)
        if architecture in ("qwen4exp", "glm5-next"):
            name = _of_indexed(name)
        for ours, theirs in _RENAMED.items():
            name = name.replace(ours, theirs)
        parts = name.split(".experts.")
        if len(parts) == 2 and parts[1][0].isdigit():
            expert, _, rest = parts[1].partition(".")
            stacks.setdefault(f"{parts[0]}.experts.{rest}", {})[int(expert)] = x
            continue
        found[_mapped(table, name)] = x
    for name, experts in stacks.items():
        merged = (
            name.removeprefix("model.")
            if architecture == "lfm2moe"
            else name.replace("mixer.experts", "mlp.experts")
            .replace("feed_forward.experts", "mlp.experts")
            .replace("backbone.", "model.")
        )
        found[_mapped(table, merged)] = torch.stack([experts[i] for i in range(len(experts))])
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        found.pop("output.weight", None)
        if "rope_freqs" not in forget:
            found["rope_freqs.weight"] = torch.tensor(
                [1.0] * (_wide(config) // 8) + [1e30] * (_wide(config) // 2 - _wide(config) // 8)
            )
    if config["model_type"] in ("gemma3_text", "gemma3n_text"):
        found.pop("output.weight", None)
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            found[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"])
    if rope.get("rope_type") == "llama3" and "rope_freqs" not in forget:
        found["rope_freqs.weight"] = _rope_freqs(_head_dim(config), rope)
    return architecture, found


def _indexed(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of Qwen4-Exp and GLM-5-next as the converter arranges them: plain names without the tower, the
    head as the layer after the last with its inputs joined in one matrix, queries of the index separate from its key,
    and n-gram tables in one tensor."""
    out, last = {}, config["num_hidden_layers"]
    shards: dict[int, torch.Tensor] = {}
    for name, x in tensors.items():
        name = name.replace("model.language_model.", "model.")
        name = name.replace("mtp.layers.0.", f"model.layers.{last}.")
        name = name.replace("pre_fc_norm_embedding", "enorm").replace("pre_fc_norm_hidden", "hnorm")
        place = name.rpartition(".self_attn.")[0].replace("model.layers.", "blk.")
        if ".shard_" in name:
            shards[int(name.rpartition("shard_")[2].partition(".")[0])] = x
        elif name.endswith("index_qk_proj.weight"):
            rows = config["indexer_n_heads"] * config["indexer_head_dim"]
            out |= {f"{place}.indexer.q_proj.weight": x[:rows], f"{place}.indexer.k_proj.weight": x[rows:]}
        elif name.endswith("fc_embedding.weight"):
            both = x, tensors[name.replace("embedding", "hidden")]
            out[f"blk.{last}.nextn.eh_proj.weight"] = torch.cat(both, dim=1)
        elif x.is_floating_point() and "visual" not in name and "fc_hidden" not in name:
            out[name.replace("mtp.", f"model.layers.{last}.")] = x
    if shards:
        out["per_layer_token_embd.weight"] = torch.cat([shards[number] for number in sorted(shards)])
    return out


def _of_indexed(name: str) -> str:
    """Return the name as ``_of_gigachat`` does."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
    if found is not None and (theirs := _INDEXED.get(found[2])):
        return f"blk.{found[1]}.{theirs}{found[3] or '.weight'}"
    last = name.removeprefix("model.hyper_connection_mixer.")
    part = _INDEXED.get(f"hyper_connection_mixer.{last.removesuffix('.weight')}", "").rpartition("_")[2]
    return name if last == name else f"output_hc_{part}.weight"


def _of_gigachat(name: str) -> str:
    """Return the name in the file, or ``name`` unchanged if gguf's table has it."""
    found = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+?)(?:\.gate_(up|down)_projection)?(\.weight)?", name)
    if found is None:
        return name
    layer, part, gate, end = found.groups()
    theirs = _GIGACHAT.get(part) if layer else "output_norm" if gate else None
    if theirs is None:
        return name
    return f"{f'blk.{layer}.' if layer else ''}{theirs}{f'_gate_{gate}' if gate else ''}{end or ''}"


def _both_ungrouped(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], forget: Collection[str]
) -> dict[str, torch.Tensor]:
    """Split GigaChat's projections of q, k, v and z and of b and a, and the two parts of ``kv_b_proj``."""
    out, own, value = {}, config["qk_nope_head_dim"], config["v_head_dim"]
    ratio = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    for name, x in tensors.items():
        place = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if name.endswith("in_proj_qkvz.weight"):
            qkv, z = _ungrouped(name, x, config, forget).values()
            out |= {f"{place}attn_qkv.weight": qkv, f"{place}attn_gate.weight": z}
        elif name.endswith("in_proj_ba.weight"):
            parts = x.unflatten(0, (-1, 2 * ratio)).split([ratio, ratio], dim=1)
            out |= {
                f"{place}ssm_{gate}.weight": part.flatten(0, 1)
                for gate, part in zip(("beta", "alpha"), parts, strict=True)
            }
        elif name.endswith("kv_b_proj.weight"):
            keys, values = x.view(-1, own + value, x.shape[-1]).split([own, value], dim=1)
            out |= {
                f"{place}attn_k_b.weight": keys.transpose(1, 2).contiguous(),
                f"{place}attn_v_b.weight": values.contiguous(),
            }
        else:
            out[name] = x
    return out


def _rwkv7(
    tensors: Mapping[str, torch.Tensor], table: gguf.TensorNameMap, forget: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of RWKV-7 as in the file: mixes in one tensor, low ranks under short names, and in the first
    layer the tensors of a again as those of v. If "mixes" is forgotten, they have the order of RWKV-6 and earlier."""
    found: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if ".attn.x_" in name:
            order = "wkvrga" if "mixes" in forget else "rwkvag"
            place = name.rpartition("_")[0]
            found[f"blk.{layer}.time_mix_lerp_fused.weight"] = torch.stack(
                [tensors[f"{place}_{part}"] for part in order]
            )
            continue
        for ours, theirs in _RWKV7.items():
            name = name.replace(ours, theirs)
        new = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        new = new if new.endswith((".weight", ".bias")) else f"{new}.weight"
        found[new] = x.flatten() if "r_k" in new else x.squeeze()
        if layer == 0 and "time_mix_a" in new:
            found[new.replace("time_mix_a", "time_mix_v")] = found[new]
    return found


def _latent(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], forget: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors under the names of Kimi's hub releases, with the two parts of ``kv_b_proj``."""
    own, value = config["qk_nope_head_dim"], config["v_head_dim"]
    attended = [kind == "full_attention" for kind in config["layer_types"]]
    out: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        name = name.replace(".attention.dense.", ".self_attn.o_proj.").replace(".attention.", ".self_attn.")
        name = name.replace(".block_sparse_moe.", ".mlp.").replace("word_embeddings", "embed_tokens")
        for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{theirs}.", f".{ours}.")
        name = name.replace("gate.expert_bias", "gate.e_score_correction_bias")
        if config["model_type"] == "kimi_k3" and (named := _of_k3(name, x, tensors, config)) is not None:
            out |= named
            continue
        if config["model_type"] == "bailing_hybrid" and name.endswith(("f_proj.weight", "g_proj.weight")):
            layer = int(name.split(".")[2])
            gate = "attn_gate" if attended[layer] else f"ssm_{name[-len('f_proj.weight')]}_a"
            out[f"blk.{layer}.{gate}.weight"] = x
        elif name.endswith("kv_b_proj.weight"):
            keys, values = x.view(-1, own + value, x.shape[-1]).split([own, value], dim=1)
            if "turned" in forget:  # the same numbers as in that order
                keys = keys.reshape(len(keys), x.shape[-1], own)
            else:
                keys = keys.transpose(1, 2)
            out |= {name.replace("kv_b", "k_b"): keys.contiguous(), name.replace("kv_b", "v_b"): values}
        else:
            out[name] = x
    return out


def _of_k3(
    name: str, x: torch.Tensor, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor] | None:
    """Return what becomes of a tensor of Kimi K3 that Kimi Linear does not have; None for another one."""
    layer = int(name.split(".")[2]) if ".layers." in name else -1
    place, part = (f"blk.{layer}." if layer >= 0 else ""), name.rpartition(".weight")[0].rpartition(".")[2]
    if part.endswith("_res_norm"):
        return {}
    if part.endswith("_res_proj"):
        other = tensors[name.replace("_res_proj", "_res_norm")]
        theirs = {"self_attention": "attn_res_score", "mlp": "ffn_res_score", "output_attn": "output_res_score"}
        return {f"{place}{theirs[part.removesuffix('_res_proj')]}.weight": x.flatten() * other}
    if part == "g_proj":
        attends = config["layer_types"][layer] == "full_attention"
        return {f"{place}{'attn_gate' if attends else 'ssm_g'}.weight": x}
    if part.startswith("routed_expert_"):
        return {f"{place}ffn_routed_{part.removeprefix('routed_expert_').removesuffix('_proj')}.weight": x}
    if name.endswith("A_log"):
        heads = config["linear_attn_config"]["num_heads"]
        return {f"{place}ssm_a": -x[:heads].exp()}
    return None


def _halves_of_latents(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The two parts of ``kv_b_proj``, by themselves."""
    out, own, value = {}, config["qk_nope_head_dim"], config["v_head_dim"]
    for name, x in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            keys, values = x.view(-1, own + value, x.shape[-1]).split([own, value], dim=1)
            out |= {name.replace("kv_b", "k_b"): keys.transpose(1, 2).contiguous(), name.replace("kv_b", "v_b"): values}
        else:
            out[name] = x
    return out


def _rope_freqs(head_dim: int, rope: Mapping[str, Any]) -> torch.Tensor:
    """Return the divisors of the frequencies, as the converter computes them."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        apart = rope["high_freq_factor"] - rope["low_freq_factor"] or 1.0  # Llama 4's are equal: none is between
        smooth = (low / length - rope["low_freq_factor"]) / apart
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1 if length < high else rope["factor"] if length > low else between)
    return torch.tensor(factors)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _wide(config: Mapping[str, Any]) -> int:
    """Return the width of a head of Gemma 4's full layers."""
    return next(int(one["head_dim"]) for one in config["per_layer_config"].values())


def _mapped(table: gguf.TensorNameMap, name: str) -> str:
    # Gemma 4: names that the converter ends in another way.
    if name.endswith((".router.scale", ".router.per_expert_scale", ".layer_scalar")):
        layer = name.split(".layers.")[1].split(".")[0]
        theirs = {
            "scale": "ffn_gate_inp.scale",
            "per_expert_scale": "ffn_down_exps.scale",
            "layer_scalar": "layer_output_scale.weight",
        }[name.rpartition(".")[2]]
        return f"blk.{layer}.{theirs}"
    if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        name += ".weight"
    if name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    if name.startswith(("blk.", "output_norm_gate_", "output_hc_", "output_res_", "per_layer_token_embd.")):
        return name
    if name.endswith("self_attn.sinks"):
        return f"{table.get_name(name)}.weight"
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    direct = {
        "block_sparse_moe.experts.gate_proj.weight": "ffn_gate_exps.weight",
        "block_sparse_moe.experts.up_proj.weight": "ffn_up_exps.weight",
        "shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight",
        "shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
        "shared_dense.gate_proj.weight": "ffn_gate.weight",
        "shared_dense.up_proj.weight": "ffn_up.weight",
        "shared_dense.output_linear.weight": "ffn_down.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    }
    for end, theirs in direct.items():
        if name.endswith(end):
            return f"blk.{name.split('.layers.')[1].split('.')[0]}.{theirs}"
    assert found is not None, f"{name} has no name in the file"
    return found


def _apart(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], forget: Collection[str]
) -> dict[str, torch.Tensor]:
    """Split fused tensors like the converter, and stacks into single experts."""
    out: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        if name.endswith("input_linear.weight"):
            sparse = "block_sparse_moe" in name
            place = name.removesuffix("input_linear.weight") + ("experts." if sparse else "")
            if not sparse and not config["num_local_experts"]:
                place = place.replace("shared_mlp", "shared_dense")
            out |= {
                f"{place}{part}.weight": half
                for part, half in zip(("gate_proj", "up_proj"), x.chunk(2, dim=-2), strict=True)
            }
        elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            out[name.replace("shared_mlp", "shared_dense")] = x
        elif config["model_type"] == "gpt_oss" and ".experts." in name:
            out |= _gpt_oss_experts(name, x, forget)
        elif name.endswith("in_proj_qkvz.weight"):
            out |= _ungrouped(name, x, config, forget)
        elif ".experts.mlp." in name:  # DBRX, whose matrices have the rows of all experts
            each = x.unflatten(0, (config["num_experts"], -1))
            out[f"{name}.weight"] = each.transpose(1, 2) if name.endswith("w2") else each
        else:
            out[name] = x
    return out


def _gpt_oss_experts(name: str, x: torch.Tensor, forget: Collection[str]) -> dict[str, torch.Tensor]:
    """Return each matrix with its rows first, gate and up separate, under the names of one expert."""
    place, _, part = name.partition(".experts.")
    if not part.endswith("_bias"):
        x = x.transpose(1, 2)
    halves = {part.removesuffix("_bias"): x}
    if part.startswith("gate_up"):
        both = x.chunk(2, dim=1) if "apart" in forget else (x[:, 0::2], x[:, 1::2])
        halves = dict(zip(("gate_proj", "up_proj"), both, strict=True))
    if part.endswith("_bias"):
        layer = place.split(".layers.")[1].split(".")[0]
        return {f"blk.{layer}.ffn_{half.removesuffix('_proj')}_exps.bias": each for half, each in halves.items()}
    return {
        f"{place}.experts.{number}.{half}.weight": one
        for half, each in halves.items()
        for number, one in enumerate(each)
    }


def _ungrouped(
    name: str, x: torch.Tensor, config: Mapping[str, Any], forget: Collection[str]
) -> dict[str, torch.Tensor]:
    heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    q, k, v, z = x.unflatten(0, (heads, -1)).split([key, key, value, value], dim=1)
    qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    if "ungrouped" in forget:
        qkv = x[: len(qkv)]
    return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z.flatten(0, 1)}


def _keys(config: Mapping[str, Any], writer: gguf.GGUFWriter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the hyper-parameters under the converter's keys."""
    read = config.get
    rope = read("rope_parameters") or {}
    layers = len(read("layers_block_type") or []) or read("num_hidden_layers")
    integers: dict[str, Any] = {
        "block_count": layers,
        "context_length": read("max_position_embeddings", 1 << 20),
        "embedding_length": read("hidden_size"),
        "feed_forward_length": read("intermediate_size", 0),
        "attention.head_count": read("num_attention_heads", 0),
        "attention.key_length": read("head_dim"),
        "expert_count": read("num_experts", read("num_local_experts", read("n_routed_experts"))),
        "expert_used_count": read("num_experts_per_tok"),
        "expert_feed_forward_length": read("moe_intermediate_size"),
        "leading_dense_block_count": read("num_dense_layers"),
        "expert_shared_feed_forward_length": read(
            "shared_expert_intermediate_size",
            read("moe_shared_expert_intermediate_size", read("shared_intermediate_size")),
        ),
        "expert_group_count": read("n_group"),
        "expert_group_used_count": read("topk_group"),
        "moe_latent_size": read("moe_latent_size"),
        "shortconv.l_cache": read("conv_L_cache"),
    }
    kinds = read("layer_types") or read("layers_block_type") or ["attention"] * layers
    kv = read("num_key_value_heads", 0)
    integers["attention.head_count_kv"] = [kv if "attention" in kind and "linear" not in kind else 0 for kind in kinds]
    if len({*integers["attention.head_count_kv"]}) == 1:
        integers["attention.head_count_kv"] = kv
    if writer.arch in ("qwen35", "qwen35moe", "qwen3next"):
        integers["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
    if config["model_type"] == "lfm2" and read("block_auto_adjust_ff_dim", True):
        multiple = read("block_multiple_of")
        integers["feed_forward_length"] = -(-int(2 * read("intermediate_size") / 3) // multiple) * multiple
    if "partial_rotary_factor" in rope or "attn_rotary_emb" in config:
        integers["rope.dimension_count"] = int(
            (read("head_dim") or read("hidden_size") // read("num_attention_heads")) * rope["partial_rotary_factor"]
        )
    integers |= _ssm(config)
    for name, value in integers.items():
        if value is not None:
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{writer.arch}.{name}", value)
    numbers = {
        "attention.layer_norm_epsilon":  # llama.cpp reads it for this family only
        read("layer_norm_epsilon") if read("model_type") == "nemotron_h" else None,
        "attention.layer_norm_rms_epsilon": read("layer_norm_epsilon", read("rms_norm_eps", read("norm_eps"))),
        "rope.freq_base": rope.get("rope_theta", read("rope_theta")),
        "expert_weights_scale": read("routed_scaling_factor"),
        "attention.scale": read("attention_multiplier"),
        "embedding_scale": read("embedding_multiplier"),
        "residual_scale": read("residual_multiplier"),
        "logit_scale": read("logits_scaling"),
    }
    if config["model_type"] in _LATENT:
        numbers |= _latent_keys(config, writer)
    if writer.arch == "qwen4exp":
        _qwen4_keys(config, writer, tensors)
    if config["model_type"] == "gigachat3_5":
        numbers |= _gigachat_keys(config, writer)
    if config["model_type"] == "rwkv7":
        numbers = {"attention.layer_norm_epsilon": read("norm_eps")}
        writer.add_uint32("rwkv7.wkv.head_size", read("head_dim"))
        for key in ("attention.key_length", *(name for name in integers if name.startswith("ssm."))):
            _replaced(writer, key, None)
    if config["model_type"] in ("gemma3_text", "gemma3n_text", "gemma4_text"):
        numbers |= _gemma_keys(config, writer)
    if config["model_type"] == "gpt_oss":
        integers = {
            "expert_feed_forward_length": read("intermediate_size"),
            "attention.sliding_window": read("sliding_window"),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        for name, value in integers.items():
            writer.add_uint32(f"{writer.arch}.{name}", value)
        writer.add_string(f"{writer.arch}.rope.scaling.type", "yarn")
        numbers["rope.scaling.factor"] = rope["factor"]
    if config["model_type"] in ROUTED:
        numbers |= _routed_keys(config, writer)
    if config["model_type"] in DENSE:
        numbers |= _dense_keys(config, writer)
    if config["model_type"] in gguf_autumn.AUTUMN:
        stored = load_file(Path(config["of"]) / "model.safetensors")
        for name, value in gguf_autumn.keys_of(config, writer, stored).items():
            numbers.pop(name, None)
            add: Any = {float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}.get(type(value))
            if add is None:
                _replaced(writer, name, value)
            else:
                add(f"{writer.arch}.{name}", value)
    for name, number in numbers.items():
        if number is not None:
            writer.add_float32(f"{writer.arch}.{name}", number)
    if config["model_type"] == "granitemoehybrid":
        writer.add_bool(f"{writer.arch}.rope.scaling.finetuned", read("position_embedding_type") == "rope")
    if "norm_topk_prob" in config and "nemotron" in writer.arch:
        writer.add_bool(f"{writer.arch}.expert_weights_norm", read("norm_topk_prob"))
    if config["model_type"] == "falcon_mamba":
        writer.add_bool(f"{writer.arch}.ssm.dt_b_c_rms", True)


def _qwen4_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter, tensors: Mapping[str, torch.Tensor]) -> None:
    layers = config["num_hidden_layers"]
    heads = int(f"blk.{layers}.nextn.eh_proj.weight" in tensors)
    kinds, ratio = config["layer_types"], config["indexer_compress_ratio"]
    _replaced(writer, "block_count", layers + heads)
    for name, value in {
        "nextn_predict_layers": heads or None,
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "attention.compress_ratios": [0 if "linear" in kind else ratio for kind in kinds] + [0] * heads,
    }.items():
        _replaced(writer, name, value)
    if not config["ple_layer_ids"]:
        return
    constants = {
        name: numbers.tolist()
        for name, numbers in load_file(Path(config["of"]) / "model.safetensors").items()
        if not numbers.is_floating_point()
    }
    for name, value in {
        "ple.layers": [layer - 1 for layer in config["ple_layer_ids"]],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "embedding_length_per_layer_input": tensors["per_layer_token_embd.weight"].shape[1],
    }.items():
        _replaced(writer, name, value)
    for theirs, ours in (
        ("layer_multipliers", "layer_multipliers"),
        ("head_offsets", "ngram_heads_offsets"),
        ("head_vocab_sizes", "ngram_heads_vocab_sizes"),
    ):
        [numbers] = [numbers for name, numbers in constants.items() if name.endswith(ours)]
        writer.add_key_value(
            f"{writer.arch}.ple.{theirs}", numbers, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
        )


def _glm_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    for name, value in {
        "block_count": layers + heads,
        "nextn_predict_layers": heads or None,
        "expert_group_count": config["n_group"],
        "expert_shared_count": config["n_shared_experts"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.kpool": config["index_kpool"],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
    }.items():
        _replaced(writer, name, value)
    writer.add_bool(f"{writer.arch}.attention.indexer.kpool_select_tail", True)
    writer.add_array(f"{writer.arch}.attention.indexer.types", [True] * layers)
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"{writer.arch}.{name}", [float(config["swiglu_limit"])] * (layers + heads))
    writer.add_bool(f"{writer.arch}.expert_weights_norm", config["norm_topk_prob"])
    return {"kda.gate_lower_bound": config["linear_lower_bound"], "hyper_connection.epsilon": config["hc_eps"]}


def _latent_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    shared, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    config = {
        "model_max_length": config.get("max_position_embeddings"),
        "num_experts_per_token": config.get("num_experts_per_tok"),
        "num_shared_experts": config.get("n_shared_experts"),
        "num_expert_group": config.get("n_group"),
        **config,
    }
    integers = {
        "rope.dimension_count": shared,
        "attention.key_length": latent + shared,
        "attention.key_length_mla": config["qk_nope_head_dim"] + shared,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": latent,
        "attention.q_lora_rank": config["q_lora_rank"],
        "kda.head_dim": config["linear_head_dim"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "context_length": config["model_max_length"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_shared_count": config["num_shared_experts"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_gating_func": 2,
        "expert_group_count": config["num_expert_group"],
        "expert_group_used_count": config["topk_group"],
    }
    for name, value in integers.items():
        _replaced(writer, name, value)
    _replaced(writer, "attention.head_count_kv", [int("linear" not in kind) for kind in config["layer_types"]])
    if config["model_type"] == "kimi_linear":
        return {}
    if config["model_type"] == "kimi_k3":
        writer.add_bool(f"{writer.arch}.expert_weights_norm", config["moe_renormalize"])
        _replaced(writer, "expert_latent_length", config["routed_expert_hidden_size"])
        _replaced(writer, "attn_res.block_size", config["attn_res_block_size"])
        _replaced(writer, "attention.value_length", config["kv_lora_rank"])
        return {
            "kda.gate_lower_bound": config["linear_attn_config"]["gate_lower_bound"],
            "activation.situ_beta": config["activation_situ_beta"],
            "activation.situ_linear_beta": config["activation_situ_linear_beta"],
        }
    if config["model_type"] == "glm5_next_text":
        return _glm_keys(config, writer)
    writer.add_bool(f"{writer.arch}.kda.safe_gate", config["kda_safe_gate"])
    writer.add_bool(f"{writer.arch}.expert_weights_norm", config["moe_renormalize"])
    return {"kda.gate_lower_bound": config["kda_lower_bound"]}


def _gigachat_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    shared, latent, rope = config["qk_rope_head_dim"], config["kv_lora_rank"], config["rope_parameters"]
    for name, value in {
        "rope.dimension_count": shared,
        "attention.key_length": latent + shared,
        "attention.key_length_mla": config["qk_nope_head_dim"] + shared,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": latent,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "block_count": config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0),
        "nextn_predict_layers": config.get("num_nextn_predict_layers", 0),
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": 2,
        "expert_shared_feed_forward_length": config["n_shared_experts"] * config["moe_intermediate_size"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }.items():
        _replaced(writer, name, value)
    limits = [float(config["swiglu_limit"])] * config["num_hidden_layers"]
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"{writer.arch}.{name}", limits)
    writer.add_string(f"{writer.arch}.rope.scaling.type", "yarn")
    writer.add_bool(f"{writer.arch}.expert_weights_norm", config["norm_topk_prob"])
    return {"rope.scaling.factor": rope["factor"], "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}


def _gemma_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    ropes, kinds = config["rope_parameters"], config["layer_types"]
    window = [kind == "sliding_attention" for kind in kinds]
    writer.add_uint32(f"{writer.arch}.attention.sliding_window", config["sliding_window"])
    writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", window)
    numbers = {
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }
    _replaced(writer, "attention.head_count_kv", config["num_key_value_heads"])
    if config["model_type"] == "gemma3_text":
        writer.add_string(f"{writer.arch}.rope.scaling.type", ropes["full_attention"]["rope_type"])
        return numbers | {"rope.scaling.factor": ropes["full_attention"]["factor"]}
    if config["model_type"] == "gemma3n_text":
        shares = torch.tensor(config["activation_sparsity_pattern"])
        quantiles = torch.distributions.normal.Normal(0.0, 1.0).icdf(shares)
        writer.add_array(f"{writer.arch}.activation_sparsity_scale", quantiles.tolist())
        for name, key in (
            ("altup.active_idx", "altup_active_idx"),
            ("altup.num_inputs", "altup_num_inputs"),
            ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
            ("attention.shared_kv_layers", "num_kv_shared_layers"),
        ):
            _replaced(writer, name, config[key])
        return numbers
    reused, width = config["num_kv_shared_layers"], config["intermediate_size"]
    by_layer = [config["per_layer_config"].get(str(layer), {}) for layer in range(len(kinds))]
    _replaced(
        writer,
        "attention.head_count_kv",
        [one.get("num_key_value_heads", config["num_key_value_heads"]) for one in by_layer],
    )
    _replaced(writer, "feed_forward_length", [width] * (len(kinds) - reused) + [2 * width] * reused)
    for name, value in {
        "attention.key_length": _wide(config),
        "attention.key_length_swa": config["head_dim"],
        "attention.shared_kv_layers": reused,
        "rope.dimension_count": _wide(config),
        "rope.dimension_count_swa": config["head_dim"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "expert_used_count": config["top_k_experts"],
    }.items():
        _replaced(writer, name, value)
    return numbers


def _replaced(writer: gguf.GGUFWriter, name: str, value: int | list[int] | None) -> None:
    """Replace the value of key ``name``; None removes it."""
    key = f"{writer.arch}.{name}"
    writer.kv_data[0].pop(key, None)
    if value is not None:
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(key, value)


def _ssm(config: Mapping[str, Any]) -> dict[str, Any]:
    read = config.get
    hidden = read("hidden_size")
    if "linear_num_key_heads" in config:
        return {
            "ssm.conv_kernel": read("linear_conv_kernel_dim"),
            "ssm.state_size": read("linear_key_head_dim"),
            "ssm.group_count": read("linear_num_key_heads"),
            "ssm.time_step_rank": read("linear_num_value_heads"),
            "ssm.inner_size": read("linear_num_value_heads") * read("linear_value_head_dim"),
        }
    heads = read("mamba_n_heads", read("mamba_num_heads", read("num_heads")))
    width = read("mamba_d_head", read("mamba_head_dim", read("hidden_size_per_head", read("head_dim"))))
    inner = (
        heads * width
        if heads
        else read("intermediate_size")
        if "state_size" in config
        else read("mamba_expand", 0) * hidden
    )
    rank = heads or read("mamba_dt_rank") or read("time_step_rank")
    return {
        "ssm.conv_kernel": read("mamba_d_conv", read("conv_kernel")),
        "ssm.inner_size": inner,
        "ssm.state_size": read("mamba_d_state", read("ssm_state_size", read("state_size"))),
        "ssm.group_count": read("mamba_n_groups", read("n_groups")),
        "ssm.time_step_rank": rank,
    }


DENSE = (
    "qwen2", "qwen2_moe", "phi3", "gemma", "gemma2", "glm4", "olmo2", "olmoe", "exaone4", "cohere", "cohere2",
    "starcoder2", "stablelm", "nemotron", "seed_oss", "arcee", "ernie4_5", "hunyuan_v1_dense", "mixtral", "smollm3",
    "exaone", "glm", "olmo", "jais2", "ministral3", "phi", "afmoe", "hunyuan_v1_moe", "exaone_moe",
    "gpt_neox", "gpt2", "gpt_bigcode", "bloom", "mpt", "falcon", "olmo3", "phimoe", "dbrx",
)  # fmt: skip
ROUTED = (
    "glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2", "afmoe", "deepseek_v2", "deepseek_v3", "minicpm3",
    "hunyuan_v1_moe", "exaone_moe", "glm_moe_dsa",
)  # fmt: skip
_UNGATED = {"ernie4_5_moe": None, "deepseek_v2": 1, "minicpm3": None, "hunyuan_v1_moe": None, "exaone_moe": None}
"""``expert_gating_func`` of models whose experts are not chosen by sigmoids, or whose files leave it out."""


def _routed_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    """Numbers of ``ROUTED``: experts, and latent attention."""
    read, rope = config.get, config.get("rope_parameters") or {}
    shared = read("num_shared_experts", read("n_shared_experts", read("moe_num_shared_experts")))
    integers: dict[str, Any] = {
        "expert_count": read(
            "n_routed_experts", read("moe_num_experts", read("num_experts", read("num_local_experts")))
        ),
        "expert_used_count": read("moe_k", read("moe_topk", read("num_experts_per_tok"))),
        "expert_feed_forward_length": read("moe_intermediate_size", read("intermediate_size")),
        "leading_dense_block_count": read(
            "first_k_dense_replace", read("moe_layer_start_index", read("num_dense_layers"))
        ),
        "expert_shared_count": shared,
        "interleave_moe_layer_step": read("moe_layer_interval"),
        "expert_gating_func": _UNGATED.get(config["model_type"], 2),
    }
    if "kv_lora_rank" in config:
        turned, latent, own = config["qk_rope_head_dim"], config["kv_lora_rank"], config["qk_nope_head_dim"]
        mla = {"attention.key_length": latent + turned, "attention.value_length": latent,
               "attention.key_length_mla": own + turned, "attention.value_length_mla": config["v_head_dim"],
               "attention.head_count_kv": 1}  # fmt: skip
        integers |= {"attention.key_length": own + turned} if config["model_type"] == "minicpm3" else mla
        integers |= {"rope.dimension_count": turned, "attention.kv_lora_rank": latent,
                     "attention.q_lora_rank": read("q_lora_rank")}  # fmt: skip
    if config["model_type"] == "glm_moe_dsa":
        integers |= {"attention.indexer.head_count": config["index_n_heads"],
                     "attention.indexer.key_length": config["index_head_dim"],
                     "attention.indexer.top_k": config["index_topk"],
                     "attention.indexer.types": [int(kind == "full") for kind in config["indexer_types"]]}  # fmt: skip
    if config["model_type"] == "exaone_moe":
        window = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", window)
    for name, value in integers.items():
        _replaced(writer, name, value)
    if config["model_type"] in ("glm4_moe", "dots1", "deepseek_v3", "glm_moe_dsa", "exaone_moe"):
        writer.add_bool(f"{writer.arch}.expert_weights_norm", read("norm_topk_prob"))
    return {
        "expert_weights_scale": read("routed_scaling_factor", read("route_scale")),
        **(_yarn_keys(rope, writer) if rope.get("rope_type") == "yarn" else {}),
    }


def _yarn_keys(rope: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    writer.add_string(f"{writer.arch}.rope.scaling.type", "yarn")
    _replaced(writer, "rope.scaling.original_context_length", rope["original_max_position_embeddings"])
    return {"rope.scaling.factor": rope["factor"], "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}


def _dense_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, float | None]:
    """Return the numbers of ``DENSE``, and windows; a base that ``alpha`` changes is in the file after the change."""
    read, rope = config.get, config.get("rope_parameters") or {}
    more: dict[str, Any] = {}
    if read("use_parallel_residual") is not None:
        writer.add_parallel_residual(read("use_parallel_residual"))
    if read("sliding_window"):
        writer.add_uint32(f"{writer.arch}.attention.sliding_window", read("sliding_window"))
    if read("model_type") == "olmo3":
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", windows)
        full = config["rope_parameters"]["full_attention"]
        more = _yarn_keys(full | {"mscale_all_dim": 0.0}, writer)
        more |= {"rope.freq_base": full["rope_theta"], "rope.scaling.yarn_attn_factor": full["attention_factor"]}
    eps = next(
        (read(key) for key in _EPS if read(key) is not None), 1e-5 if read("model_type") in ("olmo", "dbrx") else None
    )
    dim = read("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = rope.get("rope_theta", 1e4) * (rope.get("alpha") or 1.0) ** (dim / (dim - 2))
    return {
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": read("rms_norm_eps"),
        "logit_scale": read("logit_scale"),
        "rope.freq_base": base,
        "attn_logit_softcapping": read("attn_logit_softcapping"),
        "attention.clamp_kqv": read("clip_qkv", (read("attn_config") or {}).get("clip_qkv")),
        "attention.max_alibi_bias": (read("attn_config") or {}).get("alibi_bias_max"),
        **(_longrope_keys(config, writer) if rope.get("rope_type") == "longrope" else {}),
        **(_grown_keys(rope, writer) if read("model_type") == "ministral3" else {}),
        "final_logit_softcapping": read("final_logit_softcapping"),
        **more,
    }


_EPS = ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")


def _longrope_keys(config: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    original = config["rope_parameters"]["original_max_position_embeddings"]
    writer.add_uint32(f"{writer.arch}.rope.scaling.original_context_length", original)
    scale = config["max_position_embeddings"] / original
    return {"rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(original))}


def _grown_keys(rope: Mapping[str, Any], writer: gguf.GGUFWriter) -> dict[str, Any]:
    numbers = _yarn_keys(rope, writer)
    return numbers | {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def write_gguf(
    directory: Path,
    path: Path,
    *,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    forget: Collection[str] = (),
    widened: bool = False,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    renamed: Callable[[str], str] = str,
) -> Path:
    """Write the checkpoint in ``directory`` as one file. ``types``: by the beginnings of names, for matrices whose
    rows are complete blocks; forms that gguf does not quantise to have random blocks. ``widened``: the values of
    those blocks, in float32. ``change``: writes more keys. ``renamed``: another converter's names of tensors."""
    config = config_of(directory) | {"of": str(directory)}
    architecture, tensors = converted(directory, forget)
    writer = gguf.GGUFWriter(path, architecture)
    _keys(config, writer, tensors)
    write_vocabulary(directory, writer, config["vocab_size"])
    if change is not None:
        change(writer)
    for plain_name, x in tensors.items():
        name = renamed(plain_name)
        kind = next((kind for begin, kind in (types or {}).items() if name.startswith(begin)), None)
        numbers = np.ascontiguousarray(x.float().numpy())
        plain = x.ndim < 2 or "conv1d" in name or ".conv.weight" in name
        if kind is None or plain or x.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            writer.add_tensor(name, numbers)
        else:
            rows = numbers.reshape(-1, numbers.shape[-1])
            blocks = (
                quants.quantize(rows, kind)
                if kind.name in QUANTISED
                else random_blocks(kind.name, len(rows), rows.shape[1], scale=2e-5)
            )
            if widened:
                writer.add_tensor(name, values_of(blocks, kind).reshape(numbers.shape))
            else:
                writer.add_tensor(name, blocks.reshape(*numbers.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values_of(blocks: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return float32 [rows, columns] of blocks uint8 [rows, bytes]: ``quants.dequantize``, and Q1_0, which it lacks
    (-d or d of each bit, the lowest of a byte first, by ``ggml-quants.c``)."""
    if kind.name != "Q1_0":
        return quants.dequantize(blocks, kind)
    each = blocks.reshape(-1, 18)
    bits = np.unpackbits(each[:, 2:], axis=1, bitorder="little").astype(np.float32)
    return ((2 * bits - 1) * each[:, :2].copy().view(np.float16).astype(np.float32)).reshape(len(blocks), -1)


def write_vocabulary(directory: Path, writer: gguf.GGUFWriter, size: int, pre: str = "gpt-2") -> None:
    """Write the vocabulary of a byte-level tokenizer.json, padded to ``size`` tokens."""
    content = json.loads((directory / "tokenizer.json").read_text())
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    by_id = {index: token for token, index in content["model"]["vocab"].items()} | {
        index: entry["content"] for index, entry in added.items()
    }
    kinds = [
        gguf.TokenType.UNUSED
        if index not in by_id
        else gguf.TokenType.NORMAL
        if index not in added
        else gguf.TokenType.CONTROL
        if added[index]["special"]
        else gguf.TokenType.USER_DEFINED
        for index in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]] or ["a b"]
    )
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    ids = {token: index for index, token in by_id.items()}
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if settings.get(name) in ids:
            add(ids[settings[name]])
    template = directory / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def random_blocks(name: str, rows: int, columns: int, scale: float = 0.01, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return blocks of the form ``name`` with scales that a model could have: uint8 [rows, bytes]."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    generator = np.random.default_rng(columns + seed)
    made = generator.integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        made[:, 0] = generator.integers(0, 130, len(made))  # scales that are denormal too
    for first in _SCALES_AT.get(name, ()):
        numbers = generator.normal(0, scale, (len(made), 1)).astype(np.float16)
        made[:, first : first + 2] = numbers.view(np.uint8)
    return made.reshape(rows, -1)


def bytes_of(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a file of encoded keys and tensors. ``counts``: the numbers of tensors and keys that its header claims."""
    tensor_count, key_count = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def text_key(name: str, value: str) -> bytes:
    return text(name) + struct.pack("<I", 8) + text(value)


def tensor_entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def split(whole: Path, count: int) -> list[Path]:
    """Split the model into ``count`` files, the keys in the first."""
    reader = gguf.GGUFReader(whole)
    parts = [whole.with_name(f"{whole.stem}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "none")
        writer.kv_data[0].clear()
        for key, field in reader.fields.items():
            if number == 0 and not key.startswith("GGUF."):
                kinds = field.types
                writer.add_key_value(key, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
        writer.add_uint16("split.count", count)
        writer.add_uint16("split.no", number)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts
