"""``weft bench``: a group whose commands are imported at their first use, like the verbs."""

from __future__ import annotations

import click

from weft.cli.main import CommandGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("weft_tools.commands.bench_serve", "Load on a running server: throughput, TTFT, TPOT, ITL, goodput."),
    "grid": ("weft_tools.commands.bench_grid", "Streams, prompts and second turns of any server, as one table."),
    "latency": ("weft_tools.commands.bench_offline", "Seconds for one batch, without a server."),
    "throughput": ("weft_tools.commands.bench_offline", "Requests and tokens per second for many prompts, no server."),
    "kernels": ("weft_tools.commands.bench_kernels", "Each kernel compared with torch and the machine's ceiling."),
}


@click.group("bench", cls=CommandGroup, table=COMMANDS)
def command() -> None:
    """Measure kernels, the engine or a server. Flags and results have the names of other engines' benchmarks."""
