"""``weft bench``: a group whose commands are imported when they are asked for, as the verbs are."""

from __future__ import annotations

import difflib
import importlib

import click

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("weft.cli.bench_serve", "Load on a running server: throughput, TTFT, TPOT, ITL, goodput."),
    "latency": ("weft.cli.bench_offline", "Seconds for one batch, without a server."),
    "throughput": ("weft.cli.bench_offline", "Requests and tokens per second for many prompts, no server."),
    "kernels": ("weft.cli.bench_kernels", "Each kernel beside torch and the machine's ceiling."),
}


class Benches(click.Group):
    """Each module has its command under its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean `weft bench {near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"weft bench has no '{cmd_name}'; {hint}", ctx)
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, sentence) for name, (_, sentence) in COMMANDS.items()])


@click.group("bench", cls=Benches)
def command() -> None:
    """Measure kernels, the engine or a server, here and now. Flags and results have the field's names."""
