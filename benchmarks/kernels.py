"""Each op by torch and by the C++ kernels, side by side in one run.

    python -m benchmarks.kernels [--only attention conv] [--rounds 7] [--threads N] [--json FILE]

    round 1   torch  native            every side has had a run that is not counted; who is first alternates;
    round 2   native torch             a run is as many calls as fill some milliseconds; medians over the
    rounds

The shapes are those of layers of published models (LFM2-1.2B, Qwen3.5-0.8B, Granite-4.0-H-350M, Kimi-Linear),
in bfloat16 with float32 states. ``decode`` is one token of each of so many sequences, ``prefill`` one run of
so many tokens. The last column is the native kernel's rate: bytes that must move at least (decode) or useful
arithmetic (attention prefill). ``--instructions`` takes another set than the best.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from weft.host import usable_cores
from weft.tensor import layout, native
from weft.tensor.inputs import Runs
from weft.tensor.ops.add_norm import add_norm
from weft.tensor.ops.causal_conv import causal_conv
from weft.tensor.ops.gated_delta import gated_delta
from weft.tensor.ops.kimi_delta import kimi_delta
from weft.tensor.ops.mamba1 import mamba1
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.rms_norm import rms_norm
from weft.tensor.ops.rotary import rotary
from weft.tensor.ops.short_conv import short_conv
from weft.tensor.ops.silu_mul import silu_mul
from weft.tensor.ops.write_kv import write_kv
from weft.units import pages_for

BF16 = torch.bfloat16
StateCall = Callable[[torch.Tensor, Runs], object]
_RUN_S = 0.004


@dataclass(frozen=True)
class Case:
    """``call`` runs the op once; ``bytes_moved`` and ``flops`` of one call, 0 where they say nothing."""

    name: str
    call: Callable[[], object]
    bytes_moved: int = 0
    flops: int = 0


@dataclass
class Result:
    name: str
    torch_us: float
    native_us: float
    rate: str

    @property
    def ratio(self) -> float:
        return self.torch_us / self.native_us


def noise(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(*shape) * 0.5).to(dtype)


def runs_of(rows: int, tokens: int, context: int) -> Runs:
    """``rows`` sequences with ``tokens`` new ones each, behind ``context`` that are there."""
    start, width = context, pages_for(context + tokens)
    pages = torch.randperm(rows * width).to(torch.int32).view(rows, width)
    lengths = [tokens] * rows
    return Runs(offsets=[row * tokens for row in range(rows)], starts=[start] * rows, lengths=lengths,
                slots=list(range(rows)), fresh=[False] * rows, decode_count=rows if tokens == 1 else 0,
                starts_R=torch.tensor([start] * rows), slots_R=torch.arange(rows),
                context_R=torch.tensor([start + tokens] * rows), page_table_RP=pages)


def attention_cases() -> list[Case]:
    heads, kv_heads, dim = 32, 8, 64
    cases = []
    for rows, tokens, context in ((1, 1, 4095), (32, 1, 1023), (1, 512, 0), (1, 512, 3584)):
        runs = runs_of(rows, tokens, context)
        pages = runs.page_table_RP.numel()
        k, v = (noise(pages, *shape(kv_heads, dim, BF16))
                for shape in (layout.k_block_shape, layout.v_block_shape))
        q = noise(rows * tokens, heads, dim)
        kind = "decode" if tokens == 1 else "prefill"
        seen = sum(context + i + 1 for i in range(tokens)) * rows
        cases.append(Case(f"attention {kind} {rows} x {tokens} at {context + tokens}",
                          lambda q=q, k=k, v=v, runs=runs: paged_attention(q, k, v, runs, 0.125),
                          0 if tokens > 1 else 2 * seen * kv_heads * dim * 2,
                          0 if tokens == 1 else 4 * seen * heads * dim))
    return cases


def recurrent_cases(name: str, part: tuple[int, ...], make: Callable[[int], StateCall],
                    prefill: int = 512) -> list[Case]:
    cases = []
    for rows, tokens in ((1, 1), (32, 1), (1, prefill)):
        runs, state = runs_of(rows, tokens, 64), noise(rows, *part, dtype=torch.float32)
        call = make(rows * tokens)
        cases.append(Case(f"{name} {'decode' if tokens == 1 else 'prefill'} {rows} x {tokens}",
                          lambda call=call, state=state, runs=runs: call(state, runs),
                          2 * state.numel() * 4 if tokens == 1 else 0))
    return cases


def delta(tokens: int) -> StateCall:
    q, k, v = (noise(tokens, 16, 128) for _ in range(3))
    g, beta = -noise(tokens, 16, dtype=torch.float32).abs(), torch.rand(tokens, 16)
    return lambda state, runs: gated_delta(q, k, v, g, beta, state, runs, scale=0.1)


def kimi(tokens: int) -> StateCall:
    q, k, v = (noise(tokens, 32, 128) for _ in range(3))
    g, beta = -noise(tokens, 32, 128, dtype=torch.float32).abs(), torch.rand(tokens, 32)
    return lambda state, runs: kimi_delta(q, k, v, g, beta, state, runs, scale=0.1)


def state_space2(tokens: int) -> StateCall:
    x, dt, b, c = noise(tokens, 48, 32), noise(tokens, 48), noise(tokens, 1, 128), noise(tokens, 1, 128)
    a, d, bias = (torch.rand(48) for _ in range(3))
    return lambda state, runs: mamba2(x, dt, -a, b, c, d, bias, state, runs, dt_limit=(0.0, float("inf")))


def state_space1(tokens: int) -> StateCall:
    x, dt, b, c = noise(tokens, 4096), noise(tokens, 4096), noise(tokens, 16), noise(tokens, 16)
    a, d, bias = torch.rand(4096, 16), torch.rand(4096), torch.rand(4096)
    return lambda state, runs: mamba1(x, dt, -a, b, c, d, bias, state, runs)


def conv_cases() -> list[Case]:
    cases = []
    for rows, tokens in ((1, 1), (32, 1), (1, 512)):
        runs, kind = runs_of(rows, tokens, 64), "decode" if tokens == 1 else "prefill"
        x, weight, window = noise(rows * tokens, 6144), noise(6144, 4), noise(rows, 6144, 3)
        cases.append(Case(f"conv {kind} {rows} x {tokens}",
                          lambda x=x, weight=weight, window=window, runs=runs:
                          causal_conv(x, weight, None, "silu", window, runs)))
        made, gated, short = noise(rows * tokens, 6144), noise(2048, 3), noise(rows, 2048, 2)
        cases.append(Case(f"short conv {kind} {rows} x {tokens}",
                          lambda made=made, gated=gated, short=short, runs=runs:
                          short_conv(made, gated, None, short, runs)))
    return cases


def small_cases() -> list[Case]:
    cases = []
    for tokens in (1, 32, 512):
        x, y, weight = noise(tokens, 2048), noise(tokens, 2048), noise(2048)
        q, k, gate_up = noise(tokens, 32, 64), noise(tokens, 8, 64), noise(tokens, 2 * 8192)
        angles = torch.rand(tokens, 32).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        runs = runs_of(tokens, 1, 100) if tokens < 512 else runs_of(1, tokens, 0)
        positions = torch.full((tokens,), 100) if tokens < 512 else torch.arange(tokens)
        k_pages, v_pages = (noise(runs.page_table_RP.numel(), *shape(8, 64, BF16))
                            for shape in (layout.k_block_shape, layout.v_block_shape))
        each: list[tuple[str, Callable[[], object]]] = [
            ("norm", lambda x=x, weight=weight: rms_norm(x, weight, 1e-5)),
            ("add + norm", lambda x=x, y=y, weight=weight: add_norm(x, y, weight, 1e-5)),
            ("gated norm", lambda x=x, y=y, weight=weight: rms_norm(x, weight, 1e-5, gate=y)),
            ("rotary", lambda q=q, k=k, cos=cos, sin=sin: rotary(q, k, cos, sin)),
            ("silu x up", lambda gate_up=gate_up: silu_mul(gate_up)),
            ("write k, v", lambda k=k, k_pages=k_pages, v_pages=v_pages, positions=positions, runs=runs:
             write_kv(k, k, k_pages, v_pages, positions, runs))]
        cases += [Case(f"{name} {tokens}", call) for name, call in each]
    return cases


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "attention": attention_cases, "conv": conv_cases, "small": small_cases,
    "delta": lambda: recurrent_cases("gated delta", (16, 128, 128), delta),
    "kimi": lambda: recurrent_cases("Kimi delta", (32, 128, 128), kimi, 128),
    "mamba2": lambda: recurrent_cases("Mamba-2", (48, 32, 128), state_space2),
    "mamba1": lambda: recurrent_cases("Mamba-1", (4096, 16), state_space1, 128)}


def seconds_of(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def measure(case: Case, rounds: int) -> Result:
    times: dict[str, int] = {}
    taken: dict[str, list[float]] = {"torch": [], "native": []}
    for side in ("torch", "native"):
        native.choose("torch" if side == "torch" else "native")
        case.call()
        times[side] = max(1, int(_RUN_S / seconds_of(case.call, 1)))
    for number in range(rounds):
        for side in ("torch", "native") if number % 2 else ("native", "torch"):
            native.choose("torch" if side == "torch" else "native")
            taken[side].append(seconds_of(case.call, times[side]))
    by_torch, by_native = (median(taken[side]) for side in ("torch", "native"))
    rate = ""
    if case.bytes_moved:
        rate = f"{case.bytes_moved / by_native / 1e9:.1f} GB/s"
    elif case.flops:
        rate = f"{case.flops / by_native / 1e9:.0f} GFLOP/s"
    return Result(case.name, by_torch * 1e6, by_native * 1e6, rate)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--instructions", help="one of the sets that this machine has")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    args = parser.parse_args(argv)
    native.choose("native")
    if args.instructions and not native.extension().use(args.instructions):
        parser.error(f"--instructions is {args.instructions}; this machine has "
                     f"{', '.join(native.extension().instruction_sets())}")
    torch.set_num_threads(args.threads)
    native.set_threads(args.threads)
    torch.manual_seed(0)
    facts = {"processor": processor(), "cores": usable_cores(), "threads": args.threads,
             "kernels": native.extension().instruction_set(), "torch": torch.__version__,
             "rounds": args.rounds}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'':<36}{'torch us':>12}{'native us':>12}{'ratio':>8}")
    results = []
    with torch.inference_mode():
        for group in args.only:
            for case in GROUPS[group]():
                found = measure(case, args.rounds)
                results.append(found)
                print(f"{found.name:<36}{found.torch_us:>12.1f}{found.native_us:>12.1f}{found.ratio:>8.1f}  "
                      f"{found.rate}")
    if args.json is not None:
        table = [asdict(found) for found in results]
        args.json.write_text(json.dumps({"facts": facts, "results": table}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
