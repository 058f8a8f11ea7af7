"""The ``weft`` command: the table of verbs, and the form of failures.

`weft --help` must feel instant, so this file imports click and nothing else, and a verb's module is imported
when that verb runs. Failures end here, in one line on stderr and never in a traceback:

    UserError, a bad flag     exit code 2     the user can change it
    other WeftError           exit code 1     the engine or the machine failed
    Ctrl-C                    exit code 130
    anything else             a bug: the traceback is printed
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from weft.errors import UserError, WeftError
from weft.foreign import FOREIGN_VERBS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

VERBS: dict[str, tuple[str, str]] = {
    "serve": ("weft.cli.serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "join": ("weft.cli.join", "Serve with this machine for a `weft serve` elsewhere."),
    "generate": ("weft.cli.generate", "Complete a prompt (argument or pipe) and stream the text."),
    "chat": ("weft.cli.chat", "Talk to a model in the terminal, or to a running server with --url."),
    "run": ("weft.cli.chat", "Fetch a model if it is not here, serve it and talk to it in the terminal."),
    "embed": ("weft.cli.embed", "Print the embeddings of texts, or rank them by a query."),
    "batch": ("weft.cli.batch", "Answer a file of requests (OpenAI's batch lines) without a server."),
    "plan": ("weft.cli.plan", "Show a model's use of a device's memory, and the requests that then fit."),
    "pull": ("weft.cli.models", "Fetch models from the hub to this machine's disk."),
    "list": ("weft.cli.models", "List the models on this machine's disk."),
    "rm": ("weft.cli.models", "Remove models from this machine's disk."),
    "ps": ("weft.cli.ps", "List the servers of this machine and their models in memory."),
    "top": ("weft.cli.top", "Watch a running server: requests, memory, savings of its prefix cache."),
    "drain": ("weft.cli.drain", "Take a replica of a running server out of service, or restart it."),
    "doctor": ("weft.cli.doctor", "Show this machine's hardware and builds, and ways to make it faster."),
    "store": ("weft.cli.store", "Look into a store of prefixes, check it, give space back."),
    "config": ("weft.cli.config", "Show the settings of `weft serve`, or an example of its config file."),
    "completion": ("weft.cli.config", "Print the completion of `weft` for bash, zsh or fish."),
    "version": ("weft.cli.version", "Print the versions of weft, Python and torch."),
}

COMMANDS_GROUP = "weft.commands"
"""Entry points of packages that add verbs: each names a table such as VERBS. ``weft_tools`` is one of them."""
_WIDE = 10_000
"""Columns off a terminal. Tables use only the columns that their cells need."""
_SCREEN_COLUMNS = 80
"""Least columns of a screen off a terminal: COLUMNS may be the width of another window."""
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130


class CommandGroup(click.Group):
    """A group of commands. ``table``: name -> (module, sentence) of commands that are imported at their first use.
    ``added``: the entry point group of further tables, read only for other names and for help: the scan of installed
    packages takes longer than ``weft --version``. Help has the complete first sentence of each command, which click's
    own help cuts off."""

    def __init__(
        self, *args: Any, table: Mapping[str, tuple[str, str]] | None = None, added: str | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._own = dict(table or {})
        self._added = added

    @cached_property
    def _table(self) -> Mapping[str, tuple[str, str]]:
        return self._own if self._added is None else {**self._own, **added_commands(self._added), **self._own}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._table, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        table = self._own if cmd_name in self._own else self._table
        if cmd_name not in table:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(table[cmd_name][0])
        command = getattr(module, cmd_name, None) or module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in self._own:
            known = self.list_commands(ctx)
            if args[0] not in known:
                raise click.UsageError(unknown_command(ctx.command_path, args[0], known), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, sentence) for name, (_, sentence) in self._table.items()]
        rows += [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def added_commands(group: str) -> dict[str, tuple[str, str]]:
    """Return the tables of all installed packages that declare the entry point ``group``; raise UserError that names
    the package whose table cannot be imported."""
    from importlib.metadata import entry_points

    commands: dict[str, tuple[str, str]] = {}
    for point in entry_points(group=group):
        try:
            commands |= point.load()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            package = point.dist.name if point.dist else "an unknown package"
            raise UserError(f"commands of {package} ({group}: {point.value}) cannot be imported: {error}") from error
    return commands


def unknown_command(path: str, name: str, known: Sequence[str]) -> str:
    """Return one sentence for a command that ``path`` does not have, with the command to type instead."""
    foreign = FOREIGN_VERBS.get(name) if path == "weft" else None
    if foreign is not None:
        return f"weft has no '{name}': {foreign}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean `{path} {near[0]}`?" if near else f"the commands are {', '.join(known)}"
    return f"{path} has no command '{name}'; {hint}"


@click.group(
    cls=CommandGroup,
    table=VERBS,
    added=COMMANDS_GROUP,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="First steps: `weft serve`, then open another terminal and `weft chat --url http://127.0.0.1:8000`.",
)
@click.option("--version", is_flag=True, help="Print the version and exit.")
@click.pass_context
def cli(ctx: click.Context, version: bool) -> None:
    """Serve hybrid language models: attention and recurrent state in one exact memory."""
    if version:
        from weft.version import weft_version

        click.echo(f"weft {weft_version()}")
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def say_error(message: str) -> None:
    """Print a message as one line on stderr; a failed start of the server prints the same line."""
    click.secho("error: ", nl=False, err=True, fg="red", bold=True)
    click.echo(" ".join(message.split()), err=True)


def table_of(left: Iterable[str], right: Iterable[str] = (), **settings: Any) -> Table:
    """Return a table without lines: columns of words, then columns of figures. ``settings``: of rich's ``Table``."""
    from rich.table import Table

    table = Table(**{"box": None, "padding": (0, 2, 0, 0), "title_justify": "left", "title_style": "bold", **settings})
    for title in left:
        table.add_column(title, no_wrap=True)
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print ``table`` as wide as the terminal; in a pipe or a file, as wide as its cells, which are then never cut."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(table, soft_wrap=True)


def screen_console(**settings: Any) -> Console:
    """Return a console for a screen of words, bars and tables, which needs 80 columns."""
    from rich.console import Console

    console = Console(**settings)
    if not console.is_terminal:
        console.width = max(console.width, _SCREEN_COLUMNS)
    return console


@contextmanager
def progress_bar(what: str, *, as_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr, only on a terminal. Call the result with the amount done, the total, and a text."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    counts = (DownloadColumn(), TransferSpeedColumn()) if as_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn(what), BarColumn(), *counts, TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, words: str = "") -> None:
            bar.update(task, completed=done, total=total, description=words)

        yield show


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code."""
    try:
        result = cli.main(args=None if argv is None else list(argv), prog_name="weft", standalone_mode=False)
    except click.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:  # `weft eval`
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        say_error(error.format_message())
        return EXIT_USER
    except WeftError as error:
        say_error(error.message)
        return EXIT_USER if isinstance(error, UserError) else EXIT_FAILED
    except BrokenPipeError:
        # `weft generate | head`: the reader has left. Redirect stdout, so that the interpreter's flush at exit does not
        # fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0
