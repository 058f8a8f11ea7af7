"""Attention over chosen blocks, and several residual streams: Qwen4-Exp, GLM-5-next.

Delta nets and attention as in Qwen3.5. Attention sees ``budget / block`` blocks of the text, which an index
chooses for each token, and the unfinished block after them. Blocks read a mix of several residual streams.
Some delta layers add rows of tables for the last tokens: a hash of each n-gram selects a row.

    rows of table h    the (h + 1)-th prime from ``ngram_vocab_size_base`` on, counted over all such layers
    row of an n-gram   (t0 m0) xor (t1 m1) xor ..., in 64 bits, modulo the rows; t1 is the token before t0

GLM-5-next has Kimi delta layers, and latent attention without positions. Its index learns how tokens weigh in
the key of their block. Its streams are mixed by a matrix, and gates of its feed-forwards are limited.

Sources: transformers ``Qwen4ExpTextConfig`` and ``Qwen4ExpTextNGramEmbedding``, ``Glm5NextTextConfig``, whose
defaults are used here; multipliers are numbers of splitmix64 (Steele et al., 2014).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.attention import qwen_feed_forward
from weft.families.config_keys import ConfigKeys, fail
from weft.families.delta import (
    FeedDefaults,
    mtp_behind,
    qwen_mtp,
    read_gated_delta,
    read_kimi_feed_forwards,
    read_latent_attention,
)
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention, Index
from weft.families.mixers.delta import GatedDelta, KimiDelta
from weft.families.mixers.feed_forward import Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.mixers.ngrams import Ngrams, WithNgrams
from weft.families.names import Names
from weft.families.reading import (
    INDEXED_KINDS,
    Family,
    build_architecture,
    every_nth_attention,
    layer_kinds,
    read_attention,
)
from weft.families.residuals import Streams


def read_qwen4_exp(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        vocab_size=248_320,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts_per_tok=10,
        num_experts=512,
    )
    kinds = layer_kinds(keys, every_nth_attention(keys), INDEXED_KINDS)
    streams = Streams("gated", keys.integer("hc_count", 4), rank=keys.integer("hc_lowrank", 320))
    plain, index = read_attention(keys, qk_norm=True, gated=True, head_dim=256), _index(keys)
    if index is not None and plain.rope is not None and index.key_dim < plain.rope.rotary_dim:
        fail("indexer_head_dim", index.key_dim, f"its keys turn by {plain.rope.rotary_dim} dims, as those of heads")
    attention = replace(plain, index=index)
    gate = keys.get("output_gate_type") or "silu"
    if gate not in ("silu", "swish", "sigmoid"):
        fail("output_gate_type", gate, "silu and sigmoid are served")
    delta = replace(read_gated_delta(keys), sigmoid_gate=gate == "sigmoid")
    ngrams = _ngrams(keys, streams.count * keys.integer("hidden_size"), kinds)

    def mixer(layer: int) -> Mixer:
        if kinds[layer] == "attention":
            return attention
        return WithNgrams(delta, ngrams[layer]) if layer in ngrams else delta

    feed = qwen_feed_forward(keys, 0, shared=True, normalized=True)
    return build_architecture(
        family,
        keys,
        [mixer(layer) for layer in range(len(kinds))],
        [feed] * len(kinds),
        residual=streams,
        tied=keys.outer_boolean("tie_word_embeddings", False),
        mtp=qwen_mtp(keys, attention, streams),
    )


def _index(keys: ConfigKeys) -> Index:
    budget, block = keys.integer("indexer_budget"), keys.integer("indexer_compress_ratio")
    if budget % block:
        fail("indexer_budget", budget, f"it must be a multiple of indexer_compress_ratio {block}")
    if keys.integer("indexer_kv_heads") != 1:
        fail("indexer_kv_heads", keys.get("indexer_kv_heads"), "an index has one key head")
    return Index(keys.integer("indexer_n_heads"), keys.integer("indexer_head_dim"), block, budget // block)


def _ngrams(keys: ConfigKeys, stream_width: int, kinds: list[str]) -> dict[int, Ngrams]:
    """Return the n-gram tables of each layer that has them."""
    numbers = sorted(set(keys.get("ple_layer_ids") or ()))
    if any(not isinstance(n, int) or not 0 < n <= len(kinds) or kinds[n - 1] == "attention" for n in numbers):
        fail("ple_layer_ids", numbers, "it must name delta layers, counted from 1")
    if not numbers:
        return {}
    size, each = keys.integer("ngram_size", 3), keys.integer("heads_per_ngram", 8)
    width = keys.integer("ple_embed_dim", keys.integer("hidden_size"))
    count = (size - 1) * each
    if not 2 <= size <= 6:
        fail("ngram_size", size, "2 to 6 are served")
    if width % count:
        fail("ple_embed_dim", width, f"it must be a multiple of the {count} tables")
    end = keys.get("ple_eos_token_id", keys.get("eos_token_id"))
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int):
        fail("eos_token_id", end, "n-grams end at a token")
    primes = _primes(keys.integer("ngram_vocab_size_base", 20_000_000))
    pad, seed = keys.integer("make_ngram_vocab_size_divisible_by", 128), keys.integer("seed", 1234, least=0)
    tables: dict[int, Ngrams] = {}
    for place, number in enumerate(numbers):
        rows = tuple(keys.get("ngram_heads_vocab_sizes") or (next(primes) for _ in range(count)))
        multipliers = tuple(
            keys.get("layer_multipliers") or _multipliers(keys.integer("vocab_size"), size, seed + 10_007 * place)
        )
        tables[number - 1] = Ngrams(
            size,
            width // count,
            rows,
            -(-sum(rows) // pad) * pad,
            multipliers,
            end,
            stream_width,
            keys.integer("ple_conv_kernel_size", 4),
        )
    return tables


def _primes(first: int) -> Iterator[int]:
    """Yield the primes from ``first`` on."""
    for number in range(max(2, first), 1 << 62):
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number


_BITS = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _multipliers(vocab: int, count: int, seed: int) -> Iterator[int]:
    """Yield odd multipliers, small enough that a token times one fits into 63 bits."""
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    for place in range(count):
        mixed = (seed + _GAMMA * (place + 2)) & _BITS
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _BITS
        yield 2 * ((mixed ^ (mixed >> 31)) % half) + 1


_GLM = FeedDefaults(3, 12_288, 288, 2048, 2.5, 1, 1)


def read_glm5_next(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        hidden_size=4096,
        num_hidden_layers=45,
        num_attention_heads=64,
        max_position_embeddings=1_048_576,
        vocab_size=154_880,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=0,
        qk_nope_head_dim=256,
        v_head_dim=256,
        rms_norm_eps=1e-5,
        num_experts=keys.integer("n_routed_experts", _GLM.experts),
    )
    kinds = layer_kinds(keys, every_nth_attention(keys), INDEXED_KINDS)
    inner = keys.inner("linear_attn_config") or ConfigKeys({}, fallback={})
    floor = inner.get("gate_lower_bound", keys.get("linear_lower_bound"))
    # Null means no floor, silence the default.
    if floor is None and (inner.get("safe_gate") or not keys.has("linear_lower_bound")):
        floor = -5.0
    delta = KimiDelta(
        heads=inner.integer("num_heads", keys.integer("linear_num_heads", 64)),
        head_dim=inner.integer("head_dim", keys.integer("linear_head_dim", 128)),
        conv_kernel=inner.integer("short_conv_kernel_size", keys.integer("linear_conv_kernel_dim", 4)),
        decay_floor=floor,
    )
    latent, index = read_latent_attention(keys), _pooled_index(keys, kinds)
    if latent.shared_dim or latent.query_rank is None:
        fail(
            "qk_rope_head_dim",
            latent.shared_dim,
            "latent attention without positions is served, whose queries have a bottleneck (q_lora_rank)",
        )
    attention = replace(latent, norm_eps=keys.number("rms_norm_eps", 1e-5), index=index)
    limit = keys.number("swiglu_limit", 10.0)
    streams = Streams(
        "mixed",
        keys.integer("hc_mult", 4),
        rounds=keys.integer("hc_sinkhorn_iters", 20),
        eps=keys.number("hc_eps", 1e-6),
    )
    feeds = [replace(feed, limit=limit) for feed in read_kimi_feed_forwards(keys, len(kinds), _GLM)]
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else delta for kind in kinds],
        feeds,
        tied=keys.outer_boolean("tie_word_embeddings", False),
        residual=streams,
        mtp=mtp_behind(keys, attention, feeds[-1]),
    )


def _pooled_index(keys: ConfigKeys, kinds: list[str]) -> Index:
    modes, pattern = keys.get("indexer_types"), keys.get("index_topk_pattern")
    modes = modes or ["shared" if mode in ("S", "shared") else "full" for mode in pattern or ()]
    shared = [
        layer
        for layer, (kind, mode) in enumerate(zip(kinds, modes, strict=False))
        if kind == "attention" and mode == "shared"
    ]
    if shared or keys.integer("index_topk_freq", 1) > 1:
        fail("indexer_types", shared, "attention layers with an index of their own are served")
    if not keys.boolean("index_kpool_always_select_tail", True):
        fail("index_kpool_always_select_tail", False, "attention sees the unfinished block")
    chosen, block = keys.integer("index_topk", 2048), keys.integer("index_kpool", 16)
    if chosen % block:
        fail("index_topk", chosen, f"it must be a multiple of index_kpool {block}")
    return Index(
        keys.integer("index_n_heads", 32), keys.integer("index_head_dim", 128), block, chosen // block, "learned"
    )


_GLM_NAMES = Names(
    {KimiDelta: "self_attn", LatentAttention: "self_attn"},
    mixes=("attn", "ffn"),
    layer_reader="weft.models.blocks.streams:layer_reader",
    ends_reader="weft.models.blocks.streams:ends_reader",
    swiglu=False,
    shared="shared_experts",
    spelled={KimiDelta: {"flat": True}, Experts: {"exact_router": True}},
)
_QWEN_NAMES = Names(
    {Attention: "self_attn", GatedDelta: "linear_attn"},
    shared="shared_expert",
    plus_one=True,
    mixes=("attn_hyper_connection", "mlp_hyper_connection"),  # with norms of their own
    mixer_norm="",
    feed_norm="",
    final_norm="",
    layer_reader="weft.models.blocks.streams:layer_reader",
    ends_reader="weft.models.blocks.streams:ends_reader",
)
FAMILIES = (
    Family("glm5_next", ("glm5_next", "glm5_next_text"), read_glm5_next, names=_GLM_NAMES),
    Family("qwen4_exp", ("qwen4_exp", "qwen4_exp_text"), read_qwen4_exp, names=_QWEN_NAMES),
)
