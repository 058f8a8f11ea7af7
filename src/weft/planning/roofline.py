"""Cost of a step on a device that is not present: a pure function of the work in it.

    fixed + max( arithmetic: tokens x token_s + pairs x pair_s,
                 traffic:    weights + KV read + states read and written )
    moved in the arena: bytes that are read and written before anything is computed / bandwidth

The roofline is that of the published comparisons of this trace: a share of peak FLOP/s, a share of the memory
bandwidth, and a fixed time per step for all that is neither. Arithmetic is 2 FLOP per active parameter and token, and
4 x heads x head_dim per pair and attention layer. A step reads all weights outside the experts, and those experts that
at least one of its tokens is expected to choose.

The bytes that a step compresses, restores and copies (``ArenaWork.moved_bytes``) are read and written by separate
kernels before the others, so the seconds of these kernels are added.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from weft.costs.step import Work, pairs_of
from weft.errors import ConfigError
from weft.families.architecture import Architecture
from weft.families.jetmoe import ExpertAttention
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Experts, banks
from weft.families.mixers.latent_attention import LatentAttention
from weft.units import parse_byte_rate


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: dense peak FLOP/s by width of the weights, bytes/s of its memory (vendors' data
    sheets)."""

    name: str
    flops_16: float
    flops_8: float
    memory_bytes_s: float


DEVICES = {
    device.name.lower(): device
    for device in (
        Device("A100", 312e12, 312e12, 2.039e12),
        Device("L40S", 362e12, 733e12, 0.864e12),
        Device("L4", 121e12, 242e12, 0.3e12),
        Device("H100", 989e12, 1979e12, 3.35e12),
        Device("H200", 989e12, 1979e12, 4.8e12),
        Device("B200", 2250e12, 4500e12, 8.0e12),
        Device("RTX4090", 165e12, 330e12, 1.008e12),
    )
}

FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
STEP_FIXED_S = 5e-3


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Work of a model on a device, all ranks together. ``dense_params``: parameters that every step reads;
    ``expert_params``: parameters of all routed experts, of which a token uses ``expert_share``. ``pair_flops``:
    arithmetic of one (query, key) pair over all attention layers. ``kv_bytes``: of a token. ``state_bytes``: of a
    sequence.
    """

    dense_params: float
    expert_params: float
    expert_share: float
    pair_flops: float
    kv_bytes: float
    state_bytes: float
    weight_bytes: float = 1.0
    eight_bit: bool = True
    """Whether products are computed at the rate of 8-bit numbers."""

    @property
    def active_params(self) -> float:
        return self.dense_params + self.expert_params * self.expert_share


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds by kind of work; made by ``roofline``."""

    name: str
    fixed_s: float
    token_s: float
    pair_s: float
    dense_s: float
    experts_s: float
    expert_share: float
    kv_token_s: float
    state_s: float
    byte_s: float = 0.0
    """Seconds for a byte that one device reads or writes."""

    def step_s(self, work: Work) -> float:
        tokens = work.prefill_tokens + work.decodes
        arithmetic = tokens * self.token_s + (work.pairs + work.context) * self.pair_s
        traffic = (
            self.dense_s
            + self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)
            + work.context * self.kv_token_s
            + work.decodes * self.state_s
        )
        return self.fixed_s + max(arithmetic, traffic)

    def moved_s(self, moved: int) -> float:
        return moved * self.byte_s

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) * self.token_s + pairs_of(start, end) * self.pair_s

    def to_json(self) -> dict[str, Any]:
        return {"kind": "roofline", **asdict(self)}


