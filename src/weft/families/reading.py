"""Functions that all readers of families share: layer kinds, attention, sliding windows, and the record that they fill.

Layer kinds come by many names; they are "attention" or "recurrent" from here on. Windows are named by
``layer_types`` ("sliding_attention" and "full_attention"), or by one ``sliding_window`` for all. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from weft.families.architecture import Architecture, MtpLayer
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import FeedForward
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.mixers.mamba import GatedNorm, Mamba2
from weft.families.names import Names


@dataclass(frozen=True, slots=True)
class Family:
    """Models that one function reads. ``model_types``: of config.json. ``activation``: the only one that the
    feed-forward may have. ``names``: names of the blocks. ``released``: patterns of names in released files, and
    replacements (as ``re.sub`` takes them), applied in order; "{e}" in one stands for the number of an expert, if the
    tensor has the rows of all. ``transposed``: pattern of the names, after that, of matrices whose values files store
    as [columns, rows]."""

    name: str
    model_types: tuple[str, ...]
    read: Callable[[str, ConfigKeys], Architecture]
    activation: str = "silu"
    names: Names = field(default_factory=Names)
    released: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    transposed: str = ""


KINDS = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
}
"""Words for the kind of a layer, in most families."""
INDEXED_KINDS = KINDS | {"indexed_attention": "attention", "qwen_sparse_attention": "attention"}
CONVOLVED_KINDS = {
    "full_attention": "attention",
    "attention": "attention",
    "conv": "recurrent",
    "short_conv": "recurrent",
}


def layer_kinds(
    keys: ConfigKeys, fallback: Callable[[int], Sequence[str]], words: Mapping[str, str] = KINDS
) -> list[str]:
    """Return "attention" or "recurrent" for each layer, from the names that the checkpoint uses, each one of
    ``words``; where it has none, ``fallback``."""
    count = keys.integer("num_hidden_layers")
    name = "layer_types" if keys.get("layer_types") is not None else "layers_block_type"
    listed = keys.get(name)
    if listed is None:
        return list(fallback(count))
    if not isinstance(listed, list) or len(listed) != count:
        fail(name, listed, f"it must list the kind of each layer; num_hidden_layers is {count}")
    for kind in listed:
        if kind not in words:
            fail(name, kind, f"the layer kinds served are {', '.join(sorted(words))}")
    return [words[kind] for kind in listed]


def every_nth_attention(keys: ConfigKeys) -> Callable[[int], Sequence[str]]:
    interval = keys.integer("full_attention_interval", 4)
    return lambda count: ["attention" if (i + 1) % interval == 0 else "recurrent" for i in range(count)]


def read_attention(
    keys: ConfigKeys,
    *,
    rotary: bool = True,
    partial: float = 1.0,
    theta: float = 10000.0,
    scale: float | None = None,
    head_dim: int | None = None,
    qk_norm: bool = False,
    gated: bool = False,
) -> Attention:
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        fail("num_key_value_heads", kv_heads, f"it must divide num_attention_heads {heads}")
    hidden = keys.integer("hidden_size")
    if hidden < heads and not (head_dim or keys.get("head_dim")):
        fail("hidden_size", hidden, f"each of num_attention_heads {heads} needs a part of it")
    head_dim = keys.integer("head_dim", head_dim or hidden // heads)
    rope = read_rope(keys, head_dim, theta=theta, partial=partial) if rotary else None
    return Attention(
        heads,
        kv_heads,
        head_dim,
        scale if scale is not None else head_dim**-0.5,
        rope,
        qk_norm=qk_norm,
        gated=gated,
        bias=keys.boolean("attention_bias", False),
    )


def read_mamba2(
    keys: ConfigKeys,
    *,
    inner: int | None = None,
    norm: GatedNorm = "gate_first",
    multipliers: tuple[float, ...] = (),
    output_bias: bool | None = None,
) -> Mamba2:
    """Read the ``mamba_*`` keys of Granite, Bamba and Falcon-H1. ``inner``: the width that the heads fill, if it is
    not ``mamba_expand`` times the hidden size."""
    heads, groups = keys.integer("mamba_n_heads", 128), keys.integer("mamba_n_groups", 1)
    stated = "mamba_d_ssm" if inner is not None else "mamba_expand x hidden_size"
    inner = inner or keys.integer("mamba_expand", 2) * keys.integer("hidden_size")
    head_dim = inner // heads if keys.get("mamba_d_head", "auto") == "auto" else keys.integer("mamba_d_head")
    mamba = Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=keys.integer("mamba_d_state", 256),
        conv_kernel=keys.integer("mamba_d_conv", 4),
        conv_bias=keys.boolean("mamba_conv_bias", True),
        projection_bias=keys.boolean("mamba_proj_bias", False),
        dt_limit=keys.limits("time_step_limit", (0.0, float("inf"))),
        norm=norm,
        multipliers=multipliers,
        output_bias=output_bias,
    )
    return check_mamba2(mamba, inner, stated, heads="mamba_n_heads", groups="mamba_n_groups")


def check_mamba2(mamba: Mamba2, inner: int, stated: str, *, heads: str, groups: str) -> Mamba2:
    """Return ``mamba``, whose heads fill ``inner``, by the name ``stated``, and whose groups divide them; else raise
    CheckpointError. ``heads`` and ``groups``: names of the keys."""
    if mamba.inner_width != inner:
        fail(heads, mamba.heads, f"{mamba.heads} heads of {mamba.head_dim} are not {stated} = {inner}")
    if mamba.heads % mamba.groups:
        fail(groups, mamba.groups, f"it must divide {heads} {mamba.heads}")
    return mamba


def build_architecture(
    family: str,
    keys: ConfigKeys,
    mixers: Sequence[Mixer | None],
    feed_forwards: Sequence[FeedForward | None],
    *,
    tied: bool | None = None,
    eps: float | None = None,
    default_eps: float = 1e-6,
    max_positions: int | None = None,
    mtp: MtpLayer | None = None,
    **more: Any,
) -> Architecture:
    """Return an architecture. ``tied`` None: the value of ``tie_word_embeddings``, False if it is missing. ``eps``
    None: the value of ``rms_norm_eps``, ``default_eps`` if it is missing. ``more``: further fields."""
    longest = _positions(keys.integer("max_position_embeddings", max_positions), mixers)
    return Architecture(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        max_positions=longest,
        dtype=keys.dtype() or "float32",
        norm_eps=keys.number("rms_norm_eps", default_eps) if eps is None else eps,
        tied_embeddings=keys.boolean("tie_word_embeddings", False) if tied is None else tied,
        mixers=tuple(_without_whole_windows(mixer, longest) for mixer in mixers),
        feed_forwards=tuple(feed_forwards),
        mtp=mtp,
        vision=None,
        **more,
    )


def _positions(stated: int, mixers: Sequence[Mixer | None]) -> int:
    """Return the longest context: of a YaRN rope its factor times the original length, since model cards add
    ``rope_scaling`` and leave ``max_position_embeddings`` as it was."""
    attentions = (getattr(mixer, "attention", mixer) for mixer in mixers)
    ropes = (getattr(attention, "rope", None) for attention in attentions)
    return max([stated, *(int(rope.factor * rope.original_positions) for rope in ropes if _is_yarn(rope))])


def _is_yarn(rope: Rope | None) -> TypeGuard[Rope]:
    return rope is not None and rope.kind == "yarn"


def experts_per_token(keys: ConfigKeys, count: int, default: int | None = None) -> int:
    chosen = keys.integer("num_experts_per_tok", default)
    if chosen > count:
        fail("num_experts_per_tok", chosen, f"the model has {count} experts")
    return chosen


def expert_groups(
    keys: ConfigKeys, count: int, name: str, groups: int, default: int = 1, *, best: int = 2
) -> tuple[int, int]:
    """Return ``groups``, which the key ``name`` says, and how many of them ``topk_group`` chooses. Raises
    CheckpointError for groups that ``count`` experts cannot have."""
    if count % groups:
        fail(name, groups, f"it must divide the {count} experts")
    if groups > 1 and count // groups < best:
        fail(name, groups, f"a group is scored by its {best} best experts, and there are only {count} experts")
    chosen = keys.integer("topk_group", default)
    if chosen > groups:
        fail("topk_group", chosen, f"{name} is {groups}")
    return groups, chosen


def whole_or_proportional(rope: Rope, head_dim: int) -> Rope:
    """Return ``rope``. Raises CheckpointError where a part of a head turns in another way than ``proportional``: in
    these families transformers then ignores that only a part turns."""
    if rope.kind == "default" and rope.rotary_dim != head_dim:
        fail("rope_type", rope.kind, "with a partial_rotary_factor only proportional is served")
    return rope


WINDOW_KIND = "sliding_attention"


def states_window(keys: ConfigKeys, key: str = "sliding_window") -> bool:
    """Return whether there is a window: null for ``key`` means none, silence the family's default."""
    return keys.get(key) is not None or not keys.has(key)


def windowed(attention: Attention, keys: ConfigKeys, *, default: int | None = None) -> Attention:
    """Return ``attention`` with the ``sliding_window`` of ``keys``."""
    return dataclasses.replace(attention, window=keys.integer("sliding_window", default))


def _without_whole_windows(mixer: Mixer | None, max_positions: int) -> Mixer | None:
    """Return ``mixer``, whose window is none where it holds the longest context."""
    if isinstance(mixer, Attention | LatentAttention) and mixer.window is not None and mixer.window >= max_positions:
        return dataclasses.replace(mixer, window=None)
    return mixer


def kinds_with_windows(keys: ConfigKeys, known: tuple[str, ...], fallback: list[str]) -> list[str]:
    """Return ``layer_types`` as written, each one of ``known``; ``fallback`` where there are none."""
    listed = keys.get("layer_types")
    if listed is None:
        return fallback
    if not isinstance(listed, list) or len(listed) != len(fallback):
        fail("layer_types", listed, f"it must list the kind of each layer; num_hidden_layers is {len(fallback)}")
    for kind in listed:
        if kind not in known:
            fail("layer_types", kind, f"the layer kinds served here are {', '.join(known)}")
    return listed
