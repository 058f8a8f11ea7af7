"""One device's share of a model under tensor parallelism: geometry in, geometry out.

    heads, experts' width, channels      divided by tp, and must divide
    KV heads, groups of Mamba-2          divided while there are enough; from then on each has a copy of one
    hidden size, norms, routers          whole on every device

That is how the field cuts (Shoeybi et al., 2019, for attention and feed-forward; grouped heads are replicated
as every engine with grouped-query attention does), so the figures compare. What is divided is named by field:
a new mixer that calls its heads ``heads`` is divided without a word here, and one inside another is found.
Rejected: dividing the bytes, which is wrong wherever something is replicated.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from weft.errors import ConfigError
from weft.families.architecture import Architecture, Attention, Mamba2

_DIVIDED = frozenset({"heads", "k_heads", "v_heads", "channels", "width", "shared_width"})
_REPLICATED: dict[type, str] = {Attention: "kv_heads", Mamba2: "groups"}
TP_MAX = 64
"""Largest ``--tp`` that is looked at."""


def rank_architecture(architecture: Architecture, tp: int) -> Architecture:
    """``architecture`` as one of ``tp`` (at least 1) devices holds it. ``vocab_size`` stays whole: see
    ``weights``.

    Raises ConfigError naming the numbers that ``tp`` does not divide, and the values of ``--tp`` that do.
    """
    if tp == 1:
        return architecture
    stuck = _indivisible(architecture, tp)
    if stuck:
        possible = ", ".join(str(n) for n in possible_tps(architecture))
        raise ConfigError(f"--tp is {tp}, which does not divide {', '.join(stuck)} of this model; it may be "
                          f"{possible}", param="--tp")
    return replace(architecture, mixers=tuple(_share(mixer, tp) for mixer in architecture.mixers),
                   feed_forwards=tuple(_share(feed, tp) for feed in architecture.feed_forwards))


def possible_tps(architecture: Architecture) -> list[int]:
    """Values of ``--tp`` up to TP_MAX that divide this model."""
    return [tp for tp in range(1, TP_MAX + 1) if not _indivisible(architecture, tp)]


def _share(record: Any, tp: int) -> Any:
    """A record of the architecture with its numbers divided, those of records inside it too."""
    if not is_dataclass(record) or isinstance(record, type):
        return record
    changes: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in _DIVIDED:
            changes[field.name] = value // tp
        elif field.name == _REPLICATED.get(type(record)):
            changes[field.name] = max(1, value // tp)
        elif is_dataclass(value):
            changes[field.name] = _share(value, tp)
    return replace(record, **changes)


def _indivisible(architecture: Architecture, tp: int) -> list[str]:
    stuck: dict[str, None] = {}
    for record in dict.fromkeys((*architecture.mixers, *architecture.feed_forwards)):
        stuck |= dict.fromkeys(_stuck_fields(record, tp))
    return list(stuck)


def _stuck_fields(record: Any, tp: int) -> list[str]:
    """What of ``record`` can be neither divided nor, where that is allowed, replicated evenly."""
    if not is_dataclass(record) or isinstance(record, type):
        return []
    stuck = []
    for field in fields(record):
        value = getattr(record, field.name)
        replicated = field.name == _REPLICATED.get(type(record))
        if (field.name in _DIVIDED or replicated) and value % tp and not (replicated and tp % value == 0):
            stuck.append(f"{type(record).__name__}.{field.name} {value}")
        elif is_dataclass(value):
            stuck += _stuck_fields(value, tp)
    return stuck
