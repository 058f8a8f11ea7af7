"""Comparison of each kernel with torch and with the ceiling of the machine, in one run.

    ceiling     copy bandwidth, matrix rate                                 (measured)
    round 1     own  torch        each side has one uncounted call; the order rotates;
    round 2     torch  own        a sample consists of calls for some milliseconds
    share       (the least time at the ceiling) / (own time)

``benchmarks.kernels`` adds small ops, copies of memory and the kernels of other libraries.

"Own" is Triton on a GPU and C++ on a CPU. A share above 1 on a CPU means that the data was in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from weft.errors import ConfigError
from weft.families import read_architecture
from weft.families.architecture import Architecture
from weft.families.mixers.attention import Attention
from weft.families.mixers.combined import Parallel, SharedBlock
from weft.families.mixers.delta import GatedDelta, KimiDelta
from weft.families.mixers.feed_forward import Experts
from weft.families.mixers.mamba import Mamba1, Mamba2
from weft.families.mixers.short_conv import ShortConv
from weft.host import cpu_name_and_flags, usable_cores
from weft.planning.geometries import find_geometry, near_names
from weft.tensor import gpu, layout, native
from weft.tensor.gpu import page_layout
from weft.tensor.inputs import Runs
from weft.tensor.ops.conv import causal_conv, short_conv
from weft.tensor.ops.delta_rule import delta_rule
from weft.tensor.ops.mamba1 import mamba1
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.moe import moe
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.scratch import scratch
from weft.units import pages_for
from weft_tools.bench.machine import Ceiling, seconds_of
from weft_tools.bench.report import facts as now

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_RUN_S = 0.004
_CALLS_MAX = 1000


@dataclass(slots=True)
class Result:
    """Seconds of one call by side; None for a side that refused, with the reason in ``refusals``."""

    geometry: str
    name: str
    seconds: dict[str, float | None]
    bytes_moved: int
    flops: int
    ceiling_share: float | None
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sides:
    """The sides of a comparison. ``own``: the name of weft's side; ``choose(side)``: makes the process use ``own`` or
    "torch"."""

    own: str
    choose: Callable[[str], None]


def bench_of(
    device_name: str, dtype: str, decode_rows: tuple[int, ...], prefill_tokens: tuple[int, ...], context: int | None
) -> Bench:
    """Return the sizes of a run; missing sizes get the device's defaults. Raise ConfigError for a missing device."""
    if device_name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, and torch sees no CUDA device here; use --device cpu", param="--device")
    device = torch.device(device_name)
    on_gpu = device.type == "cuda"
    return Bench(
        device,
        DTYPES[dtype],
        decode_rows or ((1, 16, 64, 256) if on_gpu else (1, 32)),
        prefill_tokens or ((8192,) if on_gpu else (512,)),
        context or (2048 if on_gpu else 1024),
    )


def sides_of(device: torch.device) -> Sides:
    """Return the sides. Raise ConfigError if weft's kernels are not available for the device."""
    if device.type == "cuda":
        gpu.choose("triton")
        return Sides("triton", lambda side: gpu.choose("torch" if side == "torch" else "triton"))
    native.choose("native")
    return Sides("native", lambda side: native.choose("torch" if side == "torch" else "native"))


def run(
    bench: Bench,
    sides: Sides,
    ceiling: Ceiling,
    geometries: Iterable[str],
    groups: tuple[str, ...],
    rounds: int,
    cases: Cases | None = None,
) -> Iterator[Result]:
    """Yield each result when it is measured. Raise ConfigError for an unknown geometry."""
    known = {name: _architecture(name) for name in geometries}
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, architecture in known.items():
            for case in (cases or cases_of)(architecture, bench, groups):
                yield measure(name, case, bench, sides, ceiling, rounds)


def _architecture(name: str) -> Any:
    geometry = find_geometry(name)
    if geometry is None:
        near = ", ".join(near_names(name)) or "none"
        raise ConfigError(
            f"--geometry is {name!r}, which is not in weft's table of models; near are {near}", param="--geometry"
        )
    return read_architecture(geometry.config)


