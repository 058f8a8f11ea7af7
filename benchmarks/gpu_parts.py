"""What ``gpu_first_run`` measures, part by part, each in a process of its own.

    python -m benchmarks.gpu_parts PART [--after N] [...]      lines of "@{json}", one for each result

Results are printed as they come, so a part that is ended early has reported them. Parts that go over kernels
print the name of each kernel before they try it. If a kernel ends the process, the part is started again
behind it (``--after``): an invalid address fails every later call on a GPU.

    machine   GPU, driver, torch, Triton, and what else is not installed
    check     each kernel's first call beside torch's on the same numbers: the largest difference
    kernels   times, bytes, FLOPs, share of the ceiling measured in this run, torch and rivals beside it
    decode    a model of random weights: milliseconds of a step by batch, with graphs and without, with
              overlap, beside the time in which its bytes could be moved; what waits for the device in a step
    profile   where the time of a step is, by kernel
    drafts    a step that verifies 1 to 15 drafts, and one to three drafts of the model's own head, beside plain steps:
              both loops, graphs
    small     decode steps with joined kernels and with separate ones: the milliseconds of each
    nccl      a sum over a group of one rank, launched and in a graph: it shows that NCCL is captured, and no exchange
    families  small models with attention sinks, rings, a tower of pictures, adapters: they start, answer with
              graphs as without, and as torch's operators do (``gpu_families``)

Only torch, Triton and numpy have to be there (``bare_machine``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from typing import Any

from benchmarks.bare_machine import with_stand_ins

Found = dict[str, Any]
GEOMETRIES = ("Qwen3.5-4B", "Nemotron-H-8B", "LFM2-1.2B", "AI21-Jamba-1.5-Mini", "Qwen3-Next-80B-A3B")
"""Attention with gated delta, Mamba-2, short convolution, Mamba-1, experts; those that `weft plan` knows."""
SUMMED_ROWS, SUMS = (1, 16, 256), 20
"""Rows of 4,096 numbers, and how many sums of them are timed."""
POISONED = 3
"""Exit code of a part that cannot go on in this process."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--after", type=int, default=0, help="cases to leave out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometry", default="Qwen3.5-4B", help="of `weft plan`'s table")
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a look at a small machine")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--geometries", nargs="+", default=GEOMETRIES, help="of check and kernels")
    parser.add_argument("--groups", nargs="+", default=(), help="of check and kernels; all by default")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.absent = with_stand_ins()
    for found in PARTS[args.part](args):
        print("@" + json.dumps(found), flush=True)
    return 0


def machine(args: argparse.Namespace) -> Iterator[Found]:
    import platform

    import torch

    from weft.tensor import gpu, native

    found: Found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "triton": None,
        "absent": args.absent,
        "cpp_kernels": native.in_use(),
    }
    if gpu.INSTALLED:
        import triton

        found["triton"] = triton.__version__
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(args.device)
        found |= {
            "gpu": of.name,
            "capability": [of.major, of.minor],
            "memory_bytes": of.total_memory,
            "multiprocessors": of.multi_processor_count,
            "free_bytes": torch.cuda.mem_get_info(args.device)[0],
        }
    yield found


def check(args: argparse.Namespace) -> Iterator[Found]:
    import torch

    from weft_tools.bench.kernels import Bench

    device = chosen(args)
    bench = Bench(device, torch.bfloat16, (1, 5), (200,), 300)

    def compared(own: Callable[[], object], twin: Callable[[], object]) -> Found:
        choose_side(device, "own")
        mine = tensors_of(own())
        choose_side(device, "torch")
        theirs = tensors_of(twin())
        gaps = [
            float((a.float() - b.float()).abs().max()) if a.numel() else 0.0 for a, b in zip(mine, theirs, strict=True)
        ]
        sizes = [float(b.float().abs().max()) if b.numel() else 0.0 for b in theirs]
        return {
            "largest_gap": max(gaps, default=0.0),
            "largest_number": max(sizes, default=0.0),
            "finite": all(math.isfinite(gap) for gap in gaps),
        }

    # The same seed twice, so that each side has states of its own to write into.
    for number, name, own, twin in pairs(bench, args):
        yield from guarded(number, name, device, lambda own=own, twin=twin: compared(own, twin))


def kernels(args: argparse.Namespace) -> Iterator[Found]:
    import torch

    from benchmarks.gpu_first_run import RIVALS
    from benchmarks.kernels import installed, rivals_of
    from weft_tools.bench.kernels import Bench, measure, sides_of
    from weft_tools.bench.machine import measure_ceiling

    device = chosen(args)
    on_gpu = device.type == "cuda"
    bench = Bench(device, torch.bfloat16, tuple(args.batch), (args.prefill,), args.context, rivals_of)
    ceiling = measure_ceiling(device, bench.dtype)
    yield {
        "copy_bytes_per_s": ceiling.copy_bytes_per_s,
        "matrix_flops_per_s": ceiling.matrix_flops_per_s,
        "rivals": [name for name in RIVALS if installed(name)],
    }
    sides = sides_of(device)

    def measured(geometry: str, case: Any) -> Found:
        result = measure(geometry, case, bench, sides, ceiling, 3 if on_gpu else 1)
        return {
            "seconds": result.seconds,
            "bytes": result.bytes_moved,
            "flops": result.flops,
            "of_ceiling": result.ceiling_share,
            "refusals": result.refusals,
        }

    with torch.inference_mode():
        for number, geometry, case in cases(bench, args):
            yield from guarded(
                number,
                f"{geometry}: {case.name}",
                device,
                lambda geometry=geometry, case=case: measured(geometry, case),
            )


