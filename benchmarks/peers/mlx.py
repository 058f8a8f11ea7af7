"""Do weft and mlx-lm compute the same logits?

    python -m venv build/peers/mlx && build/peers/mlx/bin/pip install mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
    python -m benchmarks.peers.mlx [--python PROGRAM] [NAME ...]

    tiny checkpoint --+--> mlx-lm, float32 on a CPU --> logits --+--> greatest difference, of 90 positions
                      +--> weft ---------------------> logits --+

The tests compare with transformers, or with classes of their own where it has none. mlx-lm is written apart from both.
A line says "not read" where mlx-lm does not load the tiny checkpoint. Checkpoints on which it is known to differ are
named with the reason, and are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.environment import ROOT
from tests.fixtures.checkpoints import CHECKPOINTS, checkpoint
from tests.oracle.model_driver import ModelDriver
from weft.models.loading import load_model

DEFAULT_PYTHON = ROOT / "build" / "peers" / "mlx" / "bin" / "python"
ALLOWED = 1e-4
"""Largest difference, by the largest logit or 1."""
TOKENS = torch.randint(3, 500, (90,), generator=torch.Generator().manual_seed(5)).tolist()
_NO_WINDOW = {"sliding_window": None}
_TIED = {"tie_word_embeddings": True}
_WHOLE = {"use_sliding_window": False, "layer_types": None}
CHANGES: dict[str, dict[str, Any]] = {
    "plamo2": {"full_attention_idx": [1, 3]},
    "plamo2_pages": {"full_attention_idx": [1], "rope_theta": 10_000.0},
    "plamo3_scaled": {"rope_scaling_factor": None, "initial_context_length": None, "scale_embedding": False},
    "mistral": _NO_WINDOW,
    "mixtral": _NO_WINDOW,
    "phi3": _NO_WINDOW,
    "starcoder2": _NO_WINDOW,
    "qwen3_window": _WHOLE,
    "qwen2_window": _WHOLE,
    "dots1": {"layer_types": ["full_attention"] * 3},
    "falcon_h1_plain": {
        **dict.fromkeys(("key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0, 1.0],
    },
    "olmo3": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 512,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    },
    **dict.fromkeys(("lfm2_bias", "lfm2_moe_plain", "cohere", "gemma"), _TIED),
    "gemma2": _TIED | {"sliding_window": 4096},
    "rwkv7": {"norm_eps": 4e-5},
    "rwkv7_wide": {"norm_eps": 2e-5},
}
"""Settings of config.json for both, where mlx-lm ignores those of the checkpoint: windows of these families, heads of
their own, one of two bases of positions, scaled positions and embeddings of PLaMo 3, factors of Falcon-H1 (on keys,
values and biases), the attention factor of YaRN; RWKV's heads have the epsilon of heads of 64."""
_ONE_NORM, _GELU = "one gated norm over all groups there", "another form of GELU there"
KNOWN_TO_DIFFER: dict[str, str] = {
    "falcon_h1": _ONE_NORM,
    "falcon_h1_late_gate": _ONE_NORM,
    "mamba2": _ONE_NORM,
    "granite": _ONE_NORM,
    "granite_moe": _ONE_NORM,
    "granite_rope": _ONE_NORM,
    "jamba": "weights of the chosen experts sum to 1 there",
    "glm": "all of a head turns there",
    "ernie4_5_moe": "the choice of experts has no bias there",
    "gpt_bigcode": _GELU,
    "starcoder2": _GELU,
    "gemma": _GELU,
    "gpt_bigcode_heads": "rows of queries, keys and values are in another order there",
}
"""Seen with mlx-lm 0.32.2. weft agrees with transformers."""


Tensors = dict[str, torch.Tensor]
Words = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def _full(config: Mapping[str, Any]) -> list[int]:
    return [layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"]


def _first_dense(config: Mapping[str, Any]) -> int:
    return int(config["mlp_layer_types"].count("dense"))


def _kimi(config: Mapping[str, Any]) -> Mapping[str, Any]:
    full = _full(config)
    others = [layer for layer in range(config["num_hidden_layers"]) if layer not in full]
    return {
        "rope_theta": 1e4, "mla_use_nope": True, "first_k_dense_replace": _first_dense(config),
        "linear_attn_config": {
            "full_attn_layers": [1 + layer for layer in full], "kda_layers": [1 + layer for layer in others],
            "num_heads": config["linear_num_heads"], "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"]}}  # fmt: skip


