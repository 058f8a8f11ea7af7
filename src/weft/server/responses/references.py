"""``item_reference``: items of stored responses, by their ids, in the input of a request.

    {"type": "item_reference", "id": "msg_5f..o1"} --response_of--> resp_5f.. --store--> the item

An id of an item has the id of its response in it, so the store needs no index of items. Items of the
conversation that ``previous_response_id`` names are looked through first: clients may have named those.

The item takes the place of the reference, in the prompt and in the stored input of the new response. An item
of another API key does not exist, as its response does not.

Laws: L10 (owners), L11 (responses and bytes of one request, as of one conversation).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from weft.errors import RequestError
from weft.server.responses.items import Item, response_of
from weft.server.responses.store import StoredResponse, StoreLimits, UnknownResponseError


class _Output(msgspec.Struct):
    output: list[Item]


_decode_output = msgspec.json.Decoder(_Output).decode
_decode_items = msgspec.json.Decoder(list[Item]).decode


def is_reference(item: Item) -> bool:
    """OpenAI lets the type of a reference be left out."""
    return item.get("type") == "item_reference" or set(item) == {"id"}


async def with_items(given: Sequence[Item], known: Sequence[Item],
                     get: Callable[[str], Awaitable[StoredResponse]], limits: StoreLimits) -> list[Item]:
    """``given`` with items for references. ``known``: items of the conversation so far. ``get`` raises
    UnknownResponseError. Raises RequestError, UnknownResponseError."""
    by_id = {item["id"]: item for item in known}
    responses: set[str] = set()
    size = 0
    result = []
    for at, item in enumerate(given):
        if not is_reference(item):
            result.append(item)
            continue
        place, name = f"input[{at}].id", item.get("id")
        if not isinstance(name, str):
            raise RequestError(f"{place} is missing: the id of a stored item", param=place)
        response_id = response_of(name)
        if name not in by_id and response_id is not None and response_id not in responses:
            responses.add(response_id)
            if len(responses) > limits.turns:
                raise RequestError(f"input refers to items of more than {limits.turns} responses "
                                   "(limits.max_response_turns)", param="input")
            try:
                stored = await get(response_id)
            except UnknownResponseError:
                raise _unknown(place, name) from None
            size += stored.size
            if size > limits.turn_bytes:
                raise RequestError(f"input refers to responses of {size} bytes; the limit is "
                                   f"{limits.turn_bytes} (limits.max_body_mb)", param="input")
            items = [*_decode_items(stored.items), *_decode_output(stored.body).output]
            by_id.update((one["id"], one) for one in items)
        if name not in by_id:
            raise _unknown(place, name)
        result.append(by_id[name])
    return result


def _unknown(place: str, name: str) -> UnknownResponseError:
    return UnknownResponseError(f"{place}: there is no stored item {name[:256]!r}", param=place,
                                code="item_not_found")
