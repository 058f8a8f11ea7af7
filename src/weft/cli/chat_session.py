"""``weft chat --session NAME``: the conversation is a session of the server, which is saved after each answer.

    load    GET /v1/sessions/NAME    --> turns of the conversation; none for a new name
    save    POST /v1/sessions        <-- all messages so far

A turn whose save fails stays in the conversation; a line names the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.cli.conversation import AnsweredTurn, Conversation
from weft.errors import ConfigError, WeftError

if TYPE_CHECKING:
    from weft.cli.remote import RemoteModel


class ChatSession:
    """The session of a conversation in the terminal. ``name``: on the server."""

    def __init__(self, model: RemoteModel, name: str) -> None:
        self._model, self._name = model, name

    def load(self, conversation: Conversation) -> str:
        """Load the turns of the session into ``conversation``; return a line for the user. Raise ConfigError for a
        session with other messages than questions and answers, and the errors of the server."""
        try:
            session: dict[str, Any] = self._model.get(f"/v1/sessions/{self._name}").json()
        except WeftError as error:
            if error.code != "session_not_found":
                raise
            return f"the session {self._name} is new\n"
        messages = list(session["messages"] or [])
        if messages and messages[0]["role"] == "system":
            conversation.system = messages.pop(0)["content"]
        roles = [message["role"] for message in messages]
        if not messages or roles != ["user", "assistant"] * (len(messages) // 2):
            raise ConfigError(
                f"--session {self._name}: it has no questions and answers; /v1/completions continues it",
                param="--session",
            )
        conversation.turns = [
            AnsweredTurn(question["content"], answer["content"] or "", session["tokens"])
            for question, answer in zip(messages[::2], messages[1::2], strict=True)
        ]
        count = len(conversation.turns)
        return f"the session {self._name} goes on after {count} turn{'s' if count > 1 else ''}\n"

    def save(self, conversation: Conversation) -> str:
        """Save the turns; return a line for the user if that failed."""
        opening = [{"role": "system", "content": conversation.system}] if conversation.system else []
        messages = [*opening, *(message for turn in conversation.turns for message in turn.messages)]
        try:
            self._model.send("/v1/sessions", {"name": self._name, "model": self._model.model, "messages": messages})
        except WeftError as error:
            return f"the session was not saved: {error.message}\n"
        return ""
