"""The tensors of what lies around the blocks of layers, as data: the tables of ``tensors``, for the stream.

    stream_mix        several residual streams, around a block or behind all layers (Qwen4, GLM 5)
    residual_scale    biases and factors where stream and block are added (ZAYA)
    per_layer         a second embedding, and behind_layer what each layer does with it (Gemma 4)

Every rank holds all but the second embedding whole.
"""

from __future__ import annotations

from weft.families.architecture import Streams
from weft.families.tensors import Dim, Numbered, Table, Tensor, norm_weight, product


def stream_mix(shape: Streams, hidden: int, *, last: bool = False, joint: str = "") -> Table:
    """What mixes streams around one block, whole on each rank; ``last``: behind all layers. ``joint``: what
    joins the names of mixed streams to that of their block."""
    width = shape.count * hidden
    if shape.kind == "gated":
        table = (
            norm_weight("norm", width, "hc_norm")
            | product("down", width, ("input_mix_weight_down", shape.rank))
            | product("up", shape.rank, ("input_mix_weight_up", width))
        )
        return table if last else table | product("inject", width, ("block_inject_weight", shape.count))
    weights = (2 + shape.count) * shape.count
    each: dict[str, tuple[Dim, ...]] = {"fn": (weights, width), "base": (weights,), "scale": (3,)}
    return {role: (Tensor(f"{joint}{role}", dims, "float32"),) for role, dims in each.items()}


def residual_scale(hidden: int) -> Table:
    names = ("hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale")
    return {name: (Tensor(name, (hidden,), "plain"),) for name in names}


def per_layer(width: int, layers: int, vocab: int, hidden: int) -> Table:
    """Gemma 4's second embedding, and what it adds of the first."""
    return {
        "table": (Tensor("embed_tokens_per_layer.weight", (Numbered("tokens", vocab), layers * width), "plain"),),
        **product("project", hidden, ("per_layer_model_projection", layers * width)),
        **norm_weight("norm", width, "per_layer_projection_norm"),
    }


def behind_layer(width: int, hidden: int) -> Table:
    """What a layer of Gemma 4 makes of its numbers of the second embedding; the factor on the stream."""
    scalar: Table = {"scalar": (Tensor("layer_scalar", (1,), "plain"),)}
    if not width:
        return scalar
    return scalar | (
        product("gate", hidden, ("per_layer_input_gate", width))
        | product("out", width, ("per_layer_projection", hidden))
        | norm_weight("norm", hidden, "post_per_layer_input_norm")
    )
