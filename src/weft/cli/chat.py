"""``weft chat`` and ``weft run``: a conversation in the terminal, streamed.

``--url`` names a running server, otherwise one is started for as long as the chat lasts (``own_server``). ``weft run
NAME`` pulls a model that this machine does not have, then chats: as users of Ollama expect. ``cli.conversation`` has
turns and commands.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from weft.cli.conversation import Conversation, ReadLine, TerminalChat, Write
from weft.cli.flags import FlagCommand, build, given_flags, given_sampling, sampling_parameters
from weft.config import EngineConfig
from weft.config_check import flag_name
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.cli.remote import RemoteModel


_SYSTEM = click.Option(["--system"], help="System message.")
_SESSION = click.Option(
    ["--session"],
    help="Name of a session of the server: the conversation continues it, and is saved after each answer.",
)


@click.command(
    "chat",
    cls=FlagCommand,
    configs=(EngineConfig,),
    params=[
        click.Option(["--url"], envvar="WEFT_URL", help="Talk to this server instead of starting one."),
        click.Option(["--api-key"], envvar="WEFT_API_KEY", help="Key for --url."),
        _SYSTEM,
        _SESSION,
        *sampling_parameters(),
    ],
)
@click.pass_context
def command(
    ctx: click.Context, /, url: str | None, api_key: str | None, system: str | None, session: str | None, **values: Any
) -> int:
    """Talk to a model in the terminal.

    MODEL is a checkpoint directory or a hub name; without it, the embedded model. With --url it is the name of a model
    or adapter of that server. With --lora the first adapter answers.
    """
    engine_flags = given_flags(ctx, EngineConfig)
    fields = _fields(engine_flags, values)
    if url is not None:
        idle = [flag_name(name) for name in engine_flags if name not in ("model", "seed")]
        if "--lora" in idle:
            raise ConfigError(
                f"--lora cannot change the server at --url {url}; an adapter that it serves is "
                "named as the model: weft chat NAME --url URL",
                param="--lora",
            )
        if idle:
            raise ConfigError(
                f"{', '.join(idle)} cannot change the server at --url {url}; give "
                f"{'it' if len(idle) == 1 else 'them'} to `weft serve`",
                param=idle[0],
            )
        return _converse(url, values["model"], api_key, Conversation(system), fields, session)
    return _with_own_server(values, Conversation(system), fields, session)


@click.command("run", cls=FlagCommand, configs=(EngineConfig,), params=[_SYSTEM, _SESSION, *sampling_parameters()])
@click.pass_context
def run(ctx: click.Context, /, system: str | None, session: str | None, **values: Any) -> int:
    """Fetch a model if this machine does not have it, and talk to it in the terminal.

    MODEL is a hub name such as LiquidAI/LFM2-350M, or owner/name:Q4_K_M for one GGUF file of a repository; a checkpoint
    directory; without one, the embedded model. `weft chat --url` talks to a server that runs.
    """
    fields = _fields(given_flags(ctx, EngineConfig), values)
    if values["model"] is not None:
        from weft.cli.models import pull_missing

        pull_missing(values["model"], values["revision"])
    return _with_own_server(values, Conversation(system), fields, session)


def _fields(engine_flags: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling fields of each request. ``engine_flags``: the flags of the engine that the command line
    sets."""
    fields = given_sampling(values)
    return {**fields, "seed": engine_flags["seed"]} if "seed" in engine_flags else fields


def _with_own_server(
    values: dict[str, Any], conversation: Conversation, fields: dict[str, Any], session: str | None
) -> int:
    """Run a chat with a server that lives as long as the chat. Return the exit code."""
    from weft.cli.remote import own_server, waiting

    config = build(EngineConfig, values)
    with waiting("starting the engine") as on_wait, own_server(config, on_wait=on_wait) as own:
        on_wait.done()
        return _converse(own, first_adapter(config), None, conversation, fields, session)


def first_adapter(config: EngineConfig) -> str | None:
    """Return the name of the adapter that answers, for a command that asks one model."""
    from weft.adapters import named_paths

    return next(iter(named_paths(config.lora)), None)


def _converse(
    url: str,
    name: str | None,
    api_key: str | None,
    conversation: Conversation,
    fields: dict[str, Any],
    session: str | None = None,
) -> int:
    """Run a chat, and return the exit code: 1 if an answer failed and no terminal showed that."""
    from weft.cli.remote import RemoteModel

    with closing(RemoteModel(url, model=name, api_key=api_key)) as model:
        terminal = sys.stdin.isatty()
        if terminal:
            import readline  # noqa: F401  (input() edits lines and keeps a history once it is imported)
        read = _terminal_line if terminal else _piped_line
        failures = converse(model, conversation, fields, read=read, write=_write, greets=terminal, session=session)
        return 1 if failures and not terminal else 0


def converse(
    model: RemoteModel,
    conversation: Conversation,
    fields: dict[str, Any],
    *,
    read: ReadLine,
    write: Write,
    greets: bool = False,
    session: str | None = None,
) -> int:
    """Run a chat with the sampling and the context that the server lists for the model, which are printed first. Return
    the number of failed answers."""
    card = model.card()  # before the first message, so that a wrong address, key or name is reported at once
    conversation.context_tokens = card.get("max_model_len") or 0
    chat = TerminalChat(model, conversation, fields, read=read, write=write, defaults=card.get("chat_sampling"))
    if session is not None:
        from weft.cli.chat_session import ChatSession

        saved = ChatSession(model, session)
        write(click.style(saved.load(conversation), dim=True))
        chat.on_turn = saved.save
    if greets:
        write(f"{model.model} at {model.url}. /help for commands, /exit to leave.\n")
        write(click.style(chat.choices(), dim=True) + "\n")
    return chat.run()


def _terminal_line(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError:
        click.echo()  # the next output begins on a new line
        raise


def _piped_line(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    click.echo(prompt + line.rstrip("\n"))
    return line


def _write(text: str) -> None:
    click.echo(text, nl=False)
