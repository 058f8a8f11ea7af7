"""Sliding windows: which layers have one, and when it is none.

Checkpoints name them by ``layer_types`` ("sliding_attention" beside "full_attention"), or give one
``sliding_window`` for all layers. A window that no text can outgrow is full attention, and is read as that.
Pure.
"""

from __future__ import annotations

import dataclasses

from weft.families.architecture import Attention
from weft.families.config_keys import ConfigKeys, fail

WINDOW_KIND = "sliding_attention"


def states_window(keys: ConfigKeys) -> bool:
    """Whether ``sliding_window`` is a window: null is none, silence is the family's default."""
    return keys.get("sliding_window") is not None or not keys.has("sliding_window")


def windowed(attention: Attention, keys: ConfigKeys, *, default: int | None = None,
             max_positions: int | None = None) -> Attention:
    """``attention`` with the ``sliding_window`` of ``keys``."""
    window = keys.integer("sliding_window", default)
    if window >= keys.integer("max_position_embeddings", max_positions):
        return attention
    return dataclasses.replace(attention, window=window)


def kinds_with_windows(keys: ConfigKeys, known: tuple[str, ...], fallback: list[str]) -> list[str]:
    """``layer_types`` as they are written, each one of ``known``; ``fallback`` where there are none."""
    listed = keys.get("layer_types")
    if listed is None:
        return fallback
    if not isinstance(listed, list) or len(listed) != len(fallback):
        fail("layer_types", listed, f"it must list the kind of each of the {len(fallback)} layers")
    for kind in listed:
        if kind not in known:
            fail("layer_types", kind, f"the layer kinds served here are {', '.join(known)}")
    return listed
