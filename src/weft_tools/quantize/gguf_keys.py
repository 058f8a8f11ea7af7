"""config.json and tokenizer.json -> the keys of a GGUF file: ``architectures`` and ``vocabulary`` backwards.

    config.json      hidden_size 1024                    lfm2.embedding_length u32 1024
                     layer_types [conv, attention]       lfm2.attention.head_count_kv [0, 8]
    tokenizer.json   vocab, merges, added_tokens         tokenizer.ggml.tokens, merges, token_type
                     the expression that cuts text       tokenizer.ggml.pre, by the table of ``vocabulary``

A key that config.json leaves out has the default that a reader of the file assumes, so it is left out here too. The
written header is read back at once (``gguf_writing``), and must give the same architecture.

Source: llama.cpp's ``conversion`` package, for names and types of keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from weft.added_tokens import completed, read_next_to
from weft.errors import CheckpointError
from weft.pre_tokenizers import PRE_TOKENIZERS, pieces_of

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURE_OF = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1",
    "jamba": "jamba",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "llama": "llama",
    "gpt_oss": "gpt-oss",
}
"""``general.architecture`` by ``model_type``, before experts and kinds of layers are looked at."""
_INTEGERS = {
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts num_local_experts n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size"
    ),
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "num_dense_layers",
    "moe_latent_size": "moe_latent_size",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim mamba_d_conv conv_kernel",
    "ssm.state_size": "linear_key_head_dim mamba_d_state ssm_state_size state_size",
    "ssm.group_count": "linear_num_key_heads mamba_n_groups n_groups",
}
_FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "expert_weights_scale": "routed_scaling_factor",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "attn_factor": "attention_factor"}
_SIGMOID = 2
_NORM_EPS = 1e-5
_LONGEST = 1 << 20
"""Context of models without positions, tokens."""
_TYPES = {"normal": 1, "control": 3, "user defined": 4, "unused": 5}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return ``general.architecture``. Raise CheckpointError for a family that cannot be written as a GGUF file."""
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURE_OF:
        raise CheckpointError(
            f"config.json has model_type {kind!r}; GGUF files are written of {', '.join(ARCHITECTURE_OF)}",
            param="SOURCE",
        )
    name, kinds = ARCHITECTURE_OF[kind], kinds_of(config)
    if name == "granitehybrid" and all(has_attention for has_attention in kinds):
        return "granite"
    if name == "nemotron_h" and "moe" in (config.get("layers_block_type") or ()):
        return "nemotron_h_moe"
    return name


