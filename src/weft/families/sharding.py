"""Tensor parallelism as arithmetic: the part of a model that one rank holds. Geometry in, geometry out.

    heads, experts' width, channels      divided by tp, and must divide
    experts themselves, with ``ep``      divided by their number, spans differ by one at most
    KV heads, groups of Mamba-2          divided while there are enough; from then on each has a copy of one
    vocabulary                           spans of equal length, the last ones shorter
    hidden size, norms, routers          not divided: every rank has all of them

Other engines shard the same way (Shoeybi et al., 2019; grouped heads are copied everywhere), so figures can be
compared.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

from weft.errors import ConfigError
from weft.families.architecture import Architecture
from weft.families.mixers.attention import KeyIndex
from weft.families.mixers.feed_forward import Experts
from weft.units import ceil_div

_DIVIDED = frozenset({"heads", "k_heads", "v_heads", "channels", "width", "shared_width", "out_groups", "parts"})
"""Names of fields that are divided: a new mixer that calls its heads ``heads`` needs no change here."""
_WORDS = {
    "heads": "heads",
    "k_heads": "key heads",
    "v_heads": "value heads",
    "kv_heads": "KV heads",
    "groups": "groups",
    "channels": "channels",
    "width": "columns",
    "shared_width": "shared columns",
    "out_groups": "groups of the output",
    "parts": "parts of a tensor",
}
TP_MAX = 64
"""Largest ``--tp`` that ``possible_tps`` tries."""


def rank_architecture(architecture: Architecture, tp: int, *, ep: bool = False) -> Architecture:
    """Return ``architecture`` as one of ``tp`` (at least 1) devices holds it, the one with the most. ``ep``: experts
    are divided by their number. ``vocab_size`` is not divided. A head for multi-token prediction that ``tp`` does not
    divide is left out.

    Raises ConfigError naming the numbers that ``tp`` does not divide, and the values of ``--tp`` that do.
    """
    if ep:
        architecture = _experts_divided(architecture, tp)
    if tp == 1:
        return architecture
    stuck = _indivisible(architecture, tp)
    if stuck:
        possible = ", ".join(str(n) for n in possible_tps(architecture, ep=ep))
        raise ConfigError(
            f"--tp is {tp}, which does not divide this model: {', '.join(stuck)}; it may be {possible}", param="--tp"
        )
    return replace(
        architecture,
        mixers=tuple(_share(mixer, tp) for mixer in architecture.mixers),
        feed_forwards=tuple(_share(feed, tp) for feed in architecture.feed_forwards),
        mtp=None if _stuck_fields(architecture.mtp, tp) else _share(architecture.mtp, tp),
    )


def _experts_divided(architecture: Architecture, tp: int) -> Architecture:
    """Return ``architecture`` with experts divided by their number. Raises ConfigError for a model without experts, or
    with fewer than ranks."""
    counts = {feed.count for feed in architecture.feed_forwards if isinstance(feed, Experts)}
    if not counts:
        raise ConfigError("--ep divides experts over ranks, and this model has none", param="--ep")
    if min(counts) < tp:
        raise ConfigError(
            f"--tp is {tp} with --ep, and this model has {min(counts)} experts; use --tp {min(counts)} or less",
            param="--tp",
        )

    def divided(feed: Any) -> Any:
        return replace(feed, own_count=ceil_div(feed.count, tp)) if isinstance(feed, Experts) else feed

    head = architecture.mtp
    return replace(
        architecture,
        feed_forwards=tuple(map(divided, architecture.feed_forwards)),
        mtp=None if head is None else replace(head, feed_forward=divided(head.feed_forward)),
    )


def possible_tps(architecture: Architecture, *, ep: bool = False) -> list[int]:
    """Return the values of ``--tp`` up to TP_MAX that divide this model."""
    if not ep:
        return [tp for tp in range(1, TP_MAX + 1) if not _indivisible(architecture, tp)]
    divided = _experts_divided(architecture, 1)
    counts = [feed.count for feed in divided.feed_forwards if isinstance(feed, Experts)]
    return [tp for tp in range(1, min(TP_MAX, *counts) + 1) if not _indivisible(divided, tp)]


def _share(record: Any, tp: int) -> Any:
    """Return a record of the architecture with the numbers divided, also in nested records."""
    if not is_dataclass(record) or isinstance(record, type):
        return record
    changes: dict[str, Any] = {}
    copied = getattr(record, "copied", ("", ""))
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in _DIVIDED and not _is_of_whole_experts(record, field.name):
            changes[field.name] = value // tp
        elif field.name == copied[0]:
            changes[field.name] = max(1, value // tp)
            changes[copied[1]] = max(1, tp // value)
        elif is_dataclass(value):
            changes[field.name] = _share(value, tp)
    return replace(record, **changes)


def _indivisible(architecture: Architecture, tp: int) -> list[str]:
    stuck: dict[str, None] = {}
    for record in dict.fromkeys((*architecture.mixers, *architecture.feed_forwards)):
        stuck |= dict.fromkeys(_stuck_fields(record, tp))
    return list(stuck)


def _stuck_fields(record: Any, tp: int) -> list[str]:
    """Return words for each number of ``record`` that can be neither divided nor copied evenly."""
    if not is_dataclass(record) or isinstance(record, type):
        return []
    stuck = []
    for field in fields(record):
        value = getattr(record, field.name)
        if _is_of_whole_experts(record, field.name):
            continue
        copied = field.name == getattr(record, "copied", ("",))[0]
        # A KV head that chooses for all its queries needs them on one rank.
        copies = copied and not isinstance(getattr(record, "index", None), KeyIndex)
        copies &= value == 1 or not getattr(record, "grouped", False)  # nor is a group of several cut
        if (field.name in _DIVIDED or copied) and value % tp and not (copies and tp % value == 0):
            stuck.append(f"{value} {_WORDS[field.name]} of {_kind(record)}")
        elif is_dataclass(value):
            stuck += _stuck_fields(value, tp)
    return stuck


def _kind(record: Any) -> str:
    """Return the words of a class: "gated delta" for ``GatedDelta``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(record).__name__).lower()


def _is_of_whole_experts(record: Any, field: str) -> bool:
    """Return whether the field is the width of experts that ranks divide by number, and so is not divided itself."""
    return isinstance(record, Experts) and bool(record.own_count) and field == "width"
