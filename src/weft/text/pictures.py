"""Pictures in a conversation: taken out before its template writes it, and put into the text that it wrote.

    messages  {"type": "image_url", "image_url": {"url": "data:..."}}      split_images
              {"type": "image"}  + ImagePart                               the template sees no pixels
    text      ... <image> ...                                              what the template writes for it
              ... <|image_start|><image><image>...<|image_end|> ...        with_pictures: one for each row
    tokens    ... 498  396 396 396 ...  499 ...                            placed: where the rows stand

A dialect writes a picture as an ``ImagePart``, or leaves OpenAI's form. A picture stands where the template
writes the image token, in the order of the messages. A text that has the token itself cannot be told from a
picture's place, so such a conversation is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from weft.errors import RequestError
from weft.request import PlacedPicture
from weft.text.chat import ChatMessage
from weft.text.template_worker import ShownPicture

if TYPE_CHECKING:
    from weft.images.picture import Picture

IMAGE_PARTS = ("image_url", "input_image", "image")


class ImagePart(msgspec.Struct, frozen=True):
    """``source``: an address, or the bytes of a file of this program. ``where``: the part of the request that
    has it, for errors."""

    source: str | bytes
    where: str
    cache_control: Any = None


def split_images(messages: list[ChatMessage], *,
                 reads_images: bool) -> tuple[list[ChatMessage], list[ImagePart]]:
    """The messages with a bare ``{"type": "image"}`` for each picture, and the pictures in their order.
    Raises RequestError for a part without an address, and for one that the model does not read."""
    images: list[ImagePart] = []
    shown = []
    for at, message in enumerate(messages):
        if isinstance(message.content, list) and any(map(_is_image, message.content)):
            parts = []
            for index, part in enumerate(message.content):
                if _is_image(part):
                    image = _read(part, f"messages[{at}].content[{index}]", reads_images)
                    images.append(image)
                    part = {"type": "image"}
                    if image.cache_control is not None:
                        part["cache_control"] = image.cache_control
                parts.append(part)
            message = msgspec.structs.replace(message, content=parts)
        shown.append(message)
    return shown, images


def with_pictures(text: str, places: Sequence[int], pictures: Sequence[Picture],
                  image_token: str) -> tuple[str, list[int], list[ShownPicture]]:
    """``text`` with each image token replaced by what its picture shows, and ``places`` (characters) moved
    with it. Raises RequestError where the template does not write as many tokens as there are pictures."""
    pieces = text.split(image_token)
    if len(pieces) - 1 != len(pictures):
        raise RequestError(
            f"the chat template writes {image_token} {len(pieces) - 1} times for {len(pictures)} pictures: a "
            "text of the conversation has it too, or the template leaves pictures out", param="messages")
    shown, out, at = [], [pieces[0]], len(pieces[0])
    ends, shifts = [], []
    for picture, after in zip(pictures, pieces[1:], strict=True):
        spans, begin = [], at
        for part in picture.text:
            written = part if isinstance(part, str) else image_token * part
            if not isinstance(part, str):
                spans.append((at, len(written), part))
            out.append(written)
            at += len(written)
        shown.append(ShownPicture(picture.digest, picture.to_bytes(), spans))
        ends.append(begin)
        shifts.append(at - begin - len(image_token))
        out.append(after)
        at += len(after)
    # Behind a picture places move by what it and those before it have grown; ``ends`` are in the new text.
    starts = [end - shift for end, shift in zip(ends, (0, *accumulate(shifts)), strict=False)]
    moved = [place + sum(shift for start, shift in zip(starts, shifts, strict=True) if start < place)
             for place in places]
    return "".join(out), moved, shown


def placed(pictures: Sequence[ShownPicture], positions: Sequence[int]) -> list[PlacedPicture]:
    """``positions``: in tokens, of the first character of each span, in order."""
    following = iter(positions)
    return [PlacedPicture(digest=picture.digest, data=picture.data,
                          places=[(next(following), rows) for _, _, rows in picture.spans])
            for picture in pictures]


def _is_image(part: Any) -> bool:
    return isinstance(part, ImagePart) or (isinstance(part, dict) and part.get("type") in IMAGE_PARTS)


def _read(part: Any, where: str, reads_images: bool) -> ImagePart:
    if isinstance(part, ImagePart):
        where = part.where
    if not reads_images:
        raise RequestError(f"{where} is a picture; this model reads text only: its checkpoint has no vision "
                           "encoder", param=where, code="unsupported_parameter")
    if isinstance(part, ImagePart):
        return part
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url:
        raise RequestError(f"{where}.image_url: expected an object with url, the picture as a data: URL",
                           param=f"{where}.image_url")
    return ImagePart(url, where, part.get("cache_control"))
