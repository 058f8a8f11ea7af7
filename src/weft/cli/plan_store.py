"""The part of ``weft plan`` about a store: times to restore a prefix and to compute it.

    --store 3GB/s           a disk's rate, its latency             restore = latency + bytes / rate
    --device H100 --tp 8    the roofline of ``weft simulate``      compute
    --prefill-rate 450      or tokens a second, as measured        compute = tokens / rate

A prefix is its KV and one state, of all ranks together: the store of a node has whole records. The engine uses the same
estimate, and restores if that is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.cli.main import table_of
from weft.planning.model_plan import ModelPlan
from weft.planning.roofline import model_load, parse_rate, roofline
from weft.units import PAGE_TOKENS, ceil_div, format_bytes


@dataclass(frozen=True, slots=True)
class PrefixTimes:
    """A prefix of ``tokens``: its bytes in the store, and seconds to compute and to restore it."""

    tokens: int
    bytes: int
    compute_s: float
    restore_s: float


@dataclass(frozen=True, slots=True)
class RestoreTimes:
    """Times of restored and computed prefixes. ``computes``: a description of the source of the compute times."""

    bytes_s: float
    latency_s: float
    computes: str
    prefixes: tuple[PrefixTimes, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes_per_second": self.bytes_s,
            "latency_s": self.latency_s,
            "computes": self.computes,
            "prefixes": [asdict(prefix) for prefix in self.prefixes],
        }


def restore_times(
    plan: ModelPlan, whole: ModelPlan, store: str, device: str, prefill_rate: float | None
) -> RestoreTimes:
    """Return the times for the lengths of ``plan``; ``whole`` is the same model on one device. Raise ConfigError that
    names --store or --device."""
    bytes_s, latency_s = parse_rate(store)
    compute_s, words = _compute(plan, whole, device, prefill_rate)
    rows = []
    for fit in plan.fits:
        pages = ceil_div(fit.tokens, PAGE_TOKENS)
        nbytes = pages * PAGE_TOKENS * whole.kv_token_bytes + whole.state_bytes
        rows.append(PrefixTimes(fit.tokens, nbytes, compute_s(fit.tokens), latency_s + nbytes / bytes_s))
    return RestoreTimes(bytes_s, latency_s, words, tuple(rows))


def _compute(
    plan: ModelPlan, whole: ModelPlan, device: str, prefill_rate: float | None
) -> tuple[Callable[[int], float], str]:
    if prefill_rate is not None:
        return lambda tokens: tokens / prefill_rate, f"{prefill_rate:,.0f} tokens/s"
    tp, weights = plan.options.tp, plan.weights
    load = model_load(
        plan.architecture,
        parameters=weights.parameters,
        eight_bit=weights.form in ("fp8", "int8"),
        weight_bytes=weights.rank_bytes * tp / weights.parameters,
        kv_bytes=whole.kv_token_bytes,
        state_bytes=whole.state_bytes,
    )
    cost = roofline(load, device, count=tp)
    return lambda tokens: cost.prefill_s(0, tokens), f"the roofline of {cost.name}"


def shown(times: RestoreTimes) -> list[Table | Text]:
    table = table_of((), ["prefix", "in a store", "restored in", "computed in"], padding=(0, 3, 0, 0))
    table.add_column()
    for prefix in times.prefixes:
        faster = "restored" if prefix.restore_s < prefix.compute_s else "computed"
        table.add_row(
            f"{prefix.tokens:,}",
            format_bytes(prefix.bytes),
            _seconds(prefix.restore_s),
            _seconds(prefix.compute_s),
            Text(faster, style="dim"),
        )
    words = (
        f"a store of {times.bytes_s / 1e9:.3g} GB/s and {times.latency_s * 1e3:.3g} ms; computed at {times.computes}"
    )
    return [table, Text(words, style="dim")]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
