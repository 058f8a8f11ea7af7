"""A plan as plain data (``weft plan --json``): every figure that the tables and pictures are drawn from.

Bytes are of one device. The keys are part of weft's interface; a test holds them.
"""

from __future__ import annotations

from typing import Any

from weft.planning.layouts import Layout, Load
from weft.planning.model_plan import ModelPlan

SHORT_TOKENS = 100
"""The request whose cost shows what a layout charges before the text is long."""


def plan_data(plan: ModelPlan, *, compare: bool) -> dict[str, Any]:
    """What ``json.dumps`` takes. With ``compare``, a list of layouts, weft's first."""
    arena, weights = plan.arena, plan.weights
    data: dict[str, Any] = {
        "model": plan.name, "family": plan.spec.family, "layers": len(plan.spec.layers),
        "attention_layers": len(plan.spec.attention_layers),
        "recurrent_layers": len(plan.spec.recurrent_layers),
        "max_positions": plan.spec.max_positions, "tp": plan.asked.tp, "ep": plan.asked.ep,
        "dtype": plan.spec.dtype, "kv_dtype": arena.kv_dtype, "state_dtype": plan.state_dtype,
        "memory_bytes": plan.asked.memory_bytes, "workspace_bytes": plan.workspace_bytes,
        "weights": {"parameters": weights.parameters, "bytes": weights.rank_bytes, "form": weights.form,
                    "parts": dict(weights.parts)},
        "kv_bytes_per_token": plan.kv_token_bytes,
        "compressed_kv_bytes_per_token": plan.compressed_kv_token_bytes,
        "compressed_kv_bytes_per_token_int4": plan.compressed4_kv_token_bytes,
        "state_bytes_per_sequence": plan.state_bytes,
        "arena": {"bytes": arena.arena_bytes, "frame_bytes": arena.frame_bytes,
                  "frames": arena.frame_count, "page_bytes": arena.page_bytes,
                  "pages_per_frame": arena.pages_per_frame, "slot_bytes": arena.slot_stride_bytes,
                  "slots_per_frame": arena.slots_per_frame},
        "checkpoint": {"bytes": arena.slot_stride_bytes, "tokens": plan.checkpoint_tokens,
                       "compressed_bytes": plan.compressed_bytes},
        "longest_tokens": plan.longest_tokens, "enough": plan.enough, "need_bytes": plan.need_bytes,
        "tp_that_fits": plan.tp_that_fits,
        "lengths": [{"tokens": fit.tokens, "request_bytes": fit.request_bytes, "sequences": fit.sequences}
                    for fit in plan.fits],
    }
    if compare:
        data["layouts"] = [_layout_data(plan, layout) for layout in plan.layouts]
    return data


def loads(plan: ModelPlan) -> list[Load]:
    """The ways a request may be, its tokens still to be set: bare, speculating, and with prefix caching."""
    drafts = plan.asked.drafts
    speculating = [Load(0, drafts)] if drafts else []
    return [Load(0), *speculating, Load(0, drafts, cached=True)]


def _layout_data(plan: ModelPlan, layout: Layout) -> dict[str, Any]:
    def at(load: Load, tokens: int) -> dict[str, Any]:
        full = Load(tokens, load.drafts, load.cached)
        return {"tokens": tokens, "request_bytes": layout.request_bytes(full),
                "sequences": layout.sequences(full)}

    lengths = [SHORT_TOKENS, *(fit.tokens for fit in plan.fits)]
    return {"layout": layout.name, "block_tokens": layout.block_tokens,
            "loads": [{"drafts": load.drafts, "cached": load.cached,
                       "lengths": [at(load, tokens) for tokens in lengths]} for load in loads(plan)]}
