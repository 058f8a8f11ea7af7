"""The last line of ``weft plan``: the ``weft serve`` command that cuts memory as the plan does.

    weft serve owner/name --memory 44642MiB --max-model-len 32768

The line is planned again on the same bytes, with the arena rounded down to what ``--memory`` names; both are
of one rank where there are several. If the weights leave too little, int8 and then int4 are
tried: ``--quantize`` does that on loading. fp8 is the form of a published checkpoint and no value of
``weft serve --quantize``. If no form fits, there is no line, and the screen says so.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.planning.model_plan import Asked, ModelPlan, make_plan
from weft.spec import KV_DTYPES

_SERVED_FORMS = ("int8", "w8a8", "int4")
_MIB, _KIB = 1 << 20, 1 << 10


def serve_line(
    model: str | None, revision: str | None, config: Mapping[str, Any], plan: ModelPlan,
    speculate: str = "auto",
) -> str | None:
    """The command, or None where nothing fits. ``model`` is as ``weft serve`` takes it: None is the embedded
    one."""
    asked = plan.asked
    forms = [asked.quantize] if asked.quantize is None or asked.quantize in _SERVED_FORMS else []
    if not config.get("quantization_config"):
        forms += [form for form in ("int8", "int4") if form not in forms]
    for form in forms:
        served = _rounded(config, replace(asked, quantize=form))
        if served is not None:
            words = ["weft serve", *([shlex.quote(model)] if model else []),
                     *(["--revision", shlex.quote(revision)] if revision else []), *_flags(served),
                     *(["--speculate", shlex.quote(speculate)] if speculate != "auto" else [])]
            return " ".join(words)
    return None


def _rounded(config: Mapping[str, Any], asked: Asked) -> ModelPlan | None:
    """The plan of the arena that ``--memory`` will name, or None where it does not fit."""
    plan = make_plan("", config, asked)
    if not plan.enough:
        return None
    size = plan.asked.arena_bytes or plan.arena.arena_bytes
    unit = _MIB if size >= 16 * _MIB else _KIB
    rounded = make_plan("", config, replace(asked, memory_bytes=None, arena_bytes=size // unit * unit))
    return rounded if rounded.enough else None


def _flags(plan: ModelPlan) -> list[str]:
    asked = plan.asked
    assert asked.arena_bytes is not None
    whole_mib = asked.arena_bytes % _MIB == 0
    memory = f"{asked.arena_bytes // _MIB}MiB" if whole_mib else f"{asked.arena_bytes // _KIB}KiB"
    kv = next((name for name, dtype in KV_DTYPES.items() if dtype == asked.kv_dtype), None)
    longest = plan.longest_tokens
    if asked.lengths:
        longest = max(fit.tokens for fit in plan.fits if fit.sequences)
    ranks = [f"--tp {asked.tp}"] if asked.tp > 1 else []
    ranks += ["--ep"] if asked.ep else []
    flags = {"--dtype": asked.dtype, "--quantize": asked.quantize, "--kv-dtype": kv,
             "--state-dtype": asked.state_dtype, "--memory": memory,
             "--max-model-len": longest if longest < plan.spec.max_positions else None}
    return [*ranks, *(f"{flag} {value}" for flag, value in flags.items() if value is not None)]
