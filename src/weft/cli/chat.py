"""``weft chat``: a conversation in the terminal, streamed.

``--url`` names a running server, otherwise one is started for as long as the chat lasts (``own_server``). The
conversation is a function over (read a line, write text), so tests drive it without a terminal.
"""

from __future__ import annotations

import base64
import mimetypes
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.cli.flags import FlagCommand, build, given_flags, given_sampling, sampling_parameters
from weft.config import EngineConfig
from weft.config_check import flag_name
from weft.default_sampling import sampling_in_words
from weft.errors import ConfigError, WeftError

if TYPE_CHECKING:
    from weft.cli.remote import RemoteModel

QUOTES = '"""'
RESET = "/reset"
HELP = f"""\
/image  FILE: a picture for the next message
/video  FILE: a video
{RESET}  forget the conversation
/exit   leave (Ctrl-D does too)
{QUOTES}     begin and end a message of several lines
"""
_SHOW = ("/image", "/video")
_LEAVE = {"/exit", "/quit", "/bye"}
_RATE_SECONDS_MIN = 0.1
"""A shorter stream says nothing about speed."""
ANSWER_TOKENS = 4096
"""Default limit of an answer. A small model may never end one; half of the context stays for later turns."""
_TEMPLATE_TOKENS = 64
"""Tokens of the chat template around a message, at most."""

ReadLine = Callable[[str], str]
Write = Callable[[str], None]


@dataclass(slots=True)
class Conversation:
    """Messages so far. A failed or empty turn leaves no trace in them. ``pictures``: parts of the next
    message, videos too, with ``data:`` URLs. ``context_tokens``: the longest that the server takes, 0 where
    it does not say; ``used_tokens``: of the turns so far."""

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    context_tokens: int = 0
    used_tokens: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.pictures = []
        self.used_tokens = 0

    def asking(self, text: str) -> list[dict[str, Any]]:
        content: Any = text
        if self.pictures:
            content = [*self.pictures, {"type": "text", "text": text}]
        return [*self.messages, {"role": "user", "content": content}]

    def keep(self, text: str, answer: str, usage: dict[str, Any]) -> None:
        self.messages = [*self.asking(text), {"role": "assistant", "content": answer}]
        self.pictures = []
        # A stopped answer has no usage; a token has a byte or more.
        self.used_tokens = usage.get("prompt_tokens", self._tokens_max(text))
        self.used_tokens += usage.get("completion_tokens", len(answer.encode()))

    @property
    def answer_tokens(self) -> int:
        """The default limit of an answer."""
        return min(ANSWER_TOKENS, self.context_tokens // 2) if self.context_tokens else ANSWER_TOKENS

    def limited(self, fields: dict[str, Any], text: str) -> dict[str, Any]:
        """Return ``fields`` with the default limit, unless they have one or the context ends before it."""
        if self.context_tokens and self.context_tokens - self._tokens_max(text) < self.answer_tokens:
            return fields
        return {"max_tokens": self.answer_tokens, **fields}

    def _tokens_max(self, text: str) -> int:
        """Return a bound of the tokens of the next prompt."""
        return self.used_tokens + len(text.encode()) + _TEMPLATE_TOKENS

    def show(self, name: str, what: str) -> str:
        """Adds a file to the next message, an ``image`` or a ``video``; what to tell the user."""
        path = Path(name.strip("'\"")).expanduser()
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except (OSError, ValueError) as error:
            return f"error: {path} cannot be read: {getattr(error, 'strerror', None) or error}\n"
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.pictures.append({"type": f"{what}_url", f"{what}_url": {"url": f"data:{kind};base64,{data}"}})
        return f"{path.name} goes with the next message\n"


def talk(model: Any, conversation: Conversation, fields: dict[str, Any], *, read: ReadLine, write: Write) -> int:
    """Turns until the reader ends (EOFError) or leaves; the number of turns that failed.

    ``model`` has ``stream_chat`` as RemoteModel has.
    """
    failures = 0
    while True:
        text = _read_message(read, write)
        if text is None:
            return failures
        command = text.split()[0]
        if not command.startswith("/"):
            failures += not _turn(model, conversation, text, fields, write)
        elif command in _LEAVE:
            return failures
        elif command == RESET:
            conversation.reset()
            write("forgotten\n")
        elif command in _SHOW and text != command:
            write(conversation.show(text.removeprefix(command).strip(), command[1:]))
        else:
            write("" if command in ("/help", *_SHOW) else f"there is no {command}; the commands are:\n")
            write(HELP)


def _read_message(read: ReadLine, write: Write) -> str | None:
    """The next message that is not blank, or None at the end. Ctrl-C clears the line."""
    while True:
        try:
            line = read("you> ")
            if line.strip().startswith(QUOTES):
                line = _rest_of_block(line.strip()[len(QUOTES) :], read)
        except KeyboardInterrupt:
            write("\n/exit leaves\n")
            continue
        except EOFError:
            return None
        if line.strip():
            return line.strip()


def _rest_of_block(first: str, read: ReadLine) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read("...  "))
    return "\n".join(lines).rstrip().removesuffix(QUOTES)


