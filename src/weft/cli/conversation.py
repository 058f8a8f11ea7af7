"""A conversation in the terminal: turns, commands that change the turns, and the rule by which old turns are dropped.

    you> text        -> TerminalChat.ask -> Conversation.prompt + text -> stream -> Conversation.add
    you> /command    -> COMMANDS          -> a method of TerminalChat

Laws: a failed turn leaves the conversation unchanged, even if ``/retry`` or ``/edit`` had removed the last turn. The
user is told when a turn is dropped. Nothing here reads a terminal: ``read`` and ``write`` are parameters, so tests
drive a chat as a user would.

The context slides by halves. Once a conversation leaves less than a quarter of the context for the next message and its
answer, the oldest turns are dropped until at most half of the context is used. Dropping one turn at a time would change
the beginning of every later prompt, so none would be found in the prefix cache; in this way the turns between two drops
are.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click

from weft.cli.flags import SAMPLING_FLAGS, check_sampling
from weft.default_sampling import sampling_in_words
from weft.errors import UserError, WeftError
from weft.files import write_whole

if TYPE_CHECKING:
    from weft.cli.remote import AnswerDelta

QUOTES = '"""'
_RATE_SECONDS_MIN = 0.1
"""Shortest stream whose speed is shown, seconds."""
ANSWER_TOKENS = 4096
"""Default limit of an answer, tokens: a small model may never end its answer. Half of the context stays for later
turns."""
_TEMPLATE_TOKENS = 64
"""Bound of the tokens that the chat template adds to a message."""
_BYTES_PER_TOKEN = 3
"""Low estimate of the bytes of a token; it only decides when turns are dropped before the server refuses."""
FILE_VERSION = 1
"""Value of the key ``weft_chat`` in saved conversations."""

ReadLine = Callable[[str], str]
Write = Callable[[str], None]