def _own_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}


_QWEN_HYBRID: Words = lambda config: {"full_attention_interval": _full(config)[0] + 1}  # noqa: E731
WORDS: dict[str, Words] = {
    "lfm2": lambda config: {"block_dim": config["hidden_size"], "full_attn_idxs": _full(config)},
    "granitemoehybrid": lambda config: {
        "intermediate_size": config["intermediate_size" if config["num_local_experts"] else "shared_intermediate_size"],
        "layer_types": [
            {"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind)
            for kind in config["layer_types"]]},
    "mamba2": lambda config: {"intermediate_size": int(config["expand"] * config["hidden_size"])},
    "qwen3_moe": lambda config: {"num_experts": config.get("num_local_experts", config.get("num_experts"))},
    "mellum": lambda config: {"num_experts": config.get("num_local_experts", config.get("num_experts"))},
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "interns2_mobius_text": _QWEN_HYBRID,
    "kimi_linear": _kimi,
    "exaone4": lambda config: {
        **_own_heads(config), "sliding_window": config.get("sliding_window"),
        "sliding_window_pattern": "L" * (_full(config)[0]) + "G" if config.get("sliding_window") else None},
    "apertus": lambda config: {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "solar_open": lambda config: {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
    "exaone_moe": lambda config: {"is_moe_layer": [kind == "sparse" for kind in config["mlp_layer_types"]]},
    "glm4_moe": _own_heads,
    "glm_moe_dsa": lambda config: {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
        "first_k_dense_replace": _first_dense(config)},
    "exaone": lambda config: {
        "num_layers": config["num_hidden_layers"], "layer_norm_epsilon": config["rms_norm_eps"]},
    "gpt_neox": lambda config: {
        "rotary_emb_base": config["rope_theta"], "rotary_pct": config["partial_rotary_factor"]},
    "gpt2": lambda config: {"n_ctx": config["n_positions"]},
    "bailing_hybrid": lambda config: {
        "architectures": ["BailingMoeV3ForCausalLM"], "head_dim": config["linear_head_dim"],
        "num_experts_per_tok": config["num_experts_per_token"], "n_group": config["num_expert_group"],
        "max_position_embeddings": config["model_max_length"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"]},
    "olmo3": lambda config: {
        "rope_theta": config["rope_parameters"]["full_attention"]["rope_theta"],
        "rope_scaling": config["rope_parameters"]["full_attention"]},
}  # fmt: skip
"""By ``model_type``, further keys of releases from those that transformers saves."""


def _ling_name(config: Mapping[str, Any], name: str) -> str:
    kind = re.match(r"model\.layers\.(\d+)\.", name)
    delta = kind is not None and config["layer_types"][int(kind[1])] == "linear_attention"
    return name.replace(".attention.dense.", ".attention.o_proj.") if delta else name


def _kimi_name(config: Mapping[str, Any], name: str) -> str:
    name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
    for theirs, here in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        name = re.sub(rf"(block_sparse_moe\.experts\.\d+)\.{theirs}", rf"\1.{here}", name)
    return name


NAMES: dict[str, Callable[[Mapping[str, Any], str], str]] = {"bailing_hybrid": _ling_name, "kimi_linear": _kimi_name}
"""By ``model_type``, names of tensors in releases, where transformers saves others."""
BANKED = ("qwen3_5_moe_text", "interns2_mobius_text")
"""By ``model_type``, families that mlx-lm reads as Qwen3.5 with all experts of a layer in one tensor."""
NOT_READ = "not read"


def changed(name: str, folder: Path) -> Path:
    """Return a copy of the checkpoint ``name`` with its changes."""
    copy = Path(shutil.copytree(checkpoint(name), folder / name))
    config = json.loads((copy / "config.json").read_text())
    config |= CHANGES.get(name, {})
    (copy / "config.json").write_text(json.dumps(config))
    if CHANGES.get(name, {}).get("tie_word_embeddings"):
        _rewrite(copy, lambda tensors: {key: of for key, of in tensors.items() if key != "lm_head.weight"})
    return copy


def _rewrite(copy: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = copy / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})


def spelled(copy: Path) -> Path:
    """Return a copy of the checkpoint ``copy`` whose config.json has the words of releases, which mlx-lm knows."""
    theirs = copy.parent / "mlx" / copy.name
    shutil.copytree(copy, theirs)
    config = json.loads((copy / "config.json").read_text())
    turned = config.get("rope_parameters") or {}
    if "rope_theta" in turned:
        scaled = turned.get("rope_type", "default") != "default"
        config |= {key: turned[key] for key in ("rope_theta", "partial_rotary_factor") if key in turned}
        config["rope_scaling"] = turned | {"type": turned.get("rope_type")} if scaled else None
    kind = config["model_type"]
    config |= WORDS.get(kind, lambda config: {})(config)
    if kind in BANKED or kind == "qwen3_5_text":
        named = "qwen3_5_moe" if kind in BANKED else "qwen3_5"
        config = {"model_type": named, "text_config": config | {"model_type": f"{named}_text"}}
    (theirs / "config.json").write_text(json.dumps(config))
    if kind in NAMES:
        renamed = NAMES[kind]
        _rewrite(theirs, lambda tensors: {renamed(config, name): of for name, of in tensors.items()})
    if kind in BANKED:
        _rewrite(theirs, lambda tensors: _apart(config["text_config"], _stacked(tensors)))
    return theirs


def _stacked(tensors: Tensors) -> Tensors:
    """Return ``tensors`` with all experts of a layer in one."""
    each = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    rest = {name: tensor for name, tensor in tensors.items() if each.fullmatch(name) is None}
    for at, count in Counter(found[1] for name in tensors if (found := each.fullmatch(name))).items():
        gate, up, down = (
            torch.stack([tensors[f"{at}.{number}.{part}_proj.weight"] for number in range(count // 3)])
            for part in ("gate", "up", "down")
        )
        rest |= {f"{at}.gate_up_proj": torch.cat((gate, up), dim=1), f"{at}.down_proj": down}
    return rest


def _apart(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Return ``tensors`` with a copy of its bank of experts in each layer."""
    rest = {name: tensor for name, tensor in tensors.items() if "meta_mlp." not in name}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"model\.meta_mlp\.(\d+)\.(.*)", name):
            for layer in range(int(found[1]), config["num_hidden_layers"], config["num_blocks"]):
                rest[f"model.layers.{layer}.mlp.{found[2]}"] = tensor.clone()
    return rest


def ours(checkpoint: Path) -> torch.Tensor:
    model = load_model(checkpoint, "float32").model
    return ModelDriver(model, sequences=1, length=96).step((0, TOKENS))[0]


def outcome(name: str, folder: Path) -> tuple[str, bool]:
    """Return the outcome of one checkpoint, and whether it is right."""
    reason = folder / f"{name}.txt"
    if reason.exists():
        return f"{NOT_READ}: {reason.read_text()}", True
    theirs, here = torch.from_numpy(np.load(folder / f"{name}.npy")), ours(folder / name)
    width = min(theirs.shape[1], here.shape[1])
    difference, scale = (theirs[:, :width] - here[:, :width]).abs().max().item(), here.abs().max().item()
    return f"{difference:.1e} of {scale:.1f}", difference < ALLOWED * max(1.0, scale)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.mlx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--python", type=Path, default=DEFAULT_PYTHON, help="interpreter of an environment with mlx-lm")
    args = parser.parse_args(argv)
    names, wrong, equal = args.names or [*CHECKPOINTS], 0, 0
    with tempfile.TemporaryDirectory(prefix="weft-mlx-") as at:
        folder = Path(at)
        (folder / "tokens.json").write_text(json.dumps(TOKENS))
        copies = [changed(name, folder) for name in names]
        subprocess.run(
            [args.python, "-P", Path(__file__).with_name("mlx_logits.py"), folder, *map(spelled, copies)], check=True
        )
        for name in names:
            said, right = outcome(name, folder)
            known = KNOWN_TO_DIFFER.get(name, "")
            print(f"{name:<22} {said}{'' if right else f' ({known})' if known else '   WRONG'}", flush=True)
            wrong += not right and not known
            equal += right and not said.startswith(NOT_READ)
    print(f"{equal} of {len(names)} equal")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