def measure(geometry: str, case: Case, bench: Bench, sides: Sides, ceiling: Ceiling, rounds: int) -> Result:
    calls: dict[str, Call] = {sides.own: case.call, "torch": case.call, **case.rivals}
    samples: dict[str, list[float]] = {}
    times: dict[str, int] = {}
    refusals: dict[str, str] = {}
    for side, call in calls.items():
        sides.choose(side)
        try:
            call()
            once_s = seconds_of(call, 1, bench.device)
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as error:
            refusals[side] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        times[side] = min(_CALLS_MAX, max(1, int(_RUN_S / max(once_s, 1e-7))))
        samples[side] = []
    for number in range(rounds):
        order = list(samples)
        turn = number % max(len(order), 1)
        for side in order[turn:] + order[:turn]:
            sides.choose(side)
            samples[side].append(seconds_of(calls[side], times[side], bench.device))
    sides.choose(sides.own)
    seconds = {side: median(samples[side]) if side in samples else None for side in calls}
    own_s, least_s = seconds[sides.own], ceiling.least_s(case.bytes_moved, case.flops)
    return Result(
        geometry, case.name, seconds, case.bytes_moved, case.flops, least_s / own_s if own_s else None, refusals
    )


def facts_of(bench: Bench, sides: Sides, ceiling: Ceiling, rounds: int) -> dict[str, Any]:
    """Return the facts of a run that its figures depend on."""
    on_gpu = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if on_gpu else cpu_name_and_flags()[0],
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": sides.own if on_gpu else native.describe(),
        "dtype": str(bench.dtype)[6:],
        "rounds": rounds,
        "copy_gb_per_s": ceiling.copy_bytes_per_s / 1e9,
        "matrix_tflop_per_s": ceiling.matrix_flops_per_s / 1e12,
    }


def to_json(facts: dict[str, Any], results: Iterable[Result]) -> dict[str, Any]:
    return {"facts": {**now(), **facts}, "results": [asdict(result) for result in results]}


GROUPS = ("attention", "delta", "mamba2", "mamba1", "conv", "experts")
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A call to time. ``call`` runs the op once. ``bytes_moved`` and ``flops``: the least that the op's definition
    reads, writes and computes. ``rivals``: other libraries' kernels on the same numbers."""

    name: str
    call: Call
    bytes_moved: int = 0
    flops: int = 0
    rivals: dict[str, Call] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """Sizes of a run. ``decode_rows``: sequences with one token each; ``prefill_tokens`` of one sequence; ``context``:
    tokens of a decode's sequence, its own included."""

    device: torch.device
    dtype: torch.dtype
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    context: int
    rivals: Callable[..., dict[str, Call]] = lambda *of: {}
    """Other libraries' kernels for (bench, mixer, rows, tokens, tokens before, *tensors)."""

    def __post_init__(self) -> None:
        scratch.device = self.device  # torch's side allocates buffers on this device

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normal numbers of spread 0.5."""
        return (torch.randn(*shape, device=self.device) * 0.5).to(dtype or self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Return float32 in [0, 1)."""
        return torch.rand(*shape, device=self.device)

    def sizes(self) -> list[tuple[str, int, int, int]]:
        """Return (name, rows, tokens of each, tokens before them), decodes first."""
        return [
            *((f"decode {rows} x 1 at {self.context}", rows, 1, self.context - 1) for rows in self.decode_rows),
            *((f"prefill 1 x {tokens}", 1, tokens, 0) for tokens in self.prefill_tokens),
        ]

    def runs(self, rows: int, tokens: int, before: int) -> Runs:
        """Return ``rows`` sequences with ``tokens`` new tokens each after ``before``, in pages of random order."""
        width = pages_for(before + tokens)
        pages = torch.randperm(rows * width).to(torch.int32).view(rows, width)
        return Runs(
            offsets=[row * tokens for row in range(rows)],
            starts=[before] * rows,
            lengths=[tokens] * rows,
            slots=list(range(rows)),
            fresh=[False] * rows,
            decode_count=rows if tokens == 1 else 0,
            starts_R=torch.tensor([before] * rows, device=self.device),
            slots_R=torch.arange(rows, device=self.device),
            context_R=torch.tensor([before + tokens] * rows, device=self.device),
            page_table_RP=pages.to(self.device),
        )


