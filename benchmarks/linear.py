"""Matrix products in every form that a weight can have, side by side in one run.

    python -m benchmarks.linear [--rows 1 32] [--forms tiled int8 w8a8] [--rounds 9] [--threads N]
                                [--json FILE]
    python -m benchmarks.linear --busy        one thread, its own time: for a machine that others use as well
    python -m benchmarks.linear --errors      what rounding inputs by parts of 32, 128 or whole rows does

    plain     F.linear over rows, as torch lays a weight out            packed   oneDNN's order, laid out once
    tiled     the C++ kernels over bfloat16 tiles
    int8 int4 the C++ kernels, inputs rounded to int8         exact    the same, inputs as they are
    gptq mxfp4 nvfp4 int8 rows    as checkpoints have them: 4 bits with zeros by 128 columns, 6 bits by 32 and
              by 16, 8 bits with a scale for a row (bitsandbytes, torchao)
    torchao   4 bits with an offset for 128 columns
    w8a8      int8 with inputs rounded by parts of 128 columns, not 32

Each product has so many copies of its weight that they do not stay in the caches, as the layers of a model
would not; forms take turns within a round, in another order in the next; shown are medians over the rounds.
What counts are ratios to ``packed``, the fastest of torch's own products, or to the first of ``--forms``. The
matrices are those of LFM2-350M (gate and up, down, a convolution's input), and a larger one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from weft.host import cpu_name_and_flags, usable_cores
from weft.tensor import native
from weft.tensor.ops.linear import weight_product
from weft.tensor.weights.quantized import E2M1, BlockNumbers, Codes, in_tiles
from weft.tensor.weights.rounded import rounded
from weft.tensor.weights.tiles import rows_of, tiled, to_twelve_bit

SHAPES = ((9216, 1024), (1024, 4608), (3072, 1024), (8192, 2048))
ROWS = (1, 2, 4, 8, 16, 32, 256, 1024)
_COPIES_BYTES = 1 << 27
_ROWS_EXPECTED = 16  # for which oneDNN chooses its order
Product = Callable[[torch.Tensor], object]


@dataclass
class Result:
    """``milliseconds`` of one product, by form; ``weight_gb_s``: bytes of the weight over that time."""

    out: int
    columns: int
    rows: int
    milliseconds: dict[str, float]
    weight_gb_s: dict[str, float]


def forms_of(out: int, columns: int) -> dict[str, tuple[int, list[Product]]]:
    """Form -> bytes of one weight, and the product with each copy."""
    base = torch.randn(out, columns)
    copies = max(2, _COPIES_BYTES // (2 * out * columns))
    plain = [base.bfloat16() for _ in range(copies)]
    found: dict[str, tuple[int, list[Product]]] = {
        "plain": (2 * out * columns, [lambda x, w=w: F.linear(x, w) for w in plain])
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        ordered = [torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_EXPECTED) for weight in plain]
        found["packed"] = (
            2 * out * columns,
            [lambda x, w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in ordered],
        )
    tiles = [made for weight in plain if (made := tiled(weight)) is not None]
    if tiles:
        found["tiled"] = (tiles[0].nbytes, [lambda x, w=w: weight_product(x, w) for w in tiles])
        less = [made for weight in plain if tiles and (made := to_twelve_bit((rows_of(weight),))) is not None]
        if less:
            found["twelve_bit"] = (less[0].nbytes, [lambda x, w=w: weight_product(x, w) for w in less])
    for bits in (8, 4):
        codes = rounded(base, bits)
        for name, exact in ((f"int{bits}", False), (f"int{bits} exact", True)):
            weights = [replace(in_tiles(codes), exact=exact) for _ in range(copies)]
            found[name] = (weights[0].nbytes, [lambda x, w=w: weight_product(x, w) for w in weights])
    for name, stored in forms_of_files(out, columns).items():
        weights = [in_tiles(stored) for _ in range(copies)]
        found[name] = (weights[0].nbytes, [lambda x, w=w: weight_product(x, w) for w in weights])
    both = [in_tiles(rounded(base, 8), byte_inputs=True) for _ in range(copies)]
    found["w8a8"] = (both[0].nbytes, [lambda x, w=w: weight_product(x, w) for w in both])
    return found


def forms_of_files(out: int, columns: int) -> dict[str, Codes]:
    """As checkpoints of other tools come, with codes at random."""

    def codes(least: int, most: int) -> torch.Tensor:
        return torch.randint(least, most, (out, columns), dtype=torch.uint8)

    def scales(group: int) -> torch.Tensor:
        return torch.rand(out, columns // group) / columns

    zeros = torch.randint(6, 10, (out, columns // 128), dtype=torch.uint8)
    table = torch.tensor([value + 128 for value in E2M1], dtype=torch.uint8)
    powers = torch.randint(115, 121, (out, columns // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    small = torch.rand(out, columns // 16).mul_(448).to(torch.float8_e4m3fn)

    def float4(numbers: torch.Tensor, group: int) -> Codes:
        shared = torch.full((out, 1), 0.5 if group == 32 else 1e-4)
        return Codes(4, codes(0, 16), BlockNumbers(numbers, shared), None, group, table=table)

    return {
        "gptq": Codes(4, codes(0, 16), scales(128).half().float(), zeros, 128),
        "mxfp4": float4(powers, 32),
        "nvfp4": float4(small, 16),
        "torchao": Codes(
            4, codes(0, 16), scales(128).half().float(), None, 128, minimums=scales(128).half().float() * 8, signed=True
        ),
        "int8 rows": Codes(8, codes(0, 255), scales(columns), None, columns),
    }


def measure(
    out: int,
    columns: int,
    rows: int,
    forms: dict[str, tuple[int, list[Product]]],
    rounds: int,
    clock: Callable[[], float],
) -> Result:
    x = torch.randn(rows, columns).bfloat16()
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        names = list(forms)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            products = forms[name][1] if rows <= 32 else forms[name][1][:1]
            begin = clock()
            for product in products:
                product(x)
            seconds = (clock() - begin) / len(products)
            if number:  # the first round warms up
                taken[name].append(seconds)
    middle = {name: median(seconds) for name, seconds in taken.items()}
    return Result(
        out,
        columns,
        rows,
        {name: seconds * 1e3 for name, seconds in middle.items()},
        {name: forms[name][0] / seconds / 1e9 for name, seconds in middle.items()},
    )


def print_errors() -> None:
    """Of a product of 2,048 columns: the error's spread over the product's own."""
    columns = 2048
    weight = torch.randn(512, columns)
    values = rounded(weight, 8).dense()
    x = torch.randn(64, columns)
    wide = torch.where(torch.arange(columns) % 512 == 7, 30.0, 1.0)
    kinds = {"normal": x, "silu(gate) x up": F.silu(2 * x) * torch.randn_like(x), "one of 512 columns x 30": x * wide}
    print(f"{'inputs':<26}" + "".join(f"{name:>12}" for name in ("as they are", "32", "128", "rows")))
    for name, values_TC in kinds.items():
        truth = values_TC @ weight.T
        made = [values_TC]
        for part in (32, 128, columns):
            parts = values_TC.view(values_TC.shape[0], -1, part)
            scales = parts.abs().amax(-1, keepdim=True) / 127
            made.append(((parts / scales).round() * scales).flatten(1))
        errors = [float((inputs @ values.T - truth).std() / truth.std()) for inputs in made]
        print(f"{name:<26}" + "".join(f"{error:>12.2%}" for error in errors))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--forms", nargs="+", help="these alone; the first is what others are compared with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--kernels", help="an instruction set in place of the best one, such as portable")
    args = parser.parse_args(argv)
    if args.busy:
        args.threads = 1
    torch.set_num_threads(args.threads)
    if args.kernels is not None:
        native.extension().use(args.kernels)
    native.set_threads(args.threads)
    torch.manual_seed(0)
    if args.errors:
        print_errors()
        return 0
    facts = {
        "processor": cpu_name_and_flags()[0],
        "threads": args.threads,
        "kernels": native.describe(),
        "torch": torch.__version__,
        "rounds": args.rounds,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    clock = time.thread_time if args.busy else time.perf_counter
    results = []
    with torch.inference_mode():
        for out, columns in SHAPES:
            forms = forms_of(out, columns)
            base = "packed" if "packed" in forms else "plain"
            if args.forms:
                forms = {name: forms[name] for name in args.forms if name in forms}
                base = next(iter(forms))
            last = next(reversed(forms))
            print(f"\n{out} x {columns}, times as fast as {base}")
            print(
                f"{'rows':>6}{base + ' ms':>12}"
                + "".join(f"{name:>12}" for name in forms if name != base)
                + f"{last + ' GB/s':>16}"
            )
            for rows in args.rows:
                found = measure(out, columns, rows, forms, args.rounds, clock)
                results.append(found)
                took = found.milliseconds
                print(
                    f"{rows:>6}{took[base]:>12.3f}"
                    + "".join(f"{took[base] / took[name]:>12.2f}" for name in forms if name != base)
                    + f"{found.weight_gb_s[last]:>16.1f}",
                    flush=True,
                )
    if args.json is not None:
        table = [asdict(found) for found in results]
        args.json.write_text(json.dumps({"facts": facts, "results": table}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
