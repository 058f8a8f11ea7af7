"""What a model asks of a device, from its architecture: the numbers that a roofline is made of.

Parameters are counted by kind: routed experts, of which a token passes some, and all else, which every token
does. A lookup in the embedding is no arithmetic and reads one row. So the embedding is left out if the
model's head is a separate table. Attention costs 2 FLOP per number of a key and of a value, for each head and
pair of tokens; recurrent layers cost the same for every token and are far below their projections, so they
are left out.
"""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Experts,
    LatentAttention,
    Mixer,
    Parallel,
    SharedBlock,
)
from weft.sim.cost import ModelLoad


def model_load(architecture: Architecture, *, parameters: int, weight_bytes: float, eight_bit: bool,
               kv_bytes: float, state_bytes: float) -> ModelLoad:
    """``architecture`` and ``parameters`` of the whole model; ``weight_bytes`` per parameter; ``kv_bytes``
    per token and ``state_bytes`` per sequence, over all devices."""
    experts = [feed for feed in architecture.feed_forwards if isinstance(feed, Experts)]
    routed = [(_routed_parameters(feed, architecture.hidden_size), feed.per_token / feed.count)
              for feed in experts]
    total = sum(count for count, _ in routed)
    table = 0 if architecture.tied_embeddings else architecture.vocab_size * architecture.hidden_size
    return ModelLoad(
        dense_params=parameters - total - table, expert_params=total,
        expert_share=sum(count * share for count, share in routed) / total if total else 0.0,
        pair_flops=sum(_pair_flops(mixer) for mixer in architecture.mixers),
        kv_bytes=kv_bytes, state_bytes=state_bytes, weight_bytes=weight_bytes, eight_bit=eight_bit)


def _routed_parameters(feed: Experts, hidden: int) -> int:
    return feed.count * (3 if feed.gated else 2) * feed.width * (feed.latent_width or hidden)


def _pair_flops(mixer: Mixer | None) -> float:
    if isinstance(mixer, Parallel | SharedBlock):
        mixer = mixer.attention
    if isinstance(mixer, Attention):
        return 0.0 if mixer.window is not None else 4.0 * mixer.heads * mixer.head_dim
    if isinstance(mixer, LatentAttention):
        return 2.0 * mixer.heads * (mixer.key_dim + mixer.value_dim)
    return 0.0