Cases = Callable[[Architecture, Bench, tuple[str, ...]], Iterator[Case]]


def size_of(*tensors: torch.Tensor) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


F32 = torch.float32


def cases_of(architecture: Architecture, bench: Bench, groups: tuple[str, ...]) -> Iterator[Case]:
    """Yield one case at a time, because all at once would not fit in memory. ``groups``: a subset of GROUPS."""
    mixers = dict.fromkeys(part for mixer in architecture.mixers for part in parts_of(mixer))
    for mixer in mixers:
        if isinstance(mixer, Attention) and "attention" in groups and not mixer.ring:
            yield from _attention(mixer, bench)
        if isinstance(mixer, GatedDelta | KimiDelta) and "delta" in groups:
            yield from _delta(mixer, bench)
        if isinstance(mixer, Mamba2) and "mamba2" in groups:
            yield from _mamba2(mixer, bench)
        if isinstance(mixer, Mamba1) and "mamba1" in groups:
            yield from _mamba1(mixer, bench)
        if "conv" in groups:
            yield from _convolution(mixer, bench)
    if "experts" in groups:
        for feed in dict.fromkeys(architecture.feed_forwards):
            if isinstance(feed, Experts) and not feed.latent_width:
                yield from _experts(feed, architecture.hidden_size, bench)


def parts_of(mixer: object) -> tuple[object, ...]:
    if isinstance(mixer, Parallel | SharedBlock):
        return (mixer.attention, mixer.mamba)
    return () if mixer is None else (mixer,)


def _attention(of: Attention, bench: Bench) -> Iterator[Case]:
    heads, kv_heads, dim = of.heads, of.kv_heads, of.head_dim
    for name, rows, tokens, before in bench.sizes():
        runs = bench.runs(rows, tokens, before)
        k, v = pages_of(bench, runs, kv_heads, dim)
        q = bench.noise(rows * tokens, heads, dim)
        read = 2 * rows * (before + tokens) * kv_heads * dim * bench.dtype.itemsize
        seen = rows * sum(before + index + 1 for index in range(tokens))
        call = partial(paged_attention, q, k, v, runs, of.scale)
        yield Case(
            f"attention {name}",
            call,
            read + 2 * size_of(q),
            4 * seen * heads * dim,
            bench.rivals(bench, of, rows, tokens, before),
        )


def _delta(of: GatedDelta | KimiDelta, bench: Bench) -> Iterator[Case]:
    kimi = isinstance(of, KimiDelta)
    k_heads, heads = (of.heads, of.heads) if isinstance(of, KimiDelta) else (of.k_heads, of.v_heads)
    k_dim, v_dim = (of.head_dim, of.head_dim) if isinstance(of, KimiDelta) else (of.k_dim, of.v_dim)
    for name, rows, tokens, before in bench.sizes():
        runs, count = bench.runs(rows, tokens, before), rows * tokens
        q, k = (bench.noise(count, k_heads, k_dim) for _ in range(2))
        v, beta = bench.noise(count, heads, v_dim), bench.uniform(count, heads)
        g = -bench.noise(count, heads, *([k_dim] if kimi else []), dtype=F32).abs()
        state = bench.noise(rows, heads, k_dim, v_dim, dtype=F32)
        call = partial(delta_rule, q, k, v, g, beta, state, runs, scale=k_dim**-0.5)
        yield Case(
            f"{'Kimi' if kimi else 'gated'} delta {name}",
            call,
            size_of(q, k, v, v, g, beta) + 2 * size_of(state),
            8 * count * heads * k_dim * v_dim,
            bench.rivals(bench, of, rows, tokens, before, q, k, v, g, beta, state),
        )