def _turn(model: Any, conversation: Conversation, text: str, fields: dict[str, Any], write: Write) -> bool:
    """One question and its answer, written as it comes. False: the answer failed."""
    begin = time.monotonic()
    first: float | None = None
    parts: list[str] = []
    reasoned = False
    usage: dict[str, Any] = {}
    is_cut, note = False, ""
    fields = conversation.limited(fields, text)
    pieces = model.stream_chat(conversation.asking(text), fields)
    try:
        for piece in pieces:
            if first is None and (piece.text or piece.reasoning):
                first = time.monotonic() - begin
            if piece.reasoning:
                reasoned = True
                write(click.style(piece.reasoning, dim=True))
            if piece.text:
                if reasoned and not parts:
                    write("\n\n")
                parts.append(piece.text)
                write(piece.text)
            usage = piece.usage or usage
            is_cut = is_cut or piece.finish_reason == "length"
    except KeyboardInterrupt:
        note = ", stopped"
    except WeftError as error:
        write(("\n" if parts else "") + f"error: {error.message}\n")
        if conversation.messages and (error.code == "context_length_exceeded" or "context" in error.message):
            write(f"{RESET} forgets the conversation\n")
        if (error.param or "").startswith("messages"):
            conversation.pictures = []  # what is refused would be refused with every message that follows
        elif conversation.pictures:
            write("what you show still goes with the next message\n")
        return False
    finally:
        pieces.close()
    conversation.keep(text, "".join(parts), usage)
    note = _cut_note(usage, fields.get("max_tokens")) if is_cut else note
    write("\n" + click.style(_cost(usage, first, time.monotonic() - begin) + note, dim=True) + "\n")
    return True


def _cut_note(usage: dict[str, Any], limit: int | None) -> str:
    """Return what ended an answer before the model did: the limit, or the context."""
    if limit is not None and usage.get("completion_tokens", limit) >= limit:
        return f"; cut at the limit of {limit:,} tokens (--max-tokens)"
    return f"; cut at the end of the context: {RESET} forgets the conversation"


def _cost(usage: dict[str, Any], first: float | None, seconds: float) -> str:
    generated = usage.get("completion_tokens")
    if generated is None or first is None:
        return f"{seconds:.1f} s"
    prompt = usage.get("prompt_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    streamed = seconds - first
    rate = f", {(generated - 1) / streamed:.0f} tokens/s" if streamed > _RATE_SECONDS_MIN else ""
    return f"{generated} tokens, first after {first:.2f} s{rate}, {cached:,} of {prompt:,} prompt tokens from cache"


@click.command(
    "chat",
    cls=FlagCommand,
    configs=(EngineConfig,),
    params=[
        click.Option(["--url"], envvar="WEFT_URL", help="Talk to this server instead of starting one."),
        click.Option(["--api-key"], envvar="WEFT_API_KEY", help="Key for --url."),
        click.Option(["--system"], help="System message."),
        *sampling_parameters(),
    ],
)
@click.pass_context
def command(ctx: click.Context, /, url: str | None, api_key: str | None, system: str | None, **values: Any) -> int:
    """Talk to a model in the terminal.

    MODEL is a checkpoint directory or a hub name; without one, the embedded model. With --url it is the
    name to ask that server for, of an adapter too. With --lora its first adapter answers.
    """
    fields = given_sampling(values)
    given = given_flags(ctx, EngineConfig)
    if "seed" in given:
        fields["seed"] = given["seed"]
    conversation = Conversation(system)
    if url is not None:
        idle = [flag_name(name) for name in given if name not in ("model", "seed")]
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
        return _converse(url, values["model"], api_key, conversation, fields)
    from weft.cli.remote import own_server, waiting

    config = build(EngineConfig, values)
    with waiting("starting the engine") as on_wait, own_server(config, on_wait=on_wait) as own:
        on_wait.done()
        return _converse(own, first_adapter(config), None, conversation, fields)


def first_adapter(config: EngineConfig) -> str | None:
    """The name of the one that answers where a command asks one model alone."""
    from weft.adapters import named_paths

    return next(iter(named_paths(config.lora)), None)


def _converse(
    url: str, name: str | None, api_key: str | None, conversation: Conversation, fields: dict[str, Any]
) -> int:
    """The exit code: 1 where an answer failed and no terminal showed the user so."""
    from weft.cli.remote import RemoteModel

    with closing(RemoteModel(url, model=name, api_key=api_key)) as model:
        terminal = sys.stdin.isatty()
        if terminal:
            import readline  # noqa: F401  (input() edits lines and keeps a history once it is imported)
        read = _terminal_line if terminal else _piped_line
        failures = converse(model, conversation, fields, read=read, write=_write, greets=terminal)
        return 1 if failures and not terminal else 0


def converse(
    model: RemoteModel,
    conversation: Conversation,
    fields: dict[str, Any],
    *,
    read: ReadLine,
    write: Write,
    greets: bool = False,
) -> int:
    """``talk`` with the sampling and the context that the server lists for the model, which are said first."""
    card = model.card()  # before the first message: a wrong address, key or name is said at once
    conversation.context_tokens = card.get("max_model_len") or 0
    fields = {**card.get("chat_sampling", {}), **fields}
    if greets:
        write(f"{model.model} at {model.url}. /help for commands, /exit to leave.\n")
        write(click.style(_choices(fields, conversation), dim=True) + "\n")
    return talk(model, conversation, fields, read=read, write=write)


def _choices(fields: dict[str, Any], conversation: Conversation) -> str:
    """Return the sampling and the limit of the answers, in words."""
    limit = fields.get("max_tokens", conversation.answer_tokens)
    words = [sampling_in_words(fields), f"answers of at most {limit:,} tokens (--max-tokens)"]
    return "; ".join(filter(None, words))


def _terminal_line(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError:
        click.echo()  # what comes next in the terminal begins on a line of its own
        raise


def _piped_line(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    click.echo(prompt + line.rstrip("\n"))
    return line


def _write(text: str) -> None:
    click.echo(text, nl=False)