def cases(bench: Any, args: argparse.Namespace) -> Iterator[tuple[int, str, Any]]:
    """(number, geometry, case), the first ``args.after`` left out. Cases that cannot even be made (memory) are one
    that says so, and the next group has its turn."""
    from benchmarks.kernels import GROUPS, cases_of
    from weft.families import read_architecture
    from weft.planning.geometries import find_geometry
    from weft_tools.bench.kernels import Case

    def refused(error: Exception) -> Callable[[], object]:
        said = f"{type(error).__name__}: {error}"

        def call() -> object:
            raise RuntimeError(said)

        return call

    def all_of_them() -> Iterator[tuple[str, Any]]:
        for name, group in product(args.geometries, args.groups or GROUPS):
            geometry = find_geometry(name)
            assert geometry is not None
            try:
                for case in cases_of(read_architecture(geometry.config), bench, (group,)):
                    yield name, case
            except Exception as error:  # whatever it is, the others have their turn
                yield name, Case(group, refused(error))

    for number, (name, case) in islice(enumerate(all_of_them()), args.after, None):
        yield number, name, case


def pairs(
    bench: Any, args: argparse.Namespace
) -> Iterator[tuple[int, str, Callable[[], object], Callable[[], object]]]:
    """Each case twice, of the same numbers."""
    import torch

    with torch.inference_mode():
        first, second = cases(bench, args), cases(bench, args)
        while True:
            before = torch.random.get_rng_state()
            on_device = torch.cuda.get_rng_state(bench.device) if bench.device.type == "cuda" else None
            one = next(first, None)
            if one is None:
                return
            torch.random.set_rng_state(before)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, bench.device)
            other = next(second)
            yield one[0], f"{one[1]}: {one[2].name}", one[2].call, other[2].call


def guarded(number: int, name: str, device: Any, call: Callable[[], Found]) -> Iterator[Found]:
    """What ``call`` found, or why not. Ends the process where the device answers no more."""
    import torch

    yield {"number": number, "begins": name}
    try:
        found = call()
    except Exception as error:  # whatever it is, the next kernel has its turn
        found = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
    yield {"number": number, "name": name, **found}
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            sys.exit(POISONED)


def chosen(args: argparse.Namespace) -> Any:
    from weft.tensor.device import choose_device

    return choose_device(args.device)


def choose_side(device: Any, side: str) -> None:
    from weft.tensor import gpu, native

    if device.type == "cuda":
        gpu.choose("torch" if side == "torch" else "triton")
    else:
        native.choose("torch" if side == "torch" else "auto")


def tensors_of(made: object) -> list[Any]:
    import torch

    if isinstance(made, torch.Tensor):
        return [made]
    return [one for one in made if isinstance(one, torch.Tensor)] if isinstance(made, tuple | list) else []


def decode(args: argparse.Namespace) -> Iterator[Found]:
    from benchmarks.gpu_decode import decode_steps, prompt_steps

    yield from decode_steps(args, chosen(args))
    yield from prompt_steps(args, chosen(args))


def profile(args: argparse.Namespace) -> Iterator[Found]:
    from benchmarks.gpu_decode import profiles

    yield from profiles(args, chosen(args))


def drafts(args: argparse.Namespace) -> Iterator[Found]:
    from benchmarks.gpu_decode import draft_steps

    yield from draft_steps(args, chosen(args))


def small(args: argparse.Namespace) -> Iterator[Found]:
    from benchmarks.gpu_decode import small_kernels

    yield from small_kernels(args, chosen(args))


def nccl(args: argparse.Namespace) -> Iterator[Found]:
    """Of each number of rows: microseconds of a sum, launched and recorded, and whether both give the right bits."""
    import tempfile
    from pathlib import Path

    import torch

    from benchmarks.gpu_decode import now
    from weft.runner.graphs import CudaCapture
    from weft.tensor.collectives import GroupCollectives

    device = chosen(args)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        group = GroupCollectives.open(Path(folder), 0, 1, device, 60.0)
        for rows in SUMMED_ROWS:
            x = torch.randn(rows, 4096, device=device).bfloat16()
            ways: dict[str, Callable[[], Any]] = {"launched": lambda x=x: group.add(x)}
            if device.type == "cuda":
                ways["recorded"] = CudaCapture(device).capture(ways["launched"])
            found: Found = {"rows": rows}
            for way, call in ways.items():
                found[f"{way}_is_right"] = torch.equal(call(), x)
                began_s = now(device)
                for _ in range(SUMS):
                    call()
                found[f"{way}_us"] = (now(device) - began_s) / SUMS * 1e6
            yield found


def families(args: argparse.Namespace) -> Iterator[Found]:
    from benchmarks.gpu_families import cases

    device = chosen(args)
    for number, (name, call) in islice(enumerate(cases(device)), args.after, None):
        yield from guarded(number, name, device, call)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Found]]] = {
    "machine": machine,
    "check": check,
    "kernels": kernels,
    "decode": decode,
    "profile": profile,
    "drafts": drafts,
    "small": small,
    "nccl": nccl,
    "families": families,
}


if __name__ == "__main__":
    raise SystemExit(main())