def _mamba2(of: Mamba2, bench: Bench) -> Iterator[Case]:
    for name, rows, tokens, before in bench.sizes():
        runs, count = bench.runs(rows, tokens, before), rows * tokens
        x, dt = bench.noise(count, of.heads, of.head_dim), bench.noise(count, of.heads)
        b, c = (bench.noise(count, of.groups, of.state_dim) for _ in range(2))
        a, d, bias = (bench.uniform(of.heads) for _ in range(3))
        state = bench.noise(rows, of.heads, of.head_dim, of.state_dim, dtype=F32)
        call = partial(mamba2, x, dt, -a, b, c, d, bias, state, runs, dt_limit=of.dt_limit)
        yield Case(
            f"Mamba-2 {name}",
            call,
            size_of(x, x, dt, b, c) + 2 * size_of(state),
            6 * count * of.heads * of.head_dim * of.state_dim,
        )


def _mamba1(of: Mamba1, bench: Bench) -> Iterator[Case]:
    for name, rows, tokens, before in bench.sizes():
        runs, count = bench.runs(rows, tokens, before), rows * tokens
        x, dt = (bench.noise(count, of.channels) for _ in range(2))
        b, c = (bench.noise(count, of.state_dim) for _ in range(2))
        a, d, bias = bench.uniform(of.channels, of.state_dim), bench.uniform(of.channels), bench.uniform(of.channels)
        state = bench.noise(rows, of.channels, of.state_dim, dtype=F32)
        call = partial(mamba1, x, dt, -a, b, c, d, bias, state, runs)
        yield Case(
            f"Mamba-1 {name}",
            call,
            size_of(x, x, dt, b, c) + 2 * size_of(state),
            6 * count * of.channels * of.state_dim,
        )


def _convolution(of: object, bench: Bench) -> Iterator[Case]:
    if isinstance(of, ShortConv):
        for name, rows, tokens, before in bench.sizes():
            runs, projected = bench.runs(rows, tokens, before), bench.noise(rows * tokens, 3 * of.channels)
            weight = bench.noise(of.channels, of.conv_kernel)
            window = bench.noise(rows, of.channels, of.conv_kernel - 1)
            call = partial(short_conv, projected, weight, None, window, runs)
            yield Case(f"short conv {name}", call, size_of(projected, weight) * 4 // 3 + 2 * size_of(window))
        return
    if isinstance(of, GatedDelta):
        channels = 2 * of.key_width + of.value_width
    elif isinstance(of, Mamba2):
        channels = of.inner_width + 2 * of.groups * of.state_dim
    else:
        return
    for name, rows, tokens, before in bench.sizes():
        runs, x = bench.runs(rows, tokens, before), bench.noise(rows * tokens, channels)
        weight = bench.noise(channels, of.conv_kernel)
        window = bench.noise(rows, channels, of.conv_kernel - 1)
        call = partial(causal_conv, x, weight, None, "silu", window, runs)
        yield Case(f"conv {name}", call, size_of(x, x, weight) + 2 * size_of(window))


def _experts(of: Experts, hidden: int, bench: Bench) -> Iterator[Case]:
    """Yield cases of experts, routed at random, which activates more experts than text does."""
    rows = (2 if of.gated else 1) * of.width
    gate_up, down = bench.noise(of.count, rows, hidden), bench.noise(of.count, hidden, of.width)
    for name, sequences, tokens, _ in bench.sizes():
        count = sequences * tokens
        x, weights = bench.noise(count, hidden), bench.uniform(count, of.per_token)
        ids = bench.uniform(count, of.count).topk(of.per_token).indices
        awake = len(set(ids.flatten().tolist()))
        call = partial(moe, x, ids, weights, gate_up, down, activation=of.activation, gated=of.gated)
        yield Case(
            f"experts {name.split(' at')[0]}",
            call,
            awake * (size_of(gate_up, down) // of.count) + size_of(x, x, weights),
            2 * count * of.per_token * (rows + of.width) * hidden,
        )


def pages_of(bench: Bench, runs: Runs, kv_heads: int, dim: int) -> Iterator[torch.Tensor]:
    """Yield K and V for every page of ``runs``, in the layout of the device."""
    for shape in (layout.k_block_shape, layout.v_block_shape):
        yield bench.noise(runs.page_table_RP.numel(), *shape(kv_heads, dim, bench.dtype, page_layout(bench.device)))