def kinds_of(config: Mapping[str, Any]) -> list[bool]:
    """Return a list with, for each layer, whether it is attention."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds:
        return ["attention" in kind and "linear" not in kind for kind in kinds]
    layers = int(config["num_hidden_layers"])
    if config.get("model_type") == "jamba":
        period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
        return [layer % period == offset for layer in range(layers)]
    return [config.get("full_attn_idxs") is None or layer in config["full_attn_idxs"] for layer in range(layers)]


def add_numbers(writer: GGUFWriter, config: Mapping[str, Any], feed_forward: int) -> None:
    """Add the hyper-parameters. ``feed_forward``: the width of a dense layer, from its tensors."""
    kinds, read = kinds_of(config), config.get
    rope = read("rope_parameters") or read("rope_scaling") or {}
    integers: dict[str, Any] = {
        name: next((read(ours) for ours in names.split() if read(ours) is not None), None)
        for name, names in _INTEGERS.items()
    }
    integers |= {
        "block_count": len(kinds),
        "vocab_size": read("vocab_size"),
        "context_length": read("max_position_embeddings") or _LONGEST,
        "feed_forward_length": feed_forward,
        "attention.head_count_kv": _kv_heads(config, kinds),
        **_recurrent(config),
        **_of_family(config, writer.arch, kinds),
    }
    if "partial_rotary_factor" in rope:
        integers["rope.dimension_count"] = int(
            (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
            * rope["partial_rotary_factor"]
        )
    for name, value in integers.items():
        if isinstance(value, list):
            writer.add_array(f"{writer.arch}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{writer.arch}.{name}", int(value))
    theta = rope.get("rope_theta", read("rope_theta"))
    floats = {
        name: next((read(ours) for ours in names.split() if read(ours) is not None), None)
        for name, names in _FLOATS.items()
    } | {"rope.freq_base": theta}
    if writer.arch.startswith("nemotron_h"):  # llama.cpp needs both
        floats["attention.layer_norm_epsilon"] = read("layer_norm_epsilon", _NORM_EPS)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        floats["rope.scaling.factor"] = rope["factor"]
        floats |= {f"rope.scaling.{theirs}": rope.get(ours) for theirs, ours in _YARN.items()}
        if "original_max_position_embeddings" in rope:
            writer.add_uint32(
                f"{writer.arch}.rope.scaling.original_context_length", rope["original_max_position_embeddings"]
            )
    elif kind not in ("default", "llama3"):
        _fail(f"config.json has rope_type {kind!r}; default, linear, yarn and llama3 are written")
    for name, value in floats.items():
        if value is not None:
            writer.add_float32(f"{writer.arch}.{name}", float(value))
    for name, value in _flags(config, writer.arch, kinds).items():
        writer.add_bool(f"{writer.arch}.{name}", value)


def _kv_heads(config: Mapping[str, Any], kinds: list[bool]) -> int | list[int]:
    count = config.get("num_key_value_heads") or 0
    each = config["model_type"] in ("lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h", "jamba")
    return [count if has else 0 for has in kinds] if each and not all(kinds) else count


def _recurrent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``ssm.*`` keys that differ between families."""
    read = config.get
    if "linear_num_value_heads" in config:
        heads = config["linear_num_value_heads"]
        return {"ssm.time_step_rank": heads, "ssm.inner_size": heads * config["linear_value_head_dim"]}
    heads, hidden = read("mamba_n_heads", read("mamba_num_heads", read("num_heads"))), config["hidden_size"]
    if heads:
        width = read("mamba_d_head", read("mamba_head_dim", read("head_dim")))
        inner = heads * (hidden * read("mamba_expand", 2) // heads if width == "auto" else width)
        return {"ssm.time_step_rank": heads, "ssm.inner_size": inner}
    if not ("mamba_expand" in config or "state_size" in config):
        return {}
    rank = read("mamba_dt_rank", read("time_step_rank"))
    inner = read("mamba_expand", read("expand", 2)) * hidden
    return {
        "ssm.time_step_rank": -(-hidden // 16) if rank in ("auto", None) else rank,
        "ssm.inner_size": read("intermediate_size", inner) if "state_size" in config else inner,
    }


def _of_family(config: Mapping[str, Any], arch: str, kinds: list[bool]) -> dict[str, Any]:
    read = config.get
    more: dict[str, Any] = {}
    if arch in ("mamba", "mamba2"):  # keys of attention are required
        more = {
            "attention.head_count": 0,
            "attention.key_length": None,
            "attention.value_length": None,
            "feed_forward_length": 0,
        }
    if arch in ("qwen35", "qwen35moe", "qwen3next"):
        sections = (read("rope_parameters") or {}).get("mrope_section") or [11, 11, 10]
        more = {
            "attention.recurrent_layers": [not has for has in kinds],
            "full_attention_interval": kinds.index(True) + 1 if any(kinds) else None,
        }
        if arch != "qwen3next":
            more["rope.dimension_sections"] = [*sections, 0, 0][:4]
    if arch == "lfm2moe":
        more = {"expert_gating_func": _SIGMOID}
    if arch == "gpt-oss":
        more = {"expert_feed_forward_length": read("intermediate_size")}
    if arch.startswith("nemotron"):
        widths = {"mlp": read("intermediate_size"), "moe": read("moe_intermediate_size")}
        more = {"feed_forward_length": [widths.get(kind, 0) for kind in config["layers_block_type"]]}
        if arch == "nemotron_h":
            more |= {name: None for name in _INTEGERS if name.startswith(("expert_", "moe_"))}
    if arch.startswith("granite"):
        more = {"attention.key_length": None, "attention.value_length": None}
    return more


def _flags(config: Mapping[str, Any], arch: str, kinds: list[bool]) -> dict[str, bool]:
    if arch in ("granite", "granitehybrid"):
        return {"rope.scaling.finetuned": config.get("position_embedding_type") == "rope" or all(kinds)}
    if arch == "nemotron_h_moe":
        return {"expert_weights_norm": bool(config.get("norm_topk_prob", True))}
    if arch == "mamba":
        return {"ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba"}
    return {}


def add_vocabulary(writer: GGUFWriter, directory: Path, size: int) -> None:
    """Add ids, types, merges and template of the tokenizer in ``directory``, padded to ``size`` tokens.

    Raises CheckpointError for a tokenizer that is not a byte-level BPE, or whose cuts have no name."""
    from gguf import SpecialVocab

    path = directory / "tokenizer.json"
    if not path.is_file():
        _fail(f"{path}: the file is missing; a GGUF file holds the tokenizer")
    content = json.loads(path.read_text(encoding="utf-8"))
    content = completed(content, read_next_to(directory), path) or content
    model = content.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        _fail(
            f"{path}: the tokenizer is {model.get('type')!r}"
            f"{' of SentencePiece' if model.get('byte_fallback') else ''}; byte-level BPE is written"
        )
    added = {entry["id"]: entry for entry in content.get("added_tokens") or ()}
    by_id = {index: token for token, index in model["vocab"].items()}
    by_id |= {index: entry["content"] for index, entry in added.items()}
    if by_id and max(by_id) >= size:
        _fail(f"{path}: has token {max(by_id)}; the embedding has {size} rows")

    def kind(index: int) -> str:
        if index not in by_id:
            return "unused"
        if index not in added:
            return "normal"
        return "control" if added[index].get("special") else "user defined"

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(content, writer.arch, path))
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([_TYPES[kind(index)] for index in range(size)])
    special = SpecialVocab(directory, load_merges=True, n_vocab=size)
    special.merges = special.merges or [f"{by_id[0]} {by_id[0]}"]  # readers need one
    special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(content: Mapping[str, Any], arch: str, path: Path) -> str:
    """Return llama.cpp's name for the way in which this tokenizer cuts text."""
    cuts = pieces_of(content)
    names = [name for name, pre in PRE_TOKENIZERS.items() if (pre.cuts, pre.whole, pre.nfc) == cuts]
    if not names:
        _fail(f"{path}: no pre-tokenizer that weft knows cuts text by {' and '.join(map(repr, cuts[0]))}")
    return arch if arch in names else names[0]


def _fail(text: str) -> NoReturn:
    raise CheckpointError(text, param="SOURCE")
