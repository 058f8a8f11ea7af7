"""``truncation: auto``: a conversation that is too long loses its oldest turns.

    items:   system | user ... | user ... | user ... | user ...
    shown:   system |                     | user ... | user ...

A turn begins with a user message and has all that follows it, so no output of a tool is left without its
call. Leading system messages stay, and so does the last turn. If that one alone is too long, the request is
refused, as every long one is without ``auto``.

What is dropped is chosen in steps of TURNS_STEP turns where that is enough. The shown beginning is then the
same for several turns, and the prefix cache has it. A cut at each turn would move the beginning each time.

Without ``max_output_tokens`` the answer gets at least an eighth of the context.

Rejected: to drop single items (templates refuse a result without its call); to drop from the middle (the
cache would lose all behind it, too).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import ContextLengthError
from weft.server.responses.items import Item
from weft.server.responses.protocol import ResponsesBody
from weft.server.responses.turns import responses_turn
from weft.server.service import Service
from weft.server.turn import PreparedTurn, prepare_turn
from weft.text.chat_request import KnownPrefix

TURNS_STEP = 4
_ANSWER_SHARE = 8


async def prepare_response(service: Service, body: ResponsesBody, items: Sequence[Item],
                           known: KnownPrefix | None) -> PreparedTurn:
    """The turn, with as much of ``items`` as the context has room for if the request allows that. Raises
    RequestError, UnknownModelError, EngineUnavailableError."""
    try:
        return await prepare_turn(service, responses_turn(body, items, known))
    except ContextLengthError:
        if body.truncation != "auto":
            raise
    leading = next((at for at, item in enumerate(items) if not _is_system(item)), len(items))
    starts = [at for at in range(leading + 1, len(items)) if _is_user(items[at])]
    fitting = (await _first_fitting(service, body, items, leading, starts[TURNS_STEP - 1::TURNS_STEP])
               or await _first_fitting(service, body, items, leading, starts))
    if fitting is not None:
        return fitting
    shortest = items if not starts else [*items[:leading], *items[starts[-1]:]]
    return await prepare_turn(service, responses_turn(body, shortest))


async def _first_fitting(service: Service, body: ResponsesBody, items: Sequence[Item], leading: int,
                         starts: Sequence[int]) -> PreparedTurn | None:
    """The longest conversation that begins at one of ``starts`` and fits; by halving."""
    best: PreparedTurn | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        turn = await _fitting(service, body, [*items[:leading], *items[starts[middle]:]])
        if turn is None:
            low = middle + 1
        else:
            best, high = turn, middle
    return best


async def _fitting(service: Service, body: ResponsesBody, items: Sequence[Item]) -> PreparedTurn | None:
    try:
        turn = await prepare_turn(service, responses_turn(body, items))
    except ContextLengthError:
        return None
    context = turn.model.info.max_model_len
    answer = body.max_output_tokens or context // _ANSWER_SHARE
    return turn if len(turn.prompt.tokens) + answer <= context else None


def _is_system(item: Item) -> bool:
    return item.get("role") in ("system", "developer")


def _is_user(item: Item) -> bool:
    return bool(item.get("role") == "user")
