"""Each kernel beside torch and beside the machine's own ceiling, in one run.

    ceiling     copy bandwidth, matrix rate                                 (measured)
    round 1     own  torch  rivals        every side had one uncounted call; the order rotates;
    round 2     torch  rivals  own        a sample is as many calls as fill some milliseconds;
    ...                                   medians over the rounds
    share       (the least time at the ceiling) / (own time)

"Own" is Triton on a GPU and C++ on a CPU, "torch" the same op by the torch path on the same numbers. A share
above 1 on a CPU means that the data lay in a cache, unlike the copy's.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weft.bench.kernel_cases import Bench, Call, Case, cases_of
from weft.bench.machine import Ceiling, seconds_of
from weft.bench.report import facts as now
from weft.errors import ConfigError
from weft.families import read_architecture
from weft.host import usable_cores
from weft.planning.geometries import find_geometry, near_names
from weft.tensor import gpu, native

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_RUN_S = 0.004
_CALLS_MAX = 1000


@dataclass(slots=True)
class Result:
    """Seconds of one call by side; None for a side that refused, and ``refusals`` has its reason."""

    geometry: str
    name: str
    seconds: dict[str, float | None]
    bytes_moved: int
    flops: int
    ceiling_share: float | None
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sides:
    """``own``: the name of our side; ``choose(side)``: makes the process compute with it, or with "torch"."""

    own: str
    choose: Callable[[str], None]


def bench_of(device_name: str, dtype: str, decode_rows: tuple[int, ...], prefill_tokens: tuple[int, ...],
             context: int | None) -> Bench:
    """Sizes that are not given default to the device's. Raises ConfigError for a missing device."""
    if device_name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, and torch sees no CUDA device here; use --device cpu",
                          param="--device")
    device = torch.device(device_name)
    on_gpu = device.type == "cuda"
    return Bench(device, DTYPES[dtype], decode_rows or ((1, 16, 64, 256) if on_gpu else (1, 32)),
                 prefill_tokens or ((8192,) if on_gpu else (512,)), context or (2048 if on_gpu else 1024))


def sides_of(device: torch.device) -> Sides:
    """Raises ConfigError where the device's own kernels are not available."""
    if device.type == "cuda":
        gpu.choose("triton")
        return Sides("triton", lambda side: gpu.choose("torch" if side == "torch" else "triton"))
    native.choose("native")
    return Sides("native", lambda side: native.choose("torch" if side == "torch" else "native"))


def run(bench: Bench, sides: Sides, ceiling: Ceiling, geometries: Iterable[str], groups: tuple[str, ...],
        rounds: int) -> Iterator[Result]:
    """Yields each result when it is measured. Raises ConfigError for an unknown geometry."""
    known = {name: _architecture(name) for name in geometries}
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, architecture in known.items():
            for case in cases_of(architecture, bench, groups):
                yield measure(name, case, bench, sides, ceiling, rounds)


def _architecture(name: str) -> Any:
    geometry = find_geometry(name)
    if geometry is None:
        near = ", ".join(near_names(name)) or "none"
        raise ConfigError(f"--geometry is {name!r}, which is not in weft's table of models; near are {near}",
                          param="--geometry")
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
    return Result(geometry, case.name, seconds, case.bytes_moved, case.flops,
                  least_s / own_s if own_s else None, refusals)


def facts_of(bench: Bench, sides: Sides, ceiling: Ceiling, rounds: int) -> dict[str, Any]:
    """The circumstances of a figure."""
    on_gpu = bench.device.type == "cuda"
    return {"device": torch.cuda.get_device_name(bench.device) if on_gpu else processor(),
            "cores": usable_cores(), "threads": torch.get_num_threads(), "torch": torch.__version__,
            "kernels": sides.own if on_gpu else native.describe(), "dtype": str(bench.dtype)[6:],
            "rounds": rounds, "copy_gb_per_s": ceiling.copy_bytes_per_s / 1e9,
            "matrix_tflop_per_s": ceiling.matrix_flops_per_s / 1e12}


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def to_json(facts: dict[str, Any], results: Iterable[Result]) -> dict[str, Any]:
    return {"facts": {**now(), **facts}, "results": [asdict(result) for result in results]}

