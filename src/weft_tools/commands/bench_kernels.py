"""``weft bench kernels``: ``weft_tools.bench.kernels`` as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import COUNT_MAX, Count, FlagCommand
from weft.config import STEP_TOKENS_MAX, THREADS_MAX
from weft.errors import ConfigError
from weft.units import TOKENS_MAX

if TYPE_CHECKING:
    from weft_tools.bench.kernels import Cases, Result

GROUPS = ("attention", "delta", "mamba2", "mamba1", "conv", "experts")
MOVED_GROUPS = ("small", "memory")
"""Groups for developers, which ``benchmarks.kernels`` measures."""
GEOMETRIES = ("Qwen3.5-4B", "granite-4.0-h-micro", "LFM2-1.2B")

_PARAMS: list[click.Parameter] = [
    click.Option(["--device"], type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
                 help="Device; auto is a GPU if there is one."),
    click.Option(["--geometry", "geometries"], multiple=True, default=GEOMETRIES, show_default=True,
                 help="Model of `weft plan`'s table whose layers are measured; may be given several times."),
    click.Option(["--dtype"], type=click.Choice(["bfloat16", "float32"]), default="bfloat16",
                 show_default=True, help="Dtype of weights, KV and activations; states are float32."),
    click.Option(["--batch-size", "decode_rows"], type=Count(1, STEP_TOKENS_MAX), multiple=True,
                 help="Sequences of a decode; may be given several times. Default: 1, 32; on a GPU 1, 16, "
                      "64, 256."),
    click.Option(["--prefill-len", "prefill_tokens"], type=Count(2, STEP_TOKENS_MAX), multiple=True,
                 help="Tokens of a prefill; may be given several times. Default: 512; on a GPU 8192."),
    click.Option(["--context-len", "context"], type=Count(2, TOKENS_MAX),
                 help="Context of a decode. Default: 1024; on a GPU 2048."),
    click.Option(["--rounds"], type=Count(1, COUNT_MAX), default=5, show_default=True,
                 help="Measurements of each side; medians are shown."),
    click.Option(["--threads"], type=Count(1, THREADS_MAX), help="CPU threads; default: all cores."),
    click.Option(["--instructions"], help="Set of CPU instructions, such as portable; default: the best."),
    click.Option(["--output-json"], type=click.Path(path_type=Path, dir_okay=False),
                 help="Write facts and results to this file."),
]  # fmt: skip


def _kernels(
    device: str,
    geometries: tuple[str, ...],
    groups: tuple[str, ...],
    dtype: str,
    decode_rows: tuple[int, ...],
    prefill_tokens: tuple[int, ...],
    context: int | None,
    rounds: int,
    threads: int | None,
    instructions: str | None,
    output_json: Path | None,
    cases: Cases | None = None,
    rivals: Callable[..., dict[str, Any]] | None = None,
) -> int:
    """Time each kernel on real layer shapes: own kernels compared with torch, and with the machine's ceiling.

    "of ceiling" is a least time divided by the kernel's time. The least time is that of the call's bytes and
    arithmetic at the copy bandwidth and matrix rate measured in this run.
    """
    import torch

    from weft_tools.bench import kernels as kernel_bench
    from weft_tools.bench import report
    from weft_tools.bench.machine import measure_ceiling

    report.check_writable(output_json, "--output-json")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    bench = kernel_bench.bench_of(device, dtype, decode_rows, prefill_tokens, context)
    if rivals is not None:
        bench = replace(bench, rivals=rivals)
    sides = kernel_bench.sides_of(bench.device)
    _set_up_cpu(threads, instructions)
    ceiling = measure_ceiling(bench.device, bench.dtype)
    facts = kernel_bench.facts_of(bench, sides, ceiling, rounds)
    click.echo(
        f"{facts['device']}, kernels {facts['kernels']}, torch {facts['torch']}, "
        f"{facts['threads']} threads, {facts['dtype']}\n"
        f"ceiling: copies {facts['copy_gb_per_s']:,.1f} GB/s, products "
        f"{facts['matrix_tflop_per_s']:,.2f} TFLOP/s"
    )
    click.echo(
        f"{'':<38}{sides.own + ' us':>12}{'torch us':>12}{'ratio':>8}{'GB/s':>9}{'GFLOP/s':>10}{'of ceiling':>12}"
    )
    results: list[Result] = []
    for result in kernel_bench.run(bench, sides, ceiling, geometries, groups, rounds, cases):
        if not results or results[-1].geometry != result.geometry:
            click.secho(result.geometry, bold=True)
        click.echo(_line(result, sides.own))
        results.append(result)
    if output_json is not None:
        report.write(output_json, kernel_bench.to_json(facts, results))
    return 0


class GroupChoice(click.Choice[str]):
    """A choice whose error says where the other groups are measured."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in MOVED_GROUPS and value not in self.choices:
            self.fail(f"{value} is measured in a checkout: python -m benchmarks.kernels --only {value}", param, ctx)
        return super().convert(value, param, ctx)


def kernels_command(
    groups: tuple[str, ...], cases: Cases | None = None, rivals: Callable[..., dict[str, Any]] | None = None
) -> click.Command:
    """Return the command. ``groups``: values of ``--only``; ``cases`` and ``rivals``: as in
    ``weft_tools.bench.kernels``."""
    only = click.Option(
        ["--only", "groups"],
        type=GroupChoice(groups),
        multiple=True,
        default=groups,
        show_default=True,
        help="Group of kernels; may be given several times. More in a checkout: `python -m benchmarks.kernels`.",
    )
    return FlagCommand(
        "kernels",
        params=[*_PARAMS, only],
        help=_kernels.__doc__,
        callback=partial(_kernels, cases=cases, rivals=rivals),
    )


def _set_up_cpu(threads: int | None, instructions: str | None) -> None:
    import torch

    from weft.host import usable_cores
    from weft.tensor import native

    torch.set_num_threads(threads or usable_cores())
    native.set_threads(threads or usable_cores())
    if instructions is not None and not native.extension().use(instructions):
        raise ConfigError(
            f"--instructions is {instructions}; this machine has {', '.join(native.extension().instruction_sets())}",
            param="--instructions",
        )


def _line(result: Result, own: str) -> str:
    own_s, torch_s = result.seconds[own], result.seconds["torch"]
    rates = ["", ""]
    if own_s is not None:
        rates = [
            f"{result.bytes_moved / own_s / 1e9:,.1f}" if result.bytes_moved else "",
            f"{result.flops / own_s / 1e9:,.0f}" if result.flops else "",
        ]
    ratio = f"{torch_s / own_s:.1f}" if own_s and torch_s else ""
    share = "" if result.ceiling_share is None else f"{result.ceiling_share:.0%}"
    line = f"  {result.name:<36}{_us(own_s):>12}{_us(torch_s):>12}{ratio:>8}{rates[0]:>9}{rates[1]:>10}{share:>12}"
    rivals: dict[str, Any] = {side: seconds for side, seconds in result.seconds.items() if side not in (own, "torch")}
    said = [f"{side} {_us(seconds)} us" for side, seconds in rivals.items() if seconds is not None]
    said += [f"{side}: {why}" for side, why in result.refusals.items()]
    return line + ("  " + "; ".join(said) if said else "")


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.1f}"


kernels = kernels_command(GROUPS)
