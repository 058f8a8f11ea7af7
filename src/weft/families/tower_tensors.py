"""The tensors of each vision tower, as data: the tables of ``tensors``, for pictures.

    kind       layers                         ends                           projector
    siglip2    qkv, out, into, down, norms    patches, positions, last norm  linear_1, linear_2
    qwen3_5    the same, qkv as one tensor    patches of several frames      a norm, then joined neighbours
    lfm3       convolved or attending ones    patches and their norm         linear_1, linear_2

Every rank holds all of a tower, and nothing of it is quantised here.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from weft.families.tensors import Names, Table, Tensor, all_plain, layer_norm, norm_weight, product
from weft.families.vision import GridLayers, TowerKind, VisionTower


@dataclass(frozen=True, slots=True)
class _TowerNames:
    """Names of the tensors of a tower. ``qkv``: one name if q, k and v are one tensor. ``norm``: the last norm, "" if
    it belongs to the projector."""

    patches: str
    projector: Names
    prefixes: Names
    norm: str = ""
    qkv: Names = ()
    out: str = ""
    feed: Names = ()
    norms: Names = ()
    positions: str = ""


_TOWERS: dict[TowerKind, _TowerNames] = {
    "siglip2": _TowerNames(
        "embeddings.patch_embedding", ("linear_1", "linear_2"),
        tuple(f"{wrapper}{name}" for wrapper in ("model.", "")
              for name in ("vision_tower.vision_model", "vision_tower", "vision_model")),
        "post_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj",
        ("mlp.fc1", "mlp.fc2"), ("layer_norm1", "layer_norm2"), "embeddings.position_embedding"),
    "qwen3_5": _TowerNames(
        "patch_embed.proj", ("merger.linear_fc1", "merger.linear_fc2"), ("model.visual", "visual"),
        "merger.norm", ("attn.qkv",), "attn.proj", ("mlp.linear_fc1", "mlp.linear_fc2"), ("norm1", "norm2"),
        "pos_embed"),
    "lfm3": _TowerNames("patchifier", ("linear_1", "linear_2"), ("model.vision_tower", "vision_tower")),
}  # fmt: skip


def tower_prefix(names: Container[str], tower: VisionTower) -> str | None:
    """Return the prefix of the tensors of ``tower`` in a checkpoint. None without any: some conversions hold only the
    text part."""
    known = _TOWERS[tower.kind]
    return next((prefix for prefix in known.prefixes if f"{prefix}.{known.patches}.weight" in names), None)


def vision_layers(tower: VisionTower) -> list[Table]:
    """Return the tensors of each layer of a tower. Ranks do not divide them, and nothing of them is quantised here."""
    if tower.grid_layers is None:
        return [_vision_layer(tower)] * tower.layer_count
    return [_grid_layer(tower, tower.grid_layers, convolved) for convolved in tower.grid_layers.convolved]


def _grid_layer(tower: VisionTower, shape: GridLayers, convolved: bool) -> Table:
    hidden, keys = tower.hidden_size, tower.hidden_size // tower.heads * shape.kv_heads
    table = (
        norm_weight("norm", hidden, "operator_norm")
        | norm_weight("feed_norm", hidden, "ffn_norm")
        | product("into", hidden, *((f"feed_forward.{name}", tower.width) for name in ("w1", "w3")))
        | product("down", tower.width, ("feed_forward.w2", hidden))
    )
    if convolved:
        side = shape.kernel
        table |= (
            product("inner", hidden, ("conv.in_proj", 3 * hidden))
            | {"conv": (Tensor("conv.spatial_conv.weight", (hidden, 1, side, side)),)}
            | product("out", hidden, ("conv.out_proj", hidden))
        )
    else:
        table |= product(
            "qkv",
            hidden,
            *((f"self_attn.{name}_proj", rows) for name, rows in (("q", hidden), ("k", keys), ("v", keys))),
        ) | product("out", hidden, ("self_attn.out_proj", hidden))
        for part in "qk":
            table |= norm_weight(f"{part}_norm", hidden // tower.heads, f"self_attn.{part}_layernorm")
    return all_plain(table)


def _vision_layer(tower: VisionTower) -> Table:
    hidden, names = tower.hidden_size, _TOWERS[tower.kind]
    each = 3 * hidden // len(names.qkv)
    return all_plain(
        product("qkv", hidden, *((name, each) for name in names.qkv), bias=True)
        | product("out", hidden, (names.out, hidden), bias=True)
        | product("into", hidden, (names.feed[0], tower.width), bias=True)
        | product("down", tower.width, (names.feed[1], hidden), bias=True)
        | layer_norm("norm", hidden, names.norms[0])
        | layer_norm("feed_norm", hidden, names.norms[1])
    )


def vision_ends(tower: VisionTower) -> Table:
    """Return the tensors of a tower before and after its layers. Patches of several frames are stored as a convolution
    has them."""
    hidden, names = tower.hidden_size, _TOWERS[tower.kind]
    if tower.grid_layers is not None:
        return all_plain(
            product("patches", tower.patch_values * tower.frames, (names.patches, hidden))
            | norm_weight("embedding_norm", hidden)
        )
    table = product("patches", tower.patch_values, (names.patches, hidden), bias=True)
    if tower.frames > 1:
        side = tower.patch_size
        table["patches"] = (Tensor(f"{names.patches}.weight", (hidden, tower.channels, tower.frames, side, side)),)
    return all_plain(
        table
        | {"positions": (Tensor(f"{names.positions}.weight", (tower.positions, hidden)),)}
        | layer_norm("norm", hidden, names.norm)
    )


def vision_projector(tower: VisionTower, text_hidden: int) -> Table:
    """Return the tensors from neighbours of the tower to a row of the text."""
    shape, joined, (into, down) = tower.projector, tower.joined_width, _TOWERS[tower.kind].projector
    table = product("into", joined, (into, shape.width), bias=shape.bias) | product(
        "down", shape.width, (down, text_hidden), bias=shape.bias
    )
    if shape.norm or not _TOWERS[tower.kind].norm:  # over the neighbours of a row, or before they are joined
        table |= layer_norm("norm", joined if shape.norm else tower.hidden_size, "layer_norm")
    return all_plain(table)
