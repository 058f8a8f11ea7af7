"""llama-server's form of sessions: ``/slots/{id}?action=save|restore|erase``.

    "id_slot": 1 in a request   --> SlotTable: the tokens that it read and wrote
    save, filename              --> a session of that name
    restore, filename           --> the session's state is in memory; the slot has its tokens
    erase                       --> the slot has none; the session stays

Here a slot is a name for the last tokens of a client, not a part of memory. Only requests that name a slot are
recorded: without API keys all clients are one owner, and a client must not save another client's tokens by accident.
"""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import RequestError
from weft.objects.sessions import Content, check_name, tokens_of
from weft.server.protocol import read_body
from weft.server.service import Service
from weft.server.sessions.routes import Sessions
from weft.server.sessions.slot_table import SlotContent
from weft.server.sse import json_response, owner_of, read_raw

SLOTS_MAX = 64
"""Most slots of one owner."""
ACTIONS = ("save", "restore", "erase")


class SlotBody(msgspec.Struct, kw_only=True):
    filename: str | None = None


class SlotCard(msgspec.Struct, kw_only=True):
    id: int
    n_ctx: int
    is_processing: bool
    n_tokens: int


class SlotAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to a save or a restore. ``n_written`` and ``n_read``: bytes of the state. ``timings``:
    milliseconds."""

    id_slot: int
    filename: str | None = None
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: dict[str, float] | None = None


class SlotHandlers:
    """The endpoints of slots. A public method is an operation of ``openapi.endpoints``."""

    def __init__(self, service: Service, sessions: Sessions) -> None:
        self._service, self._sessions = service, sessions

    async def slots(self, request: Request) -> Response:
        self._check_processes()
        listed = [
            SlotCard(
                id=number,
                n_ctx=self._service.models.served_as(content.model).info.sizes.max_model_len,
                is_processing=False,
                n_tokens=content.count,
            )
            for number, content in self._service.slots.of(owner_of(request)).items()
        ]
        return json_response(listed)

    async def slot_action(self, request: Request) -> Response:
        self._service.check_open()
        self._check_processes()
        number, action = _slot_number(request.path_params["id_slot"]), request.query_params.get("action", "")
        if action not in ACTIONS:
            raise RequestError(f"action is {action[:20]!r}; it is {', '.join(ACTIONS)}", param="action")
        raw = await read_raw(request, undeclared=True)
        if action == "erase":
            return json_response(
                SlotAnswer(id_slot=number, n_erased=self._service.slots.pop(owner_of(request), number))
            )
        body = await read_body(raw, SlotBody, unserved={})
        if body.filename is None:
            raise RequestError("filename is missing: the name of the session", param="filename")
        name = check_name(body.filename, field="filename")
        began_s = time.perf_counter()
        answer = await (self._save if action == "save" else self._restore)(request, number, name)
        answer.timings = {f"{action}_ms": round((time.perf_counter() - began_s) * 1000, 3)}
        return json_response(answer)

    async def _save(self, request: Request, number: int, name: str) -> SlotAnswer:
        content = self._service.slots.get(owner_of(request), number)
        if content is None:
            raise RequestError(
                f"slot {number} has no tokens: it can be saved once a request that names it (id_slot) has ended",
                param="id_slot",
            )
        model = await self._service.model_for(content.model)
        saved = await self._sessions.save(
            request,
            name,
            model,
            Content(tokens=[*content.prompt, *content.answer]),
            salt=content.salt,
            expires_after=None,
        )
        return SlotAnswer(id_slot=number, filename=name, n_saved=saved.tokens, n_written=saved.bytes)

    async def _restore(self, request: Request, number: int, name: str) -> SlotAnswer:
        restored = await self._sessions.restore(request, name)
        session = await self._sessions.store.get(name, owner_of(request))
        content = SlotContent(session.requested or session.model, session.salt, tokens_of(session), [])
        self._service.slots.put(owner_of(request), number, content)
        return SlotAnswer(id_slot=number, filename=name, n_restored=restored.tokens, n_read=restored.bytes)

    def _check_processes(self) -> None:
        if self._service.counts is not None:
            raise RequestError(
                "slots need one HTTP process (--http-workers 1); /v1/sessions works with several", param="id_slot"
            )


def _slot_number(text: str) -> int:
    """Return the number of a slot. Raise RequestError."""
    if not (text.isascii() and text.isdigit() and len(text) < 4 and int(text) < SLOTS_MAX):
        raise RequestError(
            f"the slot is {text[:20]!r}; it must be at least 0 and at most {SLOTS_MAX - 1}", param="id_slot"
        )
    return int(text)
