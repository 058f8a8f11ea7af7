"""Matrices for a GGUF file, split out of the stored tensors of a checkpoint or computed from its config.

    granite      shared_mlp.input_linear [2I, H]            gate_proj | up_proj
    experts      experts.gate_up_proj [E, 2I, H]            experts.{e}.gate_proj | experts.{e}.up_proj
    gpt-oss      experts.gate_up_proj [E, H, 2I]            the same, with rows first, of even and odd columns
    qwen3_next   in_proj_qkvz, in_proj_ba                   in_proj_qkv | in_proj_z, in_proj_b | in_proj_a
    falcon-h1    multipliers of config.json                 folded into the matrices
    llama 3.1    rope_type llama3                           rope_freqs: divisors of the frequencies

Source: llama.cpp's ``conversion`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from weft.models.gguf.delta import ungrouped
from weft.models.gguf.parts import llama3_divisors

Take = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, ...]


def apart(name: str, shape: Shape, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape, Take]]:
    """Yield weft's name, shape, and the function that extracts it, for each matrix in the stored tensor."""
    kind = config["model_type"]
    place, _, last = name.rpartition(".experts.")
    if kind == "gpt_oss" and place:
        yield from _gpt_oss(place, last, shape)
    elif place and last in ("gate_up_proj", "down_proj"):
        gate, down, up = ("w1", "w2", "w3") if kind == "lfm2_moe" else ("gate_proj", "down_proj", "up_proj")
        yield from _halves(f"{place}.experts.{{e}}.", (gate, up) if "gate" in last else (down,), shape, 1)
    elif place and last == "up_proj":
        yield from _halves(f"{place}.experts.{{e}}.", ("up_proj",), shape, 1)
    elif name.endswith("input_linear.weight"):
        place = name.removesuffix("input_linear.weight") + _experts(shape)
        yield from _halves(place, ("gate_proj", "up_proj"), shape, len(shape) - 2)
    elif name.endswith("output_linear.weight"):
        yield from _halves(
            name.removesuffix("output_linear.weight") + _experts(shape), ("down_proj",), shape, len(shape) - 2
        )
    elif name.endswith(("in_proj_qkvz.weight", "in_proj_ba.weight")):
        yield from _ungrouped(name, shape, config)
    else:
        yield name, shape, scaled(config, name)


def _experts(shape: Shape) -> str:
    return "experts.{e}." if len(shape) == 3 else ""


def _halves(place: str, names: tuple[str, ...], shape: Shape, dim: int) -> Iterator[tuple[str, Shape, Take]]:
    rows = shape[dim] // len(names)
    for number, name in enumerate(names):
        yield (
            f"{place}{name}.weight",
            (*shape[:dim], rows, *shape[dim + 1 :]),
            partial(torch.narrow, dim=dim, start=number * rows, length=rows),
        )


def _gpt_oss(place: str, last: str, shape: Shape) -> Iterator[tuple[str, Shape, Take]]:
    is_bias, stem = last.endswith("_bias"), last.removesuffix("_bias")
    names = ("gate_proj", "up_proj") if stem.startswith("gate_up") else ("down_proj",)

    def gate_or_up(x: torch.Tensor, number: int) -> torch.Tensor:
        return (x if is_bias else x.transpose(1, 2))[:, number :: len(names)]

    rows = shape[-1] // len(names)
    for number, name in enumerate(names):
        take = partial(gate_or_up, number=number)
        if is_bias:
            yield f"{place}.experts.{name}_bias", (shape[0], rows), take
        else:
            yield f"{place}.experts.{{e}}.{name}.weight", (shape[0], rows, shape[1]), take


def _ungrouped(name: str, shape: Shape, config: Mapping[str, Any]) -> Iterator[tuple[str, Shape, Take]]:
    heads = config["linear_num_key_heads"]
    places = ungrouped(
        heads, config["linear_num_value_heads"] // heads, config["linear_key_head_dim"], config["linear_value_head_dim"]
    )
    for ours, undo in places.items():
        stored, _, ours = ours.partition(":")
        if ("qkvz" in name) == (stored == "ssm_in") and undo.rows is not None:
            rows = torch.from_numpy(undo.rows)
            yield (f"{name.partition('linear_attn.')[0]}{ours}", (len(rows), *shape[1:]), partial(_at, rows=rows))


def _at(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x[rows]


def scaled(config: Mapping[str, Any], name: str) -> Take:
    """Return the function that applies Falcon-H1's multipliers to the matrix ``name``; for other models, one that
    changes nothing."""
    if config["model_type"] != "falcon_h1" or name.endswith(("bias", "norm.weight")):
        return _same
    read = config.get
    attended = read("attention_in_multiplier", 1.0)
    gates, down = read("mlp_multipliers") or (1.0, 1.0)
    factors = {
        "self_attn.q_proj": attended,
        "self_attn.v_proj": attended,
        "self_attn.k_proj": attended * read("key_multiplier", 1.0),
        "self_attn.o_proj": read("attention_out_multiplier", 1.0),
        "gate_proj": gates,
        "down_proj": down,
        "mamba.out_proj": read("ssm_out_multiplier", 1.0),
        "lm_head": read("lm_head_multiplier", 1.0),
        "embed_tokens": read("embedding_multiplier", 1.0),
    }
    if "mamba.in_proj" in name:
        return partial(_times, factor=_of_rows(config))
    factor = next((factor for part, factor in factors.items() if part in name), 1.0)
    return _same if factor == 1.0 else partial(_times, factor=torch.tensor(factor))


def without_multipliers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` for weights that include the multipliers of Falcon-H1."""
    if config["model_type"] != "falcon_h1":
        return config
    return {name: value for name, value in config.items() if not name.endswith(("multiplier", "multipliers"))}


def _of_rows(config: Mapping[str, Any]) -> torch.Tensor:
    """Return multipliers of each row of Mamba's first projection: z, x, B, C and the steps have different
    multipliers."""
    inner = config.get("mamba_d_ssm") or config["mamba_n_heads"] * config["mamba_d_head"]
    group = config["mamba_n_groups"] * config["mamba_d_state"]
    counts = torch.tensor([inner, inner, group, group, config["mamba_n_heads"]])
    each = torch.tensor(config.get("ssm_multipliers") or [1.0] * 5)
    return (each * float(config.get("ssm_in_multiplier", 1))).repeat_interleave(counts).unsqueeze(1)


def _times(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return x.float() * factor


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def rope_divisors(config: Mapping[str, Any]) -> list[float] | None:
    """Return the divisors of the frequencies of positions that are scaled as in Llama 3.1; None for others."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]
    return llama3_divisors(rope, theta, head_dim)