def roofline(load: ModelLoad, device: str, *, count: int) -> Roofline:
    """Return the roofline of ``count`` accelerators named ``device``. Raises ConfigError that lists the names."""
    accelerator = DEVICES.get(device.lower())
    if accelerator is None:
        names = ", ".join(known.name for known in DEVICES.values())
        raise ConfigError(
            f"--device {device!r} is not in the table: it has {names}; or fit the times of a running engine with --fit",
            param="--device",
        )
    flops = count * FLOPS_SHARE * (accelerator.flops_8 if load.eight_bit else accelerator.flops_16)
    traffic = count * BANDWIDTH_SHARE * accelerator.memory_bytes_s
    return Roofline(
        name=f"{count} x {accelerator.name}",
        fixed_s=STEP_FIXED_S,
        token_s=2 * load.active_params / flops,
        pair_s=load.pair_flops / flops,
        dense_s=load.dense_params * load.weight_bytes / traffic,
        experts_s=load.expert_params * load.weight_bytes / traffic,
        expert_share=load.expert_share,
        kv_token_s=load.kv_bytes / traffic,
        state_s=2 * load.state_bytes / traffic,
        byte_s=1 / (BANDWIDTH_SHARE * accelerator.memory_bytes_s),
    )


def model_load(
    architecture: Architecture,
    *,
    parameters: int,
    weight_bytes: float,
    eight_bit: bool,
    kv_bytes: float,
    state_bytes: float,
) -> ModelLoad:
    """Return the work of a model. ``architecture`` and ``parameters`` are of the undivided model; ``weight_bytes`` per
    parameter; ``kv_bytes`` per token and ``state_bytes`` per sequence, over all devices.

    Parameters are counted by kind: routed experts, of which a token passes some, in each layer that uses them, and all
    else. A lookup in the embedding reads one row without arithmetic, so it is left out if the head is a separate
    table. Recurrent layers cost far less than their projections, so they are left out.
    """
    experts = [feed for feed in architecture.feed_forwards if isinstance(feed, Experts)]
    attentions = [mixer for mixer in architecture.mixers if isinstance(mixer, ExpertAttention)]
    parts: list[Experts | ExpertAttention] = [*experts, *attentions]
    routed = [(_routed_parameters(part, architecture.hidden_size), part.per_token / part.choices) for part in parts]
    total = sum(count for count, _ in routed)
    stored: list[Experts | ExpertAttention] = [feed for feed in experts if feed.bank is None]
    stored += [*banks(experts), *attentions]
    once = sum(_routed_parameters(part, architecture.hidden_size) for part in stored)
    table = 0 if architecture.tied_embeddings else architecture.vocab_size * architecture.hidden_size
    return ModelLoad(
        dense_params=parameters - once - table,
        expert_params=total,
        expert_share=sum(count * share for count, share in routed) / total if total else 0.0,
        pair_flops=sum(_pair_flops(mixer) for mixer in architecture.mixers),
        kv_bytes=kv_bytes,
        state_bytes=state_bytes,
        weight_bytes=weight_bytes,
        eight_bit=eight_bit,
    )


def _routed_parameters(feed: Experts | ExpertAttention, hidden: int) -> int:
    if isinstance(feed, ExpertAttention):
        return feed.count * 2 * feed.heads * feed.head_dim * hidden
    return feed.count * (3 if feed.gated else 2) * feed.width * (feed.latent_width or hidden)


def _pair_flops(mixer: Mixer | None) -> float:
    attended = getattr(mixer, "attention", mixer)
    if isinstance(attended, Attention):
        return 0.0 if attended.window is not None else 4.0 * attended.heads * attended.head_dim
    if isinstance(attended, LatentAttention):
        return 2.0 * attended.heads * (attended.key_dim + attended.value_dim)
    return 0.0


STORE_LATENCY_S = 1e-3
"""Seconds to the first byte of a store whose rate names no latency."""


def parse_rate(text: str) -> tuple[float, float]:
    """Parse ``3GB/s`` or ``3GB/s@100us`` into bytes a second and seconds of latency. Raises ConfigError."""
    rate, _, latency = text.partition("@")
    return float(parse_byte_rate(rate, flag="--store")), _seconds(latency, text) if latency else STORE_LATENCY_S


_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _seconds(latency: str, text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)\s*", latency)
    if match is None:
        raise ConfigError(
            f"--store {text!r}: {latency!r} is not a latency: write a number with us, ms or s, for example 100us",
            param="--store",
        )
    return float(match.group(1)) * _UNITS_S[match.group(2)]