class ChatModel(Protocol):
    """Interface to the part of RemoteModel that a chat uses."""

    @property
    def model(self) -> str: ...

    def names(self) -> list[str]: ...

    def choose(self, name: str) -> dict[str, Any]: ...

    def stream_chat(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A message of the user as content of the API, and its answer. ``tokens``: prompt and answer of this turn and of
    all before it, as the server counted them."""

    content: Any
    answer: str
    tokens: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.content}, {"role": "assistant", "content": self.answer}]


@dataclass(slots=True)
class Conversation:
    """Turns so far. ``pictures``: parts of the next message, videos too, with ``data:`` URLs. ``context_tokens``: the
    longest context of the server, 0 if it does not report one."""

    system: str | None = None
    turns: list[AnsweredTurn] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    context_tokens: int = 0

    def reset(self) -> None:
        self.turns, self.pictures = [], []

    def content(self, text: str) -> Any:
        """Return the next message's content: the waiting pictures, then ``text``."""
        return [*self.pictures, {"type": "text", "text": text}] if self.pictures else text

    def prompt(self, content: Any) -> list[dict[str, Any]]:
        """Return the messages of a request that asks ``content`` next."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [
            *opening,
            *(message for turn in self.turns for message in turn.messages),
            {"role": "user", "content": content},
        ]

    def add(self, content: Any, answer: str, usage: dict[str, Any]) -> None:
        """Add a turn. A stopped answer has no usage, so each of its bytes counts as a token."""
        tokens = usage.get("prompt_tokens", self._tokens_max(content))
        tokens += usage.get("completion_tokens", len(answer.encode()))
        self.turns.append(AnsweredTurn(content, answer, tokens))
        self.pictures = []

    @property
    def used_tokens(self) -> int:
        return self.turns[-1].tokens if self.turns else 0

    @property
    def answer_tokens(self) -> int:
        """Default limit of an answer, tokens."""
        return min(ANSWER_TOKENS, self.context_tokens // 2) if self.context_tokens else ANSWER_TOKENS

    def limited(self, fields: dict[str, Any], content: Any) -> dict[str, Any]:
        """Return ``fields`` with the default limit, unless they have one or the context ends before it."""
        if self.context_tokens and self.context_tokens - self._tokens_max(content) < self.answer_tokens:
            return fields
        return {"max_tokens": self.answer_tokens, **fields}

    def is_full(self, content: Any) -> bool:
        """Return whether less than a quarter of the context is left for the answer to ``content``."""
        new = len(_text(content).encode()) // _BYTES_PER_TOKEN
        return bool(self.context_tokens) and self.used_tokens + new > self.context_tokens * 3 // 4

    def slide(self, content: Any) -> int:
        """Drop the oldest turns until the rest and ``content`` take at most half of the context, but at least one turn.
        Return the number of dropped turns."""
        room = self.context_tokens // 2 - len(_text(content).encode()) // _BYTES_PER_TOKEN
        dropped, freed = 0, 0
        while self.turns and (dropped == 0 or self.used_tokens - freed > room):
            first = self.turns.pop(0)
            dropped, freed = dropped + 1, first.tokens
        self.turns = [AnsweredTurn(turn.content, turn.answer, turn.tokens - freed) for turn in self.turns]
        return dropped

    def _tokens_max(self, content: Any) -> int:
        """Return an upper bound of the tokens of the next prompt."""
        return self.used_tokens + len(_text(content).encode()) + _TEMPLATE_TOKENS

    def show(self, name: str, kind: str) -> str:
        """Add a file to the next message, an ``image`` or a ``video``. Return the line for the user."""
        path = _path(name)
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except (OSError, ValueError) as error:
            return f"error: {path} cannot be read: {_reason(error)}\n"
        media = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.pictures.append({"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{media};base64,{data}"}})
        return f"{path.name} goes with the next message\n"


class TerminalChat:
    """A chat: turns and commands until the input ends (EOFError) or the user leaves. ``failures``: number of failed
    turns. ``fields``: sampling fields of the requests; ``defaults``: sampling that the server lists for the model.
    """

    def __init__(
        self,
        model: ChatModel,
        conversation: Conversation,
        fields: dict[str, Any],
        *,
        read: ReadLine,
        write: Write,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.conversation, self.fields = model, conversation, fields
        self.defaults = defaults or {}
        self.failures = 0
        self.on_turn: Callable[[Conversation], str] = lambda conversation: ""
        """Called after each answer; returns a line for the user."""
        self._read, self._write = read, write
        self._left = False

    def run(self) -> int:
        """Return the number of turns that failed."""
        while not self._left and (text := self._next_message()) is not None:
            name = text.split()[0]
            if not name.startswith("/"):
                self.failures += not self.ask(self.conversation.content(text))
            elif (command := COMMANDS.get(name)) is not None:
                self._obey(command, text.removeprefix(name).strip())
            elif name in _OTHER_WORDS_FOR_EXIT:
                self.exit("")
            else:
                self._write(f"there is no {name}; the commands are:\n")
                self.help("")
        return self.failures

    def _obey(self, command: ChatCommand, argument: str) -> None:
        try:
            command.act(self, argument)
        except WeftError as error:
            self._write(f"error: {error.message}\n")

    def choices(self) -> str:
        """Return a sentence part about the sampling and the limit of answers."""
        fields = {**self.defaults, **self.fields}
        limit = fields.get("max_tokens", self.conversation.answer_tokens)
        words = [sampling_in_words(fields), f"answers of at most {limit:,} tokens (--max-tokens)"]
        return "; ".join(filter(None, words))

    # ---------------------------------------------------------------- messages

    def _next_message(self) -> str | None:
        """Return the next message that is not blank, or None at the end. Ctrl-C clears the line."""
        while True:
            try:
                line = self._read("you> ").strip()
                command, quotes, first = line.partition(QUOTES)
                if quotes and (not command or command.startswith("/")):
                    line = command + self._rest_of_block(first)
            except KeyboardInterrupt:
                self._write("\n/exit leaves\n")
                continue
            except EOFError:
                return None
            if line.strip():
                return line.strip()

    def _rest_of_block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(self._read("...  "))
        return "\n".join(lines).rstrip().removesuffix(QUOTES)

    def ask(self, content: Any) -> bool:
        """Request an answer, and write it as it comes. Return False if it failed."""
        conversation = self.conversation
        before = list(conversation.turns)
        if conversation.turns and conversation.is_full(content):
            self._slide(content)
        while True:
            try:
                return self._answer(content)
            except WeftError as error:
                too_long = error.code == "context_length_exceeded"
                if too_long and conversation.turns and conversation.context_tokens:
                    self._slide(content)
                    continue
                conversation.turns = before
                self._say_failure(error)
                return False

    def _slide(self, content: Any) -> None:
        dropped = self.conversation.slide(content)
        turns = "turn was" if dropped == 1 else f"{dropped} turns were"
        self._write(
            click.style(
                f"the context of {self.conversation.context_tokens:,} tokens is full: the oldest {turns} dropped\n",
                dim=True,
            )
        )

    def _answer(self, content: Any) -> bool:
        """Return True once the answer has ended or was stopped; raise WeftError if it failed."""
        begin = time.monotonic()
        first: float | None = None
        parts: list[str] = []
        reasoned = False
        usage: dict[str, Any] = {}
        is_cut, note = False, ""
        fields = self.conversation.limited({**self.defaults, **self.fields}, content)
        pieces = self.model.stream_chat(self.conversation.prompt(content), fields)
        try:
            for piece in pieces:
                if first is None and (piece.text or piece.reasoning):
                    first = time.monotonic() - begin
                if reasoned and piece.text and not parts:
                    self._write("\n\n")
                self._write_piece(piece)
                reasoned = reasoned or bool(piece.reasoning)
                parts += [piece.text] if piece.text else []
                usage = piece.usage or usage
                is_cut = is_cut or piece.finish_reason == "length"
        except KeyboardInterrupt:
            note = ", stopped"
        except WeftError:
            self._write("\n" if parts or reasoned else "")
            raise
        finally:
            pieces.close()
        self.conversation.add(content, "".join(parts), usage)
        unsaved = self.on_turn(self.conversation)
        note = _cut_note(usage, fields.get("max_tokens")) if is_cut else note
        self._write("\n" + click.style(_cost(usage, first, time.monotonic() - begin) + note, dim=True) + "\n")
        self._write(unsaved)
        return True

    def _write_piece(self, piece: AnswerDelta) -> None:
        if piece.reasoning:
            self._write(click.style(piece.reasoning, dim=True))
        if piece.text:
            self._write(piece.text)

    def _say_failure(self, error: WeftError) -> None:
        self._write(f"error: {error.message}\n")
        if self.conversation.turns and (error.code == "context_length_exceeded" or "context" in error.message):
            self._write("/reset forgets the conversation\n")
        if (error.param or "").startswith("messages"):
            self.conversation.pictures = []  # a refused picture would be refused with every later message
        elif self.conversation.pictures:
            self._write("the pictures still go with the next message\n")

    # ---------------------------------------------------------------- commands

    def help(self, argument: str) -> None:
        self._write(HELP)

    def exit(self, argument: str) -> None:
        self._left = True

    def reset(self, argument: str) -> None:
        self.conversation.reset()
        self._write("forgotten\n")

    def system(self, argument: str) -> None:
        """Show the system message, or change it: turns stay, and the next prompt is computed from its beginning."""
        if argument:
            self.conversation.system = None if argument == "none" else argument
        said = self.conversation.system
        self._write(f"system message: {said}\n" if said else "no system message\n")

    def choose(self, argument: str) -> None:
        if argument:
            card = self.model.choose(argument)
            self.conversation.context_tokens = card.get("max_model_len") or 0
            self.defaults = card.get("chat_sampling", {})
            self._write(f"{self.model.model} answers from here on; {self.choices()}\n")
            return
        for name in self.model.names():
            self._write(f"{'*' if name == self.model.model else ' '} {name}\n")

    def set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        name = name.lstrip("-").replace("-", "_")
        if name and name not in SAMPLING_FLAGS:
            raise UserError(f"/set has no {name}; it takes {', '.join(SAMPLING_FLAGS)}")
        if name and value.strip():
            self.fields |= check_sampling(name, value.strip())
        elif name:
            self.fields.pop(name, None)
        self._write(f"{self.choices()}\n")

    def retry(self, argument: str) -> None:
        self._again(self._last("/retry").content)

    def edit(self, argument: str) -> None:
        last = self._last("/edit")
        if not argument:
            self._write(f"the last message: {_text(last.content)}\n/edit TEXT replaces it\n")
            return
        shown = last.content[:-1] if isinstance(last.content, list) else []
        self._again([*shown, {"type": "text", "text": argument}] if shown else argument)

    def _last(self, command: str) -> AnsweredTurn:
        if not self.conversation.turns:
            raise UserError(f"{command} needs a message that was answered, and the conversation has none")
        return self.conversation.turns[-1]

    def _again(self, content: Any) -> None:
        """Send ``content`` instead of the last turn, which stays if the answer fails."""
        conversation = self.conversation
        before, pictures = list(conversation.turns), conversation.pictures
        conversation.turns, conversation.pictures = before[:-1], []
        if not self.ask(content):
            self.failures += 1
            conversation.turns = before
        conversation.pictures = pictures

    def save(self, argument: str) -> None:
        path = _path_of("/save", argument)
        if path.exists() and not _is_saved(path):
            raise UserError(f"{path} exists and is not a saved conversation: give /save another name")
        document = {
            "weft_chat": FILE_VERSION,
            "model": self.model.model,
            "system": self.conversation.system,
            "sampling": self.fields,
            "messages": [message for turn in self.conversation.turns for message in turn.messages],
            "tokens": [turn.tokens for turn in self.conversation.turns],
        }
        try:
            write_whole(path, json.dumps(document, ensure_ascii=False, indent=1).encode(), mode=0o600)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {_reason(error)}") from None
        self._write(f"{_turns(len(self.conversation.turns))} in {path}\n")

    def load(self, argument: str) -> None:
        path = _path_of("/load", argument)
        system, fields, turns = _read_saved(path)
        self.conversation.reset()
        self.conversation.system, self.conversation.turns, self.fields = system, turns, fields
        self._write(f"{_turns(len(turns))} of {path}; {self.model.model} continues with {self.choices()}\n")

    def image(self, argument: str) -> None:
        self._show("image", argument)

    def video(self, argument: str) -> None:
        self._show("video", argument)

    def _show(self, kind: str, argument: str) -> None:
        if not argument:
            raise UserError(f"/{kind} needs the name of a file")
        self._write(self.conversation.show(argument, kind))


class ChatCommand(NamedTuple):
    """A command of the conversation: its argument in capitals, a line of help, and the method that runs it."""

    argument: str
    help: str
    act: Callable[[TerminalChat, str], None]


COMMANDS: dict[str, ChatCommand] = {
    "/system": ChatCommand(
        "TEXT", "set the system message; `none`: without one; no argument: show it", TerminalChat.system
    ),
    "/model": ChatCommand(
        "NAME", "let another model answer; no argument: list the server's models", TerminalChat.choose
    ),
    "/set": ChatCommand(
        "NAME VALUE", "set temperature, top_p, max_tokens, ...; without VALUE: the default", TerminalChat.set
    ),
    "/retry": ChatCommand("", "generate the last answer again", TerminalChat.retry),
    "/edit": ChatCommand("TEXT", "send TEXT instead of the last message", TerminalChat.edit),
    "/save": ChatCommand("FILE", "save the conversation", TerminalChat.save),
    "/load": ChatCommand("FILE", "continue a saved conversation", TerminalChat.load),
    "/image": ChatCommand("FILE", "a picture for the next message", TerminalChat.image),
    "/video": ChatCommand("FILE", "a video", TerminalChat.video),
    "/reset": ChatCommand("", "forget the conversation", TerminalChat.reset),
    "/help": ChatCommand("", "this list", TerminalChat.help),
    "/exit": ChatCommand("", "leave (Ctrl-D does too)", TerminalChat.exit),
}
_OTHER_WORDS_FOR_EXIT = {"/quit", "/bye"}
HELP = "".join(f"{f'{name} {row.argument}':<18} {row.help}\n" for name, row in COMMANDS.items())
HELP += f"{QUOTES:<18} begin and end a message of several lines\n"


def _read_saved(path: Path) -> tuple[str | None, dict[str, Any], list[AnsweredTurn]]:
    """Return system message, sampling fields and turns of a saved conversation. Raise UserError for another file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["weft_chat"] != FILE_VERSION:
            raise UserError(
                f"{path} is a conversation of version {document['weft_chat']!r}; this weft reads {FILE_VERSION}"
            )
        messages, tokens, system = document["messages"], document["tokens"], document["system"]
        if [message["role"] for message in messages] != ["user", "assistant"] * len(tokens):
            raise ValueError("its messages are not of a user and an assistant in turns")
        contents = [message["content"] for message in messages]
        turns = [AnsweredTurn(*turn) for turn in zip(contents[::2], contents[1::2], map(int, tokens), strict=True)]
        if not isinstance(system, str | None) or not all(isinstance(turn.answer, str) for turn in turns):
            raise ValueError("a text is none")
        fields = {name: value for name, value in document["sampling"].items() if name in SAMPLING_FLAGS}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a saved conversation: {error}") from None
    return system, fields, turns


def _is_saved(path: Path) -> bool:
    try:
        _read_saved(path)
    except UserError:
        return False
    return True


def _path(name: str) -> Path:
    return Path(name.strip("'\"")).expanduser()


def _path_of(command: str, argument: str) -> Path:
    if not argument:
        raise UserError(f"{command} needs the name of a file")
    return _path(argument)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _text(content: Any) -> str:
    """Return the text of a message, without pictures."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _cut_note(usage: dict[str, Any], limit: int | None) -> str:
    """Return a note about the limit that cut an answer: ``max_tokens``, or the context."""
    if limit is not None and usage.get("completion_tokens", limit) >= limit:
        return f"; cut at the limit of {limit:,} tokens (/set max_tokens, --max-tokens)"
    return "; cut at the end of the context"


def _cost(usage: dict[str, Any], first: float | None, seconds: float) -> str:
    generated = usage.get("completion_tokens")
    if generated is None or first is None:
        return f"{seconds:.1f} s"
    prompt = usage.get("prompt_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    streamed = seconds - first
    rate = f", {(generated - 1) / streamed:.0f} tokens/s" if streamed > _RATE_SECONDS_MIN else ""
    return f"{generated} tokens, first after {first:.2f} s{rate}, {cached:,} of {prompt:,} prompt tokens from cache"
